"""Shared parts of the scripts: command lines, records, prompts, drafters, intervals."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import transformers

from eyas import tiny
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError, InputError
from eyas.files import write_text
from eyas.hardware import cpu_name
from eyas_lab.bench.card import commit
from eyas_lab.bench.intervals import bootstrap
from eyas_lab.bench.tasks import Prompt
from eyas_lab.bench.tasks import load as load_task

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


def write(path: Path, record: Mapping[str, Any], before: Mapping[str, Any] | None = None, quiet: bool = False) -> None:
    """Write a record with its command and machine, as it was `before` the work; print it unless `quiet`."""
    command = " ".join(["python", f"runs/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = {"load_after": machine()["load_1min"]} if before else {}
    whole = {"command": command, "machine": before or machine(), **load, **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lists of numbers stand on one line.
    text = re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(whole, indent=1))
    write_text(path, text + "\n")
    if not quiet:
        print(json.dumps(whole))


# --- texts, prompts, drafters ----------------------------------------------------------------------------


def open_text(path: Path) -> Any:
    """A text file, compressed or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8")


def bundled_prompts(limit: int | None = None) -> list[Prompt]:
    """The bundled prompts of one turn."""
    return [prompt for prompt in load_task("bundled", limit) if len(prompt.turns) == 1]


def tree_of(shape: str) -> Options:
    """Options of a dynamic tree, "nodes/depth/branch"."""
    nodes, depth, branch = map(int, shape.split("/"))
    return {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch}


def drafter(target: Target, method: str, options: Options | None = None, head: str | Path | None = None) -> Any:
    """A method with these options; head: default: the embedded model's."""
    kind = find(method)
    head = head or tiny.HEADS.get(kind.head_format)
    return kind.from_pretrained(head, target, build_options(kind.Options, options or {}))


# --- intervals -----------------------------------------------------------------------------------------


def interval(statistic: Callable[..., Any], *columns: Sequence[float] | np.ndarray) -> list[float | None]:
    """[value, low, high], rounded, of `eyas_lab.bench.intervals.bootstrap`."""
    figures = bootstrap(statistic, *columns, resamples=RESAMPLES) or (None, None, None)
    return [None if x is None else round(x, 4) for x in figures]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, another one first."""
    by %= len(items)
    return [*items[by:], *items[:by]]


# --- records that outlive an interruption --------------------------------------------------------------


class Rows:
    """A JSONL file of measurements, each written when it is made: a run that is started again goes on after the last.

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
