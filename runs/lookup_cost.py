"""What suffix and prompt_lookup cost on the host: microseconds for a token that is read, and for a cycle's proposal.

    python runs/lookup_cost.py --book BOOK.txt.gz --output docs/results/lookup_cost.json

A book is read token by token, as a text that was said; at each length the next 500 proposals are timed, each at the text's own end. Medians
and 99th percentiles of the processor's time, which other programs lengthen less than the wall's. No target is needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from _command import command, machine, run
from _common import read_book

from eyas import tiny
from eyas.drafters._ngram import Index
from eyas.drafters.prompt_lookup import Lookup, NgramIndex
from eyas.drafters.suffix import SuffixAutomaton, SuffixTree
from eyas.errors import InputError

LENGTHS = (1_000, 4_000, 16_000, 64_000)
PROPOSALS = 500


def microseconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - began)


def _keep(guesses: list[object], index: Index) -> None:
    guesses += index.guesses()


def told(values: list[float]) -> list[float]:
    """[median, 99th percentile]."""
    return [round(float(x), 1) for x in np.percentile(values, [50, 99])]


def costs(index: Index, tokens: list[int]) -> list[dict[str, object]]:
    found, read = [], 0
    for length in LENGTHS:
        while read < length:
            index.append(tokens[read])
            read += 1
        reading, proposing, proposed = [], [], []
        for _ in range(PROPOSALS):
            reading.append(microseconds(partial(index.append, tokens[read])))
            read += 1
            guesses: list[object] = []
            proposing.append(microseconds(partial(_keep, guesses, index)))
            proposed.append(len(guesses))
        row = {"tokens": length, "read_us": told(reading), "propose_us": told(proposing), "proposed": round(float(np.mean(proposed)), 1)}
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path, required=True, help=".txt.gz")
    parser.add_argument("--output", type=Path, default=Path("docs/results/lookup_cost.json"))
    args = parser.parse_args()
    before, words = machine(), tiny.tokenizer()
    tokens = words(read_book(args.book), add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < LENGTHS[-1] + PROPOSALS:
        raise InputError(f"{args.book} has {len(tokens)} tokens, fewer than the {LENGTHS[-1] + PROPOSALS} that are read")
    indices = {"suffix": SuffixAutomaton(SuffixTree()), "prompt_lookup": NgramIndex(Lookup())}
    result = {"command": command("lookup_cost.py"), "machine": before, **{name: costs(index, tokens) for name, index in indices.items()}}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
