"""Train heads for a comparison by `eyas train`, and compare them by `eyas_lab.bench`: ablation.py,
data_source.py, bench_heads.py.

Everything goes on where it was stopped: a head from its saved state, answers prompt by prompt.
Heads of one kind differ in their seed; their answers are taken together. Intervals: 95 %, bootstrap
over chats, the same draws for all heads, so differences are paired. They do not cover another seed
of the training: for that, give several --seeds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Answers, ask, chat_prompts, drafter, interval, machine, tree_of, write
from _common import parser as common_parser

import eyas
from eyas.errors import EyasError
from eyas_lab.bench.intervals import ratio_of_ratios

Shapes = Mapping[str, dict[str, Any] | None]  # name -> tree options; None: the chain of five


@dataclass(frozen=True)
class Head:
    """A head to be trained."""

    kind: str
    method: str
    flags: tuple[str, ...]  # of `eyas train`, the method's own
    data: tuple[str, ...]
    tokens: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """A file name."""
        return f"{''.join(c if c.isalnum() else '_' for c in self.kind)}-seed{self.seed}"


def parser(doc: str | None, name: str, tokens: int, seeds: int) -> argparse.ArgumentParser:
    """The options of every comparison."""
    made = common_parser(
        doc,
        output=(Path(f"docs/results/{name}.json"), "the record"),
        target=(None, "else the embedded model"),
        work=(Path(f"out/{name}"), "heads and answers"),
        tokens=(tokens, "that each head is trained on"),
        seeds=(seeds, "heads of each kind"),
        limit=(150, "chats that are answered"),
        max_new_tokens=(96, "of an answer"),
        tree=("26/5/4", "nodes/depth/branch of the dynamic tree"),
        fast_tree=("5/3/2", "nodes/depth/branch of a small tree"),
        ttt=(5, "steps of EAGLE-3's training-time test"),
        draft_vocab=(4096, "tokens that EAGLE-3 can draft"),
        batch_tokens=(2048, "of a step"),
        max_length=(512, "tokens of an example"),
        heldout_tokens=(15_000, "of the held-out loss"),
    )
    made.add_argument("--data", nargs="+", required=True, metavar="FILE", help="chats (JSONL, .gz too) to train on")
    about = "held-out chats: the last user turn of each is answered"
    made.add_argument("--chats", type=Path, required=True, metavar="FILE", help=about)
    return made


def eagle3_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """EAGLE-3's own flags of `eyas train`."""
    return ("--ttt.steps", str(args.ttt), "--head.draft-vocab", str(args.draft_vocab))


def is_done(folder: Path, tokens: int | str) -> bool:
    """Whether a training with that budget has ended in the folder."""
    path = folder / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {"step": 0, "steps": 1, "config": {}}
    return record["step"] >= record["steps"] and str(record["config"].get("tokens")) == str(tokens)


