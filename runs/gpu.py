"""Measure everything that wants a GPU, in one process: what is needed first comes first, and
nothing that was measured is lost.

    python runs/gpu.py --output FILE.json                               all stages, about 28 minutes; see --minutes
    python runs/gpu.py --stages machine,texts,first --output FILE.json  some of them
    python runs/gpu.py --shape small --output FILE.json                 the whole of it in small, on a CPU too
    python runs/gpu.py --tables FILE.json                               the tables of a record

Target and heads get random weights, on the device, in shapes of published models; acceptance is
simulated at published rates. After every case the record is written as a whole and the case's table
is printed. When the time is over (--minutes, 9 by default), or a case would not end in time, the
run ends with status 0 and says what is left; the same command goes on where it was. A case that
fails is noted, and the others go on (--retry measures it again); a device that no longer answers
ends the process, and the run goes on in a new one. The run needs torch, transformers, numpy, psutil
and rich, and no network; the stage `texts` reads the embedded model (the folder tiny/).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import machine, numbers, parser, run, words
from _gpu_lab import FULL, SMALL, Clock, Lab, OutOfTime, Plan, Results, table
from _gpu_stages import Bench, Stage, stages
from random_target import SHAPES

from eyas.errors import EyasError, OptionError, near

MOST_ROWS = 24  # of a table in the summary
LAST_SECONDS = 15.0  # before the end a case is interrupted


def chosen(every: Sequence[Stage], names: str) -> list[Stage]:
    """The stages of these names, in their own order; all without names."""
    known, wanted = [stage.name for stage in every], words(names)
    if unknown := [name for name in wanted if name not in known]:
        raise OptionError(f"unknown stage {unknown[0]!r}; {near(unknown[0], known)}")
    return [stage for stage in every if not wanted or stage.name in wanted]


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


def measure(stage_list: Sequence[Stage], bench: Bench, clock: Clock, seconds_scale: float) -> None:
    """Run the cases that the record lacks, until the time is over."""
    for stage in stage_list:
        for case in stage.cases:
            if bench.results.has(stage.name, case.name):
                continue
            clock.require(case.seconds * seconds_scale + LAST_SECONDS)
            began = time.monotonic()
            record = attempt(lambda: case.run(bench), clock)  # noqa: B023 - called at once
            bench.results.add(stage.name, case.name, {**record, "seconds": round(time.monotonic() - began, 1)})
            print(f"\n== {stage.name}: {case.name} ({time.monotonic() - began:.0f} s)\n{shown(record)}", flush=True)
            if "error" in record and not answers(bench.lab.device):
                raise DeviceError


def attempt(case: Any, clock: Clock) -> dict[str, Any]:
    """The case's record; of one that fails, its error. Warnings are part of it: they say which
    kernels were left out, and why."""
    try:
        with (
            interrupted_after(clock.left - LAST_SECONDS),
            warnings.catch_warnings(record=True) as caught,
            notes() as told,
        ):
            warnings.simplefilter("always")
            record: dict[str, Any] = case()
        texts = [str(warning.message)[:300] for warning in caught if warning.category is UserWarning]
        return {**record, "warnings": list(dict.fromkeys([*texts, *told]))}
    except Exception as error:
        if isinstance(error, OutOfTime):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"error": reason, "traceback": traceback.format_exc()[-3000:]}


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


class DeviceError(Exception):
    """The device no longer answers."""


def answers(device: torch.device) -> bool:
    """Whether the device still works: after some errors it does not, until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        return float(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def shown(record: dict[str, Any]) -> str:
    """The record's table, or its error."""
    if "error" in record:
        return f"FAILED {record['error']}"
    return "\n".join([table(record["rows"]), *(f"warning: {line}" for line in record["warnings"])])


def tables(content: dict[str, Any]) -> str:
    """All tables of a record, rows of like columns together."""
    parts = []
    for name, cases in content["stages"].items():
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for case, record in cases.items():
            for row in record.get("rows", [{"case": case, "error": record.get("error")}]):
                groups.setdefault(tuple(row), []).append(row)
        parts += [f"## {name}", *(table(rows[:MOST_ROWS]) for rows in groups.values())]
    return "\n\n".join(parts)


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the options ask for."""
    base = SMALL if args.shape == "small" else FULL
    sizes: dict[str, Any] = {"rounds": args.rounds} if args.rounds else {}
    sizes |= {name: tuple(numbers(text)) for name in ("contexts", "rows") if (text := getattr(args, name))}
    return replace(base, shape=args.shape, **sizes)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(
        __doc__,
        output=(Path("out/gpu.json"), "the record"),
        stages=("", "names, separated by commas, else all"),
        minutes=(9.0, "of the whole run"),
        device=("cuda" if torch.cuda.is_available() else "cpu", "a GPU if there is one"),
        contexts=(None, "tokens, separated by commas"),
        rows=(None, "numbers of rows, separated by commas"),
        retry=(False, "measure failed cases again"),
    )
    about = "of the target (default: llama-8b on a GPU, small on a CPU)"
    made.add_argument("--shape", choices=sorted(SHAPES), help=about)
    made.add_argument("--rounds", type=int, help="of cycles, of each contestant")
    made.add_argument("--tables", type=Path, metavar="FILE.json", help="only show the tables of a record")
    args = made.parse_args(arguments)
    args.shape = args.shape or ("small" if args.device == "cpu" else "llama-8b")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    if args.tables:
        print(tables(json.loads(args.tables.read_text(encoding="utf-8"))))
        return
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("torch sees no GPU: name another --device, or try the whole of it with --device cpu")
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    plan = plan_of(args)
    stage_list = chosen(stages(plan), args.stages)
    command = " ".join(["python", "runs/gpu.py", *(sys.argv[1:] if arguments is None else arguments)])
    about = {"command": command, "machine": machine(), "plan": vars(plan), "device": str(device)}
    results = Results(args.output, about)
    if args.retry:
        results.forget_failures()
    began = time.time() if arguments is not None else psutil.Process().create_time()
    clock, bench = Clock(args.minutes, began), Bench(Lab(device, plan), results)
    try:
        measure(stage_list, bench, clock, seconds_scale=1.0 if device.type == "cuda" else 0.02)
    except OutOfTime:
        pass
    except DeviceError:
        print("the device no longer answers: going on in a new process", flush=True)
        os.execv(sys.executable, [sys.executable, *(argument for argument in sys.argv if argument != "--retry")])
    print(f"\n{tables(results.content)}\n", flush=True)
    left_over = [f"{s.name} {c.name}" for s in stage_list for c in s.cases if not results.has(s.name, c.name)]
    failed = [f"{s.name} {c.name}" for s in stage_list for c in s.cases if "error" in results.get(s.name, c.name)]
    ended = f"left: {', '.join(left_over) or 'nothing'}; failed: {', '.join(failed) or 'none'}"
    print(f"record: {args.output}; {ended}", flush=True)
    if failed:
        raise EyasError(f"{len(failed)} of the cases failed; --retry measures them again")


if __name__ == "__main__":
    run(main)
