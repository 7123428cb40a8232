"""The heads of other methods for the embedded target, which a bench compares with EAGLE's: trained one after another, into OUTPUT/STAGE.

    python runs/bench_heads.py --data CHAT.jsonl.gz                                       everything (hours on two cores)
    python runs/bench_heads.py --data CHAT.jsonl.gz --stages small_model --tokens 20000   one of them, a minute
    eyas bench --draft small_model=out/heads/small_model ...                              what it is for

A stage is one `eyas train`; started again, it goes on where it was interrupted, and a stage that is done is left alone. Options that are
not known here are handed to every stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

COMMON = ["--max-length", "512", "--batch-tokens", "4096", "--heldout", "0.005", "--heldout-tokens", "20000", "--save-every", "50"]
# Stage -> what its `eyas train` is given more; "--tokens" is the budget that --tokens of this command replaces.
STAGES: dict[str, list[str]] = {
    # The role of Vicuna-68M beside Vicuna-7B: 1.8M parameters, of which 1.0M are the table of tokens, beside 28.3M.
    "small_model": ["--method", "small_model", "--tokens", "6000000", "--lr", "3e-3", "--warmup-steps", "10", "--eval-every", "200"],
}


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, action="append", metavar="FILE", help="chats, as for eyas train; several may be given")
    parser.add_argument("--output", type=Path, default=Path("out/heads"), metavar="FOLDER", help="default: out/heads")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="A,B", help=f"default: all of {', '.join(STAGES)}")
    parser.add_argument("--tokens", metavar="N", help="training tokens of every stage, instead of each one's own")
    return parser.parse_known_args(arguments)


def command(stage: str, args: argparse.Namespace, more: list[str]) -> list[str]:
    """The `eyas train` of a stage."""
    own = list(STAGES[stage])
    if args.tokens:
        own[own.index("--tokens") + 1] = args.tokens
    data = [part for file in args.data for part in ("--data", file)]
    return [sys.executable, "-m", "eyas", "train", *data, "--output", str(args.output / stage), *COMMON, *own, *more]


def done(folder: Path, tokens: str) -> bool:
    """Whether a training with that budget has ended there."""
    path = folder / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {"step": 0, "steps": 1, "config": {}}
    return record["step"] >= record["steps"] and str(record["config"].get("tokens")) == tokens


def main(arguments: list[str] | None = None) -> None:
    args, more = parse(arguments)
    chosen = args.stages.split(",")
    unknown = [stage for stage in chosen if stage not in STAGES]
    if unknown:
        raise SystemExit(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    for stage in chosen:
        line = command(stage, args, more)
        if done(args.output / stage, line[line.index("--tokens") + 1]):
            print(f"{stage}: done already, in {args.output / stage}")
            continue
        print(f"{stage}: {' '.join(line)}", flush=True)
        status = subprocess.run(line).returncode
        if status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
