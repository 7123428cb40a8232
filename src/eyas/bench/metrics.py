"""Figures from Answers. Pure: numbers in, numbers out.

    tau       tokens that a cycle emits, the bonus included            R   tokens/s over (memory bandwidth / bytes of weights per step)
    c         time of a cycle over the time of a vanilla step          n-alpha   acceptance in a chain after n accepted draft tokens
    speed-up  decoding tokens/s over that of a baseline on the very same prompts, = tau / c

All are ratios of sums: long answers weigh more. Intervals are 95 %, bootstrap over prompts (a prompt's turns stay together), seeded;
ratios of two contestants are paired by prompt. One prompt has no interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from eyas.bench.record import Answer, Cycle

__all__ = [
    "ALL",
    "Interval",
    "acceptance_by_depth",
    "by_prompt",
    "cycle_split",
    "interval",
    "rows",
    "speed_of",
    "speedup",
    "stage_ms",
    "tau_by_position",
    "tau_of",
    "utilisation",
]

Interval = tuple[float, float | None, float | None]  # value, low, high
RESAMPLES = 2000
Sums = Mapping[str, np.ndarray]  # sums over the turns of each prompt, in one order of the prompts

ALL = "all"  # the task that pools the others


def by_prompt(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Prompt id -> its turns."""
    found: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        found[answer.prompt].append(answer)
    return found


def _sums(answers: Iterable[Answer], prompts: Sequence[str]) -> Sums:
    grouped = by_prompt(answers)
    table = {
        "decoded": [sum(a.decoded for a in grouped[p]) for p in prompts],
        "decode": [sum(a.decode_seconds for a in grouped[p]) for p in prompts],
        "tokens": [sum(len(a.token_ids) for a in grouped[p]) for p in prompts],
        "seconds": [sum(a.seconds for a in grouped[p]) for p in prompts],
        "cycles": [sum(len(a.cycles) for a in grouped[p]) for p in prompts],
    }
    return {name: np.array(values, float) for name, values in table.items()}


