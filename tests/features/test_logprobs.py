"""Log-probabilities of emitted tokens and prompts, and traces, against a forward of the model over the whole text."""

import random
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from eyas import drafters, runners
from eyas.core.engine import Decoder, Request, Step
from eyas.core.logprobs import TokenLogprobs
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters._merge import Merged
from reference import Oracle, plain_decode, run
from test_lossless import make
from wishes import logprobs_of, wished

LAWS = (
    Sampling(),
    Sampling(1.2, top_k=9, repetition_penalty=1.3, seed=3),
    Sampling(logit_bias=((7, 40.0),), presence_penalty=1.0),
)
COUNTS = (3, 0, None, 12)


@cache
def target(by_kernels: bool = False) -> Target:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return runners.with_fastest_runner(Target(zoo.tiny("llama", **sizes)), "on" if by_kernels else "off")


def prompt(length: int) -> tuple[int, ...]:
    return tuple(random.Random(length).choices(range(3, zoo.VOCAB), k=length))


def asked() -> list[Request]:
    return [wished(prompt(3 + 7 * i), 14, LAWS[i % 3], logprobs=count) for i, count in enumerate(COUNTS)]


@cache
def wide_model() -> Any:
    """Return the model in float64."""
    return deepcopy(target().model).double()


@torch.no_grad()
def by_the_model(ids: list[int]) -> Tensor:
    """[T, V]: the log-softmax of the raw logits after each token, computed in float64."""
    return wide_model()(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


@cache
@torch.no_grad()
def tolerance() -> float:
    """What float32 may lose: four times the largest error of the model's own forward, which depends on the processor's
    order of sums (1.6e-5 with AVX2); a wrong row, position or law differs by more than 1e-2."""
    ids = list(prompt(64))
    narrow = target().model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return 4 * float((narrow - by_the_model(ids)).abs().max())


def check(entries: list[TokenLogprobs], tokens: list[int], logp_TV: Tensor, count: int) -> None:
    """The entries are those of the tokens, from these rows."""
    near = partial(pytest.approx, abs=tolerance())
    assert [entry.token for entry in entries] == tokens
    for entry, logp_V in zip(entries, logp_TV, strict=True):
        assert entry.logprob == near(float(logp_V[entry.token]))
        best = logp_V.topk(count)
        assert [value for _, value in entry.top] == near(best.values.tolist())
        assert all(value == near(float(logp_V[token])) for token, value in entry.top)
        assert len({token for token, _ in entry.top}) == count
        assert dict(entry.top).get(entry.token, entry.logprob) == entry.logprob, "two floats for one number"
        assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])


def collected(steps: list[Step], request_id: int) -> list[TokenLogprobs]:
    return [entry for step in steps if step.request_id == request_id for entry in step.extra.get("logprobs", ())]


@pytest.mark.cover(name=8)
@pytest.mark.quick("eagle3-*")
@pytest.mark.parametrize("by_kernels", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["model", "kernels"])
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_gives_the_models_own_log_probabilities(name: str, by_kernels: bool) -> None:
    """Guards the node of each token, the bonus's too: raw numbers under any law, different counts in rows."""
    drafter, rows = make(name, target(by_kernels)), 1 if (drafters.names().index(name) + by_kernels) % 2 else 3
    tokens, steps = run(Decoder(drafter.target, drafter, rows), asked())
    for i, (request, new) in enumerate(zip(asked(), tokens, strict=True)):
        entries = collected(steps, i + 1)
        if logprobs_of(request).answer is None:
            assert entries == []
            continue
        logp_TV = by_the_model([*request.prompt, *new])[len(request.prompt) - 1 : -1]
        check(entries, new, logp_TV, logprobs_of(request).answer)
        assert all(len(step.extra["logprobs"]) == len(step.tokens) for step in steps if step.request_id == i + 1)


