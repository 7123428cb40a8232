"""Settings of the process during a training run."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from eyas_train._process import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(16 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept_memory():
    faults()
    kept = faults()
print(kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_kept_during_a_run_and_not_afterwards() -> None:
    """Guards the settings of glibc by the pages that 20 tensors of 16 MiB fault in, 4,096 each or 8 huge ones: hardly any
    within a run, all of them after one that has ended."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert given_back > 100
    assert kept < given_back / 4
