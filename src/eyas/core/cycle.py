"""One cycle of speculative decoding on the device: draft, one forward of the target over the tree,
verification, commit.

The engine (core/engine.py) reads the result on the host and emits the tokens. This module knows no
requests, no method and no model family. Letters: B rows, N nodes, P nodes on the longest path, V
vocabulary, X columns of the host result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.features import RowNodes
from eyas.core.logprobs import path_logprobs
from eyas.core.ops import REFERENCE, Ops
from eyas.core.sampling import GumbelNoise, apply_sampling, apply_sampling_rows
from eyas.core.target import TargetSession
from eyas.core.tree import Cycle, Draft, Failures, TargetOutput, Verdict
from eyas.errors import EyasError
from eyas.timing import StageTimer

__all__ = ["CycleRunner", "Verify", "is_worth_keeping", "node_scores", "verify_output"]

SMALL_CACHE_BYTES = 64 * 2**20  # KV caches on a CPU up to this size are kept between requests

# (draft, scores_BNV, position_B of the root, noise, ops)
Verify = Callable[[Draft, Tensor, Tensor, GumbelNoise, Ops], Verdict]


class CycleRunner:
    """Runs the cycles of one decoder. A target's runner may wrap it (`Runner.wrap_cycle`), for
    example to replay recorded cycles.

    Attributes:
        extra_slots: cache slots that cycles need in addition to the slots of prompt and new tokens.
        records: whether cycles are recorded and replayed.
    """

    extra_slots = 0
    records = False

    def __init__(self, target: TargetSession, drafter: DraftSession, verify: Verify) -> None:
        self.target_session, self.draft_session, self.verify = target, drafter, verify

    def __call__(self, cycle_input: CycleInput, timer: StageTimer) -> Cycle:
        return self.run(cycle_input, timer, self.draft_session)

    def launch_ahead(self, cycle_input: CycleInput, timer: StageTimer) -> Cycle | None:
        """Launch the next cycle before the host has read the last one's result.

        Args:
            cycle_input: `max_position` is an upper bound, and `row_tokens` and `ends` are
                those before the last cycle.

        Returns:
            the cycle; None if it depends on something that the host must read first, and nothing was run.
        """
        return None

    def run(
        self, cycle_input: CycleInput, timer: StageTimer, drafter: DraftSession | None, draft: Draft | None = None
    ) -> Cycle:
        """Run one cycle.

        Args:
            drafter: its `draft` (unless `draft` is given) and its `commit` are called; None if the
                caller calls both.
            draft: the draft, if it exists already.
        """
        if draft is None:
            assert drafter is not None
            with timer.stage("draft"):
                draft = drafter.draft(cycle_input)
        with timer.stage("target"):
            output = self.target_session.forward(draft.tokens_BN, draft.tree, cycle_input.active_rows)
        with timer.stage("verify"):
            cycle = verify_output(draft, output, cycle_input, self.verify, self.target_session.target.runner.ops)
        with timer.stage("commit"):
            self.target_session.commit(cycle.verdict, cycle_input.active_B)
            if drafter is not None:
                drafter.commit(draft, cycle.verdict, output)
        return cycle


def is_worth_keeping(cycle_runner: CycleRunner) -> bool:
    """Return whether to use an idle decoder, whose cycles this runs, again for the next request.

    Recorded CUDA graphs are tied to the addresses of its caches. On a CPU a new cache costs
    milliseconds, which shows in short answers; a large cache is freed all the same.
    """
    cache = cycle_runner.target_session.cache
    return cycle_runner.records or (cache.device.type == "cpu" and cache.bytes_for(cache.slots) <= SMALL_CACHE_BYTES)


def verify_output(draft: Draft, output: TargetOutput, cycle_input: CycleInput, verify: Verify, ops: Ops) -> Cycle:
    """Return the cycle that follows from the target's output: scores, verdict and host tensor. Nothing is
    committed."""
    scores_BNV, failures = node_scores(output.logits_BNV, draft, cycle_input, ops)
    verdict = verify(draft, scores_BNV, cycle_input.position_B, cycle_input.noise, ops)
    width = cycle_input.top_tokens
    logprobs_BPX = None if width is None else path_logprobs(output.logits_BNV, verdict, width)
    return Cycle(draft, output, scores_BNV, verdict, _pack(scores_BNV, verdict), failures, logprobs_BPX)


def node_scores(
    logits_BNV: Tensor, draft: Draft, cycle_input: CycleInput, ops: Ops = REFERENCE
) -> tuple[Tensor, Failures]:
    """Return the scores at each node, and the nodes that have none because a request's feature failed there.

    Each row has its own `Sampling` and features. Each node's own prefix is used if something depends on it.

    Returns:
        scores [B, N, V], whose softmax over V is the distribution from which plain decoding would
        draw at each node: float32, but if tokens are only drawn from them, `ops` may leave logits
        in their own dtype; and the failures.
    """
    nodes = None if cycle_input.adjustments is None else cycle_input.adjustments.for_tree(draft.tree, draft.tokens_BN)
    scoring = {b: f for b, features in enumerate(cycle_input.features) for f in features if f.has_scores}
    if not scoring:
        scores = ops.scores if draft.q_BNV is None else apply_sampling_rows
        return scores(logits_BNV, cycle_input.sampling, nodes), {}
    scores_by_row, failures = list[Tensor](), dict[tuple[int, int], EyasError]()
    for b, (logits_NV, sampling) in enumerate(zip(logits_BNV, cycle_input.sampling, strict=True)):
        adjustments = None if nodes is None else nodes[b]
        if b not in scoring:
            scores_by_row.append(apply_sampling(logits_NV, sampling, adjustments))
            continue
        parents, tokens = draft.tree.parents_BN[b].tolist(), draft.tokens_BN[b].tolist()
        open_nodes = cycle_input.ends[b].open_nodes(parents, tokens, draft.tree.acceptable_BN[b].tolist())
        row_nodes = RowNodes(parents, tokens, cycle_input.row_tokens[b], open_nodes)
        scores_NV, failed = scoring[b].scores(logits_NV, row_nodes, sampling, adjustments)
        scores_by_row.append(scores_NV)
        failures |= {(b, n): error for n, error in failed.items()}
    return torch.stack(scores_by_row), failures


def _pack(scores_BNV: Tensor, verdict: Verdict) -> Tensor:
    """Return `Cycle.host_result_BX`, int64 [B, 3 + 2 P]."""
    if verdict.host_result_BX is not None:
        return verdict.host_result_BX
    nan_B = torch.isnan(scores_BNV.amax((1, 2))) if verdict.has_nan_B is None else verdict.has_nan_B
    head = [verdict.length_B[:, None], verdict.bonus_B[:, None], nan_B[:, None].long()]
    return torch.cat([*head, verdict.tokens_BP, verdict.path_BP], 1)
