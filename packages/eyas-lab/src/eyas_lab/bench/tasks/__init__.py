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
from collections.abc import Iterable, Iterator
from pathlib import Path

from eyas.errors import InputError, OptionError, near
from eyas_lab.bench.tasks._formats import Prompt, check_own_line, parse_line, speed_bench_line
from eyas_lab.bench.tasks._long import passages
from eyas_lab.bench.tasks._sources import BUNDLED, TASKS, Line, files_of, hub_lines, lines_of

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
    if name == "long":
        found, problems = passages(path, seed, TASKS[name].max_new_tokens)
    else:
        found, problems = _parsed(_lines_of_task(name, path), name)
    _check_not_empty(found, problems, path or name)
    for problem in problems:
        warnings.warn(problem, stacklevel=1)  # the command line shows warnings of this package as notes
    if part:
        parts = sorted({prompt.task.partition("/")[2] for prompt in found} - {""})
        found = [prompt for prompt in found if prompt.task == whole]
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
    prompts, problems = _parsed(lines_of(file), file.name.partition(".")[0], own=True)
    _check_not_empty(prompts, problems, str(file))
    return prompts, problems


def _lines_of_task(name: str, path: str) -> Iterator[Line]:
    if name == "bundled" and path:
        raise OptionError("the bundled prompts have no path; for a file of your own give --prompts FILE")
    if name == "bundled":
        yield from lines_of(BUNDLED)
    elif not path:
        yield from hub_lines(name)
    for file in files_of(name, Path(path)) if path else ():
        part = file.parent.name if name == "eagle" else ""
        if name == "speed_bench" and file.stem.startswith("throughput"):
            part = file.stem
        yield from lines_of(file, part)


def _check_not_empty(found: list[Prompt], problems: list[str], where: str) -> None:
    if not found and problems:
        raise InputError(f"{where}: no line can be used; the first: {problems[0]}")
    if not found:
        raise InputError(f"{where} has no prompts: name another file")


def _parsed(lines: Iterable[Line], name: str, own: bool = False) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a task, and a message for each line that cannot be used.

    Args:
        own: the lines are the user's, with one of the keys of OWN, and may name their task.
    """
    prompts, problems, places = list[Prompt](), list[str](), dict[str, str]()
    for line in lines:
        try:
            if (prompt := _prompt(line, name, own)) is None:
                continue
            if (first := places.setdefault(prompt.id, line.where)) != line.where:
                raise InputError(f"the id {prompt.id} is at {first} already: give each line its own")
            prompts.append(prompt)
        except InputError as error:
            problems.append(f"{line.where}: {error}")
    return prompts, problems


def _prompt(line: Line, name: str, own: bool) -> Prompt | None:
    """Return the prompt of a line; None if the line belongs to another task of a common file."""
    if isinstance(line.record, InputError):
        raise line.record
    if own:
        check_own_line(line.record)
    record = speed_bench_line(line.record) if name == "speed_bench" else line.record
    key, fields = parse_line(record)
    category = fields["category"]
    if name == "mt_bench" and category and category not in MT_BENCH:
        return None
    task = record.get("task") if own or name == "bundled" else None
    if task is not None and (not isinstance(task, str) or not task.strip()):
        raise InputError('"task" must be a string that is not empty')
    if not own:
        part = line.part or task or ""
        if name == "spec_bench":
            part = "mt_bench" if category in MT_BENCH else category or "other"
        if name == "speed_bench":
            part = "_".join(filter(None, (line.part, category or "other")))
        task = f"{name}/{part}" if part else name
        fields = {"max_new_tokens": TASKS[name].max_new_tokens, **fields}
    task = task or name
    return Prompt(f"{task}/{key or line.number}", task, **fields)


def _pick(found: list[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` of them, in their order. Every part and category gets its share, rounded up
    or down.

    Sorted by category and shuffled within, then taken at even distances: a stretch of m of n holds
    limit * m / n of the places.
    """
    count = len(found)
    if limit is None or limit >= count:
        return found
    rng = random.Random(seed)
    order = sorted(range(count), key=lambda i: (found[i].task, found[i].category, rng.random()))
    begin = rng.randrange(count)
    chosen = sorted(order[(k * count + begin) // limit] for k in range(limit))
    return [found[i] for i in chosen]
