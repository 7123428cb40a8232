"""Shared parts of the experiments: chats and books, drafters, answers by `eyas_lab.bench`, intervals,
records and figures."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import transformers
from rich.progress import Progress

from eyas import tiny
from eyas.api import LLM
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.errors import EyasError, InputError
from eyas.files import write_text
from eyas.hardware import cpu_name
from eyas_lab.bench.card import commit
from eyas_lab.bench.contestants import Drafting
from eyas_lab.bench.intervals import Interval, bootstrap, difference_of_ratios, ratio, ratio_of_ratios
from eyas_lab.bench.record import Answer
from eyas_lab.bench.rows import by_prompt
from eyas_lab.bench.run import VANILLA, Bench, OnPrompt
from eyas_lab.bench.tasks import Prompt
from eyas_lab.bench.tasks import load as load_task
from eyas_lab.folders import locked_folder

RESAMPLES = 4000
REQUIRED = object()  # the default of an option that must be given
T = TypeVar("T")
Options = dict[str, Any]


# --- the command line ----------------------------------------------------------------------------------


def parser(doc: str | None, output: Any = REQUIRED, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, with an option for each of `options`.

    Args:
        output: the default of --output and its help, where it is not required; None: without it.
        options: defaults, each alone or with its help; False is a switch, a list takes several values.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output is REQUIRED:
        made.add_argument(
            "--output", type=Path, required=True, help="the record, JSON; raw answers are kept in out/ beside its name"
        )
    elif output is not None:
        options["output"] = output
    for name, option in options.items():
        add_option(made, f"--{name.replace('_', '-')}", *(option if isinstance(option, tuple) else (option,)))
    return made


def add_option(made: argparse.ArgumentParser, flag: str, default: Any, about: str = "") -> None:
    """Add an option whose type is that of its default; without one it is a word."""
    if default is False:
        made.add_argument(flag, action="store_true", help=about)
        return
    several = isinstance(default, list)
    example = default[0] if several else default
    made.add_argument(
        flag,
        type=str if example is None else Path if isinstance(example, Path) else type(example),
        nargs="+" if several else None,
        default=default,
        help=f"{about} (default: %(default)s)".strip(),
    )


def words(text: str) -> list[str]:
    """Words that are separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def run(main: Callable[[], object]) -> NoReturn:
    """Run a script: status 2 and one line for a user's mistake, 130 when interrupted."""
    try:
        main()
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def machine() -> dict[str, object]:
    """The machine, its load just now, and the commit of this clone."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def shown_script(script: Path) -> str:
    """Return the path of a script in this repository, as a command line names it."""
    root = Path(__file__).resolve().parents[1]
    return str(script.resolve().relative_to(root)) if script.resolve().is_relative_to(root) else f"runs/{script.name}"


def write(
    path: Path, record: Mapping[str, Any], before: Mapping[str, object] | None = None, quiet: bool = False
) -> None:
    """Write a record with its command and machine, and print it unless `quiet`.

    Args:
        before: the machine at the beginning.
    """
    command = " ".join(["python", shown_script(Path(sys.argv[0])), *sys.argv[1:]])
    load = {"load_after": machine()["load_1min"]} if before else {}
    whole = {"command": command, "machine": before or machine(), **load, **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lists of numbers stand on one line.
    text = re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(whole, indent=1))
    write_text(path, text + "\n")
    if not quiet:
        print(json.dumps(whole))


# --- chats, books, drafters ----------------------------------------------------------------------------


def open_text(path: Path) -> Any:
    """A text file, compressed or not."""
    return (
        gzip.open(path, "rt", encoding="utf-8", errors="replace")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8")
    )


def chat_prompts(path: Path) -> list[Prompt]:
    """Each chat of a JSONL file up to its last user turn."""
    prompts = list[Prompt]()
    with open_text(path) as lines:
        for number, line in enumerate(lines):
            record = json.loads(line)
            turns = record.get("messages", record.get("conversations"))
            last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
            if last is not None:
                prompts.append(Prompt(f"chat/{number}", "chat", (), messages=tuple(turns[: last + 1])))
    return prompts


def bundled_prompts(limit: int | None = None) -> list[Prompt]:
    """The bundled prompts of one turn."""
    return [prompt for prompt in load_task("bundled", limit) if len(prompt.turns) == 1]


def tree(nodes: int, depth: int, branch: int, **more: Any) -> Options:
    """Options of a dynamic tree."""
    return {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch, **more}


def tree_of(shape: str) -> Options:
    """Options of "nodes/depth/branch"."""
    return tree(*(int(part) for part in shape.split("/")))


def drafter(target: Target, method: str, options: Options | None = None, head: str | Path | None = None) -> Any:
    """A method with these options; head: default: the embedded model's."""
    kind = find(method)
    head = head or tiny.HEADS.get(kind.head_format)
    return kind.from_pretrained(head, target, build_options(kind.Options, options or {}))


# --- answers -------------------------------------------------------------------------------------------


@contextmanager
def progress() -> Iterator[OnPrompt]:
    """A bar for Bench.run."""
    with Progress(transient=True) as bar:
        task = bar.add_task("prompts", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what or "prompts")


