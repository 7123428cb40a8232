"""What the experiments share that train heads and compare them: ablation.py, scaling.py, data_source.py.

    chats --> features on disk, once --> heads, one after the other --> answers of held-out chats --> JSON and plot

All of it goes on where it was stopped: features shard by shard, a head from its saved state (to the same bits on a CPU), answers chat by
chat. After each head the JSON and the plot are written anew; they say what is still missing.

Intervals: 95 %, bootstrap over chats, seeded; the same resampled chats for all heads, so that differences are paired. They do not cover
what another seed of the training would give: for that every seed stands by itself too.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _command import machine
from rich.progress import track
from torch import Tensor

import eyas
from eyas import checkpoints
from eyas.api import LLM
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder
from eyas.drafters import Drafter, find
from eyas.errors import EyasError
from eyas.train.alpha import acceptance_by_depth
from eyas.train.data import Batches, Data, Example, Examples, Report, data_hash, read
from eyas.train.features import layers_for_training, write_features
from eyas.train.loop import TrainConfig, train
from eyas.train.progress import bar
from eyas.train.record import versions
from eyas.train.state import write_text
from eyas.train.store import MANIFEST_FILE, FeatureSettings, FeatureStore, StoredExamples, plan_store, tokenizer_identity

CHAIN = 5  # draft tokens: n-alpha for n = 0..4
DRAWS = 4000
DEFAULT_LR = 2e-3
Options = dict[str, Any]


# --- the command -----------------------------------------------------------------------------------------------------------------------


def parser(about: str, name: str, tokens: int | None, seeds: int) -> argparse.ArgumentParser:
    """Flags of every experiment."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="chats (JSONL, .gz too) to train on")
    made.add_argument("--chats", type=Path, required=True, metavar="FILE", help="held-out chats: the last user turn of each is answered")
    made.add_argument("--target", help="default: the embedded model")
    made.add_argument("--output", type=Path, default=Path(f"docs/results/{name}.json"), help="and the plot beside it (%(default)s)")
    made.add_argument("--features", type=Path, metavar="FOLDER", help="what an experiment left in its work folder: taken as it is")
    made.add_argument("--work", type=Path, default=Path(f"out/{name}"), help="features, heads, answers (default: %(default)s)")
    if tokens is not None:
        made.add_argument("--tokens", type=int, default=tokens, help="that each head is trained on (default: %(default)s)")
    made.add_argument("--seeds", type=int, default=seeds, help="how many heads of each kind (default: %(default)s)")
    made.add_argument("--limit", type=int, default=150, help="chats that are answered, loops not counted (default: %(default)s)")
    made.add_argument("--max-new-tokens", type=int, default=96, help="of an answer (default: %(default)s)")
    made.add_argument("--tree", default="26/5/4", help="nodes/depth/branch of the dynamic tree (default: %(default)s)")
    made.add_argument("--ttt", type=int, default=5, help="EAGLE-3's steps of the training-time test (default: %(default)s)")
    made.add_argument("--draft-vocab", type=int, default=4096, help="tokens that EAGLE-3 can draft, at most (default: %(default)s)")
    made.add_argument("--batch-tokens", type=int, default=2048, help="of a step (default: %(default)s)")
    made.add_argument("--max-length", type=int, default=512, help="tokens of an example (default: %(default)s)")
    made.add_argument("--heldout-tokens", type=int, default=15_000, help="of the held-out loss, about (default: %(default)s)")
    made.add_argument("--evaluations", type=int, default=4, help="of the held-out loss while a head is trained (default: %(default)s)")
    return made


def open_target(args: argparse.Namespace) -> LLM:
    """The target, decoding plainly."""
    llm = eyas.load(args.target, method="vanilla")
    if llm.tokenizer is None:
        raise EyasError(f"{args.target} has no tokenizer: chats cannot be read with it")
    return llm


def tree_options(shape: str) -> Options:
    nodes, depth, branch = (int(part) for part in shape.split("/"))
    return {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch}


