"""Every way in which a text ends: drafts, predicted here, reach behind it, and nothing there is asked about."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import zoo
from eyas import drafters
from eyas.core.engine import Decoder, Request, Step
from eyas.core.features import TextEnd
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import InputError
from reference import run
from test_lossless import DRAWN, make
from tries import EOS, LONGEST, Trie
from wishes import wish, wished

PROMPT = (5, 9, 100, 3, 77, 12, 9, 100, 3, 8)
LONG, SAMPLINGS = 16, (Sampling(), Sampling(1.0, seed=3))

Ended = Callable[[tuple[int, ...]], bool]


@cache
def target() -> Target:
    return Target(zoo.tiny("llama", max_position_embeddings=len(PROMPT) + LONG + 1))


@cache
def free_text(sampling: Sampling) -> tuple[int, ...]:
    """What is decoded without an end."""
    ((tokens,), _) = run(Decoder(target(), make("vanilla", target())), [Request(PROMPT, LONG + 1, sampling)])
    return tuple(tokens)


class Stop:
    """Stops behind two tokens in a row, which may have begun before the root."""

    def __init__(self, pair: Sequence[int]) -> None:
        self.pair, self.text = tuple(pair), list[int]()

    def feed(self, token: int) -> bool:
        self.text.append(token)
        return self.ends(self.text)

    def after(self, tokens: Sequence[int]) -> bool:
        return self.ends([*self.text, *tokens])

    def ends(self, text: Sequence[int]) -> bool:
        return tuple(text[-2:]) == self.pair


class Complete(Trie):
    """A trie whose texts end by themselves, and which says so in its masks."""

    def __init__(self) -> None:
        super().__init__(True)

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        mask_NV, depths = super().mask(parents, tokens), [len(self.text)]
        for node, parent in enumerate(parents[1:], start=1):
            depths.append(depths[parent] + 1)
            if depths[node] == LONGEST and mask_NV[parent, tokens[node]] and not mask_NV[parent].all():
                mask_NV[node] = False
        return mask_NV


def ends(sampling: Sampling) -> dict[str, tuple[dict[str, Any], Ended]]:
    """The fields of a request that ends its text, and which texts have ended."""
    text = free_text(sampling)
    stop, silent = Stop(text[6:8]), Stop(text[6:8])
    eos = frozenset({text[7]})
    first = text.index(text[7]) + 1
    return {
        "eos": ({"eos": eos}, lambda new: bool(eos & {*new})),
        "eos that min_tokens bans": ({"eos": eos, "min_tokens": first + 1}, lambda new: bool(eos & {*new})),
        "stop string": ({"stop": stop.feed, "stops_after": stop.after}, lambda new: stop.ends(new)),
        "stop that tells nothing": ({"stop": silent.feed}, lambda new: silent.ends(new)),
        "length": ({"max_new_tokens": 8}, lambda new: len(new) >= 8),
        "context": ({"max_new_tokens": LONG + 1}, lambda new: len(new) > LONG),
        "structure": ({"constraint": Complete()}, lambda new: len(new) >= LONGEST),
        "structure, min_tokens": ({"constraint": Complete(), "eos": frozenset({EOS}), "min_tokens": LONG}, lambda new: len(new) >= LONGEST),
    }  # fmt: skip


PAIRS = itertools.product(enumerate(drafters.names()), enumerate(ends(SAMPLINGS[0])))
CASES = [(name, end, SAMPLINGS[(i + k) % 2]) for (i, name), (k, end) in PAIRS]


def answer(name: str, end: str, sampling: Sampling, prediction: tuple[int, ...]) -> tuple[list[int], str | None]:
    """New tokens and finish; the processor fails on texts that have ended, and sees none if that is foreseen."""
    fields, ended = ends(sampling)[end]
    behind = list[tuple[int, ...]]()

    def strict(ids: Tensor, scores: Tensor) -> Tensor:
        new = tuple(ids[0].tolist()[len(PROMPT) :])
        if any(ended(new[:length]) for length in range(1, len(new) + 1)):
            behind.append(new)
            raise KeyError(new)
        return scores

    request = wish(wished(PROMPT, LONG, sampling, processors=(strict,), prediction=prediction), **fields)
    ((tokens,), steps) = run(Decoder(target(), make(name, target())), [request])
    assert not behind or end == "stop that tells nothing"
    return tokens, steps[-1].finish


@pytest.mark.cover
@pytest.mark.quick("eagle2-*", "suffix-stop*", "vanilla-structure*", "lookahead-eos")
@pytest.mark.parametrize(("name", "end", "sampling"), CASES, ids=[f"{name}-{end}" for name, end, _ in CASES])
def test_nothing_is_asked_behind_the_end(name: str, end: str, sampling: Sampling) -> None:
    """Guards every end: a processor that knows no text behind it failed the request with drafts alone."""
    plain, finish = answer("vanilla", end, sampling, ())
    predicted = tuple(plain) + (free_text(sampling) if "structure" in end else free_text(sampling)[len(plain) :])
    tokens, last = answer(name, end, sampling, predicted or free_text(sampling))
    assert last == finish == ("length" if end in ("length", "context", "eos that min_tokens bans") else "stop")
    assert tokens == plain
    if sampling.greedy and "structure" not in end and "bans" not in end:
        assert tuple(tokens) == free_text(sampling)[: len(tokens)]


def test_open_nodes() -> None:
    """Guards the rule: nodes that end the text, and all below them, are closed; the root never is."""
    parents, tokens = [-1, 0, 1, 2, 0, 4, 5], [7, 1, 2, 3, 9, 2, 3]
    everything = {0: (), 1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (9,), 5: (9, 2), 6: (9, 2, 3)}
    assert TextEnd().open_nodes(parents, tokens) == everything
    for end, open_nodes in (
        (TextEnd(eos={2, 7}), {0, 1, 4}),
        (TextEnd(remaining=1), {0}),
        (TextEnd(remaining=2), {0, 1, 4}),
        (TextEnd(stops_after=lambda path: tuple(path) == (9, 2)), {0, 1, 2, 3, 4}),
    ):
        assert end.open_nodes(parents, tokens) == {node: everything[node] for node in open_nodes}
    assert TextEnd().open_nodes(parents, tokens, [True, False, True, True, True, True, True]).keys() == {0, 4, 5, 6}


@pytest.mark.parametrize("eos", [{-1}, {zoo.VOCAB}, {-1, -2, zoo.VOCAB + 7}])
def test_ids_that_the_target_does_not_have_end_nothing(eos: set[int]) -> None:
    """Guards transformers' -1 for "no end": min_tokens then banned the last token, the likeliest here."""
    likes_last = Sampling(logit_bias=((zoo.VOCAB - 1, 100.0),))
    asked = [Request(PROMPT, 6, sampling, frozenset(eos), min_tokens=4) for sampling in (likes_last, *SAMPLINGS)]
    tokens, _ = run(Decoder(target(), make("eagle2", target()), 2), asked)
    assert tokens[0] == [zoo.VOCAB - 1] * 6
    assert tokens[1:] == [list(free_text(sampling)[:6]) for sampling in SAMPLINGS]


