"""The table of a bench: a row of figures for each temperature, task and contestant. Numbers in,
numbers out.

`eyas_lab.metrics` and `bench.intervals` define the figures. All are ratios of sums over prompts, so long answers weigh more.
The turns of a prompt are one sample of the bootstrap; ratios of two contestants are paired by
prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eyas.core.totals import tokens_per_second
from eyas_lab.bench.intervals import (
    RESAMPLES,
    Interval,
    bootstrap,
    mean_acceptance_length,
    ratio,
    ratio_of_ratios,
    relative_cycle_cost,
)
from eyas_lab.bench.record import Answer
from eyas_lab.metrics import STAGES, Cycle, acceptance_by_depth

__all__ = ["ALL", "by_prompt", "rows", "speed_of", "speedup", "stage_ms", "tau_of", "utilisation"]

ALL = "all"  # the task that pools the others
DEPTH = 8  # deepest depth in acceptance by depth


def by_prompt(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Prompt id -> its turns."""
    grouped: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        grouped[answer.prompt].append(answer)
    return grouped


def sums(answers: Iterable[Answer], prompts: Sequence[str]) -> dict[str, list[float]]:
    """Sums over the turns of each prompt, in the order of `prompts`."""
    grouped = by_prompt(answers)
    values = {
        "emitted": lambda answer: answer.emitted,
        "decode_seconds": lambda answer: answer.decode_seconds,
        "tokens": lambda answer: len(answer.token_ids),
        "seconds": lambda answer: answer.seconds,
        "cycles": lambda answer: len(answer.cycles),
    }
    return {name: [sum(map(value, grouped[prompt])) for prompt in prompts] for name, value in values.items()}


def tau_of(answers: Sequence[Answer]) -> Interval | None:
    """Emitted tokens per cycle; None without cycles."""
    table = sums(answers, sorted(by_prompt(answers)))
    return bootstrap(ratio, table["emitted"], table["cycles"])


def speed_of(answers: Sequence[Answer]) -> float:
    """Tokens per second of the cycles; 0 without cycles."""
    return tokens_per_second(sum(a.emitted for a in answers), sum(a.decode_seconds for a in answers))


def speedup(
    answers: Sequence[Answer], baseline: Sequence[Answer], whole: bool = False, resamples: int = RESAMPLES
) -> Interval | None:
    """Tokens per second over the baseline's, on the prompts that both answered.

    Args:
        whole: whole answers, the prompt's pass included.
    """
    prompts = sorted(by_prompt(answers).keys() & by_prompt(baseline).keys())
    keys = ("tokens", "seconds") if whole else ("emitted", "decode_seconds")
    columns = [side[key] for side in (sums(answers, prompts), sums(baseline, prompts)) for key in keys]
    return bootstrap(ratio_of_ratios, *columns, resamples=resamples) if prompts else None


def stage_ms(cycles: Sequence[Cycle]) -> dict[str, float]:
    """Mean milliseconds of a cycle by stage, by the host's clock; "host" is the time outside all stages. Empty
    where stages are not reported."""
    cycles = [cycle for cycle in cycles if cycle.draft is not None]
    if not cycles:
        return {}
    stages = {name: 1e3 * float(np.mean([getattr(cycle, name) for cycle in cycles])) for name in STAGES}
    whole = 1e3 * float(np.mean([cycle.seconds for cycle in cycles]))
    return {**stages, "host": max(0.0, whole - sum(stages.values()))}


def utilisation(speed: float, bytes_per_step: float, bandwidth: float | None) -> float | None:
    """R: tokens per second divided by the rate of plain decoding that only reads the weights, once per token."""
    return None if not bandwidth else speed * bytes_per_step / bandwidth


def rows(answers: Sequence[Answer], bytes_per_step: float, bandwidth: float | None = None) -> list[dict[str, Any]]:
    """A row for each temperature, task and contestant, in the order of their first answers.

    The rows of a contestant that failed hold `error`, and no figures.
    """
    temperatures, methods, tasks = (
        list(dict.fromkeys(getattr(a, key) for a in answers)) for key in ("temperature", "method", "task")
    )
    errors = {a.method: a.error for a in answers if a.error is not None}
    table = []
    for temperature in temperatures:
        for task in [*tasks, ALL]:
            chosen = [a for a in answers if a.temperature == temperature and task in (a.task, ALL)]
            sets = {method: [a for a in chosen if a.method == method] for method in methods}
            for method, ours in sets.items():
                if not ours:
                    continue
                error = errors.get(method)
                row = _row([] if error else ours, sets.get("vanilla", []), sets.get("transformers", []))
                speed = row["tokens_per_second"]
                row["R"] = None if speed is None else _round(utilisation(speed, bytes_per_step, bandwidth), 3)
                table.append({"method": method, "task": task, "temperature": temperature, **row, "error": error})
    return table


def _row(ours: list[Answer], vanilla: list[Answer], theirs: list[Answer]) -> dict[str, Any]:
    """Return the figures of one contestant; `theirs`: transformers' plain generate."""
    cycles = [cycle for a in ours for cycle in a.cycles]
    plain_cycles = sum(len(a.cycles) for a in vanilla)
    plain_seconds = sum(a.decode_seconds for a in vanilla)
    over_vanilla, over_theirs, tau = speedup(ours, vanilla), speedup(ours, theirs), tau_of(ours)
    reported = [c for c in cycles if c.candidates is not None and c.nodes is not None]
    drafted = sum(c.candidates or 0 for c in reported)
    return {
        "prompts": len(by_prompt(ours or vanilla)),
        "tokens": sum(len(a.token_ids) for a in ours),
        "tokens_per_second": round(speed_of(ours), 2) if ours else None,
        **_value_low_high("speedup", over_vanilla),
        "speedup_whole": _interval(speedup(ours, vanilla, whole=True)),
        "speedup_vs_transformers": _round((over_theirs or (None,))[0]),
        "speedup_vs_transformers_interval": _interval(over_theirs),
        "tau": _round((tau or (None,))[0]),
        "tau_interval": _interval(tau),
        "mean_acceptance_length": _round(mean_acceptance_length(cycles)),
        "c": _round(relative_cycle_cost(sum(a.decode_seconds for a in ours), len(cycles), plain_seconds, plain_cycles)),
        "equal": all(a.differs is None for a in ours) if any(a.comparable for a in ours) else None,
        "differ": [[a.prompt, a.turn, *a.differs] for a in ours if a.differs is not None],
        "cycles": len(cycles),
        "nodes": _round(sum(c.nodes or 0 for c in reported) / len(reported), 2) if reported else None,
        "drafted": drafted if reported else None,
        "accepted": sum(c.accepted for c in cycles),
        "acceptance_by_depth": [_round(rate) for rate in acceptance_by_depth(cycles, DEPTH)] if drafted else [],
        "cycle_ms": {name: round(value, 3) for name, value in stage_ms(cycles).items()},
        "first_token_ms": round(1e3 * float(np.median([a.prefill_seconds for a in ours])), 2) if ours else None,
        "memory_bytes": max((a.memory.beyond for a in ours if a.memory and a.memory.beyond is not None), default=None),
    }


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(float(value), digits)


def _interval(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [_round(x) for x in interval]


def _value_low_high(name: str, interval: Interval | None) -> Mapping[str, float | None]:
    values = interval or (None, None, None)
    return {key: _round(value) for key, value in zip((name, f"{name}_low", f"{name}_high"), values, strict=True)}
