"""Tables of docs/lab/papers.md from the benches of runs/papers.sh, each beside the published one.

    python runs/papers.py                                                        from the records in docs/results
    python runs/papers.py --benches out/papers --heads tiny/eyas_tiny/weights --heads out/heads --output docs/lab/papers.md

Published figures are the papers' own (arXiv 2401.15077, 2406.16858, 2503.01840) and Spec-Bench's
leaderboard of 2025-04-22. Benches that are not there are left out and named at the end. This
program measures nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import parser, run
from _markdown import blocks, cell, columns, prose, table
from safetensors.torch import load_file

from eyas import tiny
from eyas.errors import InputError
from eyas.files import from_int8, write_text
from eyas_lab.bench.report import read_summary

Row = Mapping[str, Any]

# What contestants of runs/papers.sh are called in a table; the longest beginning counts.
NAMES = {
    "vanilla": "vanilla",
    "transformers": "transformers generate",
    "transformers_prompt_lookup": "transformers, prompt lookup",
    "transformers_assisted": "transformers, assisted",
    "small_model": "speculative sampling (small_model), chain",
    "prompt_lookup": "PLD",
    "suffix": "suffix",
    "lookahead": "Lookahead",
    "self_speculative": "self-speculative, chain",
    "rest": "REST",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "hydra:head=hydra++": "Hydra++",
    "eagle1:tree.choices=chain": "EAGLE-1, chain",
    "eagle1:tree.choices=reference": "EAGLE-1",
    "eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    **{f"eagle1:head=eagle1-{inputs}": f"EAGLE-1 net on {words}" for inputs, words in (
        ("shifted", "feature & shifted token"), ("unshifted", "feature & unshifted token"), ("feature", "feature"), ("token", "token"),
    )},
}  # fmt: skip

# Speed-up and tau over EAGLE-2's six tasks, T = 0, Vicuna-7B on one RTX 3090 (EAGLE-2, table 1);
# EAGLE-3: LLaMA-3.1-8B, five tasks.
SIX_TASKS = {
    "speculative sampling (small_model), chain": (1.76, 2.34), "PLD": (1.70, 1.84), "Medusa": (1.76, 2.40), "Lookahead": (1.58, 1.69),
    "Hydra": (2.55, 3.37), "EAGLE-1": (2.78, 3.79), "EAGLE-2": (3.39, 4.68), "EAGLE-3": (4.44, 6.23),
}  # fmt: skip
# The same at T = 1 (EAGLE-2, table 2; EAGLE-3, LLaMA-3.1-8B).
SIX_SAMPLED = {"EAGLE-2": (2.94, 4.20), "EAGLE-3": (3.45, 4.92)}
# Speed-ups on Spec-Bench, Vicuna-7B on one RTX 3090: MT-bench, translation, summarising, QA,
# mathematics, RAG; tokens per cycle over all.
SPEC_BENCH = {
    "speculative sampling (small_model), chain": (None,) * 6 + (2.28,), "PLD": (1.64, 1.15, 2.46, 1.28, 1.72, 1.71, 1.73),
    "Medusa": (None,) * 6 + (2.32,), "Lookahead": (None,) * 6 + (1.64,), "REST": (None,) * 6 + (1.63,), "Hydra": (None,) * 6 + (3.26,),
    "EAGLE-1": (2.31, 1.72, 2.00, 1.91, 2.38, 1.75, 3.57), "EAGLE-2": (2.56, 1.78, 2.09, 2.07, 2.66, 1.86, 4.35),
}  # fmt: skip
# n-alpha of EAGLE-1's chain and tau of its tree on MT-bench, Vicuna-7B (EAGLE-1, table 1), by temperature.
ALPHA = {0.0: ((0.79, 0.74, 0.72, 0.73, 0.67), 3.94), 1.0: ((0.71, 0.68, 0.66, 0.66, 0.65), 3.17)}


def method_name(method: str) -> str:
    """The contestant's name in a table."""
    known = [start for start in NAMES if method == start or method.startswith((f"{start}:", f"{start}-"))]
    if method.startswith("eagle1:") and method.endswith("optimal.json"):
        return "EAGLE-1, Sequoia's tree"
    name = NAMES[max(known, key=len)] if known else method
    return name + " with suffix" * method.endswith(":draft_with=suffix")


