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
import sys
from pathlib import Path

from _common import run
from _heads import call, is_done

from eyas.errors import OptionError, near

COMMON = ["--batch-tokens", "4096", "--heldout-tokens", "20000", "--save-every", "50"]
LENGTHS = ["--max-length", "512", "--heldout", "0.005"]  # features bring theirs
HEAD = ["--tokens", "2000000", "--eval-every", "150"]
# Medusa's and Hydra's heads learn the target's distribution, as EAGLE's do, so that a comparison is
# one of heads and not of losses.
HEADS = [*HEAD, "--lr", "1e-3", "--objective", "distribution"]
ABLATION = ["--method", "eagle1", *HEAD, "--lr", "2e-3"]
# Stage -> its own options of `eyas train`; "--tokens" is the budget that --tokens of this command
# replaces.
STAGES: dict[str, list[str]] = {
    # The role of Vicuna-68M beside Vicuna-7B: 1.8M parameters, 1.0M of them the table of tokens,
    # beside 28.3M.
    "small_model": [
        "--method",
        "small_model",
        "--tokens",
        "6000000",
        "--lr",
        "3e-3",
        "--warmup-steps",
        "10",
        "--eval-every",
        "200",
    ],
    "medusa": ["--method", "medusa", *HEADS],
    "hydra": ["--method", "hydra", *HEADS],
    "hydra++": ["--method", "hydra", *HEADS, "--head.arch", "prefix-mlp", "--head.blocks", "4"],
    # EAGLE-1's ablation of inputs: four nets, as many tokens each.
    **{
        f"eagle1-{inputs}": [*ABLATION, "--head.inputs", inputs]
        for inputs in ("shifted", "unshifted", "feature", "token")
    },
}


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(this command's options, those of every stage)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", action="append", metavar="FILE", help="chats, as for eyas train; several may be given"
    )
    source.add_argument("--features", metavar="FOLDER", help="written by eyas features, instead of --data")
    parser.add_argument("--output", type=Path, default=Path("out/heads"), metavar="FOLDER", help="default: out/heads")
    parser.add_argument(
        "--stages", default=",".join(STAGES), metavar="A,B", help=f"default: all of {', '.join(STAGES)}"
    )
    parser.add_argument("--tokens", metavar="N", help="training tokens of every stage, instead of each one's own")
    args, more = parser.parse_known_args(arguments)
    args.stages = [stage.strip() for stage in args.stages.split(",")]
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        raise OptionError(f"unknown stage {unknown[0]!r}; {near(unknown[0], STAGES)}")
    return args, more


def command(stage: str, args: argparse.Namespace, more: list[str]) -> list[str]:
    """The `eyas train` of a stage."""
    options = list(STAGES[stage])
    if args.tokens:
        options[options.index("--tokens") + 1] = args.tokens
    data = (
        ["--features", args.features]
        if args.features
        else [*(part for file in args.data for part in ("--data", file)), *LENGTHS]
    )
    return [
        sys.executable,
        "-m",
        "eyas",
        "train",
        *data,
        "--output",
        str(args.output / stage),
        *COMMON,
        *options,
        *more,
    ]


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
