"""What a datastore costs: to sort, to open, to look up, and on the disk.

    python runs/datastore_cost.py --data FILE ... --tokenizer MODEL --output docs/results/datastore_cost.json

The files' first `--real` tokens are cut into passages of 64 to 512 tokens, which are drawn at random, again and again, until there are
`--tokens` of them: long repetitions are the hardest for sorting, and matches with many continuations for looking up. Look-ups are those
that the method rest makes, match and trie: at places of the text itself, with its last two tokens replaced in half of them, so that short
matches are among them. Medians and 99th percentiles, by the wall's clock and the processor's: other programs on the machine lengthen the
former more. The first look-ups, which touch pages for the first time, are told apart.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _command import command, machine, run
from tokenizers import Tokenizer

from eyas.datastore import Datastore, Settings, Source, build
from eyas.drafters.rest import Retrieval, trie

WARM = 200  # look-ups that are told apart


def real_tokens(files: list[Path], words: Tokenizer, count: int) -> list[int]:
    """The first tokens of the files, paragraph by paragraph: whole books take the tokenizer much longer."""
    found: list[int] = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            for paragraph in stream.read().split("\n\n"):
                found += words.encode(paragraph + "\n\n", add_special_tokens=False).ids
                if len(found) >= count:
                    return found[:count]
    return found


def passages(real: list[int], total: int, seed: int) -> Iterator[list[int]]:
    dice, left = np.random.default_rng(seed), total
    while left > 0:
        size, at = int(dice.integers(64, 513)), int(dice.integers(0, len(real) - 512))
        yield real[at : at + min(size, left)]
        left -= size


def contexts(real: list[int], count: int, seed: int) -> list[list[int]]:
    """Texts of 16 tokens; every second one goes on with two tokens from elsewhere, so that its longest match is short."""
    dice, found = np.random.default_rng(seed), []
    for i in range(count):
        at, other = dice.integers(0, len(real) - 16, 2).tolist()
        text = real[at : at + 16]
        found.append(text if i % 2 else [*text[:14], *real[other : other + 2]])
    return found


def figures(seconds: list[tuple[float, float]]) -> dict[str, list[float]]:
    """[median, 99th percentile] in microseconds, of the wall's clock and of the processor's."""
    found = np.percentile(np.array(seconds) * 1e6, [50, 99], axis=0).round(1)
    return {"wall_us": found[:, 0].tolist(), "processor_us": found[:, 1].tolist()}


def look_ups(store: Datastore, texts: list[list[int]], options: Retrieval) -> dict[str, object]:
    """Seconds of every look-up with its trie, and what they found."""
    taken, lengths, counts, nodes = [], [], [], []
    for text in texts:
        began, busy = time.perf_counter(), time.thread_time()
        found = store.look_up(text, options.shortest, options.longest, options.depth, options.samples)
        guesses = [] if found is None else trie(found.following_SD, store.separator, options.nodes - 1)
        taken.append((time.perf_counter() - began, time.thread_time() - busy))
        lengths.append(0 if found is None else found.length)
        counts.append(0 if found is None else found.count)
        nodes.append(len(guesses))
    short = [t for t, length in zip(taken[WARM:], lengths[WARM:], strict=True) if length < 5]
    return {
        "first": figures(taken[:WARM]), "then": figures(taken[WARM:]), "matches_below_5_tokens": figures(short),
        "mean_match_tokens": round(float(np.mean(lengths)), 2), "found": round(float(np.mean(np.array(lengths) > 0)), 3),
        "median_matches": float(np.median(counts)), "most_matches": int(max(counts)), "mean_nodes": round(float(np.mean(nodes)), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="texts, .gz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer.json")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--real", type=int, default=1_000_000)
    parser.add_argument("--look-ups", type=int, default=4000)
    given = parser.parse_args()
    words = Tokenizer.from_file(str(given.tokenizer / "tokenizer.json"))
    real = real_tokens(given.data, words, given.real)
    options, rows = Retrieval(), {}
    for name, parts in (("one segment", 1), ("four segments", 4)):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            settings = Settings({}, given.tokenizer.name, words.get_vocab_size())
            began, busy = time.perf_counter(), time.process_time()
            for part in range(parts):
                size = given.tokens // parts
                source = Source(f"part {part}", str(part), lambda part=part, size=size: passages(real, size, part))
                manifest = build(store, settings, [source], {}, append=part > 0)
            built, used = time.perf_counter() - began, time.process_time() - busy
            began = time.perf_counter()
            opened = Datastore.open(store)
            rows[name] = {
                "tokens": manifest.tokens, "build_seconds": round(built, 1), "build_cpu_seconds": round(used, 1),
                "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "disk_bytes_per_token": round(manifest.bytes / manifest.tokens, 2),
                "open_ms": round((time.perf_counter() - began) * 1e3, 2),
                **look_ups(opened, contexts(real, given.look_ups, 7), options),
            }  # fmt: skip
            print(name, json.dumps(rows[name], indent=1))
    about = {"command": command("datastore_cost.py"), "machine": machine(), "real_tokens": len(real), "vocabulary": words.get_vocab_size()}
    given.output.write_text(json.dumps({**about, "rest": vars(options), "stores": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
