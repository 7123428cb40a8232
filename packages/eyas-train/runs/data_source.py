"""Is it worth while to let the target answer the training data itself? Fixed data against
regenerated data (EAGLE-1, table 6).

    eyas regenerate --data chat.jsonl.gz --output out/own.jsonl
    python packages/eyas-train/runs/data_source.py --data chat.jsonl.gz out/own.jsonl --chats HELDIN.jsonl.gz    (work in out/data_source)

--data: first the fixed answers, then the regenerated ones. Conversations are paired by what the
user says; one that ends early cuts its partner to as many turns. So both heads see the same
prompts, and both read --tokens tokens at the same learning rate. Where one source's answers are
shorter, its data are passed over more often.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _heads

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import add_option, open_text, run
from _heads import Head

from eyas.errors import EyasError, InputError
from eyas.files import write_text
from eyas_train._chat import messages_to_learn

SOURCES = ("fixed", "regenerated")
Turns = list[dict[str, Any]]


def conversations(path: Path) -> Iterator[Turns]:
    """The usable conversations of a file, up to their last reply."""
    with open_text(path) as lines:
        for line in lines:
            try:
                yield messages_to_learn(json.loads(line))
            except (InputError, json.JSONDecodeError):
                continue


def prompts(turns: Turns) -> list[tuple[int, str]]:
    """After each reply: (number of turns so far, hash of what others than the assistant have said)."""
    digest, out = hashlib.sha256(), []
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            out.append((i + 1, digest.hexdigest()))
        else:
            digest.update(f"{turn['role']}\0{turn['content']}\1".encode())
    return out


def pairs(fixed: Path, regenerated: Path) -> list[tuple[Turns, Turns]]:
    """Conversations of the same prompts, in an order that the prompts alone decide."""
    partners = {prompts(turns)[-1][1]: turns for turns in conversations(regenerated)}
    paired: dict[str, tuple[Turns, Turns]] = {}
    for turns in conversations(fixed):
        for end, key in reversed(prompts(turns)):
            if key in partners and key not in paired:
                paired[key] = turns[:end], partners[key]
                break
    return [paired[key] for key in sorted(paired)]


def main(arguments: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "data_source", tokens=400_000, seeds=2)
    add_option(parser, "--method", "eagle2", "eagle2 (EAGLE-1's net) or eagle3")
    add_option(parser, "--lr", 2e-3)
    args = parser.parse_args(arguments)
    if len(args.data) != len(SOURCES):
        parser.error("--data takes two files: the fixed answers and the regenerated ones")
    paired = pairs(*map(Path, args.data))
    if not paired:
        raise EyasError(f"{args.data[0]} and {args.data[1]} have no conversations with the same prompts")
    files = {source: args.work / f"{source}.jsonl" for source in SOURCES}
    args.work.mkdir(parents=True, exist_ok=True)
    for side, path in enumerate(files.values()):
        write_text(path, "".join(json.dumps({"messages": pair[side]}) + "\n" for pair in paired))
    flags = _heads.eagle3_flags(args) if args.method == "eagle3" else ()
    heads = [
        Head(source, args.method, flags, (str(path),), args.tokens, args.lr, seed)
        for seed in range(args.seeds)
        for source, path in files.items()
    ]
    shapes = _heads.shapes_of(args, "chain", "tree", "fast tree")
    _heads.compare(
        heads, shapes, [SOURCES], args, method=args.method, lr=args.lr, conversations=len(paired), tree=args.tree
    )


if __name__ == "__main__":
    run(main)
