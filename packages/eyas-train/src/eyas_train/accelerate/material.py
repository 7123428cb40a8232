"""The questions of a run: some are for the bench and never answered before it, the others become
training data. Which is which depends on a question's content alone, so every session of a run
decides alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eyas.errors import InputError
from eyas.files import write_text
from eyas_train.accelerate.plan import BENCH_QUESTIONS, FEWEST_QUESTIONS
from eyas_train.accelerate.questions import questions
from eyas_train.regenerate import Conversation, DataLine, GenerationSettings, parse_conversation, read_lines

__all__ = ["Material", "read_material", "write_material"]

BENCH_SHARE = 4  # at most one of so many questions is for the bench
MOST_LINES = 200_000


class Material(NamedTuple):
    """The questions, in the order in which they are asked."""

    answers: list[DataLine]
    bench: list[Conversation]


def read_material(files: Sequence[str]) -> Material:
    """Return the questions of these files, mixed; without files, the bundled ones.

    Raises:
        InputError: a file cannot be read, or there are too few questions in all of them.
    """
    lines = read_lines(files) if files else (DataLine("bundled", _json(question)) for question in questions())
    unique = {str(line.key["key"]): line for line in lines}
    mixed = [unique[key] for key in sorted(unique)][:MOST_LINES]  # sorted by a hash of their content
    bench, chosen = list[Conversation](), set[str]()
    for line in mixed:
        if len(bench) < min(BENCH_QUESTIONS[1], len(mixed) // BENCH_SHARE):
            try:
                bench.append(parse_conversation(line, GenerationSettings()))
                chosen.add(str(line.key["key"]))
            except InputError:  # the answering step reports it
                continue
    if len(mixed) < FEWEST_QUESTIONS or not bench:
        where = ", ".join(files)
        raise InputError(f"{where}: {len(mixed)} questions are too few to train on: give at least {FEWEST_QUESTIONS}")
    return Material([line for line in mixed if line.key["key"] not in chosen], bench)


def _json(question: str) -> bytes:
    return json.dumps({"prompt": question}).encode()


def write_material(material: Material, answers: Path, bench: Path) -> None:
    """Write the questions as `eyas regenerate` and `eyas bench` read them."""
    write_text(answers, "".join(line.raw.decode("utf-8-sig", "replace") + "\n" for line in material.answers))
    asked = [{**each.template, "messages": each.messages[: each.turns[0]]} for each in material.bench]
    write_text(bench, "".join(json.dumps(line) + "\n" for line in asked))
