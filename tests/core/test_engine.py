"""The Decoder: joining and leaving, stops, limits, processors, what a Step says."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import zoo
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import FitError, InputError, ModelError, OptionError
from reference import Oracle, plain_decode, run
from wishes import wished

PROMPT = (5, 9, 100, 3, 77, 12)


@pytest.fixture(scope="module")
def answer(target: Target) -> list[int]:
    return plain_decode(target.model, Request(PROMPT, 40))


@pytest.fixture
def oracle(target: Target, answer: list[int]) -> Oracle:
    return Oracle(target, {PROMPT: answer}, nodes=12, depth=6)


def test_steps_add_up(oracle: Oracle, answer: list[int]) -> None:
    """Guards the metrics' source: tokens, accepted counts and paths of the steps must add up to the answer, exactly."""
    tokens, steps = run(Decoder(oracle.target, oracle), [Request(PROMPT, 40)])
    assert tokens == [answer]
    assert [s.prefill for s in steps] == [True] + [False] * (len(steps) - 1)
    assert [s.finish for s in steps] == [None] * (len(steps) - 1) + ["length"]
    for step in steps[1:-1]:
        assert len(step.tokens) == step.accepted + 1 == len(step.path)
        drafted = [int(step.draft.tokens_BN[step.row, n]) for n in step.path[1:]]
        assert list(step.tokens[:-1]) == drafted


def test_length_is_cut_exactly(oracle: Oracle, answer: list[int]) -> None:
    """Guards trimming inside an accepted path: never past max_new_tokens, and the bonus is not counted as drafted."""
    for cut in range(1, 14):
        tokens, steps = run(Decoder(oracle.target, oracle), [Request(PROMPT, cut)])
        assert tokens == [answer[:cut]]
        assert all(s.accepted <= len(s.tokens) for s in steps)
        assert steps[-1].finish == "length"


def test_eos_and_stop_callable(oracle: Oracle, answer: list[int]) -> None:
    """Guards stopping inside an accepted path; the EOS is the last id; of several the first to come counts."""
    for place in range(12):
        token, first = answer[place], answer.index(answer[place])
        ending, stopping = frozenset({token, 10_000}), lambda t, token=token: t == token
        for request in (Request(PROMPT, 40, eos=ending), Request(PROMPT, 40, stop=stopping)):
            tokens, steps = run(Decoder(oracle.target, oracle), [request])
            assert tokens == [answer[: first + 1]]
            assert steps[-1].finish == "stop"


@pytest.mark.cover(name=1)
@pytest.mark.parametrize("name", ["vanilla", "eagle1", "eagle2"])
def test_prefix_reuse(target: Target, name: str) -> None:
    """Guards chat: a prompt that begins like the row's leftovers is answered as if from scratch, wherever they part."""
    kind = drafters.find(name)
    method = kind.random(target, seed=3)
    decoder = Decoder(target, method, rows=1, reuse=True)
    first = Request(PROMPT, 20)
    conversation = list(PROMPT) + run(decoder, [first])[0][0]
    for cut in (len(conversation), len(conversation) - 1, len(PROMPT) + 3, len(PROMPT), 2, 1, 0):
        prompt = (*conversation[:cut], 60, 61, 62)
        assert run(decoder, [Request(prompt, 15)])[0][0] == plain_decode(target.model, Request(prompt, 15)), cut
        run(decoder, [first])  # leave the same leftovers behind
    whole = Request(tuple(conversation), 5)
    assert run(decoder, [whole])[0][0] == plain_decode(target.model, whole)
    assert run(decoder, [first])[0][0] == run(decoder, [first])[0][0] == conversation[len(PROMPT) :]


def test_cancel_leaves_everything_usable(target: Target) -> None:
    """Guards closing a stream early: the row is free again and the next answer is right."""
    method = drafters.find("eagle1").random(target, seed=3)
    decoder = Decoder(target, method, rows=1)
    request_id = decoder.add(Request(PROMPT, 40))
    waiting = decoder.add(Request(PROMPT, 3))
    decoder.step()
    decoder.cancel(request_id)
    decoder.cancel(waiting)
    assert decoder.finished
    assert run(decoder, [Request(PROMPT, 12)])[0][0] == plain_decode(target.model, Request(PROMPT, 12))