def interval(columns: Sequence[np.ndarray], statistic: Callable[..., Any]) -> Interval | None:
    """The statistic of sums over prompts, resampled; None where it cannot be told.

    columns: over and under each fraction in turn. A prompt without anything under one (no cycle: its answer was one token) is left out.
    """
    kept = np.all([under > 0 for under in columns[1::2]], axis=0)
    columns = [c[kept] for c in columns]
    if not len(columns[0]):
        return None
    value = float(statistic(*(c.sum() for c in columns)))
    if not np.isfinite(value):
        return None
    if len(columns[0]) < 2:
        return value, None, None

    def of_sums(*c: np.ndarray, axis: int = -1) -> Any:
        return statistic(*(x.sum(axis) for x in c))

    found = bootstrap(tuple(columns), of_sums, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile", rng=0)
    low, high = found.confidence_interval
    return value, float(low), float(high)


def _ratio(a: Any, b: Any) -> Any:
    return np.asarray(a) / np.asarray(b)


def _ratio_of_ratios(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (np.asarray(a) / np.asarray(b)) / (np.asarray(c) / np.asarray(d))


def tau_of(answers: Sequence[Answer]) -> Interval | None:
    """Tokens per cycle."""
    sums = _sums(answers, sorted(by_prompt(answers)))
    return interval((sums["decoded"], sums["cycles"]), _ratio)


def speed_of(answers: Sequence[Answer]) -> float:
    """Decoded tokens per second, the prompt's pass apart; 0 without cycles."""
    seconds = sum(a.decode_seconds for a in answers)
    return sum(a.decoded for a in answers) / seconds if seconds else 0.0


def speedup(answers: Sequence[Answer], base: Sequence[Answer], whole: bool = False) -> Interval | None:
    """Tokens per second over the baseline's, on the prompts that both answered. `whole`: the prompt's pass included."""
    prompts = sorted(by_prompt(answers).keys() & by_prompt(base).keys())
    if not prompts:
        return None
    mine, theirs = _sums(answers, prompts), _sums(base, prompts)
    tokens, seconds = ("tokens", "seconds") if whole else ("decoded", "decode")
    return interval((mine[tokens], mine[seconds], theirs[tokens], theirs[seconds]), _ratio_of_ratios)


def cycle_split(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean milliseconds of a cycle by stage."""
    return stage_ms([c for a in answers for c in a.cycles])


def stage_ms(cycles: Sequence[Cycle]) -> dict[str, float]:
    """The same of these cycles, as the host saw them; what no stage claims is the host's. Empty where nobody tells of stages."""
    cycles = [c for c in cycles if c.draft is not None]
    if not cycles:
        return {}
    stages = {name: 1e3 * float(np.mean([getattr(c, name) for c in cycles])) for name in ("draft", "target", "verify", "commit")}
    whole = 1e3 * float(np.mean([c.seconds for c in cycles]))
    return {**stages, "host": max(0.0, whole - sum(stages.values()))}


def utilisation(tokens_per_second: float, bytes_per_step: float, bandwidth: float | None) -> float | None:
    """R: 1 is plain decoding that does nothing but read the weights once per token."""
    return None if not bandwidth else tokens_per_second * bytes_per_step / bandwidth


def acceptance_by_depth(answers: Iterable[Answer], depth: int = 8) -> list[float | None]:
    """Of cycles whose first d draft tokens were accepted and that had drafted one behind them, the share that accepted one there too;
    d = 0, 1, ...; None where no cycle got there.

    Of chains this is n-alpha (EAGLE-1, section 5). A cycle that was cut at its d-th draft token says nothing about the next one.
    """
    tested, accepted = np.zeros(depth), np.zeros(depth)
    for cycle in (c for a in answers for c in a.cycles if c.tested is not None):
        tested[: cycle.tested] += 1
        accepted[: cycle.accepted] += 1
    return [round(float(a / r), 4) if r else None for a, r in zip(accepted, tested, strict=True)]


def tau_by_position(answers: Iterable[Answer]) -> list[dict[str, float]]:
    """Tokens per cycle by the tokens that stood before the cycle, the prompt's included: `from` a power of two up to the next one."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for answer in answers:
        position = answer.prompt_tokens + len(answer.token_ids) - answer.decoded
        for cycle in answer.cycles:
            place = sums[1 << (position.bit_length() - 1)]
            place[0] += 1
            place[1] += cycle.emitted
            position += cycle.emitted
    return [{"from": begin, "cycles": n, "tau": round(tokens / n, 4)} for begin, (n, tokens) in sorted(sums.items())]


def rows(answers: Sequence[Answer], bytes_per_step: float, bandwidth: float | None = None) -> list[dict[str, Any]]:
    """The summary's table: a row for each temperature, task and method, in the order of their first answers."""
    table = []
    temperatures, methods = (list(dict.fromkeys(getattr(a, name) for a in answers)) for name in ("temperature", "method"))
    tasks = list(dict.fromkeys(a.task for a in answers))
    for temperature in temperatures:
        for task in [*tasks, ALL]:
            here = [a for a in answers if a.temperature == temperature and task in (a.task, ALL)]
            sets = {method: [a for a in here if a.method == method] for method in methods}
            for method, mine in sets.items():
                if mine:
                    row = _row(mine, sets.get("vanilla", []), sets.get("transformers", []))
                    row["R"] = _rounded(utilisation(row["tokens_per_second"], bytes_per_step, bandwidth), 3)
                    table.append({"method": method, "task": task, "temperature": temperature, **row})
    return table


def _row(mine: list[Answer], vanilla: list[Answer], theirs: list[Answer]) -> dict[str, Any]:
    cycles, base_cycles = sum(len(a.cycles) for a in mine), sum(len(a.cycles) for a in vanilla)
    step = sum(a.decode_seconds for a in vanilla) / base_cycles if base_cycles else None
    fast, tau = speedup(mine, vanilla), tau_of(mine)
    known = [c for a in mine for c in a.cycles if c.candidates is not None and c.nodes is not None]  # None of what a library does not tell
    drafted, accepted = sum(c.candidates or 0 for c in known), sum(c.accepted for a in mine for c in a.cycles)
    return {
        "prompts": len(by_prompt(mine)),
        "tokens": sum(len(a.token_ids) for a in mine),
        "tokens_per_second": round(speed_of(mine), 2),
        **{name: _rounded(value) for name, value in zip(("speedup", "speedup_low", "speedup_high"), fast or (None,) * 3, strict=True)},
        "speedup_whole": _interval(speedup(mine, vanilla, whole=True)),
        "speedup_vs_transformers": _rounded((speedup(mine, theirs) or (None,))[0]),
        "speedup_vs_transformers_interval": _interval(speedup(mine, theirs)),
        "tau": _rounded((tau or (None,))[0]),
        "tau_interval": _interval(tau),
        "c": _rounded(sum(a.decode_seconds for a in mine) / cycles / step) if cycles and step else None,
        "equal": all(a.differs is None for a in mine) if any(a.comparable for a in mine) else None,
        "differ": [[a.prompt, a.turn, *a.differs] for a in mine if a.differs is not None],
        "cycles": cycles,
        "nodes": _rounded(sum(c.nodes or 0 for c in known) / len(known), 2) if known else None,
        "drafted": drafted if known else None,
        "accepted": accepted,
        "acceptance_by_depth": acceptance_by_depth(mine) if drafted else [],
        "tau_by_position": tau_by_position(mine),
        "cycle_ms": {name: round(value, 3) for name, value in cycle_split(mine).items()},
        "first_token_ms": round(1e3 * float(np.median([a.prefill_seconds for a in mine])), 2),
        "memory_bytes": max((a.memory.beyond for a in mine if a.memory and a.memory.beyond is not None), default=None),
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(float(value), digits)


def _interval(found: Interval | None) -> list[float | None] | None:
    return None if found is None else [_rounded(x) for x in found]
