"""This machine: its processor's name and the installed versions, which measurements are recorded
with; and its OpenMP threads."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from eyas import __version__

__all__ = ["BFLOAT16_CURE", "command_output", "cpu", "cpu_name", "multiplies_bfloat16", "release_threads", "versions"]

BFLOAT16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
BFLOAT16_CURE = "torch's code for matrix units ends with an illegal instruction here; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 goes without it"

OMP_PAUSE_HARD = 2  # value of omp_pause_resource_t in OpenMP 5.0


def cpu() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo, such as "model name" and "flags"; empty where
    there is no such file."""
    path = Path("/proc/cpuinfo")
    entries: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        entries.setdefault(name.strip(), value.strip())
    return entries


def cpu_name() -> str:
    """The processor's name by its maker; the architecture where the system does not tell it."""
    brand = cpu().get("model name") or command_output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions of eyas and of the packages that a speed depends on."""
    numbers = {"eyas": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "missing"
    return numbers | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices on this CPU. On some virtual machines with AMX the
    process dies, so another one tries."""
    try:
        done = subprocess.run([sys.executable, "-c", BFLOAT16_PROBE], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next parallel region, which would
    start them again in 0.1 ms.

    GNU's OpenMP counts the threads of all callers, waiting ones too. Once they are more than the
    cores, threads no longer spin at barriers but sleep, and a forward of another thread takes three
    times as long. So whoever has no work left for its threads ends them.
    """
    library = _gnu_openmp()
    if library is not None:
        library.omp_pause_resource_all(OMP_PAUSE_HARD)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The library that torch has loaded; None where it uses another one, or an old one without this
    function."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return library if hasattr(library, "omp_pause_resource_all") else None


def command_output(*command: str) -> str | None:
    """The standard output of a program; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
