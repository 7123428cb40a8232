"""Batches: speed-up over plain decoding in as many rows, chain against tree, and throughput
(EAGLE-1, table 7).

    python runs/batch.py --chats HELDIN.jsonl.gz --output docs/results/batch.json

The same chats are answered in 1, 2, 3, 4, 8 rows, greedily, to their end or --max-new-tokens; as a
row gets free the next chat takes it. Everything from the first prompt's pass to the last token is
timed. Contestants and batch sizes are interleaved group by group; speed-ups are paired by group, 95
%, bootstrap over groups. Published: Vicuna-7B on one RTX 3090, EAGLE with its tree.
"""

from __future__ import annotations

import time
from typing import Any

from _common import Rows, Way, chat_prompts, drafters_of, interval, machine, parser, run, tree, write
from rich.progress import track

import eyas
from eyas.core.engine import Decoder, Request
from eyas.drafters import Drafter
from eyas_lab.bench.intervals import ratio_of_ratios

METHODS: dict[str, Way] = {
    "vanilla": ("vanilla", {}),
    "eagle1 chain of 3": ("eagle1", {"tree.choices": "chain-3"}),
    "eagle1 tree of 26": ("eagle1", {"tree.choices": "reference"}),
    "eagle2 tree of 5": ("eagle2", tree(5, 3, 2)),
}
PUBLISHED = {"1": 2.90, "2": 2.87, "3": 2.65, "4": 2.76}


def answer(drafting: Drafter, requests: list[Request], rows: int) -> dict[str, Any]:
    """Answer the requests in so many rows: ids, tokens and seconds."""
    began = time.perf_counter()
    decoder = Decoder(drafting.target, drafting, rows)
    texts: dict[int, list[int]] = {decoder.add(request): [] for request in requests}
    while not decoder.finished:
        for step in decoder.step():
            texts[step.request_id] += step.tokens
    seconds = round(time.perf_counter() - began, 4)
    return {"ids": list(texts.values()), "tokens": sum(map(len, texts.values())), "seconds": seconds}


def summary(rows: Rows, sizes: list[int], groups: int) -> dict[str, Any]:
    """Speeds by method and rows, and groups whose ids are not those of plain decoding in `sizes[0]` rows."""
    table: dict[str, dict[str, Any]] = {name: {} for name in METHODS}
    unequal = 0
    for size in sizes:
        for name in METHODS:
            ours, plain = ([rows.of(group, size, way)[0] for group in range(groups)] for way in (name, "vanilla"))
            unequal += sum(a["ids"] != rows.of(n, sizes[0], "vanilla")[0]["ids"] for n, a in enumerate(ours))
            columns = [[row[key] for row in side] for side in (ours, plain) for key in ("tokens", "seconds")]
            speed = round(sum(columns[0]) / sum(columns[1]), 1)
            table[name][str(size)] = {"tokens_per_second": speed, "speedup": interval(ratio_of_ratios, *columns)}
    most = {name: max(cell["tokens_per_second"] for cell in by_size.values()) for name, by_size in table.items()}
    return {
        "table": table,
        "throughput": {name: round(value / most["vanilla"], 2) for name, value in most.items()},
        "published_speedup": PUBLISHED,
        "groups_with_other_ids_than_plain_decoding": unequal,
    }


def main() -> None:
    args = parser(__doc__, chats=True, groups=4, group=8, max_new_tokens=64, rows=[1, 2, 3, 4, 8]).parse_args()
    before, llm = machine(), eyas.load(method="vanilla")
    prompts = chat_prompts(args.chats, step=max(1, 300 // (args.groups * args.group)))
    requests = [llm.request(list(p.messages), max_new_tokens=args.max_new_tokens)[0] for p in prompts]
    drafters = drafters_of(llm.target, METHODS)
    settings = {"rows": args.rows, "group": args.group, "max_new_tokens": args.max_new_tokens, "methods": list(METHODS)}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    answer(llm.drafter, requests[:2], 2)  # a warm-up
    for group in track(range(args.groups), "groups"):
        chosen = requests[group * args.group : (group + 1) * args.group]
        for size in args.rows:
            for name, drafting in drafters.items():
                if (group, size, name) not in rows:
                    rows.add((group, size, name), answer(drafting, chosen, size))
    write(args.output, {"settings": settings, **summary(rows, args.rows, args.groups)}, before)


if __name__ == "__main__":
    run(main)
