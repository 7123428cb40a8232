"""What drafting costs against context: tokens per second with the target, and the draft's own time and memory beyond the target's context.

    python runs/draft_cost.py --draft HEAD --books BOOK.txt.gz ... --output docs/results/draft_cost.json

Two parts, each interleaved so that drift of the machine hits all alike; interrupted runs go on where they stopped.

speed   Plain decoding, eagle3 and seagle continue passages of books, greedily, from prompts of 1k to the context's end; tokens per second
        of decoding and of the whole answer (the prompt's pass included), and their ratios to plain decoding's of the same passage.
draft   Sessions of the real head are fed random features and tokens, as many as the context has; then cycles of `draft` and `commit` are
        timed, of which every one accepts nothing (the time does not depend on it: the pass over what was accepted is padded). No target
        is needed. Bytes are those of the session's cache and of its pending features. "prompt" is the time to read the context, "first"
        that of the first cycle after it.

Times are the wall's and the processor's: other programs on the machine lengthen the former more. Medians with quartiles. The ratio of a
cycle at one context to that at another is taken cycle by cycle, both being timed within a second; 95 % intervals, bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from _command import command, machine, run
from _common import Rows, draw, interval, legend, line, over_over, quartiles, read_book, variant
from long_context import Prompts, points
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor

import eyas
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import Drafter
from eyas.drafters._eagle import EagleSession

CHUNK = 512  # pairs that a session is fed at a time, as the target's prefill does
METHODS = ("vanilla", "eagle3", "seagle")
CACHES: dict[str, tuple[str, dict[str, object]]] = {
    "eagle3": ("eagle3", {}),
    "seagle": ("seagle", {}),
    "seagle crop none": ("seagle", {"window.crop": "none"}),
}


# --- with the target


def speed_row(llm: eyas.LLM, drafters: dict[str, Drafter], prompt: list[int], new_tokens: int, first: int) -> dict[str, object]:
    """One passage by every method, beginning with another one each time."""
    names, row = list(drafters), {}
    for name in [*names[first:], *names[:first]]:
        result = eyas.LLM(llm.target, drafters[name], llm.tokenizer).generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
        stats = result.stats
        row[name] = {"ids": result.token_ids, "seconds": stats.seconds, "prefill": stats.prefill_seconds}
        row[name] |= {"cycles": stats.cycles, "emitted": stats.tokens}
    return row


def speed_part(rows: list[dict], contexts: list[int]) -> dict[str, object]:
    """tokens/s [median, quartiles] of decoding and of whole answers, and ratios to plain decoding."""
    out: dict[str, object] = {}
    for name in METHODS:
        out[name] = entry = {"decode": [], "whole": [], "decode_vs_vanilla": [], "whole_vs_vanilla": [], "tau": [], "equal": True}
        for context in contexts:
            own = [row[name] for row in rows if row["key"][1] == context]
            plain = [row["vanilla"] for row in rows if row["key"][1] == context]
            for part, count, less in (("decode", lambda r: r["emitted"], 1), ("whole", lambda r: len(r["ids"]), 0)):
                tokens = [[count(r) for r in found] for found in (own, plain)]
                seconds = [[r["seconds"] - less * r["prefill"] for r in found] for found in (own, plain)]
                entry[part].append(quartiles([t / s for t, s in zip(tokens[0], seconds[0], strict=True)]))
                entry[f"{part}_vs_vanilla"].append(interval(over_over, (tokens[0], seconds[0], tokens[1], seconds[1])))
            entry["tau"].append(round(sum(r["emitted"] for r in own) / sum(r["cycles"] for r in own), 3))
            entry["equal"] &= all(a["ids"] == b["ids"] for a, b in zip(own, plain, strict=True))
    return out


# --- the draft alone


class Timer:
    """Milliseconds of the wall and of the processor."""

    def __init__(self) -> None:
        self.wall, self.cpu = list[float](), list[float]()

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.wall.append(1e3 * (time.perf_counter() - self._began[0]))
        self.cpu.append(1e3 * (time.process_time() - self._began[1]))

    def row(self) -> dict[str, list[float]]:
        return {"wall": [round(x, 3) for x in self.wall], "cpu": [round(x, 3) for x in self.cpu]}


def roots_at(position: int, token: Tensor) -> CycleInput:
    """One greedy row whose root stands at that position."""
    sampling = (Sampling(),)
    ones = torch.ones(1, dtype=torch.bool, device=token.device)
    place = torch.full((1,), position, device=token.device)
    return CycleInput(token, place, ones, sampling, GumbelNoise.of(sampling, token.device), position)


def nothing_accepted(draft: Draft) -> Verdict:
    """The root alone."""
    path_BP = torch.full((1, draft.tree.max_depth + 1), -1, device=draft.tokens_BN.device)
    path_BP[:, 0] = 0
    tokens_BP = torch.zeros_like(path_BP)
    tokens_BP[:, 0] = draft.tokens_BN[:, 0]
    return Verdict(path_BP, tokens_BP, torch.ones(1, dtype=torch.long, device=path_BP.device), draft.tokens_BN[:, 0])


def bytes_of(session: DraftSession) -> dict[str, int]:
    """What a session holds."""
    assert isinstance(session, EagleSession)
    pending = (session.pending_BPF, session.pending_next_BP)
    return {
        "cache_bytes": sum(store.numel() * store.itemsize for store in session.cache._stores.values()),
        "pending_bytes": sum(tensor.numel() * tensor.itemsize for tensor in pending),
    }


class Bench:
    """A session of so many random tokens, and what its cycles take."""

    @torch.inference_mode()
    def __init__(self, drafter: Drafter, context: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        device, width = drafter.target.device, len(drafter.feature_layers) * drafter.target.hidden_size
        self.features_TF = torch.randn(CHUNK, width, generator=generator).to(device, drafter.target.dtype)
        self.tokens_T = torch.randint(drafter.target.vocab_size, (CHUNK,), generator=generator).to(device)
        self.session, self.position = drafter.open(1), context
        self.prompt, self.cycles = Timer(), Timer()
        with self.prompt:
            self.session.begin(0, 0, context)
            for start in range(0, context, CHUNK):
                part = slice(0, min(CHUNK, context - start))
                self.session.prefill(0, self.tokens_T[part], self.features_TF[part], start)

    @torch.inference_mode()
    def cycle(self) -> None:
        roots = roots_at(self.position, self.tokens_T[self.position % CHUNK][None])
        with self.cycles:
            draft = self.session.draft(roots)
            seen = TargetOutput(self.features_TF[:0], self.features_TF[None, : draft.tree.nodes])  # the draft reads features only
            self.session.commit(draft, nothing_accepted(draft), seen)
        self.position += 1

    def row(self) -> dict[str, object]:
        """The first cycle stands first."""
        return {"prompt": self.prompt.row(), "cycles": self.cycles.row(), **bytes_of(self.session)}


def draft_round(drafters: dict[str, Drafter], contexts: list[int], cycles: int, seed: int) -> dict[str, object]:
    """All sessions side by side: one cycle of each, in an order that is drawn anew every time, then the next."""
    order, shuffle = [(name, context) for name in drafters for context in contexts], random.Random(seed)
    shuffle.shuffle(order)
    benches = {key: Bench(drafters[key[0]], key[1], seed) for key in order}
    for _ in range(cycles + 1):
        shuffle.shuffle(order)
        for key in order:
            benches[key].cycle()
    return {name: {str(context): benches[name, context].row() for context in contexts} for name in drafters}


def draft_part(rows: list[dict], contexts: list[int], base: int) -> dict[str, object]:
    """Milliseconds [median, quartiles] and bytes by context; the ratio of a cycle's time to that at `base`, cycle by cycle."""

    def ratios(name: str, context: int, clock: str) -> list[float]:
        """Of each round, the median of its cycles' ratios."""
        sides = [[np.array(row[name][str(n)]["cycles"][clock][1:]) for row in rows] for n in (context, base)]
        return [float(np.median(a / b)) for a, b in zip(*sides, strict=True)]

    out: dict[str, object] = {}
    for name in CACHES:
        found = {context: [row[name][str(context)] for row in rows] for context in contexts}
        out[name] = entry = {}
        for clock in ("wall", "cpu"):
            entry[f"cycle_{clock}_ms"] = [quartiles([x for r in found[c] for x in r["cycles"][clock][1:]]) for c in contexts]
            entry[f"first_{clock}_ms"] = [quartiles([r["cycles"][clock][0] for r in found[c]]) for c in contexts]
            entry[f"prompt_{clock}_ms"] = [quartiles([r["prompt"][clock][0] for r in found[c]]) for c in contexts]
            entry[f"cycle_{clock}_ratio"] = [interval(np.median, [ratios(name, c, clock)]) for c in contexts]
        for key in ("cache_bytes", "pending_bytes"):
            entry[key] = [found[c][-1][key] for c in contexts]
    return out


