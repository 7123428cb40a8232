"""Tests of whether tokens were drawn from the referee's distributions.

The evidence is one number u for each token: the probability integral transform with randomisation,

    u = F(x-) + v p(x)          F: the sum of p over the tokens before x in some order;  v: uniform, drawn by the audit

If every token is drawn from p given its prefix, then each u is uniform on (0, 1) and independent of everything
earlier, for any p. So tokens of all positions, prompts and lengths are counted together. Two fixed orders are
used. `rank` has the most probable token first and shows a sampler that is too bold or too timid. `id` shows a
sampler that reads a random number twice. (An order drawn anew for each position would hide both: averaged over
orders, any sampler's u are nearly uniform.)

The tests, each for one sampling:

    level       sum of log p(x) - E log p, over its standard deviation: the score of a wrong temperature
    uniform     u in 16 cells
    lag         u in 8 cells, given the cell of u one or two tokens before
    answers     u in 8 cells, given the cell at the same place of the answer before it to the same prompt
    repeats     how often a token equals the one or two before it, beside the sum of its probabilities
    border      u of a cycle's first token, given the first or the last one of the cycle before (cycles known)

A test may condition on the text that precedes a token, never on later text: the token itself decides how long
its own cycle becomes. Places where one token holds nearly all of p tell nothing, and are left out; p itself
says which they are. Every statistic is a sum of martingale differences, so that its law is the usual one
although tokens depend on each other. `holm` corrects for the number of tests (Holm 1979).

This module knows no model. Letters: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np
import torch

__all__ = ["LAGS", "Evidence", "Finding", "chi_square", "holm", "run_tests", "sequence_test"]

LAGS = (1, 2)
ORDERS = ("rank", "id")
OPEN = 0.95  # a place counts for u where no token is more probable
LEAST_EXPECTED = 5.0  # tokens in a cell
LEAST_REPEATS = 10.0


@dataclass(frozen=True)
class Finding:
    """The outcome of one test."""

    name: str
    p_value: float
    tokens: int  # that it has seen
    meaning: str


@dataclass
class Evidence:
    """Numbers of N emitted tokens, in their order, which the tests read.

    Attributes:
        answer, place: the number of the token's answer, and its place there.
        prompt: the number of the prompt.
        token: its id.
        rank, id: u, by the order of probability and of ids.
        top: probability of the most probable token.
        level, variance: log p(x) - E log p, and its variance.
        repeat: [N, LAGS] probability that the token equals the one 1, 2 places earlier; NaN at the beginning.
        cycle: number of the token's cycle in its answer; -1: not known.
    """

    answer: np.ndarray
    place: np.ndarray
    prompt: np.ndarray
    token: np.ndarray
    rank: np.ndarray
    id: np.ndarray
    top: np.ndarray
    level: np.ndarray
    variance: np.ndarray
    repeat: np.ndarray
    cycle: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def join(cls, parts: Sequence[Evidence]) -> Evidence:
        """Return the evidence of several answers as one."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def chi_square(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square of so many degrees of freedom is larger."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def normal(z: float) -> float:
    """Return the probability that a standard normal number is farther from 0."""
    return 2 * NormalDist().cdf(-abs(z))


def run_tests(e: Evidence) -> list[Finding]:
    """Return every test that the evidence is enough for."""
    found = [_level(e), *(_repeats(e, k) for k in range(len(LAGS)))]
    open_N = e.top <= OPEN
    cycle_start_N = (e.cycle >= 0) & ((e.place == 0) | (e.cycle != np.roll(e.cycle, 1)))
    for order in ORDERS:
        u_N = getattr(e, order)
        everything = np.zeros(int(open_N.sum()), dtype=int)
        found.append(_uniform(f"uniform, {order}", everything, u_N[open_N], 16, "tokens are too probable, or too rare"))
        for lag in LAGS:
            before_N, now_N = _earlier(e, lag)
            found.append(
                _pairs(f"lag {lag}, {order}", u_N, open_N, before_N, now_N, "a token depends on the draw before it")
            )
        if cycle_start_N.any():
            starts = np.flatnonzero(cycle_start_N)
            same = e.answer[starts[1:]] == e.answer[starts[:-1]]
            now_N, words = starts[1:][same], "a cycle depends on the draws of the cycle before it"
            found.append(_pairs(f"border, first to first, {order}", u_N, open_N, starts[:-1][same], now_N, words))
            found.append(_pairs(f"border, last to first, {order}", u_N, open_N, now_N - 1, now_N, words))
    before_N, now_N = _same_place(e)
    found.append(_pairs("answers", e.id, open_N, before_N, now_N, "two answers share random numbers"))
    return [test for test in found if test is not None]


