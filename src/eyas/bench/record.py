"""What a bench writes down: one Answer for each contestant, prompt, turn and temperature; a line of JSON each.

An Answer holds its cycles, so that every figure can be found again from the file. This module knows no model and no clock, and computes
no figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from eyas.bench.machine import Used
from eyas.core.engine import Step

__all__ = ["FORMAT", "Answer", "Cycle", "Differs", "Memory", "answer_from", "cycle_from"]

FORMAT = 2  # of the lines and of the summary; another number is refused


class Cycle(NamedTuple):
    """One pass of the target after the prompt's own. None where a library does not tell."""

    emitted: int  # tokens, after cutting
    accepted: int  # of them drafted
    seconds: float  # from the end of the cycle before to the end of this one, by the host's clock
    nodes: int | None = None  # verified, the root and padding included
    candidates: int | None = None  # draft tokens among them that could have been accepted
    tested: int | None = None  # accepted, and one more where a draft token stood behind them and was refused
    draft: float | None = None  # seconds by stage, by the host's clock
    target: float | None = None
    verify: float | None = None
    commit: float | None = None


class Differs(NamedTuple):
    """Where an answer leaves plain decoding's."""

    at: int  # index of the first new token that differs
    margin: float | None  # between the two best scores there, as plain decoding saw them; None: there was no second one, or one text ended


class Memory(NamedTuple):
    """Bytes in use at most: of the accelerator during this answer, of the process until its end where there is none."""

    peak: int
    beyond: int | None  # of the former beyond what was in use before; None without an accelerator


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
    prefill_seconds: float  # from the question to the first token
    cycles: tuple[Cycle, ...]
    comparable: bool = True  # whether its ids must be plain decoding's: greedy, or chosen trees with the same seed
    differs: Differs | None = None  # None: equal, or not comparable
    memory: Memory | None = None
    around: Used | None = None  # while this prompt was asked, of everybody; the same in all its answers
    turns: int = 1  # that were asked of this prompt

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
        """TypeError or KeyError when it was written by another version."""
        records = {"differs": Differs, "memory": Memory, "around": Used}
        whole = {name: None if found[name] is None else record(*found[name]) for name, record in records.items()}
        ids, cycles = tuple(found["token_ids"]), tuple(Cycle(*c) for c in found["cycles"])
        return cls(**{**found, **whole, "token_ids": ids, "cycles": cycles})

    def but(self, **changes: Any) -> Answer:
        return replace(self, **changes)


def answer_from(timed: Iterable[tuple[Step, float]], **about: Any) -> Answer:
    """The Answer that a request's Steps make, each with its seconds. `about`: the fields that Steps do not know.

    Steps are taken one by one and forgotten: the laws that a drawn tree carries would fill the memory.
    """
    ids, cycles, drawn, prefill, finish = list[int](), list[Cycle](), False, 0.0, None
    for step, seconds in timed:
        ids += step.tokens
        finish = step.finish
        if step.prefill:
            prefill = seconds
        else:
            cycles.append(cycle_from(step, seconds))
            drawn |= step.draft is not None and step.draft.q_BNV is not None
    assert finish is not None
    return Answer(
        token_ids=tuple(ids), finish=finish, prefill_seconds=prefill, cycles=tuple(cycles),
        comparable=about["temperature"] == 0 or not drawn, **about,
    )  # fmt: skip


def cycle_from(step: Step, seconds: float) -> Cycle:
    """The Cycle that a Step after the prompt's was, with its seconds."""
    assert step.draft is not None
    tree = step.draft.tree
    candidate_N, parent_N = tree.candidate_BN[step.row], tree.parents_BN[step.row]
    behind = bool((candidate_N & (parent_N == step.path[step.accepted])).any())  # of the last accepted token
    refused = behind and len(step.tokens) > step.accepted  # a cycle that was cut at an accepted token says nothing about the next one
    return Cycle(
        len(step.tokens), step.accepted, seconds, candidate_N.numel(), int(candidate_N.sum()) - 1, step.accepted + refused,
        *(step.parts.get(name) for name in ("draft", "target", "verify", "commit")),
    )  # fmt: skip