class Answers(list[Answer]):
    """Answers of several contestants, or of one; figures are paired by prompt, intervals are 95 %,
    bootstrap over prompts."""

    def of(self, name: str, temperature: float = 0.0) -> Answers:
        """One contestant's answers at a temperature, in the order of the prompts."""
        return Answers(a for a in self if (a.method, a.temperature) == (name, temperature))

    def loops(self, n: int = 8) -> set[str]:
        """Prompts after which plain decoding loops: more than a fifth of the n-grams repeat. Loops
        flatter every method."""

        def share(tokens: Sequence[int]) -> float:
            grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
            return 1 - len(set(grams)) / len(grams) if grams else 0.0

        return {a.prompt for a in self if a.method == VANILLA and share(a.token_ids) > 0.2}

    def without(self, prompts: set[str]) -> Answers:
        """The answers to other prompts."""
        return Answers(a for a in self if a.prompt not in prompts)

    def equal_texts(self, name: str, temperature: float = 0.0) -> int:
        """Answers of a contestant whose ids are plain decoding's."""
        pairs = zip(self.of(name, temperature), self.of(VANILLA, temperature), strict=True)
        return sum(a.token_ids == b.token_ids for a, b in pairs)

    @property
    def tokens(self) -> int:
        return sum(len(a.token_ids) for a in self)

    def tau(self) -> list[float | None]:
        return interval(ratio, *self._emitted_and_cycles())

    def tau_over(self, baseline: Answers) -> list[float | None]:
        """tau over the baseline's."""
        return interval(ratio_of_ratios, *self._emitted_and_cycles(), *baseline._emitted_and_cycles())

    def tau_difference(self, baseline: Answers) -> list[float | None]:
        """tau less the baseline's."""
        return interval(difference_of_ratios, *self._emitted_and_cycles(), *baseline._emitted_and_cycles())

    def sums(self, *figures: Callable[[Answer], float]) -> list[list[float]]:
        """For each figure its sums over the turns of each prompt."""
        turns = by_prompt(self).values()
        return [[sum(map(figure, group)) for group in turns] for figure in figures]

    def _emitted_and_cycles(self) -> list[list[float]]:
        return self.sums(lambda a: a.emitted, lambda a: len(a.cycles))


def ask(
    llm: LLM,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    output: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 96,
) -> Answers:
    """Every drafter's answers, and plain decoding's ("vanilla"), interleaved prompt by prompt. A
    stopped run goes on.

    Args:
        llm: decodes plainly.
        output: the record; the answers are kept in out/NAME.
    """
    entered = [Drafting(VANILLA, llm.drafter), *(Drafting(name, made) for name, made in drafters.items())]
    bench = Bench(llm, entered, prompts, temperatures, max_new_tokens, {"seed": 7})
    folder = Path("out") / output.stem if not output.is_absolute() else output.with_suffix("")
    with locked_folder(folder), progress() as on_prompt:
        answers = bench.run(folder, on_prompt)
    if bench.failed:
        raise EyasError("; ".join(f"{name} failed: {why}" for name, why in bench.failed.items()))
    return Answers(answers)


# --- intervals -----------------------------------------------------------------------------------------


def interval(statistic: Callable[..., Any], *columns: Sequence[float] | np.ndarray) -> list[float | None]:
    """[value, low, high], rounded, of `eyas_lab.bench.intervals.bootstrap`."""
    return rounded(bootstrap(statistic, *columns, resamples=RESAMPLES))


def rounded(figures: Interval | None, digits: int = 4) -> list[float | None]:
    """[value, low, high], rounded."""
    return [None if x is None else round(x, digits) for x in figures or (None, None, None)]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, another one first."""
    by %= len(items)
    return [*items[by:], *items[:by]]


# --- records that outlive an interruption --------------------------------------------------------------


class Rows:
    """A JSONL file of measurements, each written when it is made. Started again with the same
    settings, a run goes on behind the last.

    InputError when the file was made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps({"settings": settings}))
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if lines and lines[0] != wanted:
            there = lines[0].get("settings", {})
            differ = [k for k in wanted["settings"] if there.get(k) != wanted["settings"][k]]
            raise InputError(
                f"{path} was measured with other settings ({', '.join(differ)}): give another --output, or move it away"
            )
        self.path = path
        self.rows = {json.dumps(line["key"]): line for line in lines[1:]}
        if not lines:
            self._write(wanted)

    def __contains__(self, key: Sequence[object]) -> bool:
        return json.dumps(list(key)) in self.rows

    def add(self, key: Sequence[object], row: Mapping[str, object]) -> None:
        """Write a row."""
        line = {"key": list(key), **row}
        self.rows[json.dumps(list(key))] = line
        self._write(line)

    def of(self, *head: object) -> list[dict[str, Any]]:
        """The rows whose key begins like that."""
        return [row for row in self.rows.values() if row["key"][: len(head)] == list(head)]

    def _write(self, line: Mapping[str, object]) -> None:
        with self.path.open("a") as f:
            print(json.dumps(line), file=f, flush=True)