@pytest.mark.slow
def test_on_long_paths() -> None:
    """Guards the order along a path: an oracle's steps emit several tokens, which the request's length cuts."""
    for length in (1, 2, 3, 5, 8, 13):
        request = wished(prompt(9), length, logprobs=2)
        answer = plain_decode(target().model, Request(prompt(9), 20))
        (new,), steps = run(Decoder(target(), Oracle(target(), {prompt(9): answer}, 14, 6)), [request])
        assert new == answer[:length]
        check(collected(steps, 1), new, by_the_model([*prompt(9), *new])[8:-1], 2)


@pytest.mark.quick("None-kernels")
@pytest.mark.parametrize("by_kernels", [False, True], ids=["model", "kernels"])
@pytest.mark.parametrize("budget", [None, 5])
def test_prompts(by_kernels: bool, budget: int | None) -> None:
    """Guards borders of chunks: each token but the first has the one before it; cached prompts are read again."""
    drafter = make("eagle2", target(by_kernels))
    decoder = Decoder(drafter.target, drafter, 2, reuse=True, prefill_budget=budget)
    for length, count in ((17, 2), (17, 0), (1, 3), (70, 4), (17, None)):
        request = wished(prompt(length), 4, prompt_logprobs=count, logprobs=1)
        (new,), steps = run(decoder, [request])
        assert new == plain_decode(target().model, request)
        (entries,) = [step.extra.get("prompt_logprobs", ()) for step in steps if step.prefill]
        assert all("prompt_logprobs" not in step.extra for step in steps if not step.prefill)
        if logprobs_of(request).prompt is None:
            assert entries == ()
            continue
        check_prompt(request, entries)


def check_prompt(request: Request, entries: Any) -> None:
    """The first token has none, each other one its own."""
    assert entries[0] is None
    logp_TV = by_the_model(list(request.prompt))[:-1]
    check(list(entries[1:]), list(request.prompt[1:]), logp_TV, logprobs_of(request).prompt)


@pytest.mark.cover
@pytest.mark.quick("eagle1-greedy", "vanilla-sampled")
@pytest.mark.parametrize("law", LAWS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["vanilla", "eagle1", "eagle2", "suffix", "lookahead", "merged"])
def test_traces(name: str, law: Sampling) -> None:
    """Guards the page: candidates only, parents first, probabilities of the right parent, and why the path ended."""
    drafter = Merged(make("eagle2", target()), make("suffix", target())) if name == "merged" else make(name, target())
    asked = wished((5, 9, 100, 3) * 5, 20, law, trace=True)
    (new,), steps = run(Decoder(drafter.target, drafter), [asked])
    assert not steps[0].extra
    text, ended = list(asked.prompt) + new[:1], set[str]()
    for step in steps[1:]:
        trace = step.extra["trace"]
        assert len(trace.nodes) == int(step.draft.tree.acceptable_BN[0].sum())
        root, *others = trace.nodes
        assert (root.parent, root.token, root.depth, root.accepted) == (-1, text[-1], 0, True)
        for n, node in enumerate(others, 1):
            assert node.parent < n
            assert node.depth == trace.nodes[node.parent].depth + 1
        assert [n for n, node in enumerate(trace.nodes) if node.accepted] == sorted(trace.path)
        path_tokens = [*(trace.nodes[n].token for n in trace.path[1:]), trace.bonus]
        assert tuple(path_tokens[: len(step.tokens)]) == step.tokens
        children = [node for node in others if node.parent == trace.path[-1]]
        assert trace.bonus not in [node.token for node in children if not drafter.samples_children]
        if step.finish is None:
            assert trace.ended == ("other token" if children else "no child")
        else:
            assert trace.ended == step.finish
        ended.add(trace.ended)
        if law is LAWS[0]:
            logp_TV = by_the_model([*text, *(node.token for node in others if node.parent == 0)])
            for node in others:
                if node.parent == 0:
                    assert node.p == pytest.approx(float(logp_TV[len(text) - 1, node.token].exp()), abs=tolerance())
        assert all(node.q is None or 0 <= node.q <= 1 for node in others)
        assert all(node.q is not None for node in others) or name in ("lookahead", "merged")
        text += step.tokens
    assert "length" in ended
    assert len(ended) > 1
