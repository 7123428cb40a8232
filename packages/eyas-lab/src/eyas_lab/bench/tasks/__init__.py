"""The tasks of a benchmark: prompts by name, from the package, a file, a folder or the hub.

    load("bundled")                        24 prompts of our own
    load("spec_bench:question.jsonl")      a file of lines, whatever its format: _formats.py
    load("spec_bench/rag:question.jsonl")  one of its tasks
    load("speed_bench:throughput_8k.jsonl")  SPEED-Bench; a folder stands for its qualitative.jsonl
    load("eagle:FOLDER")                   every task of a folder
    load("long:BOOK.txt@1000+4000")        passages of 1,000 and of 4,000 words
    load("gsm8k")                          from the hub, with the package `datasets`
    read_prompts("own.jsonl")              the user's own

A line that cannot be used is named with its file and number, and the rest goes on. This package
knows no model and no tokenizer.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import InputError, OptionError, near
from eyas_lab.bench.tasks._formats import Prompt, check_own_line, parse_line, speed_bench_line
from eyas_lab.bench.tasks._long import passages, split_lengths
from eyas_lab.bench.tasks._sources import BUNDLED, TASKS, files_of, hub_lines, lines_of

__all__ = ["Prompt", "load", "read_prompts"]

# Spec-Bench, section 4.1: MT-bench's eight categories are its one task of multi-turn conversation.
MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


def load(spec: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Return the prompts of a task, in the order of their file.

    Args:
        spec: NAME (bundled, or from the hub) or NAME:PATH; NAME/PART takes one part of a set, such
            as spec_bench/rag.
        limit: most prompts, of every part and category in proportion.
        seed: decides which prompts `limit` takes, and where the passages of `long` begin.

    Raises:
        OptionError: no such task, or an impossible limit.
        InputError: no line can be used; the message says why. If some lines can be used, each one
            that cannot is a warning.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"a limit of {limit} leaves no prompt: at least 1")
    whole, _, path = spec.partition(":")
    name, _, part = whole.partition("/")
    if name not in TASKS:
        raise OptionError(f"there is no task {name!r}; {near(name, TASKS)}")
    found, problems = _read(name, path, seed)
    for problem in problems:
        warnings.warn(problem, stacklevel=1)  # the command line shows warnings of this package as notes
    if part:
        parts = sorted({f.prompt.task.partition("/")[2] for f in found} - {""})
        found = [f for f in found if f.prompt.task == whole]
        if not found:
            raise OptionError(f"task {name} has no part {part!r}; {near(part, parts)}")
    return _pick(found, limit, seed)


def read_prompts(path: str | Path) -> tuple[list[Prompt], list[str]]:
    """Return the user's own prompts, and one line for each line that cannot be used.

    A line: {"prompt": "..."}, {"messages": [...]}, {"turns": [...]} or {"prompt_ids": [...]}; with any of them "id",
    "task" (else the file's name), "system", "max_new_tokens", "raw". Raise InputError when the file cannot be read or
    no line can be used."""
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"{file} {'is a folder' if file.exists() else 'does not exist'}; pass a file of prompts, one a line"
        )
    reader = _Reader(file.name.partition(".")[0], own=True)
    reader.read(lines_of(file))
    return [f.prompt for f in _not_empty(reader.found, reader.problems, str(file))], reader.problems


class _Found(NamedTuple):
    prompt: Prompt
    category: str  # "" where the format has none


def _read(name: str, path: str, seed: int) -> tuple[list[_Found], list[str]]:
    """All prompts of a task, and a message for each line that cannot be used."""
    task = TASKS[name]
    if name == "long":
        if not path:
            raise InputError(f"task long needs a path, long:PATH: {task.file}")
        place, lengths = split_lengths(path)
        prompts, problems = passages(Path(place), lengths, seed, task.max_new_tokens)
        return _not_empty([_Found(prompt, "") for prompt in prompts], problems, place), problems
    if name == "bundled" and path:
        raise OptionError("the bundled prompts have no path; for a file of your own give --prompts FILE")
    reader = _Reader(name, task.max_new_tokens)
    if name == "bundled":
        reader.read(lines_of(BUNDLED))
    elif path:
        for file in files_of(name, Path(path)):
            reader.read(lines_of(file), _part(name, file))
    else:
        reader.read(hub_lines(name))
    return _not_empty(reader.found, reader.problems, path or name), reader.problems


def _part(name: str, file: Path) -> str:
    """Return the part of a set of tasks that a file holds; "": its lines name it, or there is none."""
    if name == "eagle":
        return file.parent.name
    return file.stem if name == "speed_bench" and file.stem.startswith("throughput") else ""


def _not_empty(found: list[_Found], problems: Sequence[str], where: str) -> list[_Found]:
    """Return the findings. Raise InputError if it is nothing."""
    if found:
        return found
    raise InputError(
        f"{where}: no line can be used; the first: {problems[0]}"
        if problems
        else f"{where} is empty: there is no prompt in it"
    )


class _Reader:
    """Turns lines into prompts of one task.

    Args:
        name: the task's.
        max_new_tokens: for prompts without their own.
        own: the lines are the user's, with one of the keys of OWN, and may name their task.
    """

    def __init__(self, name: str, max_new_tokens: int | None = None, own: bool = False) -> None:
        self.name, self.max_new_tokens, self.own = name, max_new_tokens, own
        self.found, self.problems, self.places = list[_Found](), list[str](), dict[str, str]()

    def read(self, lines: Iterable[tuple[str, Any]], part: str = "") -> None:
        """Read lines. part: the part of the task that they belong to; "": the lines name it, or it is missing."""
        for number, (where, record) in enumerate(lines, start=1):
            try:
                if isinstance(record, InputError):
                    raise record
                found = self._prompt(record, number, part)
                if found is None:
                    continue
                first = self.places.setdefault(found.prompt.id, where)
                if first != where:
                    raise InputError(f"the id {found.prompt.id} is at {first} already: give each line its own")
                self.found.append(found)
            except InputError as error:
                self.problems.append(f"{where}: {error}")

    def _prompt(self, record: Any, number: int, part: str) -> _Found | None:
        """Return the prompt of a line; None when the line belongs to another task of a common file."""
        if self.own:
            check_own_line(record)
        if self.name == "speed_bench":
            record = speed_bench_line(record)
        name, category, fields = parse_line(record)
        if self.name == "mt_bench" and category and category not in MT_BENCH:
            return None
        task = self._task(record, category, part)
        prompt = Prompt(f"{task}/{name or number}", task, **fields)
        return _Found(
            prompt if prompt.max_new_tokens else replace(prompt, max_new_tokens=self.max_new_tokens), category
        )

    def _task(self, record: Any, category: str, part: str) -> str:
        own = record.get("task") if self.own or self.name == "bundled" else None
        if own is not None and (not isinstance(own, str) or not own.strip()):
            raise InputError('"task" must be a string that is not empty')
        if self.own:
            return own or self.name
        if self.name == "spec_bench":
            part = "mt_bench" if category in MT_BENCH else category or "other"
        if self.name == "speed_bench":
            part = "_".join(filter(None, (part, category or "other")))
        part = part or own or ""
        return f"{self.name}/{part}" if part else self.name


def _pick(found: Sequence[_Found], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` of them, in their order. Every part and category gets its share, rounded up
    or down.

    Sorted by category and shuffled within, then taken at even distances: a stretch of m of n holds
    limit * m / n of the places.
    """
    count = len(found)
    if limit is None or limit >= count:
        return [f.prompt for f in found]
    rng = random.Random(seed)
    order = sorted(range(count), key=lambda i: (found[i].prompt.task, found[i].category, rng.random()))
    begin = rng.randrange(count)
    chosen = sorted(order[(k * count + begin) // limit] for k in range(limit))
    return [found[i].prompt for i in chosen]
