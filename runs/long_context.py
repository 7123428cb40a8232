"""Acceptance against context: SEAGLE's protocol at our scale, every method on the same passages.

    python runs/long_context.py --draft HEAD --books BOOK.txt.gz ... --output docs/results/long_context.json

A passage is a point in a book. Its prompts end there and reach back over different numbers of tokens; two tasks: `continue` (the plain
text) and `summary` (a chat that asks for one paragraph about the passage). What follows the prompt is

    longest   the same text for every prompt of a passage: what the target itself says after the longest one (paired: only the visible
              prefix varies)
    book      the same text again: the book's own next tokens (not for `summary`)
    own       what the target says after each prompt: plain decoding

The text that is emitted being fixed, the target is asked once per prompt, for its features over prompt and text, and every method then
drafts against that record (`Replay`): its cycles are those that decoding with the target would make, because only accepted nodes' features
are ever read. `--check` decodes some of them with the target itself, its law forced by a logits processor, and compares cycle by cycle.

Columns: eagle3 and seagle as eyas has them; other sinks and crops; a plain window without sinks; and eagle3 with the reference's defect,
emulated here and nowhere else: once its cache holds more than N slots, tree slots included, the table of rotations is rebuilt from
positions and frequencies in half precision. Intervals: 95 %, bootstrap over passages, seeded. Texts in which more than 20 % of the 8-grams
are repeats are reported apart: loops flatter every method. Interrupted runs go on where they stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _command import command, machine, run
from _common import Rows, draw, interval, legend, line, over, over_over, read_book, variant
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import eyas
from eyas.core.cache import WindowCache
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import OnChunk, Target
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict
from eyas.drafters import Drafter
from eyas.errors import InputError
from eyas.nn import Attention
from eyas.text import render

ASK = "Summarize the following passage in a single paragraph.\n\n"
TASKS = ("continue", "summary")
MAIN = ("eagle3", "seagle", "window")  # of the first figure, with the half-precision tables; the second has all windows
WINDOWS: dict[str, dict[str, object]] = {
    "seagle": {},  # sink 4, crop halves
    "seagle sink 0": {"window.sink": 0},
    "seagle sink 1": {"window.sink": 1},
    "seagle sink 16": {"window.sink": 16},
    "seagle crop last": {"window.crop": "last"},
    "seagle crop none": {"window.crop": "none"},
    "window": {"window.sink": 0, "window.crop": "last"},
}


# --- the reference's table of rotations


class HalfTable(Attention):
    """Attention that rotates as the reference's does: rightly while the cache holds at most `limit` slots, tree slots included; from the
    first forward on that exceeds them by a table of half-precision positions times half-precision frequencies. What stands in the cache by
    then stays as it was rotated. All rows of a cache must be about equally long. The pass over what was accepted is padded here, so the
    limit is met up to a path's length of slots sooner than by the reference.
    """

    def __init__(self, plain: Attention, limit: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.shape, self.q, self.k, self.v, self.o = plain.shape, plain.q, plain.k, plain.v, plain.o
        self._frequency: Tensor | None = None
        self.limit, self.half, self.rebuilt = limit, dtype, False
        self.cache: object = None

    def look(self, cache: WindowCache) -> None:
        """The table is a new one for a new cache, as in a new process."""
        width, _ = cache.get_mask_sizes(0, 0)
        self.rebuilt = width > self.limit or (self.rebuilt and cache is self.cache)
        self.cache = cache

    def rotate(self, x_RNHh: Tensor, position_RN: Tensor) -> Tensor:
        angle = position_RN[..., None, None].to(self.half) * self.frequency(x_RNHh.device).to(self.half)
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x_RNHh.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_RNHh.dtype)

    def query(self, x: Tensor, position: Tensor) -> Tensor:
        if not self.rebuilt:
            return super().query(x, position)
        q = self.q(x)
        return self.rotate(q.view(*q.shape[:-1], -1, self.shape.head_dim), position)

    def remember(self, x_RND: Tensor, position_RN: Tensor, cache: WindowCache) -> tuple[Tensor, Tensor]:
        assert cache.window is None
        self.look(cache)
        if not self.rebuilt:
            return super().remember(x_RND, position_RN, cache)
        key, value = self.key_value(x_RND)
        still = torch.zeros_like(self.frequency(x_RND.device))  # already rotated: the cache shall turn them by nothing
        return cache.store(self.rotate(key, position_RN), value, position_RN, still)

    def forward(self, x_RND: Tensor, position_RN: Tensor, mask_R1NW: Tensor, cache: WindowCache) -> Tensor:
        self.look(cache)
        return super().forward(x_RND, position_RN, mask_R1NW, cache)


def half_table(eagle3: Drafter, limit: int, dtype: torch.dtype) -> Drafter:
    """The same head with the reference's table; the head itself stays as it is."""
    drafter = copy.copy(eagle3)
    drafter.net = copy.deepcopy(eagle3.net)
    drafter.net.layer.attention = HalfTable(drafter.net.layer.attention, limit, dtype)
    return drafter


