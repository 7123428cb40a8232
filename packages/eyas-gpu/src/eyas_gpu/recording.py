"""Recorded cycles: a cycle whose operations are always the same is recorded once and replayed (CUDA
graphs).

    recorded with its draft      the session is capturable (deterministic trees of EAGLE, P-EAGLE, DFlash, DSpark, Medusa and
                                 Hydra; plain decoding)
    recorded without its draft   the draft is made on the host, or by a model whose forwards are graphs of their own; recorded are the
                                 target's forward, verification and commit

A recording is made for a length of context, a multiple of BUCKET, and serves all rows that are not
longer: their actual lengths are tensors on the device. The inputs of a cycle are copied into the
recording's own tensors, and the state that a session keeps from cycle to cycle stays in the
recording's tensors. The host reads the result in one transfer (`Cycle.host_result_BX`).

A cycle that is recorded with its draft may run ahead (core/engine.py): all that it reads is on the
device, unless a policy decides about every cycle. The tensors that the host reads of the last cycle
are copied before the next one overwrites them.

A `Recorder` makes the recordings (graphs.py); this module knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eyas.core.cycle import CycleRunner
from eyas.core.drafter import Capturable, CycleInput
from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Cycle, Draft, FullDraft, TargetOutput, Tree, Verdict
from eyas.core.verify import verify
from eyas.timing import StageTimer

__all__ = ["BUCKET", "CycleReplay", "Recorder", "State"]

BUCKET = 256  # tokens; recordings are made for contexts of a multiple of this


@dataclass(frozen=True)
class State:
    """An attribute of a session that holds a tensor, which a cycle reads and replaces by a new one."""

    holder: object  # the session
    name: str  # name of the attribute
    shape: tuple[int, ...]  # the full shape; the new tensor may be shorter


class Recorder(Protocol):
    """Records functions and replays them: the function must run the same operations whenever it is
    called with the same key."""

    def __call__(
        self, key: Hashable, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> Cycle | None:  # fmt: skip
        """Run `work(inputs)`, by a recording.

        Args:
            key: names the recording.
            state: attributes that `work` reads and replaces.
            inplace_state: tensors that `work` both reads and overwrites in place.

        Returns:
            the result of `work`, in tensors that the next call overwrites; None if `work` cannot be
            recorded, and nothing was run.
        """
        ...

    def to_host(self, host_result_BX: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        """Return a copy on the host, and a function that waits until it has arrived (None: it is there). The function
        does not wait for work that is launched later."""
        ...


class CycleReplay(CycleRunner):
    """Runs the cycles of a decoder by recordings; cycles that cannot be recorded run normally."""

    extra_slots = BUCKET
    records = True

    def __init__(self, cycle: CycleRunner, recorder: Recorder) -> None:
        super().__init__(cycle.target_session, cycle.draft_session, cycle.verify)
        self.recorder = recorder
        self.runs_ahead = True  # whether a cycle may run before the host has read the last one's result
        self._can_run_ahead = False  # whether the last cycle was recorded with its draft, without a policy

    def __call__(self, cycle_input: CycleInput, timer: StageTimer) -> Cycle:
        self._can_run_ahead = False
        if not self._on_device(cycle_input):
            return super().__call__(cycle_input, timer)
        with timer.stage("draft"):
            context, capturable = self._recording_context(cycle_input)
            # drafters keep the input until `commit`; by then the recording has changed the lengths in place
            if capturable is None:
                cycle_input = replace(cycle_input, position_B=cycle_input.position_B.clone())
            draft = None if capturable is not None else self.draft_session.draft(cycle_input)
        if draft is not None and draft.q_BNV is not None:  # the verification of sampled trees reads values on the host
            return self._commit_copies(self.run(cycle_input, timer, None, draft), draft)
        with timer.stage("target"):
            cycle = self._replay(cycle_input, context, capturable, draft)
        if draft is not None:
            return self._commit_copies(self.run(cycle_input, timer, None, draft) if cycle is None else cycle, draft)
        if cycle is None:
            return self.run(cycle_input, timer, self.draft_session)
        self._can_run_ahead = capturable is not None and capturable.runs_ahead
        return self._copy(cycle)

    def launch_ahead(self, cycle_input: CycleInput, timer: StageTimer) -> Cycle | None:
        if (
            not (self.runs_ahead and self._can_run_ahead and self._on_device(cycle_input))
            or cycle_input.top_tokens is not None
        ):
            return None
        with timer.stage("target"):
            context, capturable = self._recording_context(cycle_input)
            cycle = None if capturable is None else self._replay(cycle_input, context, capturable, None)
        return cycle and self._copy(cycle)

    def _recording_context(self, cycle_input: CycleInput) -> tuple[int, Capturable | None]:
        """Return the length of context that the cycle's recording is made for, and how its draft is recorded."""
        context = -(-(cycle_input.max_position + 1) // BUCKET) * BUCKET
        self.target_session.cache.reserve(context + BUCKET)
        return context, self.draft_session.capturable(replace(cycle_input, max_position=context))

    def _replay(
        self, cycle_input: CycleInput, context: int, capturable: Capturable | None, draft: Draft | None
    ) -> Cycle | None:
        """Return the cycle by a recording, in tensors that the next replay overwrites; None if it cannot be
        recorded, and nothing was run."""
        noise, state = (
            cycle_input.noise,
            [State(self.target_session, "length_B", tuple(self.target_session.length_B.shape))],
        )
        inputs = {
            "tokens": cycle_input.tokens_B,
            "active": cycle_input.active_B,
            "seed": noise.seed_B,
            "greedy": noise.greedy_B,
        }
        if capturable is not None:
            state += [State(capturable.session, name, shape) for name, shape in capturable.state.items()]
            cycle_input = replace(cycle_input, tree_size=capturable.tree_size)
        if draft is not None:
            inputs |= _tensors(draft)

        def work(tensors: Mapping[str, Tensor]) -> Cycle:
            recorded_input = replace(
                cycle_input,
                tokens_B=tensors["tokens"],
                active_B=tensors["active"],
                position_B=self.target_session.length_B,
                max_position=context,
                noise=GumbelNoise(tensors["seed"], tensors["greedy"], noise.all_greedy),
            )
            lengths, self.target_session.lengths = self.target_session.lengths, [context] * len(cycle_input.sampling)
            try:
                if draft is not None:
                    return _without_scores(
                        self.run(recorded_input, StageTimer(), None, _with(draft, tensors)), keep_output=True
                    )
                assert capturable is not None
                return _without_scores(self.run(recorded_input, StageTimer(), capturable.session), keep_output=False)
            finally:
                self.target_session.lengths = lengths

        sampling = tuple(replace(s, seed=0) for s in cycle_input.sampling)
        drafted = None if draft is None else (draft.tree.nodes, draft.tree.max_depth, *_tensors(draft))
        addresses = self.target_session.cache.addresses, None if capturable is None else capturable.addresses
        key = (context, sampling, noise.all_greedy, cycle_input.tree_size, drafted, addresses, cycle_input.top_tokens)
        inplace_state = () if capturable is None else capturable.inplace_state
        return self.recorder(key, inputs, state, inplace_state, work)

    def _copy(self, cycle: Cycle) -> Cycle:
        """Return the cycle with copies of the tensors that are read after the next replay, which
        overwrites the recording's."""
        tensors, full = _tensors(cycle.draft), cycle.draft.drafted
        copies = _clones([*tensors.values(), *((full.parents_BX, full.value_BX) if full is not None else ())])
        draft = _with(cycle.draft, dict(zip(tensors, copies, strict=False)))
        if full is not None:
            draft = replace(draft, drafted=FullDraft(*copies[-2:]))
        host_result_BX, wait_for_copy = self.recorder.to_host(cycle.host_result_BX)
        verdict = replace(cycle.verdict, bonus_B=cycle.verdict.bonus_B.clone())
        return replace(cycle, draft=draft, verdict=verdict, host_result_BX=host_result_BX, wait_for_copy=wait_for_copy)

    def _on_device(self, cycle_input: CycleInput) -> bool:
        """Return whether the cycle, apart from its draft, reads no values on the host."""
        verify_on_device = self.verify is verify or getattr(self.verify, "on_device", False)
        features = [feature for features in cycle_input.features for feature in features]
        reads_host = any(feature.has_scores or feature.reads_cycle for feature in features)
        return verify_on_device and cycle_input.adjustments is None and not reads_host

    def _commit_copies(self, cycle: Cycle, draft: Draft) -> Cycle:
        """Call the drafter's `commit`, which is not part of the recording, with copies that the
        next replay does not overwrite."""
        output = replace(cycle.output, features_BNF=cycle.output.features_BNF.clone())
        cycle = replace(cycle, draft=draft, verdict=_copied_verdict(cycle.verdict), output=output)
        self.draft_session.commit(draft, cycle.verdict, output)
        return cycle


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of contiguous tensors, on a GPU by one launch for each dtype."""
    copies = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True) if tensor.dtype == dtype]
        torch._foreach_copy_([copy for copy, _ in alike], [tensor for _, tensor in alike])
    return copies


def _copied_verdict(verdict: Verdict) -> Verdict:
    return replace(
        verdict,
        path_BP=verdict.path_BP.clone(),
        tokens_BP=verdict.tokens_BP.clone(),
        length_B=verdict.length_B.clone(),
        bonus_B=verdict.bonus_B.clone(),
    )


def _without_scores(cycle: Cycle, keep_output: bool) -> Cycle:
    """Return the cycle without scores, and without the target's output unless a drafter reads it: every
    recording would keep its own."""
    empty = cycle.scores_BNV.new_empty(0)
    return replace(cycle, scores_BNV=empty, output=cycle.output if keep_output else TargetOutput(empty, empty))


def _tensors(draft: Draft) -> dict[str, Tensor]:
    """Return the tensors of a draft by the names of their fields. Drafts with q are not recorded."""
    tree = draft.tree
    fields = {
        "tokens_BN": draft.tokens_BN,
        "log_q_BN": draft.log_q_BN,
        "value_BN": draft.value_BN,
        "parents_BN": tree.parents_BN,
        "acceptable_BN": tree.acceptable_BN,
        "depth_BN": tree.depth_BN,
        "mask_BNN": tree.mask_BNN,
    }
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def _with(draft: Draft, tensors: Mapping[str, Tensor]) -> Draft:
    """Return the draft with its tensors replaced by `tensors`."""
    tree = Tree(
        tensors["parents_BN"], tensors["acceptable_BN"], tensors["depth_BN"], tensors["mask_BNN"], draft.tree.max_depth
    )  # fmt: skip
    return replace(
        draft, tree=tree, tokens_BN=tensors["tokens_BN"], log_q_BN=tensors.get("log_q_BN"), value_BN=tensors.get("value_BN")
    )  # fmt: skip