@dataclass(frozen=True)
class Bench:
    """A summary, asked by temperature and task."""

    name: str
    summary: Mapping[str, Any]

    def rows(self, temperature: float, task: str = "all") -> dict[str, Row]:
        """Name in a table -> row; in the order of the bench."""
        chosen = [row for row in self.summary["rows"] if (row["temperature"], row["task"]) == (temperature, task)]
        named = [{**row, "name": method_name(row["method"])} for row in chosen]
        return {row["name"]: row for row in named}

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(row["temperature"] for row in self.summary["rows"]))

    @property
    def tasks(self) -> list[str]:
        return [task for task in dict.fromkeys(row["task"] for row in self.summary["rows"]) if task != "all"]

    def alpha(self, temperature: float) -> dict[str, Sequence[float | None]]:
        """n-alpha of the methods that were looked at in a chain."""
        alphas, end, several = {}, f", T = {temperature:g}", len(self.temperatures) > 1
        for key, probe in self.summary["probes"].items():
            if probe["n_alpha"] and key.endswith(end) == several:
                alphas[method_name(key.removesuffix(end))] = probe["n_alpha"]
        return alphas


def equal_texts(row: Row) -> str:
    """Whether the texts are plain decoding's."""
    return {True: "yes", None: "not compared"}.get(row["equal"], f"{len(row['differ'])} not")


def whole(bench: Bench, temperature: float, published: Mapping[str, tuple[float, float]] | None) -> str:
    """All methods over all prompts."""
    makers: dict[str, Callable[[Row], str]] = {
        "tokens/s": lambda row: cell(row["tokens_per_second"], 1),
        "speed-up over vanilla": lambda row: cell([row[f"speedup{end}"] for end in ("", "_low", "_high")]),
        "over generate": lambda row: cell(row["speedup_vs_transformers"]),
        "tau": lambda row: cell(row["tau_interval"] or row["tau"]),
        "c": lambda row: cell(row["c"]),
        "equal texts": equal_texts,
    }
    if published is not None:
        theirs = {name: f"{speedup:.2f}x, {tau:.2f}" for name, (speedup, tau) in published.items()}
        makers["published: speed-up, tau"] = lambda row: theirs.get(row["name"], "")
    return columns(bench.rows(temperature), makers)


def by_task(bench: Bench, temperature: float, published: Mapping[str, Sequence[float | None]] | None) -> str:
    """Speed-up and tau of every method on every task."""
    by_name = {task: bench.rows(temperature, task) for task in bench.tasks}

    def figures(row: Row | None) -> str:
        return f"{cell(row['speedup'])}x {cell(row['tau'])}" if row else ""

    makers: dict[str, Callable[[Row], str]] = {
        task.split("/")[-1]: lambda row, rows=rows: figures(rows.get(row["name"])) for task, rows in by_name.items()
    }
    if published is not None:
        theirs = {
            name: " ".join(cell(speedup) or "-" for speedup in speedups) + f"; {cell(tau)}"
            for name, (*speedups, tau) in published.items()
        }
        makers["published: speed-ups; tau"] = lambda row: theirs.get(row["name"], "")
    return columns(bench.rows(temperature), makers)


def alphas(bench: Bench, published: bool) -> str:
    """n-alpha and tau at every temperature."""
    lines = []
    for temperature in bench.temperatures:
        rows, told = bench.rows(temperature), list[Sequence[float | None]]()
        for name, rates in bench.alpha(temperature).items():
            if rates not in told:  # heads that several methods share have one chain
                told.append(rates)
                tau = rows[name]["tau"] if name in rows else None
                lines.append([f"T = {temperature:g}, {name}", *map(cell, [tau, *rates, *[None] * 5][:6])])
        if published and temperature in ALPHA:
            rates, tau = ALPHA[temperature]
            name = "published (EAGLE-1, Vicuna-7B, MT-bench)"
            lines.append([f"T = {temperature:g}, {name}", *map(cell, (tau, *rates))])
    return table(["", "tau", "0-alpha", "1-alpha", "2-alpha", "3-alpha", "4-alpha"], lines)


def machine(bench: Bench) -> str:
    """Where and how long a bench ran."""
    card, threads, dtype = bench.summary["machine"], *(bench.summary["settings"][key] for key in ("threads", "dtype"))
    return prose(f"""
        {card["cpu"]}, threads: {threads}, {dtype}, {bench.summary["minutes"]:.0f} minutes. n-alpha: chains of five
        on six of the prompts. {" ".join(bench.summary["warnings"])}""")


