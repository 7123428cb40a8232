"""Tables of docs/lab/papers.md, from the benches of runs/papers.sh, each with the published one. runs/results.py writes
them.

Published figures are the papers' own (arXiv 2401.15077, 2406.16858, 2503.01840) and Spec-Bench's leaderboard of
2025-04-22.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _markdown import cell, columns, prose, table
from _records import record

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


@dataclass(frozen=True)
class Shown:
    """How a bench is shown."""

    published: Mapping[str, tuple[float, float]] | None = None  # means, beside the table over all prompts
    by_task: bool = False
    published_tasks: Mapping[str, Sequence[float | None]] | None = None
    chains: bool = True  # n-alpha
    published_chains: bool = True


SIX = Shown(SIX_TASKS, by_task=True, chains=False)
BENCHES = {
    "papers_chats": Shown(),
    "papers_sampled": Shown(),
    "papers_six": SIX,
    "papers_six_sampled": Shown(SIX_SAMPLED, by_task=True, chains=False),
    "papers_spec_bench": Shown(by_task=True, published_tasks=SPEC_BENCH, chains=False),
    "papers_inputs": Shown(published_chains=False),
    "papers_nestling": Shown(),
    "papers_nestling_six": SIX,
}


def paper(name: str, title: str = "") -> Iterator[str]:
    """The tables of a bench, at every temperature; its command and its machine."""
    bench, shown = Bench(record(name)), BENCHES[name]
    for temperature in bench.temperatures:
        if len(bench.temperatures) > 1:
            yield f"T = {temperature:g}:"
        yield whole(bench, temperature, shown.published)
        if shown.by_task:
            yield by_task(bench, temperature, shown.published_tasks)
    if shown.chains:
        yield alphas(bench, shown.published_chains)
    yield f"`{relative(bench.summary['command'])}`"
    yield machine(bench)
