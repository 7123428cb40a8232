"""Compute the seconds of a pass on a machine from its bandwidth, its rate of operations and its overheads.

    seconds  =  longer + (1 - overlap) * shorter  +  pass_seconds  +  layers * layer_seconds

where bytes / bandwidth and flops / rate are the longer and the shorter time. With an overlap of 1 this is the roofline,
max(bytes / bandwidth, flops / rate).

A machine is a JSON file with the fields of `Machine`. `flops` is a number, or numbers by the format of the weights,
and each of them may be numbers by the tokens of a pass: {"int8": {"1": 3e10, "16": 9e10}}. A format that
is left out takes the numbers of "bfloat16", or of the first format; "draft" holds the numbers of the draft head.

This module knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from eyas.core.params import is_number
from eyas.errors import InputError, OptionError, near
from eyas.files import parse_json

__all__ = ["MACHINES", "Machine", "Rates", "read_machine"]

Rates = Mapping[str, Mapping[int, float]]  # floating-point operations a second, by format and tokens


@dataclass(frozen=True)
class Machine:
    """Bandwidth, rates and overheads."""

    name: str
    bandwidth: float  # bytes a second, from memory
    flops: Rates
    overlap: float = 1.0  # share of the shorter of reading and computing that goes on during the longer
    pass_seconds: float = 0.0  # of a pass of the target, whatever its size
    layer_seconds: float = 0.0  # of each of its layers
    cycle_seconds: float = 0.0  # of a plain cycle beside its pass
    draft_cycle_seconds: float = 0.0  # of a cycle with a draft beside its pass and its draft
    draft_seconds: float = 0.0  # of a draft, whatever its size
    level_seconds: float = 0.0  # of each of its levels
    cache_bytes: float = 0.0  # a model with fewer bytes of weights is not read from memory
    draft_bytes: float = 2.0  # of a weight of the draft head
    number_bytes: float = 2.0  # of a number of keys and values
    source: str = ""  # where the numbers are from

    def rate(self, weights: str, tokens: float) -> float:
        """Return the operations a second of a pass over so many tokens. Between the numbers of tokens of the
        table, the time is linear; beyond them, the rate stays the last one's."""
        table = self.flops.get(weights) or self.flops.get("bfloat16") or next(iter(self.flops.values()))
        at = sorted(table)
        if tokens <= at[0] or tokens >= at[-1]:
            return table[at[0] if tokens <= at[0] else at[-1]]
        above = next(i for i, n in enumerate(at) if n >= tokens)
        low, high = at[above - 1], at[above]
        seconds = low / table[low] + (high / table[high] - low / table[low]) * (tokens - low) / (high - low)
        return tokens / seconds

    def seconds(self, size: float, flops: float, weights: str, tokens: float, resident: float) -> tuple[float, str]:
        """Return the seconds in which so many bytes are read and operations done, and which of them decides.

        Args:
            weights: the format of the weights.
            resident: bytes that are read again in each pass.
        """
        reading = 0.0 if resident <= self.cache_bytes else size / self.bandwidth
        counting = flops / self.rate(weights, tokens)
        shorter, longer = sorted((reading, counting))
        return longer + (1 - self.overlap) * shorter, "bytes" if reading > counting else "flops"

    @classmethod
    def from_json(cls, content: Any, where: str) -> Self:
        """Return the machine that a JSON value describes.

        Raises:
            InputError: one line that names the field.
        """
        if not isinstance(content, dict):
            raise InputError(f"{where}: a machine is a JSON object with name, bandwidth and flops")
        known = {each.name for each in fields(cls)}
        for name, value in content.items():
            if name not in known:
                raise InputError(f"{where}: unknown field {name!r}; {near(name, known)}")
            if name not in ("name", "source", "flops"):
                _check_number(value, f"{where}: {name}", 0.0, 1.0 if name == "overlap" else math.inf)
        if missing := [name for name in ("bandwidth", "flops") if not content.get(name)]:
            raise InputError(f"{where}: {' and '.join(missing)} must be given, in bytes or operations a second")
        texts = {"name": str(content.get("name", where)), "source": str(content.get("source", ""))}
        return cls(**{**content, **texts, "flops": _rates(content["flops"], where)})


