"""The record of a bench: one Answer for each contestant, prompt, turn and temperature; a line of
JSON each.

An Answer holds its cycles, so every figure can be computed again from the file. This module knows
no model and no clock, and computes no figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from eyas.core.engine import Step
from eyas.hardware.machine import Used
from eyas_lab.metrics import Cycle, cycle_of

__all__ = ["FORMAT", "Answer", "Differs", "Memory", "answer_from"]

FORMAT = 2  # format of the lines and of the summary; files of another format are refused


class Differs(NamedTuple):
    """Where an answer leaves plain decoding's."""

    at: int  # index of the first new token that differs
    # distance of the two best scores there (`metrics.margin`); None: sampling allows one token, or
    # one text ends there
    margin: float | None


class Memory(NamedTuple):
    """Most bytes in use: of the accelerator during this answer; without one, of the process until
    the answer's end."""

    peak: int
    beyond: int | None  # the accelerator's peak less what was in use before; None without an accelerator


@dataclass(frozen=True)
class Answer:
    """One contestant's answer to one question."""

    method: str
    prompt: str  # the prompt's id
    task: str
    turn: int  # 0 for the first question
    temperature: float
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish: str  # "stop" | "length" | "failed"
    prefill_seconds: float  # from the question to the first token
    cycles: tuple[Cycle, ...]
    # whether its ids must equal plain decoding's: greedy, or trees that draw nothing, with the same
    # seed
    comparable: bool = True
    differs: Differs | None = None  # None: equal, or not comparable
    memory: Memory | None = None
    around: Used | None = None  # CPU use of everybody while this prompt was asked; the same in all its answers
    turns: int = 1  # turns of this prompt that were asked
    error: str | None = None  # why there is no answer

    @property
    def seconds(self) -> float:
        """From the question to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds of the cycles."""
        return sum(cycle.seconds for cycle in self.cycles)

    @property
    def emitted(self) -> int:
        """Tokens of the cycles: all but the one that the prompt's pass gives."""
        return sum(cycle.emitted for cycle in self.cycles)

    def to_json(self) -> dict[str, Any]:
        """As `json` writes it."""
        return {**asdict(self), "cycles": [list(cycle) for cycle in self.cycles]}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Answer:
        """Return the Answer of a parsed line. Raise TypeError or KeyError when another version of eyas wrote it."""
        records = {"differs": Differs, "memory": Memory, "around": Used}
        parsed = {name: None if line[name] is None else kind(*line[name]) for name, kind in records.items()}
        cycles = tuple(Cycle(*cycle) for cycle in line["cycles"])
        return cls(**{**line, **parsed, "token_ids": tuple(line["token_ids"]), "cycles": cycles})

    def replace(self, **changes: Any) -> Answer:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


def answer_from(timed_steps: Iterable[tuple[Step, float]], **about: Any) -> Answer:
    """Return the Answer made of a request's Steps, each with its seconds.

    Steps are taken one by one and dropped: the distributions that a sampled tree carries would fill
    the memory.

    Args:
        about: the fields that Steps do not know.
    """
    token_ids = list[int]()
    cycles = list[Cycle]()
    sampled = False
    prefill_seconds = 0.0
    finish = None
    for step, seconds in timed_steps:
        token_ids += step.tokens
        finish = step.finish
        if step.prefill:
            prefill_seconds = seconds
        else:
            cycles.append(cycle_of(step, seconds))
            sampled |= step.draft is not None and step.draft.q_BNV is not None
    assert finish is not None
    return Answer(
        token_ids=tuple(token_ids),
        finish=finish,
        prefill_seconds=prefill_seconds,
        cycles=tuple(cycles),
        comparable=about["temperature"] == 0 or not sampled,
        **about,
    )