# --- the target, written down


@dataclass(frozen=True)
class Tape:
    """A prompt, what follows it, and the target's features at all of these tokens but the last."""

    tokens: list[int]
    prompt: int  # how many of them
    features_TF: Tensor


class Replay:
    """A target that says what is on tapes, one a row: the features there and, of the logits, which token comes next."""

    def __init__(self, target: Target, tapes: Sequence[Tape]) -> None:
        self.vocab_size, self.device, self.dtype, self.tapes = target.vocab_size, target.device, target.dtype, tapes

    def open(self, rows: int, feature_layers: Sequence[int]) -> ReplaySession:
        return ReplaySession(self)


class ReplaySession:
    """What a Decoder asks of a TargetSession."""

    def __init__(self, replay: Replay) -> None:
        self.vocab_size, self.device, self.tapes = replay.vocab_size, replay.device, replay.tapes
        self.next_BT = nn.utils.rnn.pad_sequence([torch.tensor(t.tokens[1:]) for t in self.tapes], batch_first=True).to(self.device)
        self.features_BTF = nn.utils.rnn.pad_sequence([t.features_TF for t in self.tapes], batch_first=True)
        self.end_B = torch.tensor([len(t.tokens) - 2 for t in self.tapes], device=self.device)
        self.lengths, self.length_B = [0] * len(self.tapes), torch.zeros_like(self.end_B)

    def check_fit(self, prompt: int, new: int) -> None: ...

    def reserve(self, tokens: int) -> None: ...

    def keep(self, row: int, length: int) -> None:
        self.lengths[row] = self.length_B[row] = length

    def prefill(self, row: int, tokens: Sequence[int], on_chunk: OnChunk) -> Tensor:
        """The whole prompt in one chunk, as the reference's draft reads it."""
        n = len(tokens)
        assert list(tokens) == self.tapes[row].tokens[:n]
        self.keep(row, n)
        on_chunk(torch.tensor(tokens, device=self.device), self.features_BTF[row, :n], 0)
        return torch.zeros(self.vocab_size, device=self.device).index_fill(0, self.next_BT[row, n - 1], 1.0)

    def forward(self, tokens_BN: Tensor, tree: Tree) -> TargetOutput:
        at_BN = torch.minimum(self.length_B[:, None] + tree.depth_BN, self.end_B[:, None])  # what lies past the end is never emitted
        row_B1 = torch.arange(len(self.tapes), device=self.device)[:, None]
        logits_BNV = torch.zeros(*at_BN.shape, self.vocab_size, device=self.device)
        return TargetOutput(logits_BNV.scatter(2, self.next_BT[row_B1, at_BN][..., None], 1.0), self.features_BTF[row_B1, at_BN])

    def commit(self, verdict: Verdict, active_B: Tensor) -> None:
        self.length_B = self.length_B + verdict.length_B * active_B

    def settle(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)