def fails_behind(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] - len(PROMPT) >= length:
            raise KeyError("no such text")
        return scores

    return processor


def steps_of(name: str, request: Request) -> list[Step]:
    decoder, steps = Decoder(target(), make(name, target())), list[Step]()
    decoder.add(request)
    while not decoder.finished:
        steps += decoder.step()
    return steps


@pytest.mark.parametrize("name", ["eagle2", "suffix"])
def test_tokens_before_a_failure_are_emitted(name: str) -> None:
    """Guards streams of requests that fail: the same tokens come before the error as without drafts."""
    for sampling in SAMPLINGS:
        request = wished(PROMPT, LONG, sampling, processors=(fails_behind(6),), prediction=free_text(sampling))
        steps = steps_of(name, request)
        assert [token for step in steps for token in step.tokens] == list(free_text(sampling)[:6])
        assert isinstance(steps[-1].error, InputError)
        assert len(steps) < 6, "drafts must be accepted, or this test proves nothing"


class Narrow(Trie):
    """A trie that knows no text but one, and fails at others."""

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        mask_NV, paths = super().mask(parents, tokens), [self.text]
        for parent, token in zip(parents[1:], tokens[1:], strict=True):
            paths.append((*paths[parent], token))
        if any(path != trie_text()[: len(path)] for path in paths):
            raise RuntimeError("unknown text")
        return mask_NV


@cache
def trie_text() -> tuple[int, ...]:
    request = wished(PROMPT, LONG, SAMPLINGS[1], constraint=Trie(True))
    ((tokens,), _) = run(Decoder(target(), make("vanilla", target())), [request])
    return tuple(tokens)


@pytest.mark.quick("suffix")
@pytest.mark.parametrize("name", [name for name in drafters.names() if name not in DRAWN])
def test_a_constraint_that_fails_at_a_draft_fails_nothing(name: str) -> None:
    """Guards requests whose constraint knows less than is drafted: it failed for the whole tree."""
    request = wished(PROMPT, LONG, SAMPLINGS[1], constraint=Narrow(True), prediction=(*trie_text()[:4], 1, 1, 1))
    steps = steps_of(name, request)
    assert steps[-1].finish == "stop"
    assert [token for step in steps for token in step.tokens] == list(trie_text())
