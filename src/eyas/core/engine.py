"""The Decoder: add requests, step, until finished. Rows of any age share every cycle.

    step = draft -> verify in one pass of the target -> commit -> emit

Before a cycle a `Policy` may say how large a tree to grow, that another drafter drafts, or that rows go without a draft; after it, it is
shown the cycle's Steps.

`Step` records say what one cycle did for one row; generate, stream, metrics and views are folds over them.
This module knows no method, no tokenizer and no model family.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from eyas.core.cache import common_prefix
from eyas.core.processors import Processor, apply_processors, run_processors
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling, apply_sampling_rows
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree, Verdict
from eyas.core.verify import verify
from eyas.drafters import CycleInput, Decision, Drafter, DraftSession
from eyas.drafters._merge import method_name
from eyas.errors import InputError
from eyas.runners.recording import BUCKET, Cycle, Replay, StageTimer

__all__ = ["Decision", "Decoder", "Policy", "Processor", "Request", "StageTimer", "Step", "Verify", "Watch"]

KEPT = 64 * 2**20  # bytes of the target's keys and values that a decoder keeps between requests

Verify = Callable[[Draft, Tensor, Tensor, GumbelNoise], Verdict]  # (draft, scores_BNV, position_B of the root, noise)
Watch = Callable[[CycleInput, Draft, Tensor, Verdict], None]


class Policy(Protocol):
    """Which trees, whose, and whether to draft at all.

    It is asked before a cycle's draft, so it knows what came before and nothing that this cycle draws: also where children are drawn, the
    text keeps the target's law.
    """

    def decide(self, roots: CycleInput) -> Decision:
        """For the cycle that begins at these roots."""
        ...

    def observe(self, steps: Sequence[Step]) -> None:
        """What came of it: the Steps of one cycle, one of each busy row."""
        ...

    def is_dormant(self, rows: int) -> bool:
        """Whether a cycle of so many rows would, as far as is known before it, go without the drafter: then a new row's prompt may wait."""
        return False


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[int], bool] | None = None  # told every new token in order; True = this one ends the text
    processors: tuple[Processor, ...] = ()  # run once per node with that node's own prefix: slow


@dataclass(frozen=True)
class Step:
    """What one cycle did for one row."""

    request: int  # what `add` returned
    tokens: tuple[int, ...]  # emitted, cut at stop and length
    accepted: int  # how many of them were drafted
    prefill: bool  # the first token, which comes from the prompt's own pass
    finish: str | None  # "stop" | "length" when this was the last step of the request
    path: tuple[int, ...] = ()  # accepted nodes, root first, before cutting
    draft: Draft | None = None  # the whole cycle's tree; this row is draft[row]
    row: int = 0
    seconds: float = 0.0  # of the whole cycle (all rows)
    parts: dict[str, float] = field(default_factory=dict)  # seconds by stage, host clock
    ended_at: float = field(default_factory=time.perf_counter)  # when it ended
    decision: Decision = field(default_factory=Decision)  # of the policy, before the cycle

    @property
    def decided(self) -> str:
        """What the policy had drafted for this row: "plain" (nothing), "suffix" (or what else the spare is called), "nodes/depth/branch",
        or "own" (as the options say)."""
        shape, fallback = self.decision.shape, self.decision.fallback
        if self.row in self.decision.plain:
            return "plain"
        return method_name(fallback) if fallback is not None else "own" if shape is None else "/".join(map(str, shape))


@dataclass
class _Row:
    """A request in flight."""

    ticket: int
    request: Request
    tokens: list[int]  # prompt and everything emitted; the last one is the root
    history_V: Tensor | None  # bool, tokens in the row; only with a repetition penalty
    finish: str | None = None

    @property
    def new(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True)
class _Present:
    """Of the requests in flight."""

    sampling: tuple[Sampling, ...]
    noise: GumbelNoise
    active_B: Tensor
    active_rows: tuple[int, ...]