class Recorder(Drafter):
    """Proposes nothing and keeps the features that it is shown: plain decoding, written down."""

    def __init__(self, target: Target, feature_layers: tuple[int, ...]) -> None:
        super().__init__(target)
        self.feature_layers, self.seen = feature_layers, list[Tensor]()

    def open(self, rows: int) -> DraftSession:
        recorder = self

        class Session(DraftSession):
            def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
                recorder.seen.append(features_TF)

            def draft(self, roots: CycleInput) -> Draft:
                return Draft(Tree.chain(1, 1, roots.tokens_B.device), roots.tokens_B[:, None])

            def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
                recorder.seen.append(seen.features_BNF[0])

        return Session()


class Forced:
    """A logits processor that leaves one continuation possible, as long as it is followed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        n = ids_1T.shape[1]
        if n >= len(self.tokens) or ids_1T[0].tolist() != self.tokens[:n]:
            return scores_1V
        return torch.full_like(scores_1V, -torch.inf).index_fill(1, torch.tensor([self.tokens[n]], device=scores_1V.device), 0.0)


def decode(target: Target | Replay, drafter: Drafter, requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    """Of each request the new tokens, and how many its cycles emitted, one by one. All are decoded together, a row each."""
    decoder, steps = Decoder(target, drafter, len(requests)), []  # type: ignore[arg-type]
    tickets = [decoder.add(request) for request in requests]
    while not decoder.finished:
        steps += decoder.step()
    by_row = [[step for step in steps if step.request == ticket] for ticket in tickets]
    return [([t for s in own for t in s.tokens], [len(s.tokens) for s in own if not s.prefill]) for own in by_row]


def say(target: Target, feature_layers: tuple[int, ...], prompt: list[int], new: int, sampling: Sampling, eos: frozenset[int]) -> Tape:
    """What the target itself says."""
    recorder = Recorder(target, feature_layers)
    ((tokens, _),) = decode(target, recorder, [Request(tuple(prompt), new, sampling, eos)])
    return Tape([*prompt, *tokens], len(prompt), torch.cat(recorder.seen))


def listen(target: Target, feature_layers: tuple[int, ...], prompt: list[int], text: list[int]) -> Tape:
    """What the target sees when that text follows."""
    seen: list[Tensor] = []
    target.open(1, feature_layers).prefill(0, [*prompt, *text[:-1]], lambda tokens_T, features_TF, at: seen.append(features_TF))
    return Tape([*prompt, *text], len(prompt), torch.cat(seen))


# --- passages


class Prompts:
    """Prompts of exactly so many tokens that end at a point of a book."""

    def __init__(self, llm: eyas.LLM, task: str) -> None:
        words = llm.tokenizer
        if words is None:
            raise InputError("this experiment needs a target with a tokenizer")
        specials = set(words.all_special_ids)
        first = [t for t in words("a")["input_ids"][:1] if t in specials] or [t for t in (words.bos_token_id,) if t is not None]
        self.head, self.tail = first, list[int]()
        if task == "summary":
            mark = "\N{BLACK STAR}"  # in the passage's place
            asked = render(words, [{"role": "user", "content": ASK + mark}])
            inside = words(mark, add_special_tokens=False)["input_ids"]
            at = next(i for i in range(len(asked)) if asked[i : i + len(inside)] == inside)
            self.head, self.tail = asked[:at], asked[at + len(inside) :]

    def of(self, book: list[int], point: int, length: int) -> list[int]:
        inner = length - len(self.head) - len(self.tail)
        assert 0 < inner <= point
        return [*self.head, *book[point - inner : point], *self.tail]


def points(book: list[int], count: int, longest: int, new: int) -> list[int]:
    """Where passages end: spread evenly through the book, however many are asked for later (multiples of the golden ratio)."""
    first, last = longest, len(book) - new
    if first >= last:
        raise InputError(f"a book has {len(book)} tokens, too few for prompts of {longest}")
    return [first + int((last - first) * ((i + 1) * 0.6180339887498949 % 1)) for i in range(count)]


def columns(args: argparse.Namespace, head: Drafter) -> dict[str, Drafter]:
    """All methods, or those asked for."""
    tree = {"tree.nodes": args.nodes, "tree.depth": args.depth, "tree.branch": args.branch}
    if args.chain:
        tree = {"tree.nodes": args.chain + 1, "tree.depth": args.chain, "tree.branch": 1}
    plain = variant(head, "eagle3", tree)
    found = {"eagle3": plain} | {name: variant(head, "seagle", {**tree, **options}) for name, options in WINDOWS.items()}
    for limit in args.half_from:
        for dtype in args.half_dtype:
            found[f"eagle3 {dtype} table from {limit}"] = half_table(plain, limit, getattr(torch, dtype))
    if unknown := [name for name in args.methods or () if name not in found]:
        raise InputError(f"no such method here: {', '.join(unknown)}; there are: {', '.join(found)}")
    return {name: drafter for name, drafter in found.items() if not args.methods or name in args.methods}


@dataclass(frozen=True)
class Place:
    """Where a passage ends."""

    book: str
    tokens: list[int]  # of the whole book
    point: int


class Experiment:
    """Passages in, rows out."""

    def __init__(self, args: argparse.Namespace, llm: eyas.LLM, methods: dict[str, Drafter], lengths: list[int]) -> None:
        self.args, self.llm, self.methods, self.lengths = args, llm, methods, lengths
        self.target, self.feature_layers = llm.target, llm.drafter.feature_layers
        self.prompts = {task: Prompts(llm, task) for task in args.tasks}

    def tape(self, task: str, place: Place, length: int, text: list[int]) -> Tape:
        """The record of one prompt; `text` is what must follow, empty: whatever the target says."""
        prompt = self.prompts[task].of(place.tokens, place.point, length)
        if text:
            return listen(self.target, self.feature_layers, prompt, text)
        sampling = Sampling(temperature=self.args.temperature, seed=self.args.seed + place.point)
        return say(self.target, self.feature_layers, prompt, self.args.new_tokens, sampling, self.llm.eos)

    def passages(self, task: str, places: Sequence[Place], check: bool) -> dict[str, object]:
        """A passage of every book under every length and method, the books side by side as rows of one Decoder."""
        began, new, kind = time.perf_counter(), self.args.new_tokens, self.args.continuation
        texts = [place.tokens[place.point : place.point + new] if kind == "book" else [] for place in places]
        said: dict[int, list[list[int]]] = {}
        runs: dict[str, dict[int, list[list[int]]]] = {name: {} for name in self.methods}
        listened, checks = 0.0, []
        for length in sorted(self.lengths, reverse=True):  # the longest first: it is the one that says the text
            start = time.perf_counter()
            tapes = [self.tape(task, place, length, text) for place, text in zip(places, texts, strict=True)]
            listened += time.perf_counter() - start
            said[length] = [tape.tokens[length:] for tape in tapes]
            texts = said[length] if kind == "longest" else texts
            for name, drafter in self.methods.items():
                runs[name][length] = self.cycles(tapes, drafter)
            if check and length in (self.lengths[0], self.lengths[len(self.lengths) // 2]):
                for name in {"eagle3", "seagle"} & runs.keys():
                    decoded = self.cycles(tapes, self.methods[name], forced=True)
                    checks += [mine == theirs for mine, theirs in zip(runs[name][length], decoded, strict=True)]
        by_book = [
            {
                "book": place.book, "point": place.point,
                "texts": [said[n][i] for n in (self.lengths if kind == "own" else self.lengths[-1:])],
                "cycles": {name: [found[n][i] for n in self.lengths] for name, found in runs.items()},
            }
            for i, place in enumerate(places)
        ]  # fmt: skip
        seconds = {"target": round(listened, 1), "all": round(time.perf_counter() - began, 1)}
        return {"passages": by_book, "checked_equal": checks, "seconds": seconds}

    def cycles(self, tapes: Sequence[Tape], drafter: Drafter, forced: bool = False) -> list[list[int]]:
        """Of each tape the tokens emitted by each cycle; `forced`: by the target itself, at the price of its time."""
        requests = [
            Request(tuple(t.tokens[: t.prompt]), len(t.tokens) - t.prompt, processors=(Forced(t.tokens),) if forced else ()) for t in tapes
        ]
        found = decode(self.target if forced else Replay(self.target, tapes), drafter, requests)
        if [tokens for tokens, _ in found] != [t.tokens[t.prompt :] for t in tapes]:
            raise AssertionError("what was emitted is not the text that was forced")
        return [cycles for _, cycles in found]


# --- what the rows say


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Share of n-grams that occurred before in the same text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def coverage(tokens: list[int], head: Drafter) -> float:
    """Share of these tokens that the head can draft at all."""
    known = range(head.target.vocab_size) if head.draft_ids_v is None else set(head.draft_ids_v.tolist())
    return round(sum(t in known for t in tokens) / max(1, len(tokens)), 4)


def looping(row: dict) -> bool:
    return max(map(repeated_share, row["texts"])) > 0.2


def summary(rows: list[dict], lengths: list[int], within: list[int], names: Sequence[str], seed: int) -> dict[str, object]:
    """tau by method and length, its ratio to tau within the trained length, and to eagle3's at the same length; paired by passage."""

    def pair(name: str, at: Sequence[int]) -> tuple[list[int], list[int]]:
        """(tokens emitted, cycles) by passage, of these lengths together."""
        chosen = [[r["cycles"][name][lengths.index(length)] for length in at] for r in rows]
        return [sum(map(sum, c)) for c in chosen], [sum(map(len, c)) for c in chosen]

    out: dict[str, object] = {}
    for name in names:
        out[name] = {
            "tau_within": interval(over, pair(name, within), seed),
            "tau": [interval(over, pair(name, [n]), seed) for n in lengths],
            "ratio": [interval(over_over, (*pair(name, [n]), *pair(name, within)), seed) for n in lengths],
        }
        for other in ("eagle3", "seagle"):
            if other in names and name != other:
                out[name][f"vs_{other}"] = [interval(over_over, (*pair(name, [n]), *pair(other, [n])), seed) for n in lengths]
    return out


