"""What this machine and this installation are called: what a measured time depends on, and what stands beside every number."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from eyas import __version__

__all__ = ["cpu", "cpu_name", "says", "versions"]


def cpu() -> dict[str, str]:
    """What Linux tells about the first processor, "model name" and "flags" among it; nothing elsewhere."""
    told, found = Path("/proc/cpuinfo"), dict[str, str]()
    for line in told.read_text(errors="replace").splitlines() if told.is_file() else ():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def cpu_name() -> str:
    """What the maker calls it; the architecture where nobody tells."""
    return cpu().get("model name") or says("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of eyas and of what a speed depends on."""
    found = {"eyas": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def says(*command: str) -> str | None:
    """What a program prints; None when it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