def claim(part: dict[str, dict], contexts: list[int], base: int) -> dict[str, object]:
    """SEAGLE's: at the longest context a cycle's draft takes at most 1.1 times what it takes at `base`, and as many bytes."""
    last, at = len(contexts) - 1, contexts.index(base)

    def read(name: str) -> dict[str, object]:
        ratio = {clock: part[name][f"cycle_{clock}_ratio"][last] for clock in ("wall", "cpu")}
        return {**{f"time_ratio_{clock}": r for clock, r in ratio.items()}, "bytes": [part[name]["cache_bytes"][i] for i in (at, last)]}

    seagle = read("seagle")
    held = {clock: seagle[f"time_ratio_{clock}"][0] <= 1.1 for clock in ("wall", "cpu")}
    return {
        "contexts": [base, contexts[last]], "seagle": seagle, "eagle3": read("eagle3"),
        "seagle_time_within_1.1": held, "seagle_bytes_equal": len(set(seagle["bytes"])) == 1,
    }  # fmt: skip


# --- figures


def figures(output: Path, speed: dict[str, dict], speed_at: list[int], draft: dict[str, dict], draft_at: list[int]) -> None:
    def paint_draft(figure: Figure, axes: Sequence[Axes]) -> None:
        for number, (name, found) in enumerate(draft.items()):
            line(axes[0], number, draft_at, found["cycle_cpu_ms"], name)
            size = [(c + p) / 2**20 for c, p in zip(found["cache_bytes"], found["pending_bytes"], strict=True)]
            line(axes[1], number, draft_at, [[s, s, s] for s in size], name)
        for axis, label in zip(axes, ("draft per cycle, ms of one processor", "draft's cache, MiB"), strict=True):
            axis.set_xscale("log", base=2)
            axis.set_xticks(draft_at, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in draft_at])
            axis.set(xlabel="context, tokens", ylabel=label, ylim=(0, None))
        legend(figure, axes[0], 3)

    def paint_speed(figure: Figure, axes: Sequence[Axes]) -> None:
        for axis, part in zip(axes, ("decode", "whole"), strict=True):
            for number, (name, found) in enumerate(speed.items()):
                line(axis, number, speed_at, found[part], name)
            axis.set(xlabel="prompt, tokens", ylabel=f"tokens/s, {'decoding' if part == 'decode' else 'whole answer'}", ylim=(0, None))
        legend(figure, axes[0], 3)

    if draft:
        draw(output.with_name(f"{output.stem}_draft.svg"), 2, paint_draft)
    if speed:
        draw(output.with_name(f"{output.stem}_speed.svg"), 2, paint_speed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, help="an EAGLE-3 head")
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=("speed", "draft"), default=["speed", "draft"])
    parser.add_argument("--books", type=Path, nargs="*", default=[], help=".txt.gz, for speed")
    parser.add_argument("--passages", type=int, default=2, help="of each book")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 2048, 3072, 4096], help="tokens, the new ones counted")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**n for n in range(10, 16)])
    parser.add_argument("--base", type=int, default=2048, help="the context whose cycle others are compared with")
    parser.add_argument("--rounds", type=int, default=7, help="of new sessions at every context")
    parser.add_argument("--cycles", type=int, default=20, help="timed in every session, after a first one")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--branch", type=int, default=4)
    parser.add_argument("--trained", type=int, help="tokens that the head was trained on; default: what its checkpoint says")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "speed" in args.parts and not args.books:
        parser.error("speed needs --books (or give --parts draft)")
    if "draft" in args.parts and args.base not in args.contexts:
        parser.error(f"--base {args.base} is none of --contexts")
    return args