@dataclass(frozen=True)
class Head:
    """A head to be trained and measured."""

    kind: str  # heads of one kind differ in their seed
    method: str
    options: Options
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{slug(self.kind)}-seed{self.seed}"

    def init_for_training(self, llm: LLM, counts_V: Tensor) -> Drafter:
        kind = find(self.method)
        return kind.init_for_training(llm.target, build_options(kind.Options, self.options), self.seed, counts_V)


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text).strip("_")


def eagle3_options(args: argparse.Namespace, counts_V: Tensor) -> Options:
    return {"ttt.steps": args.ttt, "head.draft_vocab": min(args.draft_vocab, int((counts_V > 0).sum()))}


# --- data and features -----------------------------------------------------------------------------------------------------------------


def by_hash(examples: Sequence[Example], tokens: int) -> Examples:
    """Examples in an order that their content alone decides, until they hold that many tokens: a smaller choice begins a larger one."""
    keys = [hashlib.sha256(repr(example.ids).encode()).digest() for example in examples]
    chosen, count = Examples(), 0
    for i in sorted(range(len(keys)), key=keys.__getitem__):
        if count >= tokens:
            break
        chosen.append(examples[i])
        count += len(examples[i].ids)
    return chosen


def first(examples: StoredExamples, tokens: int) -> StoredExamples:
    """The first examples, until they hold that many tokens."""
    count = 0
    for end, number in enumerate(examples.numbers):
        if count >= tokens:
            return StoredExamples(examples.store, examples.numbers[:end])
        count += examples.store.lengths[number]
    return examples


def tokens_of(examples: Sequence[Example]) -> int:
    return sum(len(e.ids) for e in examples)


def layers_of(llm: LLM, heads: Iterable[tuple[str, Options]]) -> tuple[int, ...]:
    """What the losses of these methods, with these options, read of the target."""
    kinds = [(find(method), options) for method, options in heads]
    return layers_for_training(llm.target, [(kind, build_options(kind.Options, options)) for kind, options in kinds])


def features(
    llm: LLM, folder: Path, files: Sequence[Path], layers: Sequence[int], args: argparse.Namespace, tokens: int,
    choose: Callable[[], tuple[Examples, Examples]] | None = None,
) -> Data:  # fmt: skip
    """Examples with the target's features beside them, in the folder; made once.

    Args:
        choose: (train, held out), asked when they are wanted; else they are the first of the files' examples by hash.
    """

    if args.features:
        return _given(llm, args.features, layers, tokens)

    def from_files() -> tuple[Examples, Examples]:
        data = read(files, llm.tokenizer, max_length=settings.max_length, heldout=settings.heldout)
        return by_hash(data.train, tokens), by_hash(data.heldout, args.heldout_tokens)

    settings = FeatureSettings(
        target={"name": llm.target.name, "fingerprint": llm.target.fingerprint(), "dtype": str(llm.target.dtype).removeprefix("torch.")},
        tokenizer=tokenizer_identity(llm.tokenizer), layers=tuple(layers), hidden_size=llm.target.hidden_size, dtype="bfloat16",
        data={
            "files": [{"name": path.name, "sha256": data_hash(path)} for path in files], "sha256": data_hash(files),
            "tokens": tokens, "heldout_tokens": args.heldout_tokens,
        },
        max_length=min(args.max_length, llm.target.context), heldout=0.05, shard_bytes=256 * 2**20,
    )  # fmt: skip
    if not (folder / MANIFEST_FILE).exists():
        sides = (choose or from_files)()
        folder.mkdir(parents=True, exist_ok=True)
        plan_store(settings, Data(*sides, report_of(sides), settings.data["sha256"]), versions()).write(folder)
    store = FeatureStore(folder)
    other = store.settings.differences(settings, llm.target.is_named)
    other += ["other numbers of tokens"] if store.settings.data != settings.data else []
    if other:
        raise EyasError(f"{folder} holds features of other settings ({'; '.join(other)}): remove it, or choose another --work")
    for shard in track(store.missing(), description="features", disable=not store.missing()):
        write_features(store, llm.target, [shard], 8192)
    store.finish()
    return store.data()


