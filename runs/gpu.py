"""Measure everything that wants a GPU, in one process: what is needed first comes first.

    python runs/gpu.py --output FILE.json                               all stages, about 20 minutes; see --minutes
    python runs/gpu.py --stages machine,texts,first --output FILE.json  some of them
    python runs/gpu.py --shape small --output FILE.json                 the whole of it in small, on a CPU too
    python runs/gpu.py --tables FILE.json                               the tables of a record

docs/lab/gpu_plan.md has the stages. The record is written after every case. When the time is over (--minutes), or a case
would not end in time, the run ends with status 0 and says what is left; the same command goes on where it was. A case
that fails is noted, and the others go on (--retry measures it again). The run needs torch, transformers, numpy, psutil and
rich, and no network.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import _markdown
import torch
from _common import machine, parser, run, words
from _gpu_lab import FULL, SHAPES, SMALL, Lab
from _gpu_stages import Case, cases

from eyas.errors import EyasError, OptionError, near
from eyas.files import write_text

MAX_ROWS = 24  # of a table in the summary
LAST_SECONDS = 15.0  # before the end a case is interrupted


class OutOfTime(Exception):  # noqa: N818 - it is no error
    """The time is over; what is left is measured by the next run."""


class Results:
    """The records of all cases, by stage and case, in one JSON file that is replaced when a case is added."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "stages": {}}
        self.content["runs"].append(dict(about))
        self.stages: dict[str, dict[str, Any]] = self.content["stages"]

    def get(self, case: Case) -> dict[str, Any] | None:
        return self.stages.get(case.stage, {}).get(case.name)

    def add(self, case: Case, record: Mapping[str, Any]) -> None:
        """Write a record, with the number of the run (in `runs`) that made it."""
        self.stages.setdefault(case.stage, {})[case.name] = {**record, "run": len(self.content["runs"]) - 1}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")

    def forget_failures(self) -> None:
        """Have failed cases measured again."""
        for name, found in self.stages.items():
            self.stages[name] = {case: record for case, record in found.items() if "error" not in record}


def chosen(every: Sequence[Case], names: str) -> list[Case]:
    """The cases of these stages, in their own order; all without names."""
    known, wanted = list(dict.fromkeys(case.stage for case in every)), words(names)
    if unknown := [name for name in wanted if name not in known]:
        raise OptionError(f"unknown stage {unknown[0]!r}; {near(unknown[0], known)}")
    return [case for case in every if not wanted or case.stage in wanted]


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """OutOfTime if the block takes longer."""

    def end(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    # again, where a library takes it for an error of its own
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds), 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(every: Sequence[Case], lab: Lab, results: Results, end: float, scale: float) -> None:
    """Run the cases that the record lacks, until the time is over: OutOfTime.

    Args:
        end: seconds since the epoch.
        scale: of the seconds that cases are estimated to take.
    """
    for case in every:
        if results.get(case) is not None:
            continue
        began = time.time()
        if end - began < case.seconds * scale + LAST_SECONDS:
            raise OutOfTime
        with interrupted_after(end - began - LAST_SECONDS):
            record = attempt(lambda: case.run(lab, results.stages))  # noqa: B023 - called at once
        seconds = round(time.time() - began, 1)
        results.add(case, {**record, "seconds": seconds})
        print(f"\n== {case.stage}: {case.name} ({seconds:.0f} s)\n{shown(record)}", flush=True)


def attempt(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The case's record, or its error; with the warnings, which say what kernels were left out, and why."""
    try:
        with warnings.catch_warnings(record=True) as caught, notes() as told:
            warnings.simplefilter("always")
            record = case()
    except OutOfTime:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"error": reason, "traceback": traceback.format_exc()[-3000:]}
    texts = [str(warning.message)[:300] for warning in caught if warning.category is UserWarning]
    return {**record, "warnings": list(dict.fromkeys([*texts, *told]))}


@contextmanager
def notes() -> Iterator[list[str]]:
    """The notes of eyas' runners: some kernels are left out with a note only."""
    told, logger = list[str](), logging.getLogger("eyas.runners")
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage()[:300])  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown; the columns are all keys in the order in which they come."""
    heads = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        if isinstance(value, list | tuple):
            return f"{cell(value[0])} [{', '.join(map(cell, value[1:]))}]"
        return "" if value is None else str(value)

    return _markdown.table(heads, ([cell(row.get(name)) for name in heads] for row in rows))


def shown(record: dict[str, Any]) -> str:
    """The record's table, or its error."""
    if "error" in record:
        return f"FAILED {record['error']}"
    return "\n".join([table(record["rows"]), *(f"warning: {line}" for line in record["warnings"])])


def tables(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables of a record, rows of like columns together."""
    parts = []
    for name, found in stages.items():
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for case, record in found.items():
            for row in record.get("rows", [{"case": case, "error": record.get("error")}]):
                groups.setdefault(tuple(row), []).append(row)
        parts += [f"## {name}", *(table(rows[:MAX_ROWS]) for rows in groups.values())]
    return "\n\n".join(parts)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(
        __doc__,
        output=(Path("out/gpu.json"), "the record"),
        stages=("", "names, separated by commas, else all"),
        minutes=(9.0, "of the whole run"),
        device=("cuda" if torch.cuda.is_available() else "cpu", "a GPU if there is one"),
        retry=(False, "measure failed cases again"),
    )
    about = "of the target (default: llama-8b on a GPU, small on a CPU)"
    made.add_argument("--shape", choices=sorted(SHAPES), help=about)
    made.add_argument("--tables", type=Path, metavar="FILE.json", help="only show the tables of a record")
    args = made.parse_args(arguments)
    args.shape = args.shape or ("small" if args.device == "cpu" else "llama-8b")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    began, args = time.time(), options(arguments)
    if args.tables:
        print(tables(json.loads(args.tables.read_text(encoding="utf-8"))["stages"]))
        return
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("torch sees no GPU: name another --device, or try the whole of it with --device cpu")
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    plan = SMALL if args.shape == "small" else replace(FULL, shape=args.shape)
    every = chosen(cases(plan), args.stages)
    command = " ".join(["python", "runs/gpu.py", *(sys.argv[1:] if arguments is None else arguments)])
    about = {"command": command, "machine": machine(), "plan": vars(plan), "device": str(device)}
    results = Results(args.output, about)
    if args.retry:
        results.forget_failures()
    with suppress(OutOfTime):
        measure(every, Lab(device, plan), results, began + 60 * args.minutes, 1.0 if device.type == "cuda" else 0.02)
    print(f"\n{tables(results.stages)}\n", flush=True)
    left = [f"{case.stage} {case.name}" for case in every if results.get(case) is None]
    failed = [f"{case.stage} {case.name}" for case in every if "error" in (results.get(case) or {})]
    ended = f"left: {', '.join(left) or 'nothing'}; failed: {', '.join(failed) or 'none'}"
    print(f"record: {args.output}; {ended}", flush=True)
    if failed:
        raise EyasError(f"{len(failed)} of the cases failed; --retry measures them again")


if __name__ == "__main__":
    run(main)
