"""Count how many logits and answers of other passes have the bits of plain decoding: by instruction set, format of weights
and activations, and kind of pass.

    python runs/exact_bits.py --output docs/results/exact_bits.json                  all instruction sets of this machine
    python runs/exact_bits.py --isas native --effort 0.1 --output out/bits.json      fewer cases

The comparisons are those of tests/exact.py, which says what plain decoding and the kinds of passes are. Each model has
random weights and nearly tied tokens; the embedded model comes with them. The kernels are compiled for each instruction
set as EYAS_KERNELS_ISA does; "VNNI emulated" replaces AVX-VNNI's one instruction by what it computes, which is slow, so
the embedded model is left out there. The record is written after each instruction set.
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import machine, parser, run, words, write

import eyas
from eyas.core.target import Target
from eyas.errors import InputError, near
from eyas.formats import WeightFormat
from eyas.kernels import _build

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import exact
from exact import MODELS, MODES, PASSES, Counts, Referee, by_kernels

EMULATED = "x86-64-v3, VNNI emulated"
EMBEDDED, IDS = "embedded", "answers"


def compile_for(isa: str) -> None:
    """Let the kernels be compiled for this instruction set from now on."""
    os.environ["EYAS_KERNELS_ISA"] = isa.partition(",")[0]
    flags = tuple(flag for flag in _build.FLAGS if not flag.startswith("-D"))
    _build.FLAGS = (*flags, "-DEYAS_EMULATE_AVX_VNNI") if isa == EMULATED else flags  # type: ignore[assignment]
    _build.outcome.cache_clear()
    _build.library()


def target_of(name: str) -> Target:
    """Return one of tests/exact.py's models, or the embedded one."""
    if name == EMBEDDED:
        return eyas.load("embedded", method="vanilla", kernels="off", dtype="float32").target
    return exact.model(name)


def counts_of(target: Target, mode: WeightFormat, threads: int, effort: float, answers: bool) -> dict[str, Counts]:
    """Compare every kind of pass of one target, and answers if they are asked for."""
    plain, other = by_kernels(target, mode), by_kernels(target, mode, threads)
    referee = Referee(plain)
    found = {
        name: exact.compare(referee, passes(other, random.Random(threads), effort)) for name, passes in PASSES.items()
    }
    if answers:
        found[IDS] = exact.compare_ids(plain, other, effort)
    return found


def main() -> None:
    sets = [*_build.runnable_isas(), *([EMULATED] if "x86-64-v3" in _build.runnable_isas() else [])]
    args = parser(
        __doc__,
        effort=(0.3, "share of the cases that are tried, at random"),
        isas=("", "instruction sets, separated by semicolons; default: all that this machine has"),
        models=(",".join((*MODELS, EMBEDDED)), "separated by commas"),
    ).parse_args()
    chosen = [isa.strip() for isa in args.isas.split(";") if isa.strip()] or sets
    for name, known in (
        *((isa, sets) for isa in chosen),
        *((name, [*MODELS, EMBEDDED]) for name in words(args.models)),
    ):
        if name not in known:
            raise InputError(f"unknown name {name!r}; {near(name, known)}")
    before = machine()
    targets = {name: target_of(name) for name in words(args.models)}
    rows = list[dict[str, Any]]()
    for isa in chosen:
        rows += rows_of(
            isa, {name: made for name, made in targets.items() if (isa, name) != (EMULATED, EMBEDDED)}, args.effort
        )
        sums = {
            "logits": sum_of(row for row in rows if row["pass"] != IDS),
            IDS: sum_of(row for row in rows if row["pass"] == IDS),
        }
        write(
            args.output, {"effort": args.effort, "models": [*targets], "sums": sums, "rows": rows}, before, quiet=True
        )
    print(sums)


def rows_of(isa: str, targets: Mapping[str, Target], effort: float) -> list[dict[str, Any]]:
    """Return a row for each mode and kind of pass, all models together; threads are 1 and 2 by turns."""
    compile_for(isa)
    rows = list[dict[str, Any]]()
    for turn, mode in enumerate(mode for mode in MODES if exact.runnable(mode)):
        totals: dict[str, Counts] = defaultdict(Counts)
        for number, (name, target) in enumerate(targets.items()):
            found = counts_of(target, mode, (turn + number) % 2 + 1, effort, answers=name in MODELS)
            for kind, counts in found.items():
                totals[kind] += counts
            print(isa, mode, name, sum(found.values(), Counts()), file=sys.stderr, flush=True)
        formats = {"instruction set": isa, "weights": mode.weights, "activations": mode.activations}
        rows += [{**formats, "pass": kind, **asdict(counts)} for kind, counts in totals.items()]
    return rows


def sum_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many things were compared, and how many differ, in all rows."""
    counts = [(row["compared"], row["different"]) for row in rows]
    return {"compared": sum(compared for compared, _ in counts), "different": sum(different for _, different in counts)}


if __name__ == "__main__":
    run(main)
