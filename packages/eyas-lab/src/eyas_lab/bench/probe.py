"""Drafted trees node by node, in a separate run, because looking costs time.

Counted are nodes whose parent was accepted: there the target's distribution p is known, and the
draft continued the target's own text:

    hit         whether it was accepted                                                               by depth and rank among its siblings
    min(1, p/q) the chance of acceptance that p and the draft's q give it (Leviathan et al. 2023)     likewise
    q           the draft's confidence, against how often it is right (EAGLE-2, figure 6)                  in bins

A rank is the drafter's own order: 0 is its first choice. q and p are conditional on the parent; for
a greedy row they are taken at temperature 1. Drafts without a q have hits only. Chains
(`Drafter.chain`) give n-alpha at every temperature, drawn as the method draws there. This module
measures no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput
from eyas.core.tree import Draft, Verdict
from eyas.drafters import DraftMethod
from eyas_lab.bench.contestants import Drafting, Question
from eyas_lab.bench.record import Answer
from eyas_lab.bench.run import Bench
from eyas_lab.metrics import acceptance_by_depth

__all__ = ["BINS", "CHAIN", "Probe", "chain_alpha", "probe"]

BINS = 10  # intervals of confidence
CHAIN = 5  # draft tokens of a chain: n-alpha for n = 0..4
NEW_TOKENS = 64  # most tokens of a probed answer
FEWEST = 10  # a position with fewer nodes is not reported


@dataclass
class Probe:
    """Sums over cycles of one row."""

    # (depth, rank) -> sums of 1, hits, alphas and squared alphas
    positions: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 4))
    # for each interval of q: sums of 1, hits, q and alphas
    bins: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(BINS)])
    scored: bool = False  # whether the draft has a q

    def watch(self, roots: CycleInput, draft: Draft, scores_BNV: Tensor, verdict: Verdict) -> None:
        """One cycle, as `Decoder(watch=...)` shows it."""
        tree, tokens_N, scores_NV = draft.tree, draft.tokens_BN[0], scores_BNV[0]
        path_P = verdict.path_BP[0][: int(verdict.length_B[0])]
        accepted_N = torch.zeros(tree.nodes, dtype=torch.bool, device=tokens_N.device).index_fill_(0, path_P, True)
        parent_N = tree.parents_BN[0].clamp(min=0)
        probed_M = (accepted_N[parent_N] & tree.acceptable_BN[0] & (tree.parents_BN[0] >= 0)).nonzero()[:, 0]
        if not len(probed_M):
            return
        p_MV = scores_NV[parent_N[probed_M]].softmax(-1)
        p_M = p_MV.gather(1, tokens_N[probed_M, None])[:, 0]
        self.scored = draft.log_q_BN is not None
        q_M = torch.ones_like(p_M) if draft.log_q_BN is None else draft.log_q_BN[0, probed_M].exp()
        alpha_M = (p_M / q_M.clamp(min=1e-30)).clamp(max=1)
        columns = (parent_N[probed_M], tree.depth_BN[0, probed_M], accepted_N[probed_M], alpha_M, q_M)
        self._add(zip(*(x.tolist() for x in columns), strict=True))

    def _add(self, nodes: Iterable[Sequence[float]]) -> None:
        ranks: dict[float, int] = defaultdict(int)
        for parent, depth, hit, alpha, q in nodes:
            rank, ranks[parent] = ranks[parent], ranks[parent] + 1
            for i, value in enumerate((1.0, hit, alpha, alpha * alpha)):
                self.positions[int(depth), rank][i] += value
            for i, value in enumerate((1.0, hit, q, alpha)):
                self.bins[min(int(q * BINS), BINS - 1)][i] += value

    def calibration_error(self) -> float | None:
        """Expected calibration error: mean distance of confidence and hit rate over the bins,
        weighed by their nodes."""
        total = sum(n for n, *_ in self.bins)
        return sum(abs(q - hits) for _, hits, q, _ in self.bins) / total if total and self.scored else None

    def to_json(self) -> dict[str, Any]:
        """Counts and rates; positions that were seen fewer than ten times are left out."""
        positions = []
        for (depth, rank), (n, hits, alpha, square) in sorted(self.positions.items()):
            if n >= FEWEST:
                mean = alpha / n
                spread = max(0.0, square / n - mean * mean) ** 0.5
                rates = {"alpha": round(mean, 4), "sd": round(spread, 4)} if self.scored else {}
                positions.append({"depth": depth, "rank": rank, "n": int(n), "hit": round(hits / n, 4), **rates})
        error = self.calibration_error()
        bins = [
            {"n": int(n), "confidence": round(q / n, 4), "hit": round(hits / n, 4), "alpha": round(alpha / n, 4)}
            for n, hits, q, alpha in self.bins
            if n and self.scored
        ]
        return {"positions": positions, "bins": bins, "calibration_error": None if error is None else round(error, 4)}


def probe(bench: Bench, prompts: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(contestant and temperature, its Probe as JSON) from `prompts` of the bench's prompts, spread
    evenly: the beginning of first turns."""
    step = max(1, len(bench.prompts) // max(1, prompts))
    chosen = bench.prompts[::step][:prompts]
    for temperature in bench.temperatures if chosen else ():
        questions = [_short(next(bench.questions(prompt, temperature))) for prompt in chosen]
        for contestant in bench.contestants:
            if not isinstance(contestant, Drafting) or contestant.name in bench.failed:
                continue
            sums = Probe()
            for question in questions:
                contestant.answer(question, sums.watch)
            figures = {**sums.to_json(), "n_alpha": chain_alpha(contestant, questions)}
            if sums.positions or figures["n_alpha"]:
                yield contestant.name + (f", T = {temperature:g}" if len(bench.temperatures) > 1 else ""), figures


def _short(question: Question) -> Question:
    request = question.request
    return replace(question, request=replace(request, max_new_tokens=min(request.max_new_tokens, NEW_TOKENS)))


def chain_alpha(contestant: Drafting, questions: Sequence[Question]) -> list[float | None] | None:
    """n-alpha for n = 0..4; None for a method that drafts no chains."""
    try:
        chain = contestant.drafter.chain(CHAIN) if isinstance(contestant.drafter, DraftMethod) else None
    except NotImplementedError:
        return None
    if chain is None:
        return None
    answers: list[Answer] = [Drafting(contestant.name, chain).answer(q) for q in questions]
    rates = acceptance_by_depth([cycle for answer in answers for cycle in answer.cycles], CHAIN)
    return [None if rate is None else round(rate, 4) for rate in rates]
