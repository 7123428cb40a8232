"""Settings of the process during a run: signal handlers, frozen target weights, denormal numbers.
Each is restored at the end.
"""

from __future__ import annotations

import ctypes
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eyas.hardware import bfloat16_gain

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEAST_BFLOAT16_GAIN = 1.2  # products are half of a step, and conversions take time
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's names (malloc.h)
KEPT_MEMORY = {M_TRIM_THRESHOLD: -1, M_TOP_PAD: 256 << 20, M_MMAP_MAX: 0}  # never give back; grow by 256 MiB; one heap
GLIBC_DEFAULTS = {M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 128 << 10, M_MMAP_MAX: 65536}


class InterruptHandler:
    """Records the first Ctrl-C or SIGTERM, so that the current step can end; the second one raises
    KeyboardInterrupt at once.
    """

    def __init__(self, on_first: Callable[[], None], ignore_second: bool = False) -> None:
        """`ignore_second`: under torchrun, which sends a process the Ctrl-C that it has already got
        from the terminal.
        """
        self.requested = False
        self.on_first, self.ignore_second = on_first, ignore_second

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals within this context. Python allows no handler in other threads than the main one."""
        is_main = threading.current_thread() is threading.main_thread()
        former = {number: signal.signal(number, self._on_signal) for number in SIGNALS} if is_main else {}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            self.on_first()
        elif not self.ignore_second:
            raise KeyboardInterrupt


@contextmanager
def frozen(target: Any) -> Iterator[None]:
    """Leave the target's weights without gradients within this context; then restore their settings."""
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
    """Return whether torch multiplies faster in bfloat16 than in float32 on this device. A CPU's instructions do not
    tell: with the same ones some are three times as fast in bfloat16, and some slower.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bfloat16_gain() > LEAST_BFLOAT16_GAIN


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let glibc keep freed memory within this context, for the next large tensor.

    A step makes and drops hundreds of them. As it is, glibc asks the system for each and gives each back, and the
    system clears the pages every time: a third of a step of SmolLM2's head. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.libc_ver()[0] == "glibc" else None
    if mallopt is None:
        yield
        return
    for option, value in KEPT_MEMORY.items():
        mallopt(option, value)
    try:
        yield
    finally:
        for option, value in GLIBC_DEFAULTS.items():
            mallopt(option, value)
        ctypes.CDLL(None).malloc_trim(0)