def figures(output: Path, task: str, found: dict[str, dict], lengths: list[int], trained: int | None) -> None:
    """One of the methods: tau and its ratio; one of the windows: their tau over that of seagle's own."""
    main = [name for name in found if name in MAIN or "table" in name]
    others = [name for name in found if name in WINDOWS and name != "seagle"]

    def paint(names: list[str], sides: Sequence[tuple[str, str]], bars: float, figure: Figure, axes: Sequence[Axes]) -> None:
        for axis, (key, label) in zip(axes, sides, strict=True):
            for number, name in enumerate(names):
                line(axis, number, lengths, found[name][key], name, bars)
            if trained and trained < lengths[-1]:
                axis.axvline(trained, color="grey", linestyle=":", linewidth=1)
            axis.set(xlabel="prompt, tokens", ylabel=label, xlim=(0, None))
            if not bars:
                axis.set_ylim(0, None)
        legend(figure, axes[0], 2 if bars else 3)

    ratio = "tau / tau within the trained length"
    draw(output.with_name(f"{output.stem}_{task}.svg"), 2, partial(paint, main, [("tau", "tokens per cycle, tau"), ("ratio", ratio)], 0))
    if "seagle" in found and others:
        aside, sides = (lengths[-1] - lengths[0]) / 150, [("vs_seagle", "tau / tau of seagle")]
        draw(output.with_name(f"{output.stem}_{task}_windows.svg"), 1, partial(paint, others, sides, aside))


