"""Drafts as each request wants them: off, at most n, with a prediction, with forced tokens. The ids stay."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import zoo
from core.test_dormant import Chance, right_now_and_then, suffix
from core.test_prompts import CASES, PARAMS, method_of, plain
from covers import turn
from eyas.core.dormant import with_policy
from eyas.core.engine import Decoder, Request, Step
from eyas.core.row_drafts import limit_nodes
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.features.predictions import MAX_MATCH, Prediction
from reference import run, run_at_random, widths_of
from test_lossless import DRAWN, SAMPLINGS
from wishes import prediction_of, wish

PROMPTS = ((5,), (11,), tuple(range(20, 49)), (7, 8, 9))


class Forced:
    """A constraint that allows one text only; `mask` is not asked here, as the text is the target's own."""

    def __init__(self, text: Sequence[int], share: float) -> None:
        self.text, self.place, self.dice, self.share = list(text), 0, random.Random(0), share
        self.offered = 0

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        return torch.ones(len(parents), zoo.VOCAB, dtype=torch.bool)

    def accept(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)

    finished = False

    def forced(self, limit: int) -> list[int]:
        """The rest of the text at times, wrong tokens at times, nothing at times."""
        self.offered += 1
        if self.dice.random() > self.share:
            return self.dice.choice([[], [3, 3, 3]])
        return self.text[self.place : self.place + limit]


def changed(text: Sequence[int], seed: int) -> tuple[int, ...]:
    """The text with tokens replaced, inserted and left out."""
    dice, found = random.Random(seed), list[int]()
    for token in text:
        kind = dice.random()
        if kind < 0.08:
            found.append(dice.randrange(zoo.VOCAB))
        elif kind < 0.16:
            found += [token, dice.randrange(zoo.VOCAB)]
        elif kind > 0.08 + 0.16:
            found.append(token)
    return tuple(found)


@pytest.mark.cover(name=2)
@pytest.mark.parametrize("name", PARAMS)
def test_ids_with_every_wish(name: str, target: Target) -> None:
    """Guards nodes that a session has not drafted, paths deeper than its tree, cycles slept through, limits, rows."""
    requests = []
    for i, kind in enumerate(("prediction", "off", 1, "both", 3, "auto", "prediction", "wrong", 2)):
        request = Request(PROMPTS[i % len(PROMPTS)], 28 - 2 * i, SAMPLINGS[i % len(SAMPLINGS)])
        answer = plain(target, request)
        drafting = {"prediction": "auto", "wrong": "auto", "both": 5}.get(kind, kind)
        request = replace(request, drafting=drafting)
        if kind in ("prediction", "both"):
            request = wish(request, prediction=changed(answer, i))
        requests.append(wish(request, prediction=tuple(range(9)) * 3) if kind == "wrong" else request)
    budget, rows, seed = turn(name, CASES, ((9, 3, 1), (None, 1, 2), (None, 4, 3)))
    tokens, steps = run_at_random(
        Decoder(target, method_of(name, target, seed), rows, prefill_budget=budget), requests, seed
    )
    for number, (request, ids) in enumerate(zip(requests, tokens, strict=True), start=1):
        if request.sampling.greedy or name not in DRAWN or prediction_of(request) or request.drafting == "off":
            expected = plain(target, wish(request, drafting="auto", prediction=()))
            assert ids == expected, f"{rows} rows, {request.drafting}, {request.sampling}"
        own = [step for step in steps if step.request_id == number and not step.prefill]
        check_candidates(request, own)
    assert sum(step.extra.get("predicted", 0) for step in steps) > 20, "no prediction was accepted"


def check_candidates(request: Request, steps: list[Step]) -> None:
    limit = request.draft_limit
    for step in steps:
        candidates = int(step.draft.tree.acceptable_BN[step.row].sum()) - 1
        assert limit is None or candidates <= limit
        assert step.accepted <= candidates
        assert step.extra.get("predicted", 0) <= step.accepted


