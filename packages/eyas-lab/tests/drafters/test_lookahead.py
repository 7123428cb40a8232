"""Lookahead: the window's tree, the pool, and what a cycle hands on to the next."""

from __future__ import annotations

import random

import pytest
import torch

import zoo
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import CycleInput
from eyas.errors import OptionError
from eyas_lab.methods.method_lookahead import Lookahead, Method, Options, Pool, Session, build_trie
from reference import plain_decode, run

SHAPE = Lookahead(width=4, ngram=4, guesses=3)
VOCAB = 50


def roots_of(tokens: list[int], active: list[bool], position: int = 7, sampling: Sampling | None = None) -> CycleInput:
    rows = tuple(sampling or Sampling() for _ in tokens)
    position_B = torch.full((len(tokens),), position)
    return CycleInput(
        torch.tensor(tokens), position_B, torch.tensor(active), rows, GumbelNoise.from_sampling(rows), position
    )


def started(prompt: list[int], rows: int = 1, shape: Lookahead = SHAPE) -> Session:
    session = Session(shape, rows)
    session.begin(0, 0, len(prompt))
    session.prefill(0, torch.tensor(prompt), torch.zeros(len(prompt), 0), 0)
    return session


def says(draft: Draft, said: list[int]) -> TargetOutput:
    """Logits by which the lowest level's window nodes say these tokens."""
    logits_BNV = torch.zeros(*draft.tokens_BN.shape, VOCAB)
    for column, token in enumerate(said):
        logits_BNV[:, 2 * 4 + column, token] = 9.0
    return TargetOutput(logits_BNV, logits_BNV[..., :0])


def nothing_accepted(draft: Draft) -> Verdict:
    none_B = torch.zeros(draft.tree.rows, dtype=torch.long)
    P = draft.tree.max_depth + 1
    path_BP = torch.full((draft.tree.rows, P), -1)
    path_BP[:, 0] = 0
    tokens_BP = torch.zeros(draft.tree.rows, P, dtype=torch.long)
    tokens_BP[:, 0] = draft.tokens_BN[:, 0]
    return Verdict(path_BP, tokens_BP, none_B + 1, none_B)


def test_the_window_is_the_drawn_tree() -> None:
    """Guards mask and positions of the window: b1 attends to the root, a1 and itself, nothing else;
    depth = column + level; only n-grams of the pool are acceptable."""
    session = started([3, 4, 5, 6, 3, 4, 5, 7, 9])
    draft = session.draft(roots_of([3], [True]))
    tree = draft.tree
    assert (tree.nodes, tree.max_depth) == (12 + 9, 5)
    for level in range(3):
        for column in range(4):
            node = 4 * level + column
            seen = {*range(column + 1), *(4 * k + column for k in range(level + 1))}
            assert set(tree.mask_BNN[0, node].nonzero()[:, 0].tolist()) == seen
            assert int(tree.depth_BN[0, node]) == column + level
    assert tree.acceptable_BN[0, :12].tolist() == [True] + [False] * 11
    branch = [
        (int(tree.parents_BN[0, n]), int(draft.tokens_BN[0, n])) for n in range(12, 21) if tree.acceptable_BN[0, n]
    ]
    assert branch == [(0, 4), (12, 5), (13, 7), (13, 6)]  # the newest n-gram of the prompt first


def test_what_the_window_says_becomes_ngrams() -> None:
    """Guards the hand-over: column by column, levels and what was said make n-grams for the pool;
    the levels move up by one; the new level 0 begins with the next root. The n-grams come back as
    candidates once their first token is the root."""
    session = started([1, 2], shape=Lookahead(4, 4, 3, prompt=False))
    first = session.draft(roots_of([30], [True]))
    window = first.tokens_BN[0, :12].view(3, 4)
    assert int(window[0, 0]) == 30
    assert int(first.tree.acceptable_BN.sum()) == 1  # the pool is empty
    session.commit(first, nothing_accepted(first), says(first, [41, 42, 43, 44]))
    second = session.draft(roots_of([30], [True]))
    moved = second.tokens_BN[0, :12].view(3, 4)
    assert moved[0, 1:].tolist() == window[1, 1:].tolist()
    assert moved[1].tolist() == window[2].tolist()
    assert moved[2].tolist() == [41, 42, 43, 44]
    assert second.tokens_BN[0, 12:15].tolist() == [*window[1:, 0].tolist(), 41]
    assert second.tree.acceptable_BN[0, 12:].tolist() == [True] * 3 + [False] * 6


