"""Batches: speed-up over plain decoding in as many rows, chain against tree, and throughput (EAGLE-1, table 7).

    python runs/batch.py --chats HELDIN.jsonl.gz --output docs/results/batch.json

The same chats are answered in 1, 2, 3, 4, 8 rows, greedily, to their end or --max-new-tokens; as a row gets free the next chat takes it.
What is timed is everything from the first prompt's pass to the last token. Contestants and batch sizes are interleaved group by group;
speed-ups are paired by group, with 95 % intervals (bootstrap over groups). Published: Vicuna-7B on one RTX 3090, EAGLE with its tree. A CPU
has no idle compute that a batch could use, so what a GPU shows at large batches shows here at small ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

from _common import Rows, command, interval, machine, over_over, run
from rich.progress import track

import eyas
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.drafters import Drafter, find

METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "vanilla": ("vanilla", {}),
    "eagle1 chain of 3": ("eagle1", {"tree.choices": "chain-3"}),
    "eagle1 tree of 26": ("eagle1", {"tree.choices": "reference"}),
    "eagle2 tree of 5": ("eagle2", {"tree.nodes": 5, "tree.depth": 3, "tree.branch": 2}),
}
PUBLISHED = {"1": 2.90, "2": 2.87, "3": 2.65, "4": 2.76}


def drafter_of(llm: eyas.LLM, method: str, options: dict[str, object]) -> Drafter:
    kind, head = find(method), llm.drafter
    chosen = build_options(kind.Options, options)
    return kind(llm.target, chosen, head.net, head.shape, head.embed_tokens) if kind.needs_weights else kind(llm.target, chosen)


def answer(llm: eyas.LLM, drafter: Drafter, prompts: list[tuple[int, ...]], rows: int, new: int) -> tuple[list[list[int]], int, float]:
    """(new ids of each prompt, cycles of the loop, seconds)."""
    began = time.perf_counter()
    decoder = Decoder(llm.target, drafter, rows)
    tickets = [decoder.add(Request(prompt, new, Sampling(), llm.eos)) for prompt in prompts]
    said: dict[int, list[int]] = {ticket: [] for ticket in tickets}
    cycles = 0
    while not decoder.finished:
        cycles += 1
        for step in decoder.step():
            said[step.request] += step.tokens
    return [said[ticket] for ticket in tickets], cycles, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("docs/results/batch.json"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="chats of a group")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    before, llm = machine(), eyas.load()
    with gzip.open(args.chats, "rt") as file:
        chats = [json.loads(line)["conversations"] for line in file][:: max(1, 300 // (args.groups * args.group))]
    prompts = [llm.ids(messages[: max(i for i, m in enumerate(messages) if m["role"] == "user") + 1]) for messages in chats]
    drafters = {name: drafter_of(llm, *how) for name, how in METHODS.items()}
    settings = {"rows": args.rows, "group": args.group, "max_new_tokens": args.max_new_tokens, "methods": list(METHODS)}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    answer(llm, llm.drafter, prompts[:2], 2, 8)  # a warm-up
    for group in track(range(args.groups), description="groups"):
        mine = prompts[group * args.group : (group + 1) * args.group]
        for size in args.rows:
            for name, drafter in drafters.items():
                if [group, size, name] not in rows:
                    said, cycles, seconds = answer(llm, drafter, mine, size, args.max_new_tokens)
                    rows.add(
                        [group, size, name], {"tokens": sum(map(len, said)), "cycles": cycles, "seconds": round(seconds, 4), "ids": said}
                    )
    table: dict[str, dict[str, object]] = {name: {} for name in METHODS}
    unequal = 0
    for size in args.rows:
        plain = [rows.of(group, size, "vanilla")[0] for group in range(args.groups)]
        for name in METHODS:
            found = [rows.of(group, size, name)[0] for group in range(args.groups)]
            unequal += sum(a["ids"] != rows.of(g, args.rows[0], "vanilla")[0]["ids"] for g, a in enumerate(found))
            columns = [[r[key] for r in side] for side in (found, plain) for key in ("tokens", "seconds")]
            table[name][str(size)] = {
                "tokens_per_second": round(sum(columns[0]) / sum(columns[1]), 1), "speedup": interval(over_over, columns),
            }  # fmt: skip
    most = {name: max(float(cell["tokens_per_second"]) for cell in by_size.values()) for name, by_size in table.items()}  # type: ignore[index]
    result = {
        "command": command("batch.py"), "machine": before, "load_after": machine()["load_1min"], "settings": settings, "table": table,
        "throughput": {name: round(value / most["vanilla"], 2) for name, value in most.items()}, "published_speedup": PUBLISHED,
        "groups_with_other_ids_than_plain_decoding": unequal,
    }  # fmt: skip
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: {size: cell["speedup"] for size, cell in by_size.items()} for name, by_size in table.items()}))


if __name__ == "__main__":
    run(main)
