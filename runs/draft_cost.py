"""Measure the cost of drafting against context: the draft's own time and memory beyond the target's
context.

    python runs/draft_cost.py --draft HEAD --rounds 8 --output docs/results/draft_cost.json

Sessions of the real head are fed random features and tokens, as many as the context has; then
cycles of `draft` and `commit` are timed, of which every one accepts nothing (the time does not
depend on it: the pass over what was accepted is padded). No target is needed. Bytes are those of
the session's cache and of its pending features. "prompt" is the time to read the context, "first"
that of the first cycle.

Times are the wall's and the processor's: other programs on the machine lengthen the former more.
Medians with quartiles. Sessions of all contexts run side by side, cycle by cycle; the ratio of a
round's cycles to those at --base is paired by round, 95 %, bootstrap over rounds.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Rows, Way, eagle3_drafters, interval, machine, parser, quantiles, run, write
from rich.progress import track

import eyas
from eyas.core.drafter import CycleInput
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import Drafter
from eyas_lab.bench.intervals import ratio

CHUNK = 512  # tokens that a session is fed at a time, as the target's prefill does
METHODS: dict[str, Way] = {
    "eagle3": ("eagle3", {}),
    "seagle": ("seagle", {}),
    "seagle crop none": ("seagle", {"window.crop": "none"}),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Timer:
    """Milliseconds by the wall's clock and the processor's."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {name: [] for name in CLOCKS}

    def __enter__(self) -> None:
        self._began = {name: clock() for name, clock in CLOCKS.items()}

    def __exit__(self, *error: object) -> None:
        for name, clock in CLOCKS.items():
            self.ms[name].append(round(1e3 * (clock() - self._began[name]), 3))


def nothing_accepted(draft: Draft) -> Verdict:
    """A verdict that accepts the root alone."""
    path_BP = torch.full((1, draft.tree.max_depth + 1), -1)
    path_BP[:, 0] = 0
    tokens_BP = torch.zeros_like(path_BP)
    tokens_BP[:, 0] = draft.tokens_BN[:, 0]
    return Verdict(path_BP, tokens_BP, torch.ones(1, dtype=torch.long), draft.tokens_BN[:, 0])


class Session:
    """A drafter's session behind so many random tokens, and the time of its cycles."""

    @torch.inference_mode()
    def __init__(self, drafting: Drafter, context: int, seed: int) -> None:
        generator, target = torch.Generator().manual_seed(seed), drafting.target
        width = len(drafting.feature_layers) * target.hidden_size
        self.features_TF = torch.randn(CHUNK, width, generator=generator).to(target.dtype)
        self.tokens_T = torch.randint(target.vocab_size, (CHUNK,), generator=generator)
        self.session, self.position = drafting.open(1), context
        self.prompt, self.cycles = Timer(), Timer()
        with self.prompt:
            self.session.begin(0, 0, context)
            for start in range(0, context, CHUNK):
                part = slice(0, min(CHUNK, context - start))
                self.session.prefill(0, self.tokens_T[part], self.features_TF[part], start)

    @torch.inference_mode()
    def cycle(self) -> None:
        """One cycle, timed."""
        token_B, sampling = self.tokens_T[self.position % CHUNK][None], (Sampling(),)
        active_B, position_B = torch.ones(1, dtype=torch.bool), torch.full((1,), self.position)
        noise = GumbelNoise.from_sampling(sampling, token_B.device)
        cycle_input = CycleInput(token_B, position_B, active_B, sampling, noise, self.position)
        with self.cycles:
            draft = self.session.draft(cycle_input)
            # the draft reads features only
            output = TargetOutput(self.features_TF[:0], self.features_TF[None, : draft.tree.nodes])
            self.session.commit(draft, nothing_accepted(draft), output)
        self.position += 1

    def row(self) -> dict[str, Any]:
        """The first cycle stands first."""
        session: Any = self.session
        pending = [value for name, value in vars(session).items() if name.startswith("pending")]
        return {
            "prompt": self.prompt.ms,
            "cycles": self.cycles.ms,
            "cache_bytes": sum(store.numel() * store.itemsize for store in session.cache._stores.values()),
            "pending_bytes": sum(tensor.numel() * tensor.itemsize for tensor in pending),
        }


def measure(drafters: dict[str, Drafter], contexts: list[int], count: int, seed: int) -> dict[str, Any]:
    """All sessions side by side: one cycle of each, in an order that is drawn anew every time, then
    the next."""
    order, shuffle = [(name, context) for name in drafters for context in contexts], random.Random(seed)
    sessions = {key: Session(drafters[key[0]], key[1], seed) for key in order}
    for _ in range(count + 1):
        shuffle.shuffle(order)
        for key in order:
            sessions[key].cycle()
    return {name: {str(context): sessions[name, context].row() for context in contexts} for name in drafters}


def summary(rows: list[dict[str, Any]], contexts: list[int], base: int) -> dict[str, Any]:
    """Milliseconds and bytes by context, and the ratio of a cycle's time to that at `base`."""
    out: dict[str, Any] = {}
    for name in METHODS:
        measured = {context: [row[name][str(context)] for row in rows] for context in contexts}
        out[name] = {key: [measured[c][-1][key] for c in contexts] for key in ("cache_bytes", "pending_bytes")}
        for clock in CLOCKS:
            cycles = {c: [row["cycles"][clock] for row in measured[c]] for c in contexts}  # the first stands first
            medians = {c: [float(np.median(ms[1:])) for ms in cycles[c]] for c in contexts}
            prompts = [[row["prompt"][clock][0] for row in measured[c]] for c in contexts]
            out[name] |= {
                f"cycle_{clock}_ms": [quantiles([x for ms in cycles[c] for x in ms[1:]]) for c in contexts],
                f"first_{clock}_ms": [quantiles([ms[0] for ms in cycles[c]]) for c in contexts],
                f"prompt_{clock}_ms": [quantiles(ms) for ms in prompts],
                f"cycle_{clock}_ratio": [interval(ratio, medians[c], medians[base]) for c in contexts],
            }
    return out


def main() -> None:
    shape = {"base": 2048, "rounds": 7, "cycles": 20, "nodes": 16, "depth": 5, "branch": 4, "trained": 0, "seed": 0}
    contexts = [2**n for n in range(10, 16)]
    made = parser(__doc__, draft=None, target=None, **shape, contexts=contexts)
    args = made.parse_args()
    if args.base not in args.contexts:
        made.error(f"--base {args.base} is none of --contexts")
    before = machine()
    drafters = eagle3_drafters(eyas.load(args.target, method="vanilla").target, METHODS, args)
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "rounds", "draft")}
    settings |= {"head": Path(args.draft or "embedded").name, "threads": torch.get_num_threads()}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    keys = [("draft", turn) for turn in range(args.rounds)]
    if any(key not in rows for key in keys):
        measure(drafters, [CHUNK], 3, args.seed)  # warm-up
    for key in track(keys, "rounds"):
        if key not in rows:
            rows.add(key, measure(drafters, args.contexts, args.cycles, args.seed + key[1]))
    draft = summary([row for row in rows.of("draft") if tuple(row["key"]) in keys], args.contexts, args.base)
    write(args.output, {"settings": settings, "rounds": args.rounds, "draft": draft}, before)


if __name__ == "__main__":
    run(main)