def test_window_nodes_draw_with_the_noise_of_their_position() -> None:
    """Guards the shared noise: at temperature 1 a window node says what the target would draw
    there, with that position's noise. Were it another position's, or none, 4 of 4 would agree with
    odds below 1e-4 (50 tokens, flat laws)."""
    session = started([1, 2])
    roots = roots_of([30], [True], 7, Sampling(1.0, seed=5))
    draft = session.draft(roots)
    flat = TargetOutput(torch.zeros(1, draft.tree.nodes, VOCAB), torch.zeros(1, draft.tree.nodes, 0))
    session.commit(draft, nothing_accepted(draft), flat)
    position_1W = 7 + torch.tensor([[2, 3, 4, 5]]) + 1
    assert session.states[0].levels[-1] == roots.noise.gumbel(position_1W, VOCAB)[0].argmax(-1).tolist()


def test_the_pool_is_bounded_and_newest_first() -> None:
    """Guards memory in long texts, and recency: what was seen again is new again."""
    pool = Pool(3)
    for ngram in ((1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3), (1, 6, 6), (1, 7, 7)):
        pool.add(ngram)
    assert pool.after(1) == [(7, 7), (6, 6), (2, 3)]
    assert pool.after(2) == [(9, 9)]
    assert pool.after(3) == []


def test_empty_rows_learn_nothing() -> None:
    """Guards rows without a request: their garbage must not reach a pool, and they need no window."""
    session = started([1, 2, 3, 4], rows=2)
    before = [list(level) for level in session.states[0].levels]
    session.end(0)
    draft = session.draft(roots_of([0, 0], [False, False]))
    session.commit(draft, nothing_accepted(draft), says(draft, [1, 2, 3, 4]))
    assert session.states[0].tokens == []
    assert session.states[0].pool.after(0) == []
    assert len(before) == 3


def test_a_row_that_is_kept() -> None:
    """Guards chats: the tokens are cut back to what is shared and go on from there; the pool stays.
    Prompts that come in chunks give the n-grams that lie across them."""
    session = started([1, 2, 3, 4, 5])
    assert session.truncate(0, 3) == 3
    session.begin(0, 3, 6)
    session.prefill(0, torch.tensor([7, 8]), torch.zeros(2, 0), 3)
    session.prefill(0, torch.tensor([9]), torch.zeros(1, 0), 5)
    assert session.states[0].tokens == [1, 2, 3, 7, 8, 9]
    assert session.states[0].pool.after(1) == [(2, 3, 7), (2, 3, 4)]
    assert session.states[0].pool.after(3) == [(7, 8, 9)]
    session.begin(0, 0, 6)
    assert session.states[0].pool.after(1) == []


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 5, 2), (6, 2, 4), (5, 3, 5)])
@pytest.mark.parametrize("reuse", [False, True])
def test_shapes(shape: tuple[int, int, int], reuse: bool) -> None:
    """Guards windows at their edges (one column, one level), greedy and sampled, in rows that join
    and leave, and a chat's row."""
    target, dice = Target(zoo.FAMILIES["llama"]()), random.Random(0)
    prompt = tuple(dice.randrange(100) for _ in range(6))
    laws = (Sampling(), Sampling(0.9, seed=2, repetition_penalty=1.3), Sampling())
    requests = [Request((*prompt, *range(i)), 24, sampling) for i, sampling in enumerate(laws)]
    options = dict(zip(("lookahead.width", "lookahead.ngram", "lookahead.guesses"), shape, strict=True))
    drafter = Method(target, build_options(Options, options))
    tokens, steps = run(Decoder(target, drafter, 1 if reuse else 2, reuse), requests)
    assert tokens == [plain_decode(target.model, request) for request in requests]
    assert {step.draft.tree.nodes for step in steps if step.draft is not None} == {drafter.options.lookahead.nodes}
    for name, value in (("width", 0), ("ngram", 1), ("guesses", 0), ("guesses", 1.5)):
        with pytest.raises(OptionError, match=f"lookahead.{name} must be a whole number"):
            build_options(Options, {f"lookahead.{name}": value})


def test_ngrams_with_a_common_beginning_share_nodes() -> None:
    """Guards against siblings with the same token, which verification refuses."""
    assert build_trie([(1, 2, 3), (1, 2, 4), (5, 2, 3)]) == ([-1, 0, 1, 1, -1, 4, 5], [1, 2, 3, 4, 5, 2, 3])
    assert build_trie([]) == ([], [])