def equal_steps(args: argparse.Namespace, context: int) -> list[int]:
    if args.at:
        return sorted(set(args.at))
    last = context - args.new_tokens
    return [256 + round((last - 256) * i / (args.lengths - 1)) for i in range(args.lengths)] if args.lengths > 1 else [last]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, nargs="+", required=True, help=".txt.gz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft", required=True, help="an EAGLE-3 head")
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--passages", type=int, default=10, help="of each book")
    parser.add_argument("--lengths", type=int, default=9, help="so many prompt lengths, from 256 to the context less the new tokens")
    parser.add_argument("--at", type=int, nargs="+", help="these prompt lengths instead")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--continuation", choices=("longest", "book", "own"), default="longest")
    parser.add_argument("--temperature", type=float, default=0.0, help="of what the target says; drafts are greedy in any case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--branch", type=int, default=4)
    parser.add_argument("--chain", type=int, help="a chain of so many draft tokens instead of the tree")
    parser.add_argument("--trained", type=int, help="tokens that the head was trained on; default: what its checkpoint says")
    parser.add_argument("--half-from", type=int, nargs="*", default=[2048, 512], help="slots from which the table is a half-precision one")
    parser.add_argument("--half-dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16"])
    parser.add_argument("--methods", nargs="+", help="only these columns")
    parser.add_argument("--check", type=int, default=1, help="passages of each task also decoded with the target itself")
    return parser.parse_args()


