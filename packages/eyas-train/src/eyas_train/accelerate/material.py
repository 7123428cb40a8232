"""The questions of a run: some are for the bench and never answered before it, the others become
training data. Which is which depends on a question's content alone, so every session of a run
decides alike. `questions.jsonl` has questions for a target, where the user brings none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from eyas.errors import InputError
from eyas.files import write_text
from eyas_train.accelerate.plan import FEWEST_QUESTIONS, MOST_BENCH_QUESTIONS
from eyas_train.regenerate import Conversation, DataLine, GenerationSettings, parse_conversation, read_lines


class Material(NamedTuple):
    """The questions, in the order in which they are asked."""

    answers: list[DataLine]
    bench: list[Conversation]


def questions() -> list[str]:
    """Return the bundled questions, mixed: every form with every subject that suits it. They are plain English, of the
    kinds that people ask a chat model."""
    text = Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8")
    kinds = [json.loads(line) for line in text.splitlines()]
    every = [form.format(subject) for kind in kinds for subject in kind["subjects"] for form in kind["forms"]]
    random.Random(0).shuffle(every)
    return every


def read_material(files: Sequence[str]) -> Material:
    """Return the questions of these files, mixed; without files, the bundled ones. A quarter of them at most is for the
    bench.

    Raises:
        InputError: a file cannot be read, or there are too few questions in all of them.
    """
    bundled = (DataLine("bundled", json.dumps({"prompt": question}).encode()) for question in questions())
    unique = {str(line.key["key"]): line for line in (read_lines(files) if files else bundled)}
    mixed = [unique[key] for key in sorted(unique)][:200_000]  # sorted by a hash of their content
    found = Material([], [])
    for line in mixed:
        if len(found.bench) < min(MOST_BENCH_QUESTIONS, len(mixed) // 4):
            with suppress(InputError):  # the answering step reports it
                found.bench.append(parse_conversation(line, GenerationSettings()))
                continue
        found.answers.append(line)
    if len(mixed) < FEWEST_QUESTIONS or not found.bench:
        where = ", ".join(files)
        raise InputError(f"{where}: {len(mixed)} questions are too few to train on: give at least {FEWEST_QUESTIONS}")
    return found


def write_material(material: Material, answers: Path, bench: Path) -> None:
    """Write the questions as `eyas regenerate` and `eyas bench` read them."""
    write_text(answers, "".join(line.raw.decode("utf-8-sig", "replace") + "\n" for line in material.answers))
    asked = [{**each.template, "messages": each.messages[: each.turns[0]]} for each in material.bench]
    write_text(bench, "".join(json.dumps(line) + "\n" for line in asked))