@pytest.mark.cover(name=6)
@pytest.mark.quick("suffix")
@pytest.mark.parametrize("name", PARAMS)
def test_forced_tokens_are_drafted(name: str, target: Target) -> None:
    """Bug: wrong tokens that a constraint calls forced are emitted, right ones refused, or another row's."""
    for rows in (1, 3):
        requests = [Request(PROMPTS[i], 30, SAMPLINGS[i]) for i in range(3)]
        answers = [plain(target, request) for request in requests]
        constraints = [Forced(answer, 0.7) for answer in answers]
        asked = [wish(r, constraint=c) for r, c in zip(requests, constraints, strict=True)]
        decoder, found, accepted = Decoder(target, method_of(name, target), rows), dict[int, list[int]](), 0
        tickets = [decoder.add(request) for request in asked]
        while not decoder.finished:
            for step in decoder.step():
                found.setdefault(step.request_id, []).extend(step.tokens)
                constraint = constraints[tickets.index(step.request_id)]
                constraint.place = len(found[step.request_id])
                accepted += step.accepted
        assert [found[request_id] for request_id in tickets] == answers
        assert accepted > 40
        assert all(constraint.offered for constraint in constraints)


@pytest.mark.parametrize("name", ["eagle1", "eagle2", "small_model"])
def test_rows_that_are_off_cost_a_plain_cycle(name: str, target: Target) -> None:
    """Bug: a tree is drafted, or verified, for rows that want none; with a policy or without, alone or not."""
    for policy in (None, Chance(0, None, suffix(target))):
        drafter = right_now_and_then(name, target)
        decoder = Decoder(target, with_policy(drafter, policy), rows=2)
        with widths_of(target.model) as widths:
            off = [Request((1, 2, 3), 8, drafting="off"), Request((1, 2, 3, 4), 8, Sampling(1.0), drafting="off")]
            run(decoder, off)
        own_model = name == "small_model"  # its model is the target itself, and reads the prompts too
        assert sorted(widths) == [1] * 7 + [3] * (1 + own_model) + [4] * (1 + own_model)


def test_a_limit_makes_dynamic_trees_smaller(target: Target) -> None:
    """Bug: nodes that cannot be accepted are forwarded all the same, where the tree could be smaller."""
    drafter = right_now_and_then("eagle2", target)
    _, steps = run(Decoder(target, drafter), [Request((5,), 12, drafting=3)])
    assert {step.draft.tree.nodes for step in steps if step.draft is not None} == {4}
    _, steps = run(Decoder(target, drafter, 2), [Request((5,), 12, drafting=3), Request((11,), 12, drafting=6)])
    assert {step.draft.tree.nodes for step in steps if step.draft is not None} <= {4, 7}


@pytest.mark.slow
def test_a_row_that_follows_its_prediction_needs_no_head(target: Target) -> None:
    """Bug: the head drafts although the prediction is followed, or has not read what came meanwhile."""
    request = Request(PROMPTS[2], 60)
    answer = plain(target, request)
    text = (*answer[:40], *reversed(answer[40:]))
    tokens, steps = run(Decoder(target, right_now_and_then("eagle2", target)), [wish(request, prediction=text)])
    assert tokens == [answer]
    labels = [step.drafted_by for step in steps if not step.prefill]
    assert "prediction" in labels
    assert labels[-1] != "prediction"
    followed = [step for step in steps if step.drafted_by == "prediction"]
    assert sum(step.extra.get("predicted", 0) for step in followed) > 10
    assert max(len(step.tokens) for step in steps) == 17


def follow(prediction: Prediction, tokens: Sequence[int]) -> list[list[int]]:
    for token in tokens:
        prediction.read(token)
    return [continuation.tokens for continuation in prediction.continuations()]