def relative(text: str) -> str:
    """Paths from the repository's folder on."""
    return re.sub(r"[^\s=:,]*/(out/(?:papers|heads)|data/|models/)", r"\1", text)


PUBLISHED_MEANS = """
    Published: means over the tasks, Vicuna-7B on one RTX 3090, T = 0; EAGLE-3: LLaMA-3.1-8B, five of
    the tasks. Ours: a 28M-parameter model that knows bookings and small talk and is lost on most of
    these questions; its answers loop, which flatters whoever copies."""


@dataclass(frozen=True)
class Section:
    """How a bench is shown."""

    heading: str
    text: str
    published: Mapping[str, tuple[float, float]] | None = None  # means, beside the table over all prompts
    by_task: bool = False
    published_tasks: Mapping[str, Sequence[float | None]] | None = None
    chains: bool = True  # n-alpha
    published_chains: bool = True

    def show(self, bench: Bench) -> Iterator[str]:
        """The section's tables, at every temperature of the bench."""
        yield f"## {self.heading}"
        yield prose(self.text)
        for temperature in bench.temperatures:
            if len(bench.temperatures) > 1:
                yield f"T = {temperature:g}:"
            yield whole(bench, temperature, self.published)
            if self.by_task:
                yield by_task(bench, temperature, self.published_tasks)
        if self.chains:
            yield alphas(bench, self.published_chains)
        yield f"`{relative(bench.summary['command'])}`"
        yield machine(bench)


SECTIONS = {
    "chats": Section(
        "All methods, chats (EAGLE-1 figures 1 and 9, tables 1 and 5; EAGLE-2 table 1)",
        "Held-in chats (the embedded model's home ground), T = 0; every tree has 26 nodes, every chain five draft tokens.",
    ),
    "sampled": Section(
        "Sampling (EAGLE-1 figure 2, table 1; EAGLE-2 table 2)",
        """The same chats at T = 1. Trees that look at the target's noise return plain decoding's own
        ids; what is sampled follows its distribution.""",
    ),
    "six": Section(
        "The six tasks of EAGLE-2 (tables 1 and 2; EAGLE-1 figure 8, table 2)",
        PUBLISHED_MEANS,
        SIX_TASKS,
        by_task=True,
        chains=False,
    ),
    "six_sampled": Section(
        "Sampling on the six tasks (EAGLE-1 table 2; EAGLE-2 table 2)",
        """The six tasks at T = 1. Published: EAGLE-2 with Vicuna-7B and EAGLE-3 with LLaMA-3.1-8B,
        means; EAGLE-1 with Vicuna-7B: HumanEval 2.39x 3.43, GSM8K 2.34x 3.29, Alpaca 2.21x 3.30.""",
        SIX_SAMPLED,
        by_task=True,
        chains=False,
    ),
    "spec_bench": Section(
        "Spec-Bench",
        "Published: Vicuna-7B on one RTX 3090, in the order MT-bench, translation, summarising, QA, mathematics, RAG.",
        by_task=True,
        published_tasks=SPEC_BENCH,
        chains=False,
    ),
    "inputs": Section(
        "What the net reads (EAGLE-1 figures 3, 5 and 10)",
        "Four nets of the same size, each on as many tokens (`make bench-heads`), chains of five.",
        published_chains=False,
    ),
    "nestling": Section(
        "Another target: nestling",
        "The model that the embedded one's training began from, with heads warm-started from the embedded one's.",
    ),
    "nestling_six": Section(
        "nestling on the six tasks of EAGLE-2", PUBLISHED_MEANS, SIX_TASKS, by_task=True, chains=False
    ),
}


INTRODUCTION = prose("""
    Made by `runs/papers.py` from the benches of `runs/papers.sh`; [results](results.md) has the
    summary, [benchmark](../guide/benchmark.md) defines the columns. Intervals: 95 %, bootstrap over prompts,
    paired. EAGLE-2 and EAGLE-3 rank as the papers do (`--tree.confidence-temperature 1`).""")