def _level(e: Evidence) -> Finding | None:
    variance = float(e.variance.sum())
    if variance < 1.0:
        return None
    z = float(e.level.sum()) / variance**0.5
    words = "tokens are too probable (a lower temperature)" if z > 0 else "tokens are too rare (a higher temperature)"
    return Finding("level", normal(z), len(e), words)


def _repeats(e: Evidence, k: int) -> Finding | None:
    """Compare repeats with a Poisson law of the same mean, which is wider than theirs."""
    before_N, now_N = _earlier(e, LAGS[k])
    hits = float((e.token[before_N] == e.token[now_N]).sum())
    mean = float(e.repeat[now_N, k].sum())
    if mean < LEAST_REPEATS:
        return None
    at_least, at_most = (
        float(f(torch.tensor(hits + one, dtype=torch.float64), torch.tensor(mean, dtype=torch.float64)))
        for f, one in ((torch.special.gammainc, 1e-300), (torch.special.gammaincc, 1.0))
    )
    words = "a token is drawn again too often" if hits > mean else "a token is drawn again too seldom"
    return Finding(f"repeats, {LAGS[k]}", min(1.0, 2 * min(at_least, at_most)), len(now_N), words)


def _earlier(e: Evidence, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of tokens of one answer, `lag` apart."""
    now_N = np.arange(lag, len(e))
    is_pair = (e.answer[now_N] == e.answer[now_N - lag]) & (e.place[now_N] == e.place[now_N - lag] + lag)
    return now_N[is_pair] - lag, now_N[is_pair]


def _same_place(e: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of tokens at one place of two answers to the same prompt that follow each other."""
    order_N = np.lexsort((e.answer, e.place, e.prompt))
    before_N, now_N = order_N[:-1], order_N[1:]
    same = (e.prompt[before_N] == e.prompt[now_N]) & (e.place[before_N] == e.place[now_N])
    return before_N[same], now_N[same]


def _pairs(
    name: str, u_N: np.ndarray, open_N: np.ndarray, before_N: np.ndarray, now_N: np.ndarray, words: str
) -> Finding | None:
    told = open_N[before_N] & open_N[now_N]
    return _uniform(name, (u_N[before_N[told]] * 8).astype(int).clip(0, 7), u_N[now_N[told]], 8, words)


def _uniform(name: str, rows_N: np.ndarray, u_N: np.ndarray, cells: int, words: str) -> Finding | None:
    """Test whether u is uniform in each row: the row of a token depends only on the text that precedes it."""
    if not len(u_N):
        return None
    column_N = (u_N * cells).astype(int).clip(0, cells - 1)
    table = np.bincount(rows_N * cells + column_N, minlength=(rows_N.max() + 1) * cells).reshape(-1, cells)
    table = table[table.sum(1) >= LEAST_EXPECTED * cells]
    if not len(table):
        return None
    expected = table.sum(1, keepdims=True) / cells
    statistic = float(((table - expected) ** 2 / expected).sum())
    return Finding(name, chi_square(statistic, len(table) * (cells - 1)), int(table.sum()), words)


def sequence_test(seen: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float]) -> Finding | None:
    """Test whether whole answers have their exact probabilities; improbable answers share a cell.

    Args:
        seen: how often each answer was given.
        law: the probability of every answer that there can be.
    """
    count = sum(seen.values())
    large = [answer for answer, p in law.items() if p * count >= LEAST_EXPECTED]
    cells = [(seen.get(answer, 0), law[answer] * count) for answer in large]
    rest = count - sum(n for n, _ in cells), count - sum(expected for _, expected in cells)
    if rest[1] < LEAST_EXPECTED and cells:  # answers that there cannot be are in it, too
        least = min(range(len(cells)), key=lambda i: cells[i][1])
        n, expected = cells.pop(least)
        rest = rest[0] + n, rest[1] + expected
    cells.append(rest)
    if len(cells) < 2:
        return None
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells)
    return Finding(
        "sequences", chi_square(statistic, len(cells) - 1), count, "whole short answers have other probabilities"
    )


def holm(p_values: Sequence[float], error: float) -> list[bool]:
    """Return which hypotheses are rejected: with probability `error` at most, any of the true ones (Holm 1979)."""
    rejected = [False] * len(p_values)
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] > error / (len(p_values) - place):
            break
        rejected[i] = True
    return rejected