def measure_speed(args: argparse.Namespace, llm: eyas.LLM, rows: Rows, tree: dict[str, object]) -> list[dict]:
    drafters = {name: variant(llm.drafter, name, {} if name == "vanilla" else tree) for name in METHODS}
    prompts, longest = Prompts(llm, "continue"), max(args.prompts) - args.new_tokens
    texts = {path.name: llm.tokenizer(read_book(path), add_special_tokens=False, verbose=False)["input_ids"] for path in args.books}
    ends = {name: points(text, args.passages, longest, args.new_tokens) for name, text in texts.items()}
    keys = [["speed", n, name, at[i]] for i in range(args.passages) for name, at in ends.items() for n in args.prompts]
    if any(key not in rows for key in keys):
        for drafter in drafters.values():  # warm-up
            eyas.LLM(llm.target, drafter, llm.tokenizer).generate(next(iter(texts.values()))[:512], max_new_tokens=16)
    for turn, key in enumerate(track(keys, description="speed")):
        if key not in rows:
            _, n, name, end = key
            prompt = prompts.of(texts[name], end, n - args.new_tokens)
            rows.add(key, speed_row(llm, drafters, prompt, args.new_tokens, turn % len(METHODS)))
    return [row for row in rows.of("speed") if row["key"] in keys]


