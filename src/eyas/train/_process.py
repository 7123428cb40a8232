"""Settings of the process during a run: signal handlers, frozen target weights, denormal numbers.
Each is restored at the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eyas.hardware import multiplies_bfloat16

__all__ = ["InterruptHandler", "flushed_denormals", "frozen", "has_bf16"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptHandler:
    """Records the first Ctrl-C or SIGTERM, so that the current step can end; the second one raises
    KeyboardInterrupt at once.
    """

    def __init__(self, on_first: Callable[[], None], ignore_second: bool = False) -> None:
        """`ignore_second`: under torchrun, which sends a process the Ctrl-C that it has already got
        from the terminal.
        """
        self.requested = False
        self.on_first = on_first
        self.ignore_second = ignore_second
        self.previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():  # Python allows no handler in other threads
            self.previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            self.on_first()
        elif not self.ignore_second:
            raise KeyboardInterrupt


@contextmanager
def frozen(target: Any) -> Iterator[None]:
    """Leave the target's weights without gradients within this context; afterwards they require gradients as
    before."""
    model = getattr(target, "model", None)
    trainable = [value for value in model.parameters() if value.requires_grad] if isinstance(model, nn.Module) else []
    for value in trainable:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in trainable:
            value.requires_grad_(True)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Let denormal numbers count as zero within this context: a CPU is many times slower with them, and no update of
    the weights depends on them."""
    before = float(torch.tensor(2.0**-126) / 2) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def has_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bfloat16, and torch can use them. A CPU
    without them is about four times slower in bfloat16 than in float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    announced = device.type == "cpu" and any(check is not None and bool(check()) for check in checks)
    return announced and multiplies_bfloat16()
