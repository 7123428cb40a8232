"""The end of a bench: everything that was found in one object, and the files of it.

FOLDER/summary.json, report.md, report.html, and each picture as SVG; with a profile a trace of each method
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.adaptive.cost import verify_cost
from eyas.bench import cost, metrics, plots, report
from eyas.bench.machine import Snapshot, Used, busy, card
from eyas.bench.probe import probe
from eyas.bench.profile import profile
from eyas.bench.record import FORMAT, Answer
from eyas.bench.run import Bench, OnPrompt
from eyas.train.state import write_text

__all__ = ["summarise", "write"]

RUNS_BY = {
    "kernels": "compiled kernels",
    "model": "its own forward",
    "graphs": "CUDA graphs",
    "compiled graphs": "CUDA graphs, compiled layers",
}


def summarise(
    bench: Bench, answers: Sequence[Answer], before: Snapshot, command: str, *, probe_prompts: int = 6,
    skipped: Mapping[str, str] | None = None, on_prompt: OnPrompt = lambda done, of, what: None, traces: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What is measured beside the answers is measured here: drafted trees node by node, bandwidth, a pass's time against nodes.

    Args:
        before: from the begin of this run.
        traces: the folder of traces, if cycles are to be profiled.

    Where acceptance was simulated, title and warnings say so, and no tree is looked at.
    """
    simulated = bench.simulated
    target, settings, jobs = bench.llm.target, bench.settings(), len(bench.prompts) * len(bench.temperatures)
    device = target.device
    warnings = [f"Acceptance is simulated ({simulated}): tau was given, texts mean nothing; times are measured."] if simulated else []
    warnings += [line] if (line := busy(_meanwhile(answers), settings["threads"])) else []
    machine = card(before, dtype=settings["dtype"], device=settings["device"])
    probes = {}
    for name, found in probe(bench, 0 if simulated else probe_prompts):
        on_prompt(jobs, jobs, f"looked at the trees of {name}")
        probes[name] = found
    bandwidth, weights, rate, profiles = cost.bandwidth(device), cost.bytes_per_step(target), None, {}
    if traces is not None:
        rate = cost.flop_rate(target)
        for name, found in profile(bench, bandwidth, rate, traces):
            on_prompt(jobs, jobs, f"profiled {name}")
            profiles[name] = found
    forms = ("weights", "activations", "draft_weights")
    rounded = [f"{what.replace('_', ' ')} rounded to {settings[what]}" for what in forms if settings[what] != "exact"]
    how = ", ".join((RUNS_BY[settings["runs_by"]], *rounded))
    title = f"eyas bench: {target.name}, {settings['dtype']}, {settings['device']}, by {how}"
    return {
        "format": FORMAT, "title": title + (" (SIMULATED acceptance)" if simulated else ""), "command": command, "warnings": warnings,
        "machine": machine, "rows": metrics.rows(answers, weights, bandwidth), "probes": probes, "profiles": profiles,
        "verify_cost": verify_cost(target), "bytes_per_step": weights,
        "bandwidth": None if bandwidth is None else round(bandwidth), "flops_per_second": None if rate is None else round(rate),
        "peak_memory_bytes": max((a.memory.peak for a in answers if a.memory), default=None),
        "skipped": dict(skipped or {}), "minutes": round(sum(a.seconds for a in answers) / 60, 2), "settings": settings,
    }  # fmt: skip


def _meanwhile(answers: Sequence[Answer]) -> Used:
    """While the prompts were asked, in this run and in those before it that were interrupted."""
    each = {(a.temperature, a.prompt): a.around for a in answers if a.around is not None}.values()
    told = all(u.others is not None for u in each)
    return Used(sum(u.seconds for u in each), sum(u.others or 0.0 for u in each) if told else None)


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Each file whole or not at all."""
    pictures = plots.pictures(summary)
    for name, (_, svg) in pictures.items():
        write_text(folder / f"{name}.svg", svg)
    write_text(folder / "report.md", report.markdown(summary))
    write_text(folder / "report.html", report.page(summary, dict(pictures.values())))
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
