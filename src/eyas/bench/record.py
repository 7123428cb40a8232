"""What a bench writes down: one Answer for each contestant, prompt, turn and temperature; a line of JSON each.

An Answer holds its cycles, so that every figure can be found again from the file. This module knows no model and computes no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from eyas.decode import Step

__all__ = ["FORMAT", "Answer", "Cycle", "Differs", "answer_from"]

FORMAT = 1  # of the lines and of the summary; another number is refused


class Cycle(NamedTuple):
    """One pass of the target after the prompt's own. Seconds by the host's clock; None where a library does not tell."""

    emitted: int  # tokens, after cutting
    accepted: int  # of them drafted
    nodes: int  # verified, the root and padding included
    candidates: int  # draft tokens among them that could have been accepted
    depth: int  # most draft tokens on a path
    seconds: float
    draft: float | None = None
    target: float | None = None
    verify: float | None = None
    commit: float | None = None


class Differs(NamedTuple):
    """Where an answer leaves plain decoding's."""

    at: int  # index of the first new token that differs
    margin: float  # between the two best scores there, as plain decoding saw them


@dataclass(frozen=True)
class Answer:
    """One contestant's answer."""

    method: str
    prompt: str  # its id
    task: str
    turn: int  # 0 for the first question
    temperature: float
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish: str  # "stop" | "length"
    prefill_seconds: float  # until the first token
    cycles: tuple[Cycle, ...]
    comparable: bool = True  # whether its ids must be plain decoding's: greedy, or chosen trees with the same seed
    differs: Differs | None = None  # None: equal, or not comparable

    @property
    def seconds(self) -> float:
        """From the prompt to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def decode_seconds(self) -> float:
        return sum(c.seconds for c in self.cycles)

    @property
    def decoded(self) -> int:
        """Tokens that cycles emitted: all but what came with the prompt's own pass."""
        return sum(c.emitted for c in self.cycles)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cycles": [list(c) for c in self.cycles]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Answer:
        differs = found.pop("differs")
        cycles = tuple(Cycle(*c) for c in found.pop("cycles"))
        ids = tuple(found.pop("token_ids"))
        return cls(**found, cycles=cycles, token_ids=ids, differs=None if differs is None else Differs(*differs))

    def against(self, differs: Differs | None) -> Answer:
        return replace(self, differs=differs)


def answer_from(steps: Sequence[Step], **about: Any) -> Answer:
    """The Answer that a request's Steps make. `about`: the fields that Steps do not know."""
    first, cycles = steps[0], [_cycle(step) for step in steps[1:]]
    assert first.prefill
    finish = steps[-1].finish
    assert finish is not None
    drawn = any(s.draft is not None and s.draft.q_BNV is not None for s in steps)
    return Answer(
        token_ids=tuple(t for s in steps for t in s.tokens), finish=finish, prefill_seconds=first.seconds,
        cycles=tuple(cycles), comparable=about["temperature"] == 0 or not drawn, **about,
    )  # fmt: skip


def _cycle(step: Step) -> Cycle:
    assert step.draft is not None
    parts, candidates = step.parts, step.draft.tree.candidate_BN[step.row]
    stages = (parts.get(name) for name in ("draft", "target", "verify", "commit"))
    return Cycle(
        len(step.tokens), step.accepted, candidates.numel(), int(candidates.sum()) - 1, step.draft.tree.max_depth, step.seconds, *stages
    )