def call(line: Sequence[str]) -> int:
    """The exit status of a command. Ctrl-C is for the command alone: it saves where it is."""
    with subprocess.Popen(line) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def train(head: Head, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The record of the head's training in the folder: trained now, trained further, or already there."""
    line = [sys.executable, "-m", "eyas", "train", "--method", head.method, "--output", str(folder), *head.flags]
    line += [part for file in head.data for part in ("--data", file)]
    line += ["--target", args.target] if args.target else []
    options = {
        "tokens": head.tokens,
        "lr": head.lr,
        "seed": head.seed,
        "batch-tokens": args.batch_tokens,
        "max-length": args.max_length,
        "heldout-tokens": args.heldout_tokens,
        "heldout": 0.05,
        "save-every": 20,
        "eval-every": 0,
    }
    line += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    if not is_done(folder, head.tokens):
        print(" ".join(line[1:]), file=sys.stderr, flush=True)
        if status := call(line):
            raise KeyboardInterrupt if status == 130 else EyasError(f"training {head.name} ended with status {status}")
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return record


def compare(
    heads: Sequence[Head], shapes: Shapes, pairs: Sequence[tuple[str, str]], args: argparse.Namespace, **settings: Any
) -> None:
    """Train the heads, answer the chats with all of them, and write the record.

    Args:
        pairs: kinds (a, b) whose difference b - a is reported.
    """
    before = machine()
    trainings = {head.name: train(head, args.work / "heads" / head.name, args) for head in heads}
    llm = eyas.load(args.target, method="vanilla")
    drafters = {}
    for head in heads:
        for shape, options in shapes.items():
            made = drafter(llm.target, head.method, options, args.work / "heads" / head.name)
            drafters[f"{head.name} {shape}"] = made.chain(5) if options is None else made
    prompts = chat_prompts(args.chats, args.limit)
    answers = ask(llm, drafters, prompts, args.work.resolve() / "answers.json", max_new_tokens=args.max_new_tokens)
    looping = answers.loops()
    answers = answers.without(looping)

    def of(kind: str, shape: str) -> Answers:
        return Answers(a for head in heads if head.kind == kind for a in answers.of(f"{head.name} {shape}"))

    record = {
        "caption": caption(llm.target.name, heads, trainings, len(prompts) - len(looping)),
        "settings": settings,
        "chats": {"file": args.chats.name, "answered": len(prompts) - len(looping), "loops": len(looping)},
        "kinds": {
            kind: figures({shape: of(kind, shape) for shape in shapes}, answers.of("vanilla"))
            for kind in dict.fromkeys(head.kind for head in heads)
        },
        "differences": {
            f"{b} - {a}": {"tau": {shape: of(b, shape).tau_difference(of(a, shape)) for shape in shapes}}
            for a, b in pairs
        },
        "heads": [described(head, trainings[head.name], answers, shapes) for head in heads],
    }
    write(args.output, record, before)


def caption(target: str, heads: Sequence[Head], trainings: Mapping[str, Any], chats: int) -> str:
    """Name the heads that were compared, in one line."""
    tokens = sorted({record["tokens"] for record in trainings.values()})
    span = " to ".join(f"{n:,}" for n in dict.fromkeys((tokens[0], tokens[-1])))
    seeds = len({head.seed for head in heads})
    return f"{target}; {span} tokens per head, {seeds} seeds; {chats} held-out chats, T = 0; 95 %, bootstrap over chats"


def described(head: Head, training: Mapping[str, Any], answers: Answers, shapes: Shapes) -> dict[str, Any]:
    """A head, its training, and whether its texts are plain decoding's."""
    return {
        **{key: getattr(head, key) for key in ("name", "kind", "method", "flags", "lr", "seed")},
        **{key: training.get(key) for key in ("step", "tokens", "seconds")},
        "heldout": training["losses"][-1] if training.get("losses") else None,
        "equal_to_plain": {shape: answers.equal_texts(f"{head.name} {shape}") for shape in shapes},
    }


def figures(by_shape: Mapping[str, Answers], vanilla: Answers) -> dict[str, Any]:
    """tau, n-alpha and speed-up of the heads of one kind together."""
    out: dict[str, Any] = {"tau": {shape: ours.tau() for shape, ours in by_shape.items()}}
    if "chain" in by_shape:
        out["n-alpha"] = by_shape["chain"].alphas()
    out["speedup"] = {
        shape: interval(ratio_of_ratios, *tokens_and_seconds(ours), *tokens_and_seconds(vanilla))
        for shape, ours in by_shape.items()
    }
    return out


def tokens_and_seconds(answers: Answers) -> list[list[float]]:
    """Whole answers' tokens and seconds of each prompt."""
    return answers.sums(lambda a: len(a.token_ids), lambda a: a.seconds)


def shapes_of(args: argparse.Namespace, *names: str) -> Shapes:
    """The chain, the tree and the fast tree, by name."""
    known: Shapes = {"chain": None, "tree": tree_of(args.tree), "fast tree": tree_of(args.fast_tree)}
    return {name: known[name] for name in names}
