"""The tasks by name: where their lines come from, a file or the hub.

This module knows no format of a line; `datasets` is imported only when the hub is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import InputError, first_line
from eyas_lab.chat_files import chat_lines, is_chat_file, parse_chat_line

__all__ = ["BUNDLED", "TASKS", "Line", "Task", "files_of", "hub_lines", "lines_of"]

BUNDLED = Path(__file__).parents[1] / "prompts.jsonl"
QUESTIONS = "question.jsonl"  # what Spec-Bench, MT-bench and EAGLE call their files
QUALITATIVE = "qualitative.jsonl"  # the part of SPEED-Bench that a folder stands for


class Task(NamedTuple):
    """A named task."""

    about: str
    file: str  # what PATH is
    hub: tuple[str, str | None, str] | None = None  # dataset, configuration, split
    max_new_tokens: int | None = None  # most new tokens of an answer; --max-new-tokens may ask for fewer


class Line(NamedTuple):
    """A line of a task."""

    where: str
    number: int  # in its file
    record: Any  # the JSON; of a line that is not JSON the InputError that says so
    part: str = ""  # part of the task that its file holds; "": the lines name it, or there is none


# 1024 is what Spec-Bench's scripts allow (evaluation/inference_baseline.py), 512 what EAGLE's do in
# effect (their --max-new-token of 1024 is parsed and not used), 1024 what llama.cpp's client asks of
# SPEED-Bench; the others are our own choice of what an answer of that kind needs.
TASKS = {
    "bundled": Task("24 prompts of eyas' own, four of each of six kinds", "", max_new_tokens=128),
    "spec_bench": Task("Spec-Bench, 480 prompts, six tasks", "question.jsonl of github.com/hemingkx/Spec-Bench", None, 1024),
    "speed_bench": Task("SPEED-Bench, 880 prompts, or 1,536 of one length", "qualitative.jsonl, throughput_8k.jsonl, ...", None, 1024),
    "mt_bench": Task("MT-bench, 80 prompts of two turns", "question.jsonl", ("lighteval/mt-bench", None, "train"), 1024),
    "humaneval": Task("HumanEval, 164 functions to complete", "HumanEval.jsonl.gz", ("openai/openai_humaneval", None, "test"), 512),
    "gsm8k": Task("GSM8K, 1,319 school sums", "test.jsonl", ("openai/gsm8k", "main", "test"), 512),
    "alpaca": Task("Alpaca instructions", "alpaca_data.json", ("tatsu-lab/alpaca", None, "train"), 512),
    "cnn_dm": Task("CNN/DailyMail articles", 'a .jsonl with "article"', ("abisee/cnn_dailymail", "3.0.0", "test"), 256),
    "nq": Task("Natural Questions", 'a .jsonl with "question"', ("google-research-datasets/nq_open", None, "validation"), 256),
    "eagle": Task("the EAGLE papers' six sets, 80 prompts each", "the folder eagle/data of github.com/SafeAILab/EAGLE", None, 512),
    "chats": Task("whole chats, asked up to their longest reply", 'a .jsonl with "messages" or "conversations"'),
    "long": Task("passages of a book", "a text, or a folder of texts; PATH@1000+4000 for lengths in words", None, 256),
}  # fmt: skip


def files_of(name: str, path: Path) -> list[Path]:
    """Return the files of lines at a path. That is the path itself, or of a folder its question.jsonl, its only
    file of lines, or the question.jsonl of each folder in it. Of SPEED-Bench's folder it is
    qualitative.jsonl."""
    if path.is_file():
        return [path]
    if name == "speed_bench" and (path / QUALITATIVE).is_file():
        return [path / QUALITATIVE]
    if not path.exists():
        raise InputError(f"task {name}: {path} does not exist; PATH is {TASKS[name].file}")
    if (path / QUESTIONS).is_file():
        return [path / QUESTIONS]
    here = sorted(file for file in path.iterdir() if file.is_file() and is_chat_file(file))
    if len(here) == 1:
        return here
    below = sorted(path.glob(f"*/{QUESTIONS}"))
    if here or not below:
        found = f"holds {', '.join(file.name for file in here)}: name one of them" if here else f"holds no {QUESTIONS}"
        raise InputError(f"task {name}: the folder {path} {found}; PATH is {TASKS[name].file}")
    return below


def lines_of(file: Path, part: str = "") -> Iterator[Line]:
    """Yield every line of a file, which holds this part of a task."""
    for number, (where, raw) in enumerate(chat_lines(file), start=1):
        try:
            yield Line(where, number, parse_chat_line(raw), part)
        except InputError as error:
            yield Line(where, number, error, part)


def hub_lines(name: str) -> Iterator[Line]:
    """Yield the rows of a task's dataset on the hub. InputError says what to install, or which path to give instead."""
    task = TASKS[name]
    file = f"give a file, {name}:PATH ({task.file})"
    if task.hub is None:
        raise InputError(f"task {name} is not on the hub: {file}")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise InputError(f"task {name}: {file}, or `pip install datasets` to have it from the hub") from None
    dataset, configuration, split = task.hub
    try:
        rows: Iterable[Any] = datasets.load_dataset(dataset, configuration, split=split)
    except Exception as error:  # the library raises errors of several others, for example without a network
        reason = first_line(error, 160)
        raise InputError(f"task {name}: {dataset} cannot be fetched from the hub ({reason}); {file}") from error
    for number, row in enumerate(rows, start=1):
        yield Line(f"{dataset}, row {number}", number, row)
