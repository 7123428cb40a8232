"""Shared parts of the experiments: chats and books, drafters, answers by `eyas.bench`, intervals,
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
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from rich.progress import Progress

from eyas import tiny
from eyas.api import LLM
from eyas.bench.contestants import Drafting
from eyas.bench.record import Answer
from eyas.bench.rows import by_prompt
from eyas.bench.run import VANILLA, Bench, OnPrompt, locked
from eyas.bench.tasks import Prompt
from eyas.bench.tasks import load as load_task
from eyas.core.drafter import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.errors import EyasError, InputError
from eyas.files import write_text
from eyas.hardware import cpu_name
from eyas.metrics import Interval, bootstrap, depth_counts, difference_of_ratios, ratio, ratio_of_ratios

RESAMPLES = 4000
REQUIRED = object()  # the default of an option that must be given
CHAIN = 5  # draft tokens of a chain: n-alpha for n = 0..4
Options = dict[str, Any]


# --- the command line ----------------------------------------------------------------------------------


def parser(
    doc: str | None, output: Any = REQUIRED, chats: bool = False, heads: bool = False, **options: Any
) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, with an option for each of `options`.

    Args:
        output: the default of --output and its help, where it is not required; None: without it.
        chats: with --chats, a file of chats.
        heads: with --draft METHOD=HEAD, as `heads_of` takes it.
        options: defaults, each alone or with its help; False is a switch, a list takes several values.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output is REQUIRED:
        made.add_argument(
            "--output", type=Path, required=True, help="the record, JSON; raw answers are kept in out/ beside its name"
        )
    elif output is not None:
        options["output"] = output
    if chats:
        made.add_argument("--chats", type=Path, required=True, metavar="FILE", help="chats, JSONL; .gz too")
    if heads:
        made.add_argument(
            "--draft", action="append", default=[], metavar="METHOD=HEAD", help="default: the embedded model's heads"
        )
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


def numbers(text: str) -> list[int]:
    """Whole numbers that are separated by commas."""
    return [int(part) for part in text.split(",")]


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
    """The machine, and its load just now."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(
    path: Path, record: Mapping[str, Any], before: Mapping[str, object] | None = None, quiet: bool = False
) -> None:
    """Write a record with its command and machine, and print it unless `quiet`.

    Args:
        before: the machine at the beginning.
    """
    command = " ".join(["python", f"runs/{Path(sys.argv[0]).name}", *sys.argv[1:]])
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


def chat_prompts(path: Path, limit: int | None = None, step: int = 1) -> list[Prompt]:
    """Each chat of a JSONL file up to its last user turn."""
    prompts = list[Prompt]()
    with open_text(path) as lines:
        for number, line in enumerate(lines):
            record = json.loads(line)
            turns = record.get("messages", record.get("conversations"))
            last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
            if last is not None and number % step == 0:
                prompts.append(Prompt(f"chat/{number}", "chat", (), messages=tuple(turns[: last + 1])))
    return prompts[:limit]


def bundled_prompts(limit: int | None = None) -> list[Prompt]:
    """The bundled prompts of one turn."""
    return [prompt for prompt in load_task("bundled", limit) if len(prompt.turns) == 1]


