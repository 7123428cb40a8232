"""The functions that eyas asks this distribution for, by the name "gpu": a target that runs by CUDA graphs.

Kernels are used on a device after all of them have given torch's numbers there. Otherwise a warning names the first
that failed, and torch computes instead.
"""

from __future__ import annotations

import logging
import warnings
from functools import cache, partial

import torch

from eyas.core.ops import Ops
from eyas.core.target import Target
from eyas.runners.tools import UnsuitedError, fault_of_runner
from eyas_gpu._fp8 import TORCH
from eyas_gpu._trial import fault_of_kernels
from eyas_gpu.compiled import CompiledLayers
from eyas_gpu.cycle import GpuOps
from eyas_gpu.graphs import GraphRunner
from eyas_gpu.layers import GpuModelLayers, check
from eyas_gpu.operators import available

__all__ = ["TORCH", "layers", "operations", "with_graphs"]

log = logging.getLogger(__name__)


def with_graphs(target: Target, kernels: str, own: bool) -> Target:
    """Return the target by CUDA graphs, once a graph has given the numbers of the model's own forward; else as it is.

    Args:
        kernels: "auto", "on" or "compile"; `eyas.runners.with_fastest_runner` explains them.
        own: eyas loaded the model, so nobody else changes its weights.
    """
    if reason := target.own_forward_only("graphs") or _growing_rope(target):
        if kernels != "auto":
            warnings.warn(reason, stacklevel=6)
        return target
    compiled = CompiledLayers(target.family.layers) if kernels == "compile" else None
    fused, draft_layers = layers(target, join_weights=own), partial(layers, join_weights=False)
    made = GraphRunner(target, None, compiled, fused, operations(target.device), draft_layers)
    if fault := fault_of_runner(target, made):
        warnings.warn(f"the model runs by its own forward, as a CUDA graph fails on this GPU: {fault}", stacklevel=6)
        return target
    return target.run_with(made)


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


def _growing_rope(target: Target) -> str:
    """Return why a target has no CUDA graphs, if it has a kind of RoPE whose frequencies depend on the length of the
    text; "" if it has none."""
    rope = getattr(target.model.config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, dict)}
    kind = next((kind for kind in ("dynamic", "longrope") if kind in kinds), "")
    return kind and f"no CUDA graphs: {kind} rotary positions depend on the length, which the host has to look at"