def _rates(value: Any, where: str) -> Rates:
    """Return the rates by format and tokens of a number, of numbers by format, or of tables by format."""
    by_format = value if isinstance(value, dict) else {"bfloat16": value}
    rates = {}
    for weights, entry in by_format.items():
        table = entry if isinstance(entry, dict) and entry else {"1": entry}
        for tokens, rate in table.items():
            if not str(tokens).isdigit() or int(tokens) < 1:
                raise InputError(f"{where}: flops of {weights}: {tokens!r} is not a number of tokens")
            _check_number(rate, f"{where}: flops of {weights}", 1.0)
        rates[str(weights)] = {int(tokens): float(rate) for tokens, rate in table.items()}
    return rates


def _check_number(value: Any, what: str, least: float, most: float = math.inf) -> None:
    if not is_number(value) or not least <= value <= most:
        bound = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise InputError(f"{what} must be a number {bound}, not {value!r}")


# --- GPUs that can be named ---------------------------------------------------------------------------------------

REACHED_BANDWIDTH = 0.85  # of the published one, by large kernels that read weights; assumed
REACHED_FLOPS = 0.6  # of the published ones, by products with few rows; assumed
KERNEL_SECONDS = 2e-6  # of a small kernel in a recorded graph; assumed, as in docs/lab/gpu_plan.md
# Kernels, as docs/lab/gpu_plan.md counts them: of a layer beside its four products, of a pass beside its layers, of a draft
# and of each of its levels beside the layer, of verification and commit.
LAYER_KERNELS, PASS_KERNELS, DRAFT_KERNELS, LEVEL_KERNELS, VERIFY_KERNELS, PLAIN_KERNELS = 6, 5, 18, 8, 13, 3


def _hopper(name: str, bandwidth: float, sheet: str) -> Machine:
    """Return a GPU of the H100's architecture."""
    dense = {"float32": 67e12, "bfloat16": 989e12}  # published, without sparsity; rounded weights multiply as bfloat16
    return Machine(
        name=name,
        bandwidth=REACHED_BANDWIDTH * bandwidth,
        flops={weights: {1: REACHED_FLOPS * rate} for weights, rate in dense.items()},
        pass_seconds=PASS_KERNELS * KERNEL_SECONDS,
        layer_seconds=LAYER_KERNELS * KERNEL_SECONDS,
        cycle_seconds=PLAIN_KERNELS * KERNEL_SECONDS,
        draft_cycle_seconds=VERIFY_KERNELS * KERNEL_SECONDS,
        draft_seconds=DRAFT_KERNELS * KERNEL_SECONDS,
        level_seconds=LEVEL_KERNELS * KERNEL_SECONDS,
        source=f"{sheet}: {bandwidth / 1e12:.2f} TB/s, 989 TFLOP/s in bfloat16; assumed: {REACHED_BANDWIDTH:.0%} and "
        f"{REACHED_FLOPS:.0%} of them are reached, {1e6 * KERNEL_SECONDS:.0f} us a small kernel (docs/lab/gpu_plan.md)",
    )


MACHINES = {
    "h100": _hopper("NVIDIA H100 SXM", 3.35e12, "NVIDIA's data sheet of the H100 (SXM5, 80 GB)"),
    "h200": _hopper("NVIDIA H200 SXM", 4.8e12, "NVIDIA's data sheet of the H200 (SXM, 141 GB)"),
}


def read_machine(name: str) -> Machine:
    """Return a machine by its name, or from a JSON file.

    Raises:
        InputError, OptionError: one line that names the mistake.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ["cpu", *MACHINES]
        raise OptionError(
            f"--machine {name!r} is neither a JSON file nor a known machine; {near(name, known)}"
        ) from error
    return Machine.from_json(parse_json(text), str(path))