HEADS_TITLE = "## What the heads are, and what their training took (EAGLE-1, section 4)"
# Trained parameters over the target's (EAGLE-1, section 4.1: 0.24B for 7B, 0.37B for 13B, 0.56B for
# 33B, 0.99B for 70B).
SHARES = "EAGLE-1 for 7B 3.4 %, 13B 2.8 %, 33B 1.7 %, 70B 1.4 %, 1-2 days on four A100 for 70B (68,000 dialogues)"
TRAINED = {
    "eagle1": "EAGLE-1 and EAGLE-2 (shipped)", "eagle3": "EAGLE-3 (shipped; the last of its four stages)",
    "medusa": "Medusa, 4 heads", "hydra": "Hydra, 4 heads", "hydra++": "Hydra++, 4 heads", "small_model": "small model",
    **{f"eagle1-{inputs}": NAMES[f"eagle1:head=eagle1-{inputs}"] for inputs in ("shifted", "unshifted", "feature", "token")},
}  # fmt: skip


def trained(folders: Sequence[Path]) -> str:
    """Sizes and training costs of the heads in every folder in `folders` that holds a training."""
    whole = sum(weight.numel() for weight in tiny.model().parameters())
    heads = {path.name: path for folder in reversed(folders) for path in folder.iterdir()}
    makers: dict[str, Callable[[Row], str]] = {
        "parameters": lambda row: f"{row['parameters'] / 1e6:.2f}M",
        "of the target's": lambda row: f"{100 * row['parameters'] / whole:.1f} %",
        "tokens": lambda row: f"{row['tokens'] / 1e6:.2f}M",
        "steps": lambda row: str(row["steps"]),
        "minutes": lambda row: f"{row['seconds'] / 60:.0f}",
        "tokens/s": lambda row: f"{row['tokens'] / row['seconds']:,.0f}",
        "held-out accuracy": lambda row: cell(row["losses"][-1].get("accuracy")),
        "0-alpha": lambda row: cell(row["losses"][-1].get("0-alpha")),
    }
    rows = {
        title: {**json.loads((heads[name] / "training.json").read_text()), "parameters": parameters(heads[name])}
        for name, title in TRAINED.items()
        if name in heads
    }
    text = prose(f"""
        The target has {whole / 1e6:.1f}M parameters. Published: {SHARES}. A head's own tables of tokens count
        (Medusa's heads have one each), those that it shares with the target do not. On the two
        cores of a CPU, in float32, most of them beside other work.""")
    return f"{text}\n\n{columns(rows, makers)}"


def parameters(folder: Path) -> int:
    """Parameters in a folder's files of weights."""
    files = (from_int8(load_file(file)) for file in folder.glob("*.safetensors"))
    return sum(value.numel() for tensors in files for value in tensors.values() if value.is_floating_point())


def page(folder: Path, heads: Sequence[Path] = (), old: str = "") -> str:
    """docs/lab/papers.md.

    Args:
        folder: of runs/papers.sh, or of the records that were kept of it.
        old: the page so far; without heads their section is taken from it.
    """
    places = {name: (folder / name / "summary.json", folder / f"papers_{name}.json") for name in SECTIONS}
    there = {name: path for name, paths in places.items() for path in paths if path.exists()}
    if not there:
        raise InputError(f"{folder} holds no finished bench of runs/papers.sh")
    parts = ["# The papers at our scale", INTRODUCTION]
    for name, path in there.items():
        parts += SECTIONS[name].show(Bench(name, read_summary(path)))
    if heads:
        parts += [HEADS_TITLE, trained(heads)]
    elif HEADS_TITLE in old:
        parts.append(old[old.index(HEADS_TITLE) :].partition("\nNot run:")[0].rstrip())
    if missing := SECTIONS.keys() - there.keys():
        parts.append(f"Not run: {', '.join(sorted(missing))}.")
    return blocks(parts)


def main() -> None:
    made = parser(
        __doc__,
        output=(Path("docs/lab/papers.md"), "the page"),
        benches=(Path("docs/results"), "the folder of runs/papers.sh, or the records of it"),
        results=(Path("docs/results"), "where the benches' summaries are kept"),
    )
    made.add_argument(
        "--heads", type=Path, action="append", default=[], metavar="FOLDER", help="that hold trained heads"
    )
    args = made.parse_args()
    old = args.output.read_text() if args.output.exists() else ""
    write_text(args.output, page(args.benches, args.heads, old))
    for name in SECTIONS:
        if (path := args.benches / name / "summary.json").exists():
            write_text(args.results / f"papers_{name}.json", relative(path.read_text()))
    print(args.output)


if __name__ == "__main__":
    run(main)
