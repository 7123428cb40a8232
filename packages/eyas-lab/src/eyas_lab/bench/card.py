"""The description of the machine that accompanies every number (the machine card)."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import psutil
import torch

import eyas
from eyas.hardware import command_output, cpu_name, versions
from eyas.hardware.machine import Snapshot, cores, snapshot

__all__ = ["card", "commit", "gpus"]

CLONE = Path(eyas.__file__).parents[2]  # where .git is, if eyas runs from a clone


def card(before: Snapshot | None = None, *, dtype: str | None = None, device: str | None = None) -> dict[str, Any]:
    """Return the machine as JSON; unknown entries are None.

    Args:
        before: the snapshot of the measurement's beginning, for the load then and now.
        dtype, device: the target's, in torch's names.
    """
    memory = psutil.virtual_memory()
    return {
        "cpu": cpu_name(),
        "cores": len(cores()),
        "physical_cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.total,
        "gpus": gpus(),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "device": device,
        "dtype": dtype,
        "versions": versions(),
        "commit": commit(),
        "load_before": before.load if before else None,
        "load_after": snapshot().load,
    }


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that torch sees: name, memory_bytes and driver."""
    if torch.cuda.is_available():
        driver = (
            command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        ).splitlines()
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {"name": p.name, "memory_bytes": p.total_memory, "driver": driver[0] if driver else None}
            for p in properties
        ]
    if torch.backends.mps.is_available():
        return [{"name": "Apple GPU", "memory_bytes": psutil.virtual_memory().total, "driver": None}]
    return []


def commit(clone: Path = CLONE) -> str | None:
    """Return the commit of the clone that eyas runs from, with a + when tracked files were changed
    since; None if it is not a clone."""
    if not (clone / ".git").exists():
        return None
    at = command_output("git", "-C", str(clone), "rev-parse", "HEAD")
    changed = command_output("git", "-C", str(clone), "status", "--porcelain", "--untracked-files=no")
    return f"{at}{'+' if changed else ''}" if at else None
