"""Processors over trees: only prefixes that decoding reaches, and one clear error for one that returns no scores."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

import zoo
from eyas import drafters
from eyas.core.engine import Decoder
from eyas.core.requests import Request, check_request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import InputError
from eyas.features import Guidance, Traced
from reference import run
from test_lossless import DRAWN, make
from wishes import wished

PROMPT = (5, 9, 100, 3, 77, 12, 9, 100, 3, 8)
EOS = 2
LONGEST = 9  # tokens of an allowed text, EOS included


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.FAMILIES["llama"]())


def allowed_after(answer: tuple[int, ...]) -> list[int]:
    """The children of a node in a trie of allowed answers; KeyError where there is no such node."""
    for n, token in enumerate(answer):
        if token not in children(answer[:n]):
            raise KeyError(answer)
    return children(answer)


def children(answer: tuple[int, ...]) -> list[int]:
    if EOS in answer or len(answer) >= LONGEST:
        return []
    if len(answer) == LONGEST - 1:
        return [EOS]
    place = 31 * sum(answer) + 7 * len(answer)
    return sorted({3 + (place + 13 * k) % (zoo.VOCAB - 3) for k in range(12)} | {9, 100})


def trie(limit: int, seen: set[tuple[int, ...]]) -> PrefixConstrainedLogitsProcessor:
    """transformers' own processor; it raises for prefixes outside the trie, and here for those that are too long."""

    def allowed(batch: int, ids: Tensor) -> list[int]:
        answer = tuple(ids.tolist()[len(PROMPT) :])
        assert len(answer) < limit, "nothing is drawn behind the last token"
        seen.add(answer)
        return allowed_after(answer)

    return PrefixConstrainedLogitsProcessor(allowed, num_beams=1)


LAWS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=5, seed=4))
# Each pair of method, law and limit once.
PAIRS = [
    (name, law, (LONGEST + 8, 6)[(i + k) % 2]) for i, name in enumerate(drafters.names()) for k, law in enumerate(LAWS)
]


@pytest.mark.cover(method=10)
@pytest.mark.quick("eagle2-*", "suffix-*")
@pytest.mark.parametrize(("method", "sampling", "limit"), PAIRS)
def test_a_trie_sees_only_prefixes_that_can_happen(target: Target, method: str, sampling: Sampling, limit: int) -> None:
    """Guards processors behind forbidden tokens, an EOS, scouts or the last token, where a trie raises."""
    drafter, seen = make(method, target), set[tuple[int, ...]]()
    request = wished(PROMPT, limit, sampling, frozenset({EOS}), processors=(trie(limit, seen),))
    tokens, _ = run(Decoder(target, drafter), [request])
    plain, _ = run(Decoder(target, make("vanilla", target)), [request])
    if sampling.greedy or method not in DRAWN:
        assert tokens == plain
    assert len(tokens[0]) == min(limit, LONGEST)
    assert all(tuple(tokens[0][:n]) in seen for n in range(len(tokens[0])))


def nothing(ids: Tensor, scores: Tensor) -> Any:
    return None


def narrow(ids: Tensor, scores: Tensor) -> Tensor:
    return scores[:, :-1]


def forbids_all(ids: Tensor, scores: Tensor) -> Tensor:
    return torch.full_like(scores, -torch.inf)


def not_a_number(ids: Tensor, scores: Tensor) -> Tensor:
    return scores * torch.nan


class Infinite:
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(scores == scores.amax(), torch.inf)


BAD: list[tuple[Callable[..., Any], str]] = [
    (nothing, "processor nothing returned NoneType"),
    (narrow, "processor narrow returned scores of shape"),
    (forbids_all, "processor forbids_all forbids every token"),
    (not_a_number, "processor not_a_number returned scores that are NaN"),
    (Infinite(), "processor Infinite returned scores that are inf"),
]


@pytest.mark.parametrize("late", [False, True], ids=["first token", "in a tree"])
@pytest.mark.parametrize(("processor", "message"), BAD, ids=[message.split()[1] for _, message in BAD])
def test_bad_scores_name_the_processor(target: Target, processor: Callable[..., Any], message: str, late: bool) -> None:
    """Guards against empty texts, tracebacks and blame on the target; at the first token and in a tree."""

    def sometimes(ids: Tensor, scores: Tensor) -> Tensor:
        return processor(ids, scores) if ids.shape[1] > len(PROMPT) + 2 * late else scores

    sometimes.__name__ = message.split()[1]
    request = wished(PROMPT[:-1], 8, Sampling(1.0), processors=(sometimes if late else processor,))
    with pytest.raises(InputError, match=message):
        run(Decoder(target, make("eagle2", target)), [request])


@pytest.mark.slow
def test_a_processor_that_writes_into_its_scores_changes_nothing_else(target: Target) -> None:
    """Guards the logits that the drafter reads after the cycle: lookahead drafts from them."""

    def writes(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 20:] = -torch.inf
        return scores

    def copies(ids: Tensor, scores: Tensor) -> Tensor:
        return writes(ids, scores.clone())

    paths = []
    for processor in (writes, copies):
        tokens, steps = run(Decoder(target, make("lookahead", target)), [wished(PROMPT, 20, processors=(processor,))])
        paths.append((tokens, [step.path for step in steps]))
    assert paths[0] == paths[1]


def test_two_features_with_scores_are_refused() -> None:
    """Bug: the last one wins, and the other one's rule is broken without a word."""
    scoring = Guidance(processors=(lambda ids, scores: scores,))
    check_request(Request((1, 2), 3, features=(scoring, Traced())), 9)
    with pytest.raises(InputError, match="Guidance and Guidance both compute the distribution"):
        check_request(Request((1, 2), 3, features=(scoring, scoring)), 9)
