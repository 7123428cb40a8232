"""Acceptance against context: SEAGLE's protocol at our scale, every method on the same passages.

    python runs/long_context.py --draft HEAD --books BOOK.txt.gz ... --output docs/results/long_context.json

A passage is a point in a book. Its prompts end there and reach back over different numbers of
tokens; two tasks: `continue` (the plain text) and `summary` (a chat that asks for one paragraph
about the passage). All prompts of a passage are followed by the same text: what the target itself
says after the longest one. So only the visible prefix varies. The text is forced by a verification
that accepts it alone; drafts see the target's own features of it. Only the first token is the
target's own choice after each prompt.

Methods: eagle3 and seagle as eyas has them, and seagle with other sinks and crops. Intervals: 95 %,
bootstrap over passages. Interrupted runs go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import Rows, Way, book_tokens, eagle3_drafters, interval, machine, parser, run, write
from rich.progress import track
from torch import Tensor

import eyas
from eyas.api import LLM
from eyas.core.engine import Decoder, Request
from eyas.core.ops import Ops
from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Draft, Verdict
from eyas.core.verify import verify
from eyas.drafters import Drafter
from eyas.errors import InputError
from eyas.text import render
from eyas_lab.bench.intervals import ratio, ratio_of_ratios

ASK = "Summarize the following passage in a single paragraph.\n\n"
METHODS: dict[str, Way] = {
    "eagle3": ("eagle3", {}),
    "seagle": ("seagle", {}),  # sink 4, crop halves
    "seagle sink 0": ("seagle", {"window.sink": 0}),
    "seagle sink 16": ("seagle", {"window.sink": 16}),
    "seagle crop last": ("seagle", {"window.crop": "last"}),
    "seagle crop none": ("seagle", {"window.crop": "none"}),
    "window": ("seagle", {"window.sink": 0, "window.crop": "last"}),
}


class ForcedText:
    """A verification that accepts one text, of one row: the token at each position is given."""

    on_device = False

    def __init__(self, prompt_tokens: int, text: Sequence[int]) -> None:
        self.prompt_tokens, self.text = prompt_tokens, torch.tensor([*text, 0])

    def __call__(self, draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise, ops: Ops) -> Verdict:
        index_BN = position_B[:, None] + draft.tree.depth_BN - self.prompt_tokens + 1
        tokens_BN = self.text[index_BN.clamp(max=len(self.text) - 1)]
        forced_BNV = torch.full_like(scores_BNV, -1e9).scatter(2, tokens_BN[..., None], 0.0)
        return verify(draft, forced_BNV, position_B, noise, ops)


def cycles(drafting: Drafter, prompt: list[int], text: list[int]) -> list[int]:
    """Tokens that each cycle emits, when the text follows the prompt."""
    decoder, emitted = Decoder(drafting.target, drafting, verify=ForcedText(len(prompt), text)), list[int]()
    decoder.add(Request(tuple(prompt), len(text)))
    while not decoder.finished:
        emitted += [len(step.tokens) for step in decoder.step() if not step.prefill]
    return emitted


class Prompts:
    """Prompts of exactly so many tokens that end at a point of a book."""

    def __init__(self, llm: LLM, task: str) -> None:
        tokenizer = llm.tokenizer
        specials = set(tokenizer.all_special_ids)
        first = [token for token in tokenizer("a")["input_ids"][:1] if token in specials]
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.head, self.tail = first or bos, list[int]()
        if task == "summary":
            mark = "\N{BLACK STAR}"  # in the passage's place
            ids = render(tokenizer, [{"role": "user", "content": ASK + mark}])
            inside = tokenizer(mark, add_special_tokens=False)["input_ids"]
            at = next(i for i in range(len(ids)) if ids[i : i + len(inside)] == inside)
            self.head, self.tail = ids[:at], ids[at + len(inside) :]

    def of(self, book: list[int], point: int, length: int) -> list[int]:
        """The prompt of that length."""
        inner = length - len(self.head) - len(self.tail)
        assert 0 < inner <= point
        return [*self.head, *book[point - inner : point], *self.tail]


def points(book: list[int], count: int, longest: int, new: int) -> list[int]:
    """Where passages end: spread evenly, however many are asked for later (multiples of the golden ratio)."""
    first, last = longest, len(book) - new
    if first >= last:
        raise InputError(f"a book has {len(book)} tokens, too few for prompts of {longest}")
    return [first + int((last - first) * ((i + 1) * 0.6180339887498949 % 1)) for i in range(count)]


def summary(passages: list[dict[str, Any]], lengths: list[int], within: list[int]) -> dict[str, Any]:
    """tau by method and length, its ratio to tau within the trained length, and to the other
    method's; paired by passage."""

    def pair(name: str, at: Sequence[int]) -> list[list[float]]:
        chosen = [[row["cycles"][name][lengths.index(n)] for n in at] for row in passages]
        return [[sum(map(sum, c)) for c in chosen], [sum(map(len, c)) for c in chosen]]

    return {
        name: {
            "tau_within": interval(ratio, *pair(name, within)),
            "tau": [interval(ratio, *pair(name, [n])) for n in lengths],
            "ratio": [interval(ratio_of_ratios, *pair(name, [n]), *pair(name, within)) for n in lengths],
            "vs_seagle": [interval(ratio_of_ratios, *pair(name, [n]), *pair("seagle", [n])) for n in lengths],
        }
        for name in METHODS
    }


def main() -> None:
    made = parser(
        __doc__,
        draft=None,
        target=None,
        passages=4,
        new_tokens=64,
        nodes=16,
        depth=5,
        branch=4,
        trained=0,
        at=([256, 448, 1024, 2048, 3072, 4032], "lengths of the prompts"),
    )
    made.add_argument("--books", type=Path, nargs="+", required=True, help=".txt.gz")
    made.add_argument("--tasks", nargs="+", choices=("continue", "summary"), default=["continue", "summary"])
    args = made.parse_args()
    before, lengths = machine(), sorted(args.at)
    llm = eyas.load(args.target, method="vanilla")
    drafters = eagle3_drafters(llm.target, METHODS, args)
    trained = drafters["seagle"].trained_length
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "passages", "tasks", "draft")}
    settings |= {"lengths": lengths, "books": [path.name for path in args.books]}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    books = {path.name.split(".")[0]: book_tokens(llm, path) for path in args.books}
    keys = [(task, i, name) for i in range(args.passages) for task in args.tasks for name in books]
    for task, i, name in track(keys, "passages"):
        if (task, i, name) in rows:
            continue
        makes, point = Prompts(llm, task), points(books[name], args.passages, lengths[-1], args.new_tokens)[i]
        prompts = [makes.of(books[name], point, n) for n in lengths]
        text = list(llm.generate(prompts[-1], max_new_tokens=args.new_tokens).token_ids)
        by_method = {method: [cycles(made, prompt, text) for prompt in prompts] for method, made in drafters.items()}
        rows.add((task, i, name), {"text": text, "cycles": by_method})
    within = [n for n in lengths if n + args.new_tokens <= (trained or 0)] or lengths[:1]
    tasks = {}
    for task in args.tasks:
        measured = [row for row in rows.of(task) if tuple(row["key"]) in keys]
        tasks[task] = {"passages": len(measured), "all": summary(measured, lengths, within)}
    write(args.output, {"settings": settings, "trained_length": trained, "within": within, "tasks": tasks}, before)


if __name__ == "__main__":
    run(main)