class Decoder:
    """Decodes up to `rows` requests at a time; more wait in line.

    Args:
        reuse: keep what a finished row holds, and start the next prompt after the longest prefix that it shares with it (chat).
        verify: how a cycle's verdict is reached; another one than `verify.verify` is for experiments, whose text is no longer the target's.
        watch: shown every cycle's roots, draft, processed scores and verdict, outside of the time that Steps report.
        policy: decides about every cycle; decoders that follow each other may share it. None: every cycle as the drafter's options say.
        clock: makes what times a cycle; another one than `StageTimer` for who wants to know more about the stages than their seconds.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rows: int = 1, reuse: bool = False, *, verify: Verify = verify, watch: Watch | None = None,
        policy: Policy | None = None, clock: Callable[[], StageTimer] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.method, self.reuse, self.verify, self.watch, self.policy = target, drafter, reuse, verify, watch, policy
        self.clock = clock or StageTimer
        self.target = target.open(rows, drafter.feature_layers)
        from eyas.adaptive.dormant import DormantSession  # until sessions are wrapped from outside

        self.drafter = drafter.open(rows) if policy is None else DormantSession(drafter.open(rows), rows, self._is_dormant)
        self.waiting: deque[tuple[int, Request]] = deque()
        self.rows: list[_Row | None] = [None] * rows
        self.cached_tokens: list[list[int]] = [[] for _ in range(rows)]  # tokens whose keys and values an empty row still holds
        self._tickets = 0
        recorder = target.run.recorder()
        self.replay = None if recorder is None else Replay(recorder, self.target, self.drafter, self._run)
        self._bonus_B: Tensor | None = None  # the next roots, as long as no row changes hands
        self._present: _Present | None = None  # what is the same in every cycle while no row changes hands

    def serves(self, target: Target, drafter: Drafter, rows: int, policy: Policy | None) -> bool:
        """Whether another one made of these would do the same from now on."""
        same = self.model is target and self.method is drafter and self.policy is policy and len(self.rows) == rows
        return same and self.finished and not self.reuse

    @property
    def lasts(self) -> bool:
        """Whether it should serve again: recordings are made for where its caches lie; on a CPU new caches cost milliseconds, which shows
        in short answers, and are kept where they are small."""
        cache = self.target.cache
        return self.replay is not None or (cache.device.type == "cpu" and cache.bytes_for(cache.slots) <= KEPT)

    @property
    def finished(self) -> bool:
        return not self.waiting and not any(self.rows)

    def add(self, request: Request) -> int:
        """Line up a request; returns its number. A request that cannot be served is refused here, before anything runs."""
        bad = [t for t in request.prompt if not 0 <= t < self.model.vocab_size]
        if not request.prompt:
            raise InputError("the prompt is empty: give at least one token")
        if bad:
            vocab = self.model.vocab_size
            raise InputError(f"token id {bad[0]} is outside the target's vocabulary of {vocab} (0..{vocab - 1})")
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be 1 or more, got {request.max_new_tokens}")
        self.target.check_fit(len(request.prompt), request.max_new_tokens)
        self._tickets += 1
        self.waiting.append((self._tickets, request))
        return self._tickets

    @torch.inference_mode()
    def cancel(self, ticket: int) -> None:
        """Forget a request, waiting or in flight."""
        self.waiting = deque(w for w in self.waiting if w[0] != ticket)
        for b, row in enumerate(self.rows):
            if row is not None and row.ticket == ticket:
                self._leave(b)

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One cycle for every row in flight, after waiting requests have taken the empty rows."""
        steps = self._join()
        if not any(self.rows):
            return steps
        clock = self.clock()
        roots = self._roots()
        cycle = self.replay(roots, clock) if self.replay and self._can_be_replayed(roots) else self._run(self.drafter, roots, clock)
        self._bonus_B = cycle.verdict.bonus_B
        emitted = self._emit(cycle, clock, roots.decision)
        if self.policy is not None:
            self.policy.observe(emitted)
        if self.watch is not None:
            self.watch(roots, cycle.draft, cycle.scores_BNV, cycle.verdict)
        return steps + emitted

    def _run(self, drafter: DraftSession | None, roots: CycleInput, clock: StageTimer, draft: Draft | None = None) -> Cycle:
        """A cycle to its end on the device. draft: what was drafted already; drafter: who drafts otherwise, and is told what came of it."""
        with clock.stage("draft"):
            if draft is None:
                assert drafter is not None
                draft = drafter.draft(roots)
        with clock.stage("target"):
            seen = self.target.forward(draft.tokens_BN, draft.tree)
        with clock.stage("verify"):
            scores_BNV = self._process(seen.logits_BNV, draft, roots)
            verdict = self.verify(draft, scores_BNV, roots.position_B, roots.noise)
        with clock.stage("commit"):
            self.target.commit(verdict, roots.active_B)
            if drafter is not None:
                drafter.commit(draft, verdict, seen)
        bad_B = torch.isnan(scores_BNV.amax((1, 2))) if verdict.broken_B is None else verdict.broken_B
        columns = [verdict.length_B[:, None], verdict.bonus_B[:, None], bad_B[:, None].long(), verdict.tokens_BP, verdict.path_BP]
        return Cycle(draft, seen, scores_BNV, verdict, torch.cat(columns, 1))

    def _can_be_replayed(self, roots: CycleInput) -> bool:
        """Whether nothing in the cycle, but perhaps its draft, looks at values on the host, and nobody looks into it."""
        known = self.verify is verify or getattr(self.verify, "on_device", False)
        asks = roots.history_BV is not None or any(row is not None and row.request.processors for row in self.rows)
        return known and not asks and self.watch is None and self.clock is StageTimer

    def _is_dormant(self) -> bool:
        return self.policy is not None and self.policy.is_dormant(1 + sum(row is not None for row in self.rows))

    def _join(self) -> list[Step]:
        """Waiting requests enter empty rows: prefill, and the first token."""
        steps = []
        while self.waiting and None in self.rows:
            ticket, request = self.waiting.popleft()
            clock, b = self.clock(), self._best_row(request.prompt)
            self.target.reserve(len(request.prompt) + request.max_new_tokens + (BUCKET if self.replay else 0))
            scores_1V = apply_sampling(self._prefill(b, request.prompt)[None], request.sampling, *self._first_context(request))
            root = Draft(Tree.chain(1, 1, scores_1V.device), torch.tensor([[request.prompt[-1]]], device=scores_1V.device))
            position_B = torch.tensor([len(request.prompt) - 1], device=scores_1V.device)
            verdict = verify(root, scores_1V[None], position_B, GumbelNoise.of([request.sampling], scores_1V.device))
            self._check_nan(bool(torch.isnan(scores_1V).any()), request.prompt)
            row = _Row(ticket, request, list(request.prompt), self._history(request))
            self.rows[b], self._present = row, None
            steps.append(self._give(b, [int(verdict.bonus_B)], 0, clock, prefill=True))
        return steps

    def _best_row(self, prompt: Sequence[int]) -> int:
        empty = [b for b, row in enumerate(self.rows) if row is None]
        return max(empty, key=lambda b: common_prefix(self.cached_tokens[b], prompt))

    def _prefill(self, b: int, prompt: Sequence[int]) -> Tensor:
        """Target and drafter read the prompt, from where the row's leftovers end; returns the logits [V] of its last token."""
        shared = min(common_prefix(self.cached_tokens[b], prompt), self.target.lengths[b], len(prompt) - 1)
        kept = self.drafter.keep(b, shared) if shared else 0
        self.drafter.begin(b, kept, len(prompt))
        self.target.keep(b, kept)
        self.cached_tokens[b] = []
        return self.target.prefill(b, prompt[kept:], lambda tokens_T, features_TF, at: self.drafter.prefill(b, tokens_T, features_TF, at))

    def _first_context(self, request: Request) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
        history_V = self._history(request)
        custom = run_processors(request.processors, request.prompt, request.sampling.greedy)
        return None if history_V is None else history_V[None], custom

    def _history(self, request: Request) -> Tensor | None:
        if request.sampling.repetition_penalty == 1.0:
            return None
        history_V = torch.zeros(self.model.vocab_size, dtype=torch.bool, device=self.model.device)
        history_V[list(request.prompt)] = True
        return history_V

    def _roots(self) -> CycleInput:
        device, rows, tokens_B = self.model.device, self.rows, self._bonus_B
        if self._present is None or tokens_B is None:
            tokens_B = torch.tensor([row.tokens[-1] if row else 0 for row in rows], device=device)
        if self._present is None:
            busy_one = next(row.request.sampling for row in rows if row)
            idle = busy_one if self.replay else Sampling()  # recordings are made for rows' laws: no other one for every set of idle rows
            sampling = tuple(row.request.sampling if row else idle for row in rows)
            active_B = torch.tensor([row is not None for row in rows], device=device)
            active_rows = tuple(b for b, row in enumerate(rows) if row is not None)
            self._present = _Present(sampling, GumbelNoise.of(sampling, device), active_B, active_rows)
        present, history = self._present, None
        if any(row is not None and row.history_V is not None for row in rows):
            blank_V = torch.zeros(self.model.vocab_size, dtype=torch.bool, device=device)
            history = torch.stack([blank_V if row is None or row.history_V is None else row.history_V for row in rows])
        roots = CycleInput(
            tokens_B=tokens_B,
            position_B=self.target.length_B,
            active_B=present.active_B,
            sampling=present.sampling,
            noise=present.noise,
            max_position=max(self.target.lengths),
            history_BV=history,
            active_rows=present.active_rows,
            row_tokens=tuple(row.tokens if row else () for row in rows),
        )
        return roots if self.policy is None else replace(roots, decision=self.policy.decide(roots))

    def _process(self, logits_BNV: Tensor, draft: Draft, roots: CycleInput) -> Tensor:
        """Each row's own Sampling, once per node, with that node's own prefix where something depends on it."""
        seen_BNV = None
        if roots.history_BV is not None:
            seen_BNV = draft.tree.seen(draft.tokens_BN, roots.history_BV)
        if not any(row is not None and row.request.processors for row in self.rows):
            return apply_sampling_rows(logits_BNV, roots.sampling, seen_BNV)
        rows = []
        for b, row in enumerate(self.rows):
            seen_NV, sampling = None if seen_BNV is None else seen_BNV[b], roots.sampling[b]
            if row is None or not row.request.processors:
                rows.append(apply_sampling(logits_BNV[b], sampling, seen_NV))
                continue
            request = row.request
            remaining = request.max_new_tokens - row.new
            rows.append(apply_processors(
                logits_BNV[b], draft, b, row.tokens, sampling, seen_NV, request.processors, request.eos, remaining
            ))  # fmt: skip
        return torch.stack(rows)

    def _emit(self, cycle: Cycle, clock: StageTimer, decision: Decision) -> list[Step]:
        """The cycle's one transfer to the host; then tokens are handed out, cut at stop and length, once, before any metric."""
        host, P = cycle.columns_BX.tolist(), cycle.verdict.path_BP.shape[1]
        self.target.settle([length + (host[b][0] if self.rows[b] else 0) for b, length in enumerate(self.target.lengths)])
        steps = []
        for b, (length, bonus, bad, *rest) in enumerate(host):
            row = self.rows[b]
            if row is not None:
                self._check_nan(bool(bad), row.tokens)
                path = tuple(rest[P : P + length])
                steps.append(self._give(b, [*rest[1:length], bonus], length - 1, clock, path=path, draft=cycle.draft, decision=decision))
        return steps

    def _give(
        self,
        b: int,
        tokens: list[int],
        drafted: int,
        clock: StageTimer,
        *,
        prefill: bool = False,
        path: tuple[int, ...] = (),
        draft: Draft | None = None,
        decision: Decision | None = None,
    ) -> Step:
        """Hand tokens to a row until something ends it."""
        row = self.rows[b]
        assert row is not None
        given = 0
        for token in tokens:
            row.tokens.append(token)
            given += 1
            if row.history_V is not None:
                row.history_V[token] = True
            completed = row.request.stop is not None and row.request.stop(token)
            stopped = completed or token in row.request.eos
            row.finish = "stop" if stopped else "length" if row.new >= row.request.max_new_tokens else None
            if row.finish:
                break
        if row.finish:
            self._leave(b)
        return Step(
            row.ticket, tuple(tokens[:given]), min(given, drafted), prefill, row.finish, path, draft, b, clock.total(), dict(clock.parts),
            decision=decision or Decision(),
        )  # fmt: skip

    def _leave(self, b: int) -> None:
        """The row is empty; with `reuse`, what it holds may serve the next prompt."""
        row = self.rows[b]
        assert row is not None
        self.rows[b], self._present = None, None
        if self.reuse:
            self.cached_tokens[b] = row.tokens
        else:
            self.drafter.end(b)
            self.target.keep(b, 0)

    def _check_nan(self, bad: bool, tokens: Sequence[int]) -> None:
        if bad:
            raise self.model.nan_error(tokens)
