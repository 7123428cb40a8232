"""Is it worth while to let the target answer the training data itself? Fixed data against regenerated data (EAGLE-1, table 6).

    eyas regenerate --data chat.jsonl.gz --output out/own.jsonl
    python runs/data_source.py --data chat.jsonl.gz out/own.jsonl --chats HELDIN.jsonl.gz           (work in out/data_source)

--data: first the fixed answers, then the regenerated ones. Conversations are paired by what the user says; one that ends early
cuts its partner to as many turns. So both heads see the same prompts, and both read as many tokens, at the same learning rate. Where one
source's answers are shorter, its data are passed over more often: the JSON says how often, and how many tokens counted.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _heads
from _command import run
from _heads import Exam, Head, Results, eagle3_options, tree_options

from eyas.api import LLM
from eyas.errors import EyasError, InputError
from eyas.train._chat import ChatReader, messages_to_learn
from eyas.train.data import FIRST_COUNTABLE, Example, Examples
from eyas.train.vocab import count_tokens

SOURCES = ("fixed", "regenerated")
Turns = list[dict[str, Any]]


def conversations(path: Path) -> Iterator[Turns]:
    """Those of a file that can be used, up to their last reply."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as f:
        for text in f:
            try:
                yield messages_to_learn(json.loads(text))
            except (InputError, json.JSONDecodeError):
                continue


def prompts(turns: Turns) -> list[tuple[int, str]]:
    """After each reply: (how many turns there are by then, hash of what others than the assistant have said)."""
    said, found = hashlib.sha256(), []
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            found.append((i + 1, said.hexdigest()))
        else:
            said.update(f"{turn['role']}\0{turn['content']}\1".encode())
    return found


def pairs(fixed: Path, regenerated: Path) -> list[tuple[Turns, Turns]]:
    """Conversations of the same prompts, in an order that the prompts alone decide."""
    wanted = {prompts(turns)[-1][1]: turns for turns in conversations(regenerated)}
    found: dict[str, tuple[Turns, Turns]] = {}
    for turns in conversations(fixed):
        for end, key in reversed(prompts(turns)):
            if key in wanted and key not in found:
                found[key] = turns[:end], wanted[key]
                break
    return [found[key] for key in sorted(found)]


class Sources:
    """Both sides' examples, the same prompts in the same order."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self.made: list[tuple[Examples, Examples]] | None = None

    def of(self, number: int) -> tuple[Examples, Examples]:
        """(train, held out) of a source; both sources are read when the first is asked for."""
        self.made = self.made or self._read()
        return self.made[number]

    def _read(self) -> list[tuple[Examples, Examples]]:
        reader, args = ChatReader(self.llm.tokenizer), self.args
        sides, trained = [(Examples(), Examples()) for _ in SOURCES], [0, 0]
        both = ([self._example(reader, turns) for turns in pair] for pair in pairs(*args.data))
        for number, (one, other) in enumerate(pair for pair in both if None not in pair):
            apart = number % 20 == 0
            sides[0][apart].append(one)
            sides[1][apart].append(other)
            trained = [count + len(e.ids) * (not apart) for count, e in zip(trained, (one, other), strict=True)]
            if min(trained) >= args.tokens:
                break
        if not len(sides[0][0]):
            raise EyasError(f"{args.data[0]} and {args.data[1]} have no, or too few, conversations with the same prompts")
        return sides

    def _example(self, reader: ChatReader, turns: Turns) -> Example | None:
        try:
            found = reader.read({"messages": turns})
        except InputError:
            return None
        length = min(self.args.max_length, self.llm.target.context)
        ids, counted = found.ids[:length], found.counted[:length]
        return Example(ids, counted) if any(counted[FIRST_COUNTABLE:]) else None


def draw_plot(figure: Any, result: dict[str, Any]) -> None:
    """n-alpha by n; tau and speed-up by shape."""
    alpha, tau, speed = figure.subplots(1, 3)
    for place, (kind, found) in enumerate(result["kinds"].items()):
        _heads.line(alpha, [n + 0.05 * place for n in range(_heads.CHAIN)], found["n-alpha"], kind, color=f"C{place}")
        for axes, name in ((tau, "tau"), (speed, "speedup")):
            x = [i + 0.12 * place for i in range(len(found[name]))]
            _heads.line(axes, x, list(found[name].values()), kind, color=f"C{place}", linestyle="none")
            axes.set_xticks(range(len(found[name])), list(found[name]))
    alpha.set(xlabel="n: own outputs that the draft's input holds", ylabel="n-alpha", xticks=range(_heads.CHAIN))
    tau.set_ylabel("tau")
    speed.set_ylabel("speed-up over plain decoding")
    alpha.legend(fontsize=7, frameon=False)


def main(argv: list[str] | None = None) -> None:
    parser = _heads.parser(__doc__, "data_source", tokens=400_000, seeds=2)
    parser.add_argument("--method", default="eagle2", help="eagle2 (EAGLE-1's net) or eagle3 (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=_heads.DEFAULT_LR, help="(default: %(default)s)")
    parser.add_argument("--fast-tree", default="5/3/2", help="nodes/depth/branch of the small tree (default: %(default)s)")
    args = parser.parse_args(argv)
    if len(args.data) != len(SOURCES):
        parser.error("--data wants two files: the fixed answers and the regenerated ones")
    llm = _heads.open_target(args)
    layers, sources = _heads.layers_of(llm, [(args.method, {})]), Sources(llm, args)
    data = {
        source: _heads.features(
            llm, Path(args.work, f"features-{source}"), args.data, layers, args, args.tokens, choose=lambda i=i: sources.of(i)
        )
        for i, source in enumerate(SOURCES)
    }
    counts_V = sum(count_tokens(found.train, llm.target.vocab_size) for found in data.values())
    options = eagle3_options(args, counts_V) if args.method == "eagle3" else {}
    shapes = {"chain": None, "tree": tree_options(args.tree), "fast tree": tree_options(args.fast_tree)}
    exam = Exam(llm, args, shapes, beside=True)
    sizes = {
        source: {
            "examples": len(found.train), "tokens": _heads.tokens_of(found.train),
            "counted_tokens": sum(sum(e.counted) for e in found.train),
        }
        for source, found in data.items()
    }  # fmt: skip
    results = Results.begin(
        exam, len(SOURCES) * args.seeds, method=args.method, tokens_per_head=args.tokens, lr=args.lr, data=[p.name for p in args.data],
        sources=sizes, batch_tokens=args.batch_tokens, max_length=args.max_length, tree=args.tree, fast_tree=args.fast_tree,
        seeds=list(range(args.seeds)),
    )  # fmt: skip
    for seed in range(args.seeds):
        for source, found in data.items():
            head = Head(source, args.method, options, args.lr, seed)
            folder, steps = args.work / "heads" / head.name, _heads.steps_for(args.tokens, found.train, args, seed)
            about = _heads.train_head(llm, head, found, steps, counts_V, args, folder)
            results.add(head, about, exam.take(head, folder))
            results.write([SOURCES], draw_plot)
    print(results.caption)


if __name__ == "__main__":
    run(main)