def _given(llm: LLM, folder: Path, layers: Sequence[int], tokens: int) -> Data:
    """The first of the examples of a finished store, in its own order."""
    store = FeatureStore(folder)
    if not llm.target.is_named(store.settings.target["fingerprint"]) or not set(layers) <= set(store.settings.layers):
        raise EyasError(f"{folder} holds features of another target, or lacks one of the layers {', '.join(map(str, layers))}")
    data = store.data()
    return Data(first(data.train, tokens), data.heldout, data.report, data.sha256)


def report_of(sides: tuple[Examples, Examples]) -> Report:
    every = [e for side in sides for e in side]
    return Report(lines=len(every), examples=len(every), tokens=tokens_of(every), counted_tokens=sum(sum(e.counted) for e in every))


# --- training --------------------------------------------------------------------------------------------------------------------------


def steps_for(tokens: int, examples: Sequence[Example], args: argparse.Namespace, seed: int) -> int:
    """Steps in which about that many tokens are read."""
    config = TrainConfig(tokens=tokens, batch_tokens=args.batch_tokens, max_length=args.max_length)
    return config.total_steps(Batches(examples, args.batch_tokens, seed))


def train_head(llm: LLM, head: Head, data: Data, steps: int, counts_V: Tensor, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The head in the folder: trained, trained further, or already there; and what is to be said about its training."""
    config = TrainConfig(
        lr=head.lr, steps=steps, batch_tokens=args.batch_tokens, max_length=args.max_length, heldout=0.05,
        heldout_tokens=args.heldout_tokens, seed=head.seed, eval_every=-(-steps // args.evaluations), save_every=20,
    )  # fmt: skip
    print(f"-- {folder.relative_to(args.work)}: {head.method}, lr {head.lr:g}, {steps} steps", file=sys.stderr, flush=True)
    drafter = head.init_for_training(llm, counts_V)
    with bar() as show:
        done = train(drafter, data.train, data.heldout, config, folder, progress=show)
    if done.interrupted:
        raise KeyboardInterrupt
    assert drafter.net is not None
    return {
        "kind": head.kind, "seed": head.seed, "method": head.method, "options": head.options, "lr": head.lr, "steps": done.steps,
        "tokens": done.tokens, "data_tokens": tokens_of(data.train), "epochs": round(done.tokens / tokens_of(data.train), 2),
        "best_step": done.best_step, "heldout": {name: round(value, 4) for name, value in done.heldout.items()},
        "training_minutes": round(done.seconds / 60, 2), "parameters": sum(p.numel() for p in drafter.net.parameters()),
    }  # fmt: skip


# --- answers ---------------------------------------------------------------------------------------------------------------------------


class Lines:
    """A JSONL file that is gone on with. Its first line says what it is of; a file of something else is begun anew."""

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        self.path, found = path, []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:  # the end of a run that was killed
                break
        self.rows: list[Any] = found[1:] if found and found[0] == what else []
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row) + "\n" for row in (what, *self.rows)))

    def add(self, row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a") as f:
            print(json.dumps(row), file=f)


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """Each chat up to its last user turn."""
    found = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as f:
        for line in f:
            record = json.loads(line)
            turns = record.get("messages", record.get("conversations"))
            last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
            found += [] if last is None else [turns[: last + 1]]
    return found


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of n-grams that occurred before in the same answer."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class Exam:
    """Held-out chats, answered greedily: by plain decoding once, and by every head in some shapes.

    Answers in which more than 20 % of the 8-grams repeat are left out (loops flatter every method), and those of a single token.
    """

    def __init__(self, llm: LLM, args: argparse.Namespace, shapes: Mapping[str, Options | None], beside: bool) -> None:
        """
        Args:
            shapes: name -> tree options; None: the chain.
            beside: answer by plain decoding beside each head again, for the speed-up; the order changes from chat to chat.
        """
        self.llm, self.args, self.shapes, self.beside = llm, args, dict(shapes), beside
        chats = read_chats(args.chats)
        self.what = {"target": llm.target.fingerprint(), "chats": data_hash(args.chats), "max_new_tokens": args.max_new_tokens}
        plain = Lines(args.work / "plain.jsonl", self.what)
        self.chats: dict[int, list[dict[str, str]]] = {}
        self.plain: dict[int, list[int]] = {}
        self.loops = 0
        for i, chat in enumerate(track(chats, description="plain answers")):
            if len(self.chats) == args.limit:
                break
            if i == len(plain.rows):
                plain.add(self.answer(llm.drafter, chat)[1])
            tokens = plain.rows[i]
            loop = repeated_share(tokens) > 0.2
            self.loops += loop
            if len(tokens) > 1 and not loop:
                self.chats[i], self.plain[i] = chat, tokens

    def answer(self, drafter: Drafter, chat: list[dict[str, str]]) -> tuple[dict[str, Any], list[int]]:
        request, _ = self.llm.request(chat, max_new_tokens=self.args.max_new_tokens)
        began, decoder, steps = time.perf_counter(), Decoder(self.llm.target, drafter), []
        decoder.add(request)
        while not decoder.finished:
            steps += decoder.step()
        cycles = [s for s in steps if not s.prefill]
        counts = {
            "emitted": sum(len(s.tokens) for s in cycles), "cycles": len(cycles), "by_depth": acceptance_by_depth(cycles, CHAIN),
            "seconds": round(time.perf_counter() - began, 5), "decoding_seconds": round(sum(s.seconds for s in cycles), 5),
        }  # fmt: skip
        return counts, [t for s in steps for t in s.tokens]

    def drafters(self, method: str, folder: Path) -> dict[str, Drafter]:
        kind, weights, found = find(method), checkpoints.load(str(folder)), dict[str, Drafter]()
        for name, options in self.shapes.items():
            loaded = kind.load(weights, self.llm.target, build_options(kind.Options, options or {}))
            found[name] = loaded.chain(CHAIN) if options is None else loaded
        return {**({"vanilla": self.llm.drafter} if self.beside else {}), **found}

    def take(self, head: Head, folder: Path) -> list[dict[str, Any]]:
        """What the head does with every chat: a row each."""
        what = {**self.what, "head": data_hash(folder / "model.safetensors"), "shapes": self.shapes, "beside": self.beside}
        lines, drafters = Lines(folder / "answers.jsonl", what), self.drafters(head.method, folder)
        names, todo = list(drafters), list(self.chats)[len(lines.rows) :]
        for number, i in enumerate(track(todo, description=f"answers of {head.name}", disable=not todo), start=len(lines.rows)):
            row: dict[str, Any] = {"chat": i}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                row[name], tokens = self.answer(drafters[name], self.chats[i])
                row[name]["equal"] = tokens == self.plain[i]
            lines.add(row)
        return lines.rows[: len(self.chats)]


# --- figures ---------------------------------------------------------------------------------------------------------------------------


class Resampled:
    """Ratios of sums over chats, with their intervals: [value, low, high]; None where nothing was counted."""

    def __init__(self, chats: int, seed: int = 0) -> None:
        self.weight_SC = np.random.default_rng(seed).multinomial(chats, np.full(chats, 1 / chats), DRAWS)

    def ratio(self, above_C: np.ndarray, below_C: np.ndarray) -> list[float | None]:
        return _interval(*self._both(above_C, below_C))

    def difference(self, a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> list[float | None]:
        """Ratio of b minus that of a, paired by chat."""
        (value_a, drawn_a), (value_b, drawn_b) = self._both(*a), self._both(*b)
        return _interval(value_b - value_a, drawn_b - drawn_a)

    def quotient(self, a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> list[float | None]:
        """Ratio of b over that of a, paired by chat: a speed-up."""
        (value_a, drawn_a), (value_b, drawn_b) = self._both(*a), self._both(*b)
        return _interval(value_b / value_a, drawn_b / drawn_a)

    def _both(self, above_C: np.ndarray, below_C: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return above_C.sum() / np.float64(below_C.sum()), (self.weight_SC @ above_C) / (self.weight_SC @ below_C)


def _interval(value: float, drawn_S: np.ndarray) -> list[float | None]:
    good = drawn_S[np.isfinite(drawn_S)]
    if not len(good) or not np.isfinite(value):
        return [None, None, None]
    return [round(float(x), 4) for x in (value, *np.percentile(good, [2.5, 97.5]))]


def pooled(answers: Sequence[list[dict[str, Any]]], shape: str, key: str) -> np.ndarray:
    """By chat, summed over heads."""
    return np.sum([[row[shape][key] for row in rows] for rows in answers], axis=0).astype(float)


def tau_counts(answers: Sequence[list[dict[str, Any]]], shape: str) -> tuple[np.ndarray, np.ndarray]:
    return pooled(answers, shape, "emitted"), pooled(answers, shape, "cycles")


def alpha_counts(answers: Sequence[list[dict[str, Any]]], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, reached) of the (n+1)-th token of a chain."""
    reached_accepted = pooled(answers, "chain", "by_depth")
    return reached_accepted[:, n, 1], reached_accepted[:, n, 0]


def speed_counts(answers: Sequence[list[dict[str, Any]]], shape: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, seconds): tokens of an answer are the same for all."""
    return pooled(answers, "vanilla", "emitted") + (key == "seconds") * len(answers), pooled(answers, shape, key)


def figures_of(exam: Exam, draw: Resampled, answers: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of heads of one kind, their answers taken together."""
    found: dict[str, Any] = {"tau": {shape: draw.ratio(*tau_counts(answers, shape)) for shape in exam.shapes}}
    if "chain" in exam.shapes:
        found["n-alpha"] = [draw.ratio(*alpha_counts(answers, n)) for n in range(CHAIN)]
    for key, name in (("seconds", "speedup"), ("decoding_seconds", "speedup_without_the_prompts_pass")) if exam.beside else ():
        base = speed_counts(answers, "vanilla", key)
        found[name] = {shape: draw.quotient(base, speed_counts(answers, shape, key)) for shape in exam.shapes}
    return found


def differences_of(
    exam: Exam, draw: Resampled, a: Sequence[list[dict[str, Any]]], b: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:  # fmt: skip
    """Of b to a, paired by chat."""
    found: dict[str, Any] = {"tau": {s: draw.difference(tau_counts(a, s), tau_counts(b, s)) for s in exam.shapes}}
    if "chain" in exam.shapes:
        found["n-alpha"] = [draw.difference(alpha_counts(a, n), alpha_counts(b, n)) for n in range(CHAIN)]
    return found


@dataclass
class Results:
    """Heads that are done, and what is written about them."""

    exam: Exam
    planned: int
    settings: dict[str, Any]
    heads: list[dict[str, Any]]
    answers: dict[str, list[list[dict[str, Any]]]]  # by kind, a list for each seed

    @classmethod
    def begin(cls, exam: Exam, planned: int, **settings: Any) -> Results:
        return cls(exam, planned, settings, [], {})

    def add(self, head: Head, about: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        equal = sum(all(row[shape]["equal"] for shape in self.exam.shapes) for row in answers)
        self.heads.append({"name": head.name, **about, "equal_to_plain": f"{equal} of {len(answers)}"})
        self.answers.setdefault(head.kind, []).append(answers)

    @property
    def complete(self) -> bool:
        return len(self.heads) == self.planned

    @property
    def caption(self) -> str:
        exam, tokens = self.exam, sorted({head["tokens"] for head in self.heads})
        read = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        seeds = max(len(found) for found in self.answers.values())
        said = f"{exam.llm.target.name}; {read} tokens per head, {seeds} seed{'s' * (seeds > 1)}; {len(exam.chats)} held-out chats, T = 0"
        part = "" if self.complete else f"\nPARTIAL: {len(self.heads)} of {self.planned} heads are trained"
        return f"{said}; 95 % bootstrap over chats{part}"

    def write(self, pairs: Sequence[tuple[str, str]], draw_plot: Callable[[Any, dict[str, Any]], None]) -> None:
        """The JSON and the plot. `pairs`: kinds (a, b) whose difference, b - a, is wanted."""
        exam, draw = self.exam, Resampled(len(self.exam.chats))
        kinds = {
            kind: {**figures_of(exam, draw, found), "by_seed": [figures_of(exam, draw, [one]) for one in found]}
            for kind, found in self.answers.items()
        }
        between = {
            f"{b} - {a}": differences_of(exam, draw, self.answers[a], self.answers[b])
            for a, b in pairs
            if len(self.answers.get(a, ())) == len(self.answers.get(b, ())) > 0
        }
        result = {
            "command": shlex.join(["python", f"runs/{Path(sys.argv[0]).name}", *sys.argv[1:]]), "complete": self.complete,
            "heads_trained": f"{len(self.heads)} of {self.planned}", "caption": self.caption,
            "machine": machine(), "versions": versions(), "settings": self.settings,
            "chats": {"file": exam.args.chats.name, "sha256": self.exam.what["chats"], "answered": len(exam.chats), "loops": exam.loops},
            "intervals": f"[value, low, high]: 95 %, bootstrap over chats ({DRAWS} draws, seed 0), seeds pooled; differences paired",
            "kinds": kinds, "differences": between, "heads": self.heads,
        }  # fmt: skip
        text = re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(result, indent=1))
        text = text[:-2] + ',\n "per_chat": ' + self._per_chat() + "\n}\n"
        assert json.loads(text).items() >= json.loads(json.dumps(result)).items()
        exam.args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(exam.args.output, text)
        plot(exam.args.output.with_suffix(".svg"), result, draw_plot)

    def _per_chat(self) -> str:
        """Raw counts, from which every interval can be found again; a line for each head and shape."""
        timed = ("seconds", "decoding_seconds") if self.exam.beside else ()
        columns, lines = ("chat", "emitted", "cycles", *timed), []
        every = [*(("vanilla",) if self.exam.beside else ()), *self.exam.shapes]
        counter = {kind: iter(found) for kind, found in self.answers.items()}
        for head in self.heads:
            rows = next(counter[head["kind"]])
            for shape in every:
                table = [[row["chat"], *(row[shape][k] for k in columns[1:])] for row in rows]
                if shape == "chain":
                    table = [[*flat, *(n for pair in row[shape]["by_depth"] for n in pair)] for flat, row in zip(table, rows, strict=True)]
                lines.append(f"  {json.dumps(head['name'] + ' ' + shape)}: {json.dumps(table, separators=(',', ':'))}")
        said = [*columns, "in a chain, for each depth: reached, accepted"]
        return "{\n" + ",\n".join([f'  "columns": {json.dumps(said)}', *lines]) + "\n }"


def plot(path: Path, result: dict[str, Any], draw_plot: Callable[[Any, dict[str, Any]], None]) -> None:
    """An SVG that is the same for the same figures."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        figures = path.with_suffix(".json")
        print(f"no plot: matplotlib is missing (pip install -e '.[dev]'); the figures are in {figures}", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "eyas", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        draw_plot(figure, result)
        figure.supxlabel(result["caption"], fontsize=7.5, color="0.25" if result["complete"] else "tab:red")
        figure.savefig(path, metadata={"Date": None})


def line(axes: Any, x: Sequence[float], intervals: Sequence[Sequence[float | None]], label: str, **style: Any) -> None:
    """Points with their intervals, joined."""
    known = [(at, *interval) for at, interval in zip(x, intervals, strict=True) if interval[0] is not None]
    if known:
        at, value, low, high = (np.array(column, float) for column in zip(*known, strict=True))
        reach = np.maximum(0, [value - low, high - value])
        axes.errorbar(at, value, reach, marker="o", markersize=4, capsize=2, linewidth=1.2, label=label, **style)
