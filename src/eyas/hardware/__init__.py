"""This machine: its processor's name and the installed versions, which measurements are recorded
with."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from eyas import __version__

__all__ = [
    "BFLOAT16_CURE",
    "bfloat16_gain",
    "command_output",
    "cpu",
    "cpu_name",
    "versions",
]

# one thread by its own clock: other processes on the machine do not count
BFLOAT16_PROBE = """
import time, torch
torch.set_num_threads(1)
def seconds(dtype):
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    def once():
        began = time.thread_time()
        a @ b
        return time.thread_time() - began
    return min(once() for _ in range(12))
print(max(1e-9, seconds(torch.float32)) / max(1e-9, seconds(torch.bfloat16)))  # some clocks are coarse
"""
BFLOAT16_CURE = "torch's code for matrix units ends with an illegal instruction here; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 goes without it"


def cpu() -> dict[str, str]:
    """Return the first processor's entries in /proc/cpuinfo, such as "model name" and "flags"; empty where
    there is no such file."""
    path = Path("/proc/cpuinfo")
    entries: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        entries.setdefault(name.strip(), value.strip())
    return entries


def cpu_name() -> str:
    """Return the processor's name by its maker; the architecture where the system does not tell it."""
    brand = cpu().get("model name") or command_output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of eyas and of the packages that a speed depends on."""
    numbers = {"eyas": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "missing"
    return numbers | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@cache
def bfloat16_gain() -> float:
    """Return how many times as fast torch multiplies matrices in bfloat16 as in float32 on this CPU, measured once; 0
    if it cannot. On some virtual machines with AMX the process dies, so another one tries."""
    try:
        done = subprocess.run([sys.executable, "-c", BFLOAT16_PROBE], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return float(done.stdout) if done.returncode == 0 else 0.0


def command_output(*command: str) -> str | None:
    """Return the standard output of a program; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
