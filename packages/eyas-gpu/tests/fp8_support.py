"""Whether this build of torch multiplies fp8 on a CPU; that of torch 2.11 does not."""

from __future__ import annotations

import pytest
import torch

from eyas_gpu._fp8 import Fp8Linear

__all__ = ["MULTIPLIES", "needs_fp8"]


def _multiplies() -> bool:
    try:
        Fp8Linear(torch.nn.Linear(16, 16))(torch.ones(1, 16))
    except (RuntimeError, NotImplementedError):
        return False
    return True


MULTIPLIES = _multiplies()
needs_fp8 = pytest.mark.skipif(not MULTIPLIES, reason="this build of torch multiplies no fp8 on a CPU")
