"""Biases that an audit must find, in two forms. Laws over recorded distributions serve to simulate the power
that is stated when an audit begins. Verification rules run in eyas' own loop (`eyas audit --self-test`).

    plain            no bias: must pass
    temperature      a temperature that is too high by 5 %
    temperature_10   by 10 %
    relaxed          a draft is accepted with min(1, 2 p / q)
    wrong_q          drafts come from q, and are tested against another q: q^0.7, normalised
    read_twice       two neighbouring positions read the same noise

For the power, q is the target's p with errors of the size that good drafts have (acceptance about 0.75), and no
direction is common to all positions. A draft that errs in one direction is found sooner.

Letters: N positions, K most probable tokens there (the others are left out), T tokens that are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from eyas.core.sampling import GumbelNoise
from eyas.core.verify import verify
from eyas_lab.audit.statistics import LAGS, Evidence, run_tests, sequence_test

__all__ = ["ARMS", "Recorded", "power", "rule", "sequence_power"]

ARMS = {
    "plain": "no bias",
    "temperature": "a temperature 5 % too high",
    "temperature_10": "a temperature 10 % too high",
    "relaxed": "drafts accepted with 2 p / q",
    "wrong_q": "drafts tested against a q that they do not come from",
    "read_twice": "random numbers read twice",
}
FACTORS = {"temperature": 1.05, "temperature_10": 1.10}
RELAXED, WRONG, DRAFT_ERROR = 2.0, 0.7, 0.8
KEPT = 32
ROUNDS = 20


def biased_law(arm: str, p_NK: np.ndarray) -> np.ndarray:
    """Return the law of the tokens that a sampler with this bias draws, [N, K]."""
    if arm in FACTORS:
        return _normal(p_NK ** (1 / FACTORS[arm]))
    if arm not in ("relaxed", "wrong_q"):
        return p_NK
    q_NK = _normal(p_NK * np.exp(DRAFT_ERROR * np.random.default_rng(0).standard_normal(p_NK.shape)))
    tested_NK, factor = (_normal(q_NK**WRONG), 1.0) if arm == "wrong_q" else (q_NK, RELAXED)
    accepted_NK = np.minimum(q_NK, factor * p_NK * q_NK / np.maximum(tested_NK, 1e-300))
    rest_NK = (p_NK - tested_NK).clip(0) + 1e-300 * p_NK
    return np.asarray(accepted_NK + (1 - accepted_NK.sum(-1, keepdims=True)) * _normal(rest_NK))


def _normal(p_NK: np.ndarray) -> np.ndarray:
    return np.asarray(p_NK / p_NK.sum(-1, keepdims=True))


class Recorded:
    """Distributions along texts that the referee has read.

    Args:
        p_NV: float64.
        answer_N, place_N: where each position is, as in `Evidence`.
    """

    def __init__(self, p_NV: Tensor, answer_N: np.ndarray, place_N: np.ndarray) -> None:
        _, ids_NK = p_NV.topk(min(KEPT, p_NV.shape[1]))
        ids_NK = ids_NK.sort(-1).values
        self.answer_N, self.place_N, self.tokens_NK = answer_N, place_N, ids_NK.numpy()
        self.p_NK = p_NK = _normal(p_NV.gather(1, ids_NK).numpy())
        logp_NK = np.log(np.where(p_NK > 0, p_NK, 1.0))
        self.level_NK = logp_NK - (p_NK * logp_NK).sum(-1, keepdims=True)
        self.variance_N = (p_NK * self.level_NK**2).sum(-1)
        self.id_NK = p_NK.cumsum(-1) - p_NK
        order_NK = np.argsort(-p_NK, axis=-1, kind="stable")
        sorted_NK = np.take_along_axis(p_NK, order_NK, -1)
        self.rank_NK = np.empty_like(p_NK)
        np.put_along_axis(self.rank_NK, order_NK, sorted_NK.cumsum(-1) - sorted_NK, -1)

    def drawn(self, arm: str, tokens: int, rng: np.random.Generator) -> Evidence:
        """Return the evidence of tokens that a sampler with this bias draws along the texts, which are read again and again."""
        at_T = np.arange(tokens) % len(self.p_NK)
        if arm == "read_twice":
            with np.errstate(divide="ignore"):
                noise_TK = _gumbel(np.arange(tokens) // 2, self.tokens_NK[at_T], int(rng.integers(2**62)))
                column_T = (np.log(self.p_NK[at_T]) + noise_TK).argmax(-1)
        else:
            cumulated_NK = biased_law(arm, self.p_NK).cumsum(-1)
            cumulated_NK[:, -1] = 1.0
            places = np.searchsorted(
                (cumulated_NK + np.arange(len(cumulated_NK))[:, None]).ravel(), at_T + rng.random(tokens)
            )
            column_T = places.clip(max=cumulated_NK.size - 1) - at_T * cumulated_NK.shape[1]
        token_T, chance_T = self.tokens_NK[at_T, column_T], self.p_NK[at_T, column_T]
        repeat_TL = np.full((tokens, len(LAGS)), np.nan)
        for k, lag in enumerate(LAGS):
            same_TK = self.tokens_NK[at_T[lag:]] == token_T[:-lag, None]
            repeat_TL[lag:, k] = (self.p_NK[at_T[lag:]] * same_TK).sum(-1)
        rounds_T = np.arange(tokens) // len(self.p_NK)
        return Evidence(
            answer=rounds_T * (self.answer_N.max() + 1) + self.answer_N[at_T],
            place=self.place_N[at_T],
            prompt=self.answer_N[at_T],
            token=token_T,
            rank=self.rank_NK[at_T, column_T] + rng.random(tokens) * chance_T,
            id=self.id_NK[at_T, column_T] + rng.random(tokens) * chance_T,
            top=self.p_NK.max(-1)[at_T],
            level=self.level_NK[at_T, column_T],
            variance=self.variance_N[at_T],
            repeat=repeat_TL,
            cycle=np.full(tokens, -1),
        )


def _gumbel(position_T: np.ndarray, tokens_TK: np.ndarray, seed: int) -> np.ndarray:
    """Return Gumbel noise by (position, token): the finaliser of SplitMix64 makes it of their numbers."""
    x_TK = tokens_TK.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x_TK += position_T[:, None].astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x_TK = (x_TK ^ (x_TK >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(-np.log(-np.log(((x_TK >> np.uint64(12)) + 0.5) * 2.0**-52)))


def power(recorded: Recorded, arm: str, tokens: int, threshold: float) -> float:
    """Return how often an audit of so many tokens finds a bias: a test with a p-value below the threshold."""
    rng, found = np.random.default_rng([0, tokens]), 0
    for _ in range(ROUNDS):
        tests = run_tests(recorded.drawn(arm, tokens, rng))
        found += min((test.p_value for test in tests), default=1.0) <= threshold
    return found / ROUNDS


def sequence_power(law: Mapping[tuple[int, ...], float], arm: str, answers: int, threshold: float) -> float:
    """Return how often the test of whole short answers finds a bias.

    Args:
        law: the probability of every answer.
    """
    biased = _biased_answers(law, arm)
    chances = np.array([biased[answer] for answer in law]).clip(0)
    rng, found, listed = np.random.default_rng(answers), 0, list(law)
    for counts in rng.multinomial(answers, chances / chances.sum(), size=ROUNDS):
        test = sequence_test({a: int(n) for a, n in zip(listed, counts, strict=True) if n}, dict(law))
        found += test is not None and test.p_value <= threshold
    return found / ROUNDS


def _biased_answers(law: Mapping[tuple[int, ...], float], arm: str) -> dict[tuple[int, ...], float]:
    """Return the probabilities of the same answers when each token but the first is drawn with a bias."""
    mass: dict[tuple[int, ...], float] = {}
    for answer, chance in law.items():
        for length in range(len(answer) + 1):
            mass[answer[:length]] = mass.get(answer[:length], 0.0) + chance
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prefix in mass:
        if prefix:
            children.setdefault(prefix[:-1], []).append(prefix)
    biased: dict[tuple[int, ...], float] = {(): 1.0}
    for number, (prefix, longer) in enumerate(sorted(children.items(), key=lambda item: len(item[0]))):
        p_1K = np.array([[mass[child] / mass[prefix] for child in longer]])
        # each prefix has errors of its own: the row of this number
        law_K = biased_law(arm, np.repeat(p_1K, number + 1, 0))[-1] if prefix else p_1K[0]
        biased |= {child: biased[prefix] * float(p) for child, p in zip(longer, law_K, strict=True)}
    return biased


# --- the same in eyas' own loop -----------------------------------------------------------------------------------


class _Noise(GumbelNoise):
    """The noise of a cycle with a bias."""

    def __init__(self, noise: GumbelNoise, factor: float = 1.0, twice: bool = False) -> None:
        super().__init__(noise.seed_B, noise.greedy_B, noise.all_greedy)
        self.factor, self.twice = factor, twice

    def accepts(self, chance: Tensor, *rest: Any, **options: Any) -> Tensor:
        return super().accepts(self.factor * chance, *rest, **options)

    def gumbel(self, position_BN: Tensor, *rest: Any, **options: Any) -> Tensor:
        return super().gumbel(position_BN // 2 * 2 if self.twice else position_BN, *rest, **options)


def rule(arm: str) -> Any:
    """Return the verification rule of eyas with this bias, for `EyasDeployment`; for drafts that are sampled from q."""

    def verify_with_bias(
        draft: Any, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise, ops: Any = None
    ) -> Any:
        if arm in FACTORS:
            return verify(draft, scores_BNV / FACTORS[arm], position_B, noise, ops)
        if draft.q_BNV is None:  # greedy rows
            return verify(draft, scores_BNV, position_B, noise, ops)
        if arm == "relaxed":
            return verify(draft, scores_BNV, position_B, _Noise(noise, RELAXED))
        if arm == "wrong_q":
            q_BNV = draft.q_BNV**WRONG
            draft = replace(draft, q_BNV=q_BNV / q_BNV.sum(-1, keepdim=True))
            return verify(draft, scores_BNV, position_B, noise, ops)
        chosen = replace(draft, q_BNV=None)  # the same tree, along the target's own draws
        return verify(chosen, scores_BNV, position_B, _Noise(noise, twice=True))

    return verify if arm == "plain" else verify_with_bias