def measure_draft(args: argparse.Namespace, llm: eyas.LLM, rows: Rows, tree: dict[str, object]) -> list[dict]:
    drafters = {name: variant(llm.drafter, method, {**tree, **options}) for name, (method, options) in CACHES.items()}
    keys = [["draft", turn] for turn in range(args.rounds)]
    if any(key not in rows for key in keys):
        draft_round(drafters, [CHUNK], 3, args.seed)  # warm-up
    for key in track(keys, description="draft"):
        if key not in rows:
            rows.add(key, draft_round(drafters, args.contexts, args.cycles, args.seed + key[1]))
    return [row for row in rows.of("draft") if row["key"] in keys]


def main() -> None:
    args, before = parse(), machine()
    llm = eyas.load(args.target, args.draft)
    llm.drafter.trained_length = args.trained or llm.drafter.trained_length
    tree = {"tree.nodes": args.nodes, "tree.depth": args.depth, "tree.branch": args.branch}
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "parts", "books", "passages", "rounds", "draft")}
    settings |= {"head": Path(args.draft).name, "trained_length": llm.drafter.trained_length, "threads": torch.get_num_threads()}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    speed = speed_part(measure_speed(args, llm, rows, tree), args.prompts) if "speed" in args.parts else {}
    draft = draft_part(measure_draft(args, llm, rows, tree), args.contexts, args.base) if "draft" in args.parts else {}
    result = {
        "command": command("draft_cost.py"), "machine": before, "load_after": machine()["load_1min"], "settings": settings,
        "books": [path.name for path in args.books], "passages": args.passages, "rounds": args.rounds,
        "claim": claim(draft, args.contexts, args.base) if draft else {}, "speed": speed, "draft": draft,
    }  # fmt: skip
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    figures(args.output, speed, [n - args.new_tokens for n in args.prompts], draft, args.contexts)
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
