"""The heads of other methods for the embedded target, which a bench compares with EAGLE's: trained
one after another, into OUTPUT/STAGE.

    python runs/bench_heads.py --data CHAT.jsonl.gz                                       everything (hours on two cores)
    python runs/bench_heads.py --features FEATURES                                        the same, from what `eyas features` wrote
    python runs/bench_heads.py --data CHAT.jsonl.gz --stages small_model --tokens 100000  one of them, minutes
    eyas bench --draft small_model=out/heads/small_model ...                              its use

Started again it goes on: a stage that is done is left alone. Options that are not known here are
handed to every stage's `eyas train`. All stages read the target's final features, nothing else:
`eyas features --method medusa`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _common import parser, run, words

from eyas.errors import OptionError, near

COMMON = "--batch-tokens 4096 --heldout-tokens 20000 --save-every 50"
LENGTHS = "--max-length 512 --heldout 0.005"  # features bring theirs
HEAD = "--tokens 2000000 --eval-every 150"
# Medusa's and Hydra's heads learn the target's distribution, as EAGLE's do, so that a comparison is
# one of heads and not of losses.
HEADS = f"{HEAD} --lr 1e-3 --objective distribution"
# Stage -> its own options of `eyas train`; "--tokens" is the budget that --tokens of this command replaces.
STAGES = {
    # The role of Vicuna-68M beside Vicuna-7B: 1.8M parameters, 1.0M of them the table of tokens,
    # beside 28.3M.
    "small_model": "--method small_model --tokens 6000000 --lr 3e-3 --warmup-steps 10 --eval-every 200",
    "medusa": f"--method medusa {HEADS}",
    "hydra": f"--method hydra {HEADS}",
    "hydra++": f"--method hydra {HEADS} --head.arch prefix-mlp --head.blocks 4",
    # EAGLE-1's ablation of inputs: four nets, as many tokens each.
    **{
        f"eagle1-{inputs}": f"--method eagle1 {HEAD} --lr 2e-3 --head.inputs {inputs}"
        for inputs in ("shifted", "unshifted", "feature", "token")
    },
}


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(this command's options, those of every stage)."""
    made = parser(
        __doc__,
        output=(Path("out/heads"), "the heads' folders"),
        stages=(",".join(STAGES), "some of them"),
        tokens=(None, "training tokens of every stage, instead of each one's own"),
    )
    source = made.add_mutually_exclusive_group(required=True)
    about = "chats, as for eyas train; several may be given"
    source.add_argument("--data", action="append", metavar="FILE", help=about)
    source.add_argument("--features", metavar="FOLDER", help="written by eyas features, instead of --data")
    args, more = made.parse_known_args(arguments)
    args.stages = words(args.stages)
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        raise OptionError(f"unknown stage {unknown[0]!r}; {near(unknown[0], STAGES)}")
    return args, more


def command(stage: str, args: argparse.Namespace, more: list[str]) -> list[str]:
    """The `eyas train` of a stage."""
    options = STAGES[stage].split()
    if args.tokens:
        options[options.index("--tokens") + 1] = args.tokens
    data = ["--features", args.features] if args.features else LENGTHS.split()
    data += [part for file in args.data or () for part in ("--data", file)]
    line = [sys.executable, "-m", "eyas", "train", *data, "--output", str(args.output / stage)]
    return [*line, *COMMON.split(), *options, *more]


def is_done(folder: Path, tokens: str) -> bool:
    """Whether a training with that budget has ended in the folder."""
    path = folder / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {"step": 0, "steps": 1, "config": {}}
    return record["step"] >= record["steps"] and str(record["config"].get("tokens")) == tokens


def call(line: Sequence[str]) -> int:
    """The exit status of a command. Ctrl-C is for the command alone: it saves where it is."""
    with subprocess.Popen(line) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def main(arguments: list[str] | None = None) -> None:
    args, more = parse(arguments)
    for stage in args.stages:
        line = command(stage, args, more)
        if is_done(args.output / stage, line[line.index("--tokens") + 1]):
            print(f"{stage}: done already, in {args.output / stage}")
            continue
        print(f"{stage}: {' '.join(line)}", flush=True)
        if status := call(line):
            raise SystemExit(status)


if __name__ == "__main__":
    run(main)