def test_a_prediction_is_followed() -> None:
    """Bug: the first tokens are not drafted, too few of a text long followed, or more than there is."""
    text = list(range(100, 160))
    prediction = Prediction(text, 16)
    assert follow(prediction, []) == [text[:8]]
    assert follow(prediction, text[:1]) == [text[1:5]]
    assert follow(prediction, text[1:10]) == [text[10:26]]
    assert follow(prediction, text[10:55]) == [text[55:]]
    assert follow(prediction, text[55:]) == []


def test_a_prediction_finds_its_place_again() -> None:
    """Bug: after a token replaced, inserted, deleted or repeated nothing is drafted, or at a wrong place."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 11, 12, 13, 14]
    assert follow(Prediction(text, 16), [1, 2, 99]) == [[4, 5, 6, 7], [3, 4, 5, 6]]
    assert follow(Prediction(text, 16), [1, 2, 99, 4]) == [[5, 6, 7, 8]], "the nearer 4"
    assert follow(Prediction(text, 16), [1, 2, 99, 98, 97, 96, 95]) == []
    assert follow(Prediction(text, 16), [1, 2, 99, 98, 97, 96, 95, 6, 7]) == [[8, 9, 10, 3, 4, 11]]
    assert follow(Prediction(text, 16), [1, 2, 9, 10, 3]) == [[4, 11, 12, 13, 14]]


@pytest.mark.slow
def test_a_place_is_that_of_the_longest_match() -> None:
    """The definition, against a search through all places, for random texts over few tokens."""
    dice = random.Random(3)
    for _ in range(60):
        text = [dice.randrange(4) for _ in range(40)]
        answer = changed(text, dice.randrange(1000))
        prediction = Prediction(text, 8)
        for end, token in enumerate(answer, start=1):
            lost = prediction.unmatched or text[prediction.position : prediction.position + 1] != [token]
            prediction.read(token)
            said = answer[max(0, end - MAX_MATCH) : end]
            lengths = [
                next((n for n in range(min(i, len(said)), 0, -1) if list(said[-n:]) == text[i - n : i]), 0)
                for i in range(41)
            ]
            if lost and max(lengths):
                assert lengths[prediction.position] == max(lengths) == prediction.matched
            if not prediction.unmatched:
                assert text[prediction.position - 1] == token


def test_the_most_probable_nodes_are_kept() -> None:
    """Bug: a node is kept without its parent, or a less probable one in its place."""
    acceptable_BN = torch.tensor([[True] * 6, [True] * 6, [True, True, False, True, True, False]])
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 2]] * 3), 2, acceptable_BN)
    log_q_BN = torch.tensor([[0.0, -1.0, -0.5, -0.1, -2.0, -0.2]] * 3)
    kept = limit_nodes(Draft(tree, torch.arange(18).view(3, 6), log_q_BN), (2, None, 2)).tree.acceptable_BN
    assert kept.int().tolist() == [[1, 0, 1, 0, 0, 1], [1] * 6, [1, 1, 0, 1, 0, 0]]


def test_sampled_nodes_are_kept_by_their_place() -> None:
    """Bug: what was drawn decides which node is tested. Trees of one shape keep the same nodes."""
    parents, generator = torch.tensor([[-1, 0, 0, 1, 1, 2]]), torch.Generator().manual_seed(0)
    for most in range(7):
        found = set()
        for _ in range(5):
            tokens, log_q = torch.randint(9, (1, 6), generator=generator), -torch.rand(1, 6, generator=generator)
            draft = Draft(Tree.build(parents, 2), tokens, log_q, torch.rand(1, 6, 9))
            found.add(tuple(limit_nodes(draft, (most,)).tree.acceptable_BN[0].int().tolist()))
        (kept,) = found
        assert sum(kept) == min(most, 5) + 1
        assert all(not kept[n] or kept[parent] for n, parent in enumerate(parents[0].tolist()) if parent >= 0)
        assert kept[1] >= kept[2]
        assert kept[3] >= kept[4]