def main() -> None:
    args, before = parse(), machine()
    llm = eyas.load(args.target, args.draft)
    head = llm.drafter
    head.trained_length = args.trained or head.trained_length
    methods, lengths = columns(args, head), equal_steps(args, llm.target.context)
    if args.continuation == "book" and "summary" in args.tasks:
        raise InputError("the book does not go on with a summary: --continuation book goes with --tasks continue")
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "passages", "tasks", "check", "draft")}
    settings |= {"lengths": lengths, "head": Path(args.draft).name, "methods": list(methods), "at": None}
    settings["books"] = [path.name for path in args.books]
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    experiment = Experiment(args, llm, methods, lengths)
    books = {
        path.name.split(".")[0]: llm.tokenizer(read_book(path), add_special_tokens=False, verbose=False)["input_ids"] for path in args.books
    }
    spread = [points(book, args.passages, lengths[-1], args.new_tokens) for book in books.values()]
    keys = [[task, i] for i in range(args.passages) for task in args.tasks]
    for task, i in track(keys, description="passages"):
        if [task, i] not in rows:
            places = [Place(name, book, at[i]) for (name, book), at in zip(books.items(), spread, strict=True)]
            rows.add([task, i], experiment.passages(task, places, check=i < args.check))
    within = [n for n in lengths if n + args.new_tokens <= (head.trained_length or 0)] or lengths[:1]
    result = {
        "command": command("long_context.py"), "machine": before, "load_after": machine()["load_1min"],
        "minutes": round(sum(row["seconds"]["all"] for row in rows.rows.values()) / 60, 1),
        "settings": settings, "trained_length": head.trained_length, "within": within,
        "columns": {name: drafter.describe() for name, drafter in methods.items()},
        "tasks": {},
    }  # fmt: skip
    for task in args.tasks:
        groups = [row for row in rows.of(task) if row["key"] in keys]
        measured = [passage for group in groups for passage in group["passages"]]
        calm = [row for row in measured if not looping(row)]
        checks = [same for group in groups for same in group["checked_equal"]]
        entry = {
            "passages": len(measured), "loops": len(measured) - len(calm),
            "new_tokens": sum(len(text) for row in measured for text in row["texts"]),
            "share_in_draft_vocabulary": coverage([t for row in measured for text in row["texts"] for t in text], head),
            "replayed_cycles_equal_decoded_ones": f"{sum(checks)} of {len(checks)} runs",
            "all": summary(measured, lengths, within, list(methods), args.seed),
            "without_loops": summary(calm, lengths, within, list(methods), args.seed) if calm and len(calm) < len(measured) else {},
        }  # fmt: skip
        result["tasks"][task] = entry
        figures(args.output, task, entry["all"], lengths, head.trained_length)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