def book_tokens(llm: LLM, path: Path) -> list[int]:
    """The tokens of a book without Project Gutenberg's preface and licence."""
    with open_text(path) as f:
        text = f.read()
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*", text)
    end = re.search(r"\*\*\* ?END OF", text)
    text = text[start.end() if start else 0 : end.start() if end else len(text)].strip()
    if llm.tokenizer is None:
        raise InputError("this experiment needs a target with a tokenizer")
    return list(llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tree(nodes: int, depth: int, branch: int, **more: Any) -> Options:
    """Options of a dynamic tree."""
    return {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch, **more}


def tree_of(shape: str) -> Options:
    """Options of "nodes/depth/branch"."""
    return tree(*(int(part) for part in shape.split("/")))


def drafter(target: Target, method: str, options: Options | None = None, head: str | Path | None = None) -> Drafter:
    """A method with these options; head: default: the embedded model's."""
    kind = find(method)
    head = head or tiny.HEADS.get(kind.reads)
    return kind.from_pretrained(head, target, build_options(kind.Options, options or {}))


def heads_of(named: Sequence[str], methods: Sequence[str] = ("eagle3", "eagle2")) -> dict[str, str | None]:
    """Method -> head, of METHOD=PATH arguments; without any: the embedded model's heads of these
    methods."""
    pairs = (argument.partition("=") for argument in named)
    return {method: head for method, _, head in pairs} or dict.fromkeys(methods)


# --- answers -------------------------------------------------------------------------------------------


@contextmanager
def progress() -> Iterator[OnPrompt]:
    """A bar for Bench.run."""
    with Progress(transient=True) as bar:
        task = bar.add_task("prompts", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what or "prompts")


def ask(
    llm: LLM,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    output: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 96,
) -> list[Answer]:
    """Every drafter's answers, and plain decoding's ("vanilla"), interleaved prompt by prompt. A
    stopped run goes on.

    Args:
        llm: decodes plainly.
        output: the record; the answers are kept in out/NAME.
    """
    entered = {VANILLA: llm.drafter, **{name: made for name, made in drafters.items() if name != VANILLA}}
    bench = Bench(
        llm,
        [Drafting(name, made) for name, made in entered.items()],
        prompts,
        temperatures,
        max_new_tokens,
        {"seed": 7},
    )
    folder = Path("out") / output.stem if not output.is_absolute() else output.with_suffix("")
    with locked(folder), progress() as on_prompt:
        answers = bench.run(folder, on_prompt)
    if bench.failed:
        raise EyasError("; ".join(f"{name} failed: {why}" for name, why in bench.failed.items()))
    return answers


def select(answers: Sequence[Answer], name: str, temperature: float = 0.0) -> list[Answer]:
    """One contestant's answers at a temperature, in the order of the prompts."""
    return [a for a in answers if (a.method, a.temperature) == (name, temperature)]


def equal_texts(answers: Sequence[Answer], name: str, temperature: float = 0.0) -> int:
    """Answers whose ids are plain decoding's."""
    pairs = zip(select(answers, name, temperature), select(answers, VANILLA, temperature), strict=True)
    return sum(a.token_ids == b.token_ids for a, b in pairs)


def loops(answers: Sequence[Answer], n: int = 8) -> set[str]:
    """Prompts after which plain decoding loops: more than a fifth of the n-grams repeat. Loops
    flatter every method."""

    def share(tokens: Sequence[int]) -> float:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return {a.prompt for a in answers if a.method == VANILLA and share(a.token_ids) > 0.2}


# --- intervals -----------------------------------------------------------------------------------------


def interval(statistic: Callable[..., Any], *columns: Sequence[float] | np.ndarray) -> list[float | None]:
    """[value, low, high], rounded, of `eyas.metrics.bootstrap`."""
    return rounded(bootstrap(statistic, *columns, resamples=RESAMPLES))


def rounded(figures: Interval | None, digits: int = 4) -> list[float | None]:
    """[value, low, high], rounded."""
    return [None if x is None else round(x, digits) for x in figures or (None, None, None)]


def tau_columns(answers: Sequence[Answer]) -> list[list[float]]:
    """(emitted tokens, cycles) of each prompt."""
    turns = by_prompt(answers).values()
    return [[sum(a.emitted for a in group) for group in turns], [sum(len(a.cycles) for a in group) for group in turns]]


def tau_interval(answers: Sequence[Answer]) -> list[float | None]:
    """tau."""
    return interval(ratio, *tau_columns(answers))


def tau_over(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[float | None]:
    """tau over the baseline's, paired by prompt."""
    return interval(ratio_of_ratios, *tau_columns(answers), *tau_columns(baseline))


def tau_difference(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[float | None]:
    """tau less the baseline's, paired by prompt."""
    return interval(difference_of_ratios, *tau_columns(answers), *tau_columns(baseline))


def alpha_intervals(answers: Sequence[Answer], depth: int = CHAIN) -> list[list[float | None]]:
    """n-alpha of chains for n = 0..depth-1."""
    counts_PD2 = np.array([depth_counts(a.cycles, depth) for a in answers], float)
    return [interval(ratio, counts_PD2[:, n, 1], counts_PD2[:, n, 0]) for n in range(depth)]


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
