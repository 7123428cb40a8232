"""The functions that eyas asks this distribution for, by the name "gpu" (`eyas.runners.graphs.GpuKernels`).

Kernels are used on a device after all of them have given torch's numbers there. Otherwise a warning names the first
that failed, and torch computes instead.
"""

from __future__ import annotations

import logging
import warnings
from functools import cache

import torch

from eyas.core.ops import Ops
from eyas.core.target import Target
from eyas.runners.tools import UnsuitedError
from eyas_gpu._fp8 import TORCH
from eyas_gpu._trial import fault_of_kernels
from eyas_gpu.cycle import GpuOps
from eyas_gpu.layers import GpuModelLayers, check
from eyas_gpu.operators import available

__all__ = ["TORCH", "layers", "operations"]

log = logging.getLogger(__name__)


def operations(device: torch.device) -> Ops:
    """Return the operations of a cycle by kernels, if these work on this device; else in torch."""
    return GpuOps() if _kernels_work(device) else TORCH


def layers(target: Target, join_weights: bool) -> GpuModelLayers | None:
    """Return the layers of the target by kernels, compared with its own; None if its layers have another shape, or if
    the kernels do not work on its device.

    Args:
        join_weights: whether matrices with the same input are joined: for models that nobody else uses.
    """
    if not _kernels_work(target.device):
        return None
    try:
        check(made := GpuModelLayers(target, join_weights=False))
    except UnsuitedError as why:
        log.info("layers run by the model's own code: %s", why)
        return None
    return GpuModelLayers(target, join_weights=True) if join_weights else made


@cache
def _kernels_work(device: torch.device) -> bool:
    if not available(device):
        return False
    log.info(
        "GPU kernels are tried, and compiled where they are new to this machine: up to a minute, once (Triton keeps them on disk)"
    )
    if fault := fault_of_kernels(device, GpuOps()):
        warnings.warn(f"eyas' GPU kernels are left out, as one fails on this GPU: {fault}", stacklevel=2)
    return not fault
