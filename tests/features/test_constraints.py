"""Constraints at every node of a tree, with a toy: a trie of texts whose branches follow from the tokens before."""

from functools import cache

import pytest
import torch

import zoo
from eyas import drafters, runners
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters._merge import Merged
from eyas.errors import InputError
from reference import Oracle, plain_decode, run
from test_lossless import DRAWN, make
from tries import EOS, LONGEST, Trie
from wishes import constraint_of, wished

SAMPLINGS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=5, presence_penalty=1.0, seed=4))


@cache
def target(kernels: bool = False) -> Target:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return runners.with_fastest_runner(Target(zoo.tiny("llama", **sizes)), "on" if kernels else "off")


def requests() -> list[Request]:
    """New ones, as a constraint serves once: ended by EOS, by themselves, by length; two free ones."""
    eos = frozenset({EOS})
    made = [wished((5, 9, 100, 3), 20, law, eos, constraint=Trie()) for law in SAMPLINGS]
    made += [wished((12, 9, 31), 20, law, eos, constraint=Trie(True)) for law in SAMPLINGS]
    cut = wished((60, 61), 6, SAMPLINGS[1], eos, constraint=Trie())
    return [*made, cut, Request((7, 7, 7), 12), Request((1, 2), 12, Sampling(1.0, seed=9))]


@cache
def answers() -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(plain_decode(target().model, request)) for request in requests())


@pytest.mark.cover(name=10)
@pytest.mark.parametrize("kernels", [False, True], ids=["model", "kernels"])
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_keeps_to_the_constraint(name: str, kernels: bool) -> None:
    """Guards each node's mask, beside free rows; the trie asserts that nothing is asked or emitted behind its end."""
    drafter, asked = make(name, target(kernels)), requests()
    rows = 1 if (drafters.names().index(name) + kernels) % 2 else 3
    tokens, steps = run(Decoder(drafter.target, drafter, rows), asked)
    for request, new, plain in zip(asked, tokens, answers(), strict=True):
        if request.sampling.greedy or constraint_of(request) is not None or name not in DRAWN:
            assert tuple(new) == plain, request
    ends = {step.request_id: step.finish for step in steps if step.finish}
    assert [ends[i + 1] for i in range(len(asked))] == ["stop"] * 6 + ["length"] * 3


@pytest.mark.slow
def test_paths_through_a_constraint_are_accepted() -> None:
    """Guards masks below the root, before the request's length too; two methods in one tree agree."""
    asked = requests()
    known = {r.prompt: list(a) for r, a in zip(asked, answers(), strict=True) if r.sampling == SAMPLINGS[1]}
    oracle = Oracle(target(), known, 16, 6)
    (tokens, steps) = run(Decoder(target(), oracle, 2), [asked[1], asked[4]])
    assert tokens == [list(answers()[1]), list(answers()[4])]
    assert sum(step.accepted for step in steps) >= 8
    for length in range(1, LONGEST):
        short = wished((5, 9, 100, 3), length, SAMPLINGS[1], frozenset({EOS}), constraint=Trie())
        assert run(Decoder(target(), oracle), [short])[0] == [list(answers()[1][:length])]
    (tokens, _) = run(Decoder(target(), Merged(make("eagle2", target()), make("suffix", target()))), requests()[:3])
    assert [tuple(t) for t in tokens] == list(answers()[:3])


class Broken(Trie):
    """A trie that fails in one of its methods, after two tokens."""

    def __init__(self, where: str, result: object = None) -> None:
        super().__init__()
        self.where, self.result = where, result

    def __getattribute__(self, name: str) -> object:
        own = super().__getattribute__
        if name in ("mask", "accept", "finished", "forced") and name == own("where") and len(own("text")) >= 2:
            if (result := own("result")) is not None:
                return lambda *args: result
            raise RuntimeError("broken here")
        return own(name)


@pytest.mark.quick("eagle2-accept", "vanilla-mask", "vanilla-forced")
@pytest.mark.parametrize("fault", ["mask", "accept", "finished", "forced", "shape"])
@pytest.mark.parametrize("name", ["vanilla", "eagle2"])
def test_a_constraint_that_fails_fails_alone(fault: str, name: str) -> None:
    """Guards the requests beside it and after it."""
    broken = Broken("mask", torch.ones(1, 3, dtype=torch.bool)) if fault == "shape" else Broken(fault)
    message = "constraint gave a mask of shape" if fault == "shape" else "constraint raised RuntimeError: broken here"
    drafter = make(name, target())
    decoder = Decoder(drafter.target, drafter, 2)
    asked = [requests()[7], wished((5, 9, 100, 3), 20, constraint=broken), requests()[1], requests()[8]]
    tickets, tokens, errors = [decoder.add(r) for r in asked], dict[int, list[int]](), dict[int, str]()
    while not decoder.finished:
        for step in decoder.step():
            tokens.setdefault(step.request_id, []).extend(step.tokens)
            if step.error is not None:
                assert (type(step.error), step.finish) == (InputError, "error")
                errors[step.request_id] = str(step.error)
    assert list(errors) == [tickets[1]]
    assert errors[tickets[1]].startswith(message)
    assert [tuple(tokens[tickets[i]]) for i in (0, 2, 3)] == [answers()[7], answers()[1], answers()[8]]
