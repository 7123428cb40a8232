"""What a run needs of the process and the machine it runs in. What it changes there it puts back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Interrupt", "flushed_denormals", "frozen", "has_bf16"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """The first Ctrl-C or SIGTERM is remembered, so that no step is left half done; the second is a KeyboardInterrupt wherever it comes."""

    def __init__(self, on_first: Callable[[], None], patient: bool = False) -> None:
        """`patient`: only ever remember: torchrun hands on a Ctrl-C that the process has already got from the terminal."""
        self.asked, self.on_first, self.patient = False, on_first, patient

    def __enter__(self) -> Interrupt:
        self.here = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handler, and sends no signal
        if self.here:
            self.before = [(number, signal.signal(number, self._on_signal)) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        if self.here:
            for number, handler in self.before:
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if self.asked:
            if self.patient:
                return
            raise KeyboardInterrupt
        self.asked = True
        self.on_first()


@contextmanager
def frozen(target: Any) -> Iterator[None]:
    """No gradient is worked out for the target's weights, whether they ask for one or not."""
    model = getattr(target, "model", None)
    asking = [value for value in model.parameters() if value.requires_grad] if isinstance(model, nn.Module) else []
    for value in asking:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in asking:
            value.requires_grad_(True)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers too small for a normal float count as zero: a CPU is many times slower with them, and no update can tell."""
    before = float(torch.tensor(2.0**-126) / 2) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16. A CPU without them is about four times slower with it than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capable = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return device.type == "cpu" and any(ask is not None and bool(ask()) for ask in capable)