@pytest.mark.parametrize("own", [False, True], ids=["processors", "penalty"])
def test_each_node_has_its_own_prefix(target: Target, own: bool) -> None:
    """Guards generate's processors and our penalty inside the tree: ancestors count, cousins do not."""
    slow = () if own else (NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.7))
    asked: Any = {"repetition_penalty": 1.4} if own else {"logits_processor": LogitsProcessorList(slow)}
    ids = torch.tensor([PROMPT])
    asked |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    theirs = target.model.generate(ids, max_new_tokens=30, **asked)[0, len(PROMPT) :].tolist()
    request = wished(PROMPT, 30, Sampling(repetition_penalty=1.4 if own else 1.0), processors=slow)
    for method in (Oracle(target, {PROMPT: theirs}), drafters.find("eagle2").random(target, seed=4)):
        assert run(Decoder(target, method), [request])[0][0] == theirs


@pytest.mark.quick("256")
@pytest.mark.parametrize("length", [245, 248, 254, 255, 256])
def test_a_path_longer_than_the_tree_has_nodes(target: Target, length: int) -> None:
    """Guards the cache's edge: a commit writes the deepest path's slots, however few nodes were verified."""
    request = Request((tuple(range(100)) * 3)[:length], 6)
    small = {"tree.nodes": 3, "tree.depth": 8}
    kind = drafters.find("eagle2")
    method = kind.random(target, build_options(kind.Options, small))
    assert run(Decoder(target, method), [request])[0][0] == plain_decode(target.model, request)


@pytest.mark.quick("llama_dynamic")
@pytest.mark.parametrize("family", ["gpt2", "llama_dynamic", "phi3_longrope"])
def test_up_to_the_last_position_of_the_context(family: str) -> None:
    """Guards nodes past the context: tables of positions, lengths at which dynamic NTK and longrope change."""
    target = Target((zoo.FAMILIES | zoo.SWITCHING)[family]())
    request = Request(tuple(int(x) for x in torch.arange(target.context - 12) % 100), 12)
    method = drafters.find("eagle2").random(target)
    assert run(Decoder(target, method), [request])[0][0] == plain_decode(target.model, request)


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt": ()}, "empty"),
    ({"prompt": (1, 4000)}, "token id 4000 is outside the target's vocabulary of 160"),
    ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
    ({"max_new_tokens": 512}, "exceed the target's context of 512"),
    ({"sampling": Sampling(logit_bias=((160, 1.0),))}, "logit_bias: token id 160 is outside the target's"),
    ({"min_tokens": 6}, r"min_tokens must be from 0 to max_new_tokens \(5\), got 6"),
    ({"logprobs": 161}, r"logprobs must be from 0 to the size of the vocabulary \(160\), got 161"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0"),
    ({"prediction": (1, 4000)}, "prediction: token id 4000 is outside the target's vocabulary"),
    *(({"drafting": wrong}, "drafting must be auto, off or a number of draft") for wrong in (0, -1, True, "on", 1.5)),
])  # fmt: skip
def test_refusals(target: Target, fields: dict[str, Any], message: str) -> None:
    """Guards bad requests: refused when added, before anything runs, with the numbers."""
    decoder = Decoder(target, drafters.find("vanilla")(target))
    with pytest.raises((InputError, FitError, OptionError), match=message):
        decoder.add(wished(**{"prompt": (1,), "max_new_tokens": 5, **fields}))
    assert decoder.finished


def test_nan_names_the_layer() -> None:
    """Guards broken weights: one clear line instead of nonsense."""
    model = zoo.FAMILIES["llama"]()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    target = Target(model)
    decoder = Decoder(target, drafters.find("vanilla")(target))
    decoder.add(Request(PROMPT, 5))
    (step,) = decoder.step()
    assert (type(step.error), step.finish) == (ModelError, "error")
    assert "NaN (after layer 2)" in str(step.error)
