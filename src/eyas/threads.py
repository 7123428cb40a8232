"""Settings that torch keeps for a process or a thread: OpenMP threads, default dtype and device."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

__all__ = ["cpu_by_default", "plain_defaults", "release_threads"]

OMP_PAUSE_HARD = 2  # value of omp_pause_resource_t in OpenMP 5.0


def cpu_by_default() -> AbstractContextManager[object]:
    """Return a context for this thread that undoes torch.set_default_device: new tensors are on the CPU, unless the code
    names a device."""
    is_cpu = torch.empty(0, dtype=torch.bool).is_cpu  # a microsecond, where torch.get_default_device takes four
    return nullcontext() if is_cpu else torch.device("cpu")


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Undo torch.set_default_dtype and set_default_device within this context, in which nets are made. As in
    from_pretrained of transformers, the dtype belongs to the process, so it is set for a moment only."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with cpu_by_default():
            yield
    finally:
        torch.set_default_dtype(before)


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next parallel region, which would
    start them again in 0.1 ms.

    GNU's OpenMP counts the threads of all callers, waiting ones too. Once they are more than the cores, threads
    sleep at barriers instead of spinning, and a forward of another thread takes three times as long. So code
    without further work for its threads ends them.
    """
    library = _gnu_openmp()
    if library is not None:
        library.omp_pause_resource_all(OMP_PAUSE_HARD)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """Return the library that torch has loaded; None where it uses another one, or an old one without this
    function."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return library if hasattr(library, "omp_pause_resource_all") else None
