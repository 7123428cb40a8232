"""Train heads for a comparison by `eyas train`, and compare them by `eyas.bench`: ablation.py,
scaling.py, data_source.py, bench_heads.py.

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

from _common import (
    alpha_intervals,
    ask,
    chat_prompts,
    drafter,
    equal_texts,
    interval,
    loops,
    machine,
    select,
    tau_difference,
    tau_interval,
    tree_of,
    write,
)

import eyas
from eyas.bench.record import Answer
from eyas.bench.rows import by_prompt
from eyas.errors import EyasError
from eyas.metrics import ratio_of_ratios

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
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", nargs="+", required=True, metavar="FILE", help="chats (JSONL, .gz too) to train on")
    made.add_argument(
        "--chats",
        type=Path,
        required=True,
        metavar="FILE",
        help="held-out chats: the last user turn of each is answered",
    )
    made.add_argument("--target", help="default: the embedded model")
    made.add_argument("--output", type=Path, default=Path(f"docs/results/{name}.json"), help="default: %(default)s")
    made.add_argument("--work", type=Path, default=Path(f"out/{name}"), help="heads and answers (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=tokens, help="that each head is trained on (default: %(default)s)")
    made.add_argument("--seeds", type=int, default=seeds, help="heads of each kind (default: %(default)s)")
    made.add_argument("--limit", type=int, default=150, help="chats that are answered (default: %(default)s)")
    made.add_argument("--max-new-tokens", type=int, default=96, help="of an answer (default: %(default)s)")
    made.add_argument("--tree", default="26/5/4", help="nodes/depth/branch of the dynamic tree (default: %(default)s)")
    made.add_argument("--fast-tree", default="5/3/2", help="nodes/depth/branch of a small tree (default: %(default)s)")
    made.add_argument("--ttt", type=int, default=5, help="steps of EAGLE-3's training-time test (default: %(default)s)")
    made.add_argument(
        "--draft-vocab", type=int, default=4096, help="tokens that EAGLE-3 can draft (default: %(default)s)"
    )
    made.add_argument("--batch-tokens", type=int, default=2048, help="of a step (default: %(default)s)")
    made.add_argument("--max-length", type=int, default=512, help="tokens of an example (default: %(default)s)")
    made.add_argument("--heldout-tokens", type=int, default=15_000, help="of the held-out loss (default: %(default)s)")
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
    numbers = {"tokens": head.tokens, "lr": head.lr, "seed": head.seed, "batch-tokens": args.batch_tokens}
    numbers |= {
        "max-length": args.max_length,
        "heldout-tokens": args.heldout_tokens,
        "heldout": 0.05,
        "save-every": 20,
        "eval-every": 0,
    }
    line += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
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
    looping = loops(answers)
    answers = [a for a in answers if a.prompt not in looping]

    def of(kind: str, shape: str) -> list[Answer]:
        return [a for head in heads if head.kind == kind for a in select(answers, f"{head.name} {shape}")]

    kinds = {
        kind: figures(kind, shapes, of, select(answers, "vanilla"))
        for kind in dict.fromkeys(head.kind for head in heads)
    }
    differences = {
        f"{b} - {a}": {"tau": {shape: tau_difference(of(b, shape), of(a, shape)) for shape in shapes}} for a, b in pairs
    }
    tokens = sorted({record["tokens"] for record in trainings.values()})
    caption = (
        f"{llm.target.name}; {' to '.join(f'{n:,}' for n in dict.fromkeys((tokens[0], tokens[-1])))} tokens per head, "
        f"{len({head.seed for head in heads})} seeds; {len(prompts) - len(looping)} held-out chats, T = 0; 95 %, bootstrap over chats"
    )
    described = [
        {
            **{key: getattr(head, key) for key in ("name", "kind", "method", "flags", "lr", "seed")},
            **{key: trainings[head.name].get(key) for key in ("step", "tokens", "seconds")},
            "heldout": trainings[head.name]["losses"][-1] if trainings[head.name].get("losses") else None,
            "equal_to_plain": {shape: equal_texts(answers, f"{head.name} {shape}") for shape in shapes},
        }
        for head in heads
    ]
    chats = {"file": args.chats.name, "answered": len(prompts) - len(looping), "loops": len(looping)}
    record = {
        "caption": caption,
        "settings": settings,
        "chats": chats,
        "kinds": kinds,
        "differences": differences,
        "heads": described,
    }
    write(args.output, record, before)


def figures(kind: str, shapes: Shapes, of: Any, vanilla: Sequence[Answer]) -> dict[str, Any]:
    """tau, n-alpha and speed-up of the heads of one kind together."""
    out: dict[str, Any] = {"tau": {shape: tau_interval(of(kind, shape)) for shape in shapes}}
    if "chain" in shapes:
        out["n-alpha"] = alpha_intervals(of(kind, "chain"))
    out["speedup"] = {
        shape: interval(ratio_of_ratios, *speed_columns(of(kind, shape)), *speed_columns(vanilla)) for shape in shapes
    }
    return out


def speed_columns(answers: Sequence[Answer]) -> list[list[float]]:
    """(tokens, seconds) of each prompt, whole answers."""
    turns = by_prompt(answers).values()
    return [
        [sum(len(a.token_ids) for a in group) for group in turns],
        [sum(a.seconds for a in group) for group in turns],
    ]


def shapes_of(args: argparse.Namespace, *names: str) -> Shapes:
    """The chain, the tree and the fast tree, by name."""
    known: Shapes = {"chain": None, "tree": tree_of(args.tree), "fast tree": tree_of(args.fast_tree)}
    return {name: known[name] for name in names}
