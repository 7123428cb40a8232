"""One cycle up to its end on the device, and how cycles that are always the same operations are recorded once and replayed (CUDA graphs).

    recorded with its draft      where the session says that it is fixed (EAGLE's, Medusa's, Hydra's chosen trees; plain decoding)
    recorded from its draft on   where the draft is made on the host or by something that has graphs of its own: pass, verification, commit

A recording is made as if every row were as long as its bucket, so it holds for all rows that are not longer; how long they are, the device
knows. What it reads is copied into tensors of its own; what sessions keep from cycle to cycle lies where the recording left it. The host
learns what came of it by one transfer (`Cycle.columns_BX`), and sends nothing but roots that are new.

A recorder makes it happen (fast/graphs.py); this module knows no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from eyas.core.sampling import GumbelNoise
from eyas.core.target import TargetSession
from eyas.core.tree import Draft, FullDraft, TargetOutput, Tree, Verdict
from eyas.drafters import CycleInput, DraftSession

__all__ = ["BUCKET", "Cycle", "Recorder", "Replay", "StageTimer", "State"]

BUCKET = 256  # tokens: recordings are made for multiples of this


@dataclass(frozen=True)
class Cycle:
    """What a cycle leaves on the device."""

    draft: Draft
    seen: TargetOutput
    scores_BNV: Tensor
    verdict: Verdict
    columns_BX: Tensor  # int64; all that the host is told: length, bonus, whether a score is no number, tokens, path


class StageTimer:
    """Seconds by stage, on the host's clock: of one cycle."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.parts: dict[str, float] = {}
        self._stage, self._since = "", 0.0

    def stage(self, name: str) -> AbstractContextManager[object]:
        """What happens during the `with` is this stage's; stages follow each other."""
        self._stage = name
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.parts[self._stage] = time.perf_counter() - self._since

    def total(self) -> float:
        return time.perf_counter() - self.began


@dataclass(frozen=True)
class State:
    """A tensor that a cycle reads and replaces."""

    holder: object
    name: str
    shape: tuple[int, ...]  # in full; a cycle may leave a shorter one


class Recorder(Protocol):
    """Records work that is the same operations for one key, and runs it again."""

    def __call__(
        self, key: Hashable, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> Cycle | None:  # fmt: skip
        """What work leaves, in tensors that the next call overwrites; None: it cannot be recorded, and nothing was done.

        shifted: what work changes where it lies, from what it finds there.
        """
        ...


Run = Callable[[DraftSession | None, CycleInput, StageTimer, Draft | None], Cycle]


class Replay:
    """Cycles of one decoder, by a recorder of its own.

    run: a cycle as it is: (drafter that drafts and is told what came of it, roots, clock, draft where it is there already).
    """

    def __init__(self, recorder: Recorder, target: TargetSession, drafter: DraftSession, run: Run) -> None:
        self.recorder, self.target, self.drafter, self.run = recorder, target, drafter, run

    def __call__(self, roots: CycleInput, clock: StageTimer) -> Cycle:
        room = -(-(roots.max_position + 1) // BUCKET) * BUCKET
        self.target.cache.reserve(room + BUCKET)
        with clock.stage("draft"):
            fixed = self.drafter.fixed(replace(roots, max_position=room))
            if fixed is None:  # who drafts keeps the roots until it is told, when the lengths are others already
                roots = replace(roots, position_B=roots.position_B.clone())
            draft = None if fixed is not None else self.drafter.draft(roots)
        if draft is not None and draft.q_BNV is not None:  # laws that siblings were drawn from are judged on the host
            return self._told(self.run(None, roots, clock, draft), draft)
        noise, state = roots.noise, [State(self.target, "length_B", tuple(self.target.length_B.shape))]
        inputs = {"tokens": roots.tokens_B, "active": roots.active_B, "seed": noise.seed_B, "greedy": noise.greedy_B}
        if fixed is not None:
            state += [State(fixed.session, name, shape) for name, shape in fixed.state.items()]
        if draft is not None:
            inputs |= _tensors(draft)

        def work(given: Mapping[str, Tensor]) -> Cycle:
            here = replace(
                roots, tokens_B=given["tokens"], active_B=given["active"], position_B=self.target.length_B, max_position=room,
                noise=GumbelNoise(given["seed"], given["greedy"], noise.all_greedy),
            )  # fmt: skip
            lengths, self.target.lengths = self.target.lengths, [room] * len(roots.sampling)
            try:
                cycle = self.run(
                    None if fixed is None else fixed.session, here, StageTimer(), None if draft is None else _with(draft, given)
                )
                return _light(cycle, told=fixed is None)
            finally:
                self.target.lengths = lengths

        sampling = tuple(replace(s, seed=0) for s in roots.sampling)
        drafted = None if draft is None else (draft.tree.nodes, draft.tree.max_depth, *_tensors(draft))
        addresses = self.target.cache.addresses, None if fixed is None else fixed.addresses
        key, inplace_state = (
            (room, sampling, noise.all_greedy, roots.decision.shape, drafted, addresses),
            () if fixed is None else fixed.inplace_state,
        )
        with clock.stage("target"):
            cycle = self.recorder(key, inputs, state, inplace_state, work)
        if draft is not None:
            return self._told(self.run(None, roots, clock, draft) if cycle is None else cycle, draft)
        if cycle is None:
            return self.run(self.drafter, roots, clock, None)
        verdict = replace(cycle.verdict, bonus_B=cycle.verdict.bonus_B.clone())  # the next roots, which another recording may overwrite
        left = _with(cycle.draft, {name: x.clone() for name, x in _tensors(cycle.draft).items()})
        if (whole := left.drafted) is not None:
            left = replace(left, drafted=FullDraft(whole.parents_BX.clone(), whole.value_BX.clone()))
        return replace(cycle, draft=left, verdict=verdict)

    def _told(self, cycle: Cycle, draft: Draft) -> Cycle:
        """The drafter, which is no part of the recording, is told what came of its draft, in tensors that nobody overwrites."""
        given = cycle.verdict
        copies = {name: getattr(given, name).clone() for name in ("path_BP", "tokens_BP", "length_B", "bonus_B")}
        verdict = replace(given, **copies)
        cycle = replace(cycle, draft=draft, verdict=verdict, seen=replace(cycle.seen, features_BNF=cycle.seen.features_BNF.clone()))
        self.drafter.commit(draft, verdict, cycle.seen)
        return cycle


def _light(cycle: Cycle, told: bool) -> Cycle:
    """Without what nobody reads and every recording would keep: scores, and what the target saw unless a drafter is told."""
    none, seen = cycle.scores_BNV.new_empty(0), cycle.seen
    return replace(cycle, scores_BNV=none, seen=seen if told else TargetOutput(none, none))


def _tensors(draft: Draft) -> dict[str, Tensor]:
    """By the names of their fields; a draft has no q here."""
    tree = draft.tree
    found = {
        "tokens_BN": draft.tokens_BN, "score_BN": draft.score_BN, "value_BN": draft.value_BN, "parents_BN": tree.parents_BN,
        "candidate_BN": tree.candidate_BN, "depth_BN": tree.depth_BN, "mask_BNN": tree.mask_BNN,
    }  # fmt: skip
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _with(draft: Draft, found: Mapping[str, Tensor]) -> Draft:
    """The same with these tensors."""
    tree = Tree(found["parents_BN"], found["candidate_BN"], found["depth_BN"], found["mask_BNN"], draft.tree.max_depth)
    return replace(draft, tree=tree, tokens_BN=found["tokens_BN"], score_BN=found.get("score_BN"), value_BN=found.get("value_BN"))
