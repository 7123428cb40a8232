"""Laws that depend on the text before a token: presence and frequency penalty, logit bias, min_tokens.

Plain decoding in tests/reference.py writes them out token by token, so nothing here is compared with itself.
"""

from functools import cache
from typing import Any

import pytest
import torch

import zoo
from eyas import drafters, runners
from eyas.core.adjustments import Adjustments
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling, apply_sampling
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.errors import OptionError
from reference import Oracle, plain_decode, run
from test_lossless import DRAWN, make

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # which the kernels support
BIAS = tuple((token, (-100.0, 3.0, 7.5, -2.5)[token % 4]) for token in range(0, 160, 3))
LAWS = (
    Sampling(presence_penalty=2.0),
    Sampling(1.0, frequency_penalty=1.5, presence_penalty=-0.5, seed=3),
    Sampling(logit_bias=BIAS, frequency_penalty=2.0),
    Sampling(),
    Sampling(0.8, top_k=30, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=BIAS, seed=4),
    Sampling(0.9, seed=5),
)  # fmt: skip
PROMPTS = ((5, 9, 100, 3), (12, 9, 31, 8, 40, 9, 31, 8), (60, 61, 62), (7, 7, 7), (1, 2, 3, 4, 5), (90,))


@cache
def target(kernels: bool) -> Target:
    return runners.with_fastest_runner(Target(zoo.tiny("llama", **SIZES)), "on" if kernels else "off")


@cache
def answered() -> tuple[tuple[Request, list[int]], ...]:
    """A request for each law, with its text. The last two may not end for 9 tokens, and would end sooner."""
    made = []
    for i, (prompt, law) in enumerate(zip(PROMPTS, LAWS, strict=True)):
        request = Request(prompt, 20 - i, law)
        if i > 3:
            early = plain_decode(target(False).model, request)
            request = Request(prompt, 20 - i, law, frozenset(early[2:5]), min_tokens=9)
        made.append((request, plain_decode(target(False).model, request)))
    return tuple(made)


@pytest.mark.slow
def test_the_laws_matter() -> None:
    """The power of the tests below: without its law each text but one is another."""
    for request, answer in answered():
        law = Sampling(request.sampling.temperature, seed=request.sampling.seed)
        plain = Request(request.prompt, request.max_new_tokens, law)
        assert (plain_decode(target(False).model, plain) == answer) == (request.sampling == Sampling())
    assert all(len(answer) >= 9 for _, answer in answered())


@pytest.mark.cover
@pytest.mark.parametrize("kernels", [False, True], ids=["model", "kernels"])
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_keeps_the_laws(name: str, kernels: bool) -> None:
    """Guards each node's text, and rows of different laws: cousins, the prompt or the root counted twice."""
    drafter, rows = make(name, target(kernels)), 1 if (drafters.names().index(name) + kernels) % 2 else 3
    tokens, _ = run(Decoder(drafter.target, drafter, rows), [request for request, _ in answered()])
    for (request, answer), new in zip(answered(), tokens, strict=True):
        if request.sampling.greedy or name not in DRAWN:
            assert new == answer, request.sampling


@pytest.mark.slow
def test_deep_paths_keep_the_laws() -> None:
    """Guards penalties below the root: an oracle's long paths are accepted, with ancestors that are counted."""
    oracle = Oracle(target(False), {r.prompt: a for r, a in answered()}, nodes=16, depth=6)
    tokens, steps = run(Decoder(oracle.target, oracle, 3), [request for request, _ in answered()])
    assert tokens == [answer for _, answer in answered()]
    assert sum(step.accepted for step in steps) > 30


def test_nodes_count_their_own_ancestors() -> None:
    """Guards the counts of a tree with repeated tokens, by hand. Deterministic."""
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 3]]), 3)  # 0 -- 1 -- 3 -- 5,  1 -- 4,  0 -- 2
    tokens_BN = torch.tensor([[2, 1, 3, 1, 2, 1]])
    base = Adjustments(
        counts=torch.tensor([[0.0, 4.0, 1.0, 0.0]]),
        end_tokens=torch.tensor([[True, False, False, False]]),
        tokens_before_end=torch.tensor([2]),
    )
    nodes = base.for_tree(tree, tokens_BN)
    rows = ("0410", "0510", "0411", "0610", "0520", "0710")
    assert nodes.counts[0].tolist() == [list(map(int, row)) for row in rows]
    assert nodes.tokens_before_end.tolist() == [[2, 1, 1, 0, 0, -1]]
    scores_NV = apply_sampling(torch.zeros(6, 4), Sampling(frequency_penalty=0.5, presence_penalty=1.0), nodes[0])
    assert scores_NV[5].tolist() == [0.0, -4.5, -1.5, 0.0]
    assert (scores_NV[:, 0] == -torch.inf).tolist() == [True, True, True, False, False, False]
    first = base.for_depths(torch.tensor([0])).after_tokens(torch.tensor([[1]]))
    again = first.of_nodes(torch.tensor([[0, 0]])).after_tokens(torch.tensor([[1, 2]]))
    assert again.counts[0].tolist() == [[0, 6, 1, 0], [0, 5, 2, 0]]


@pytest.mark.slow
def test_the_end_comes_after_min_tokens_and_no_later() -> None:
    """Guards the border: with min_tokens = k an EOS can be the (k+1)-th token, and none before it."""
    free, drafter = plain_decode(target(False).model, Request(PROMPTS[2], 12)), make("suffix", target(False))
    for token in dict.fromkeys(free[:-1]):
        first, eos = free.index(token), frozenset({token})
        for wait in (first, first + 1):
            request = Request(PROMPTS[2], 12, eos=eos, min_tokens=wait)
            ((new,), steps) = run(Decoder(drafter.target, drafter), [request])
            assert new == plain_decode(drafter.target.model, request)
            assert new[:first] == free[:first]
            assert (new[first] == token) == (wait == first)
            assert (steps[-1].finish == "stop") == (new[-1] == token)


@pytest.mark.parametrize(("options", "message"), [
    ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty must be from -2 to 2"),
    ({"logit_bias": ((3, 101.0),)}, "the bias of token 3 must be from -100 to 100, got 101"),
    ({"logit_bias": ((-1, 1.0),)}, "-1 is not a token id"),
])  # fmt: skip
def test_impossible_laws(options: dict[str, Any], message: str) -> None:
    """Guards the ranges of OpenAI's interface."""
    with pytest.raises(OptionError, match=message):
        Sampling(**options)
