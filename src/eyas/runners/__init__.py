"""Runners: ways to run the target's forward. `prepared` chooses one for a target and a machine.

cpu.py         compiled C++ kernels for the model types that they support; cpu_ops.py and cpu_grow.py: the rest of the cycle by kernels
graphs.py      the model's own forward, or whole cycles, as CUDA graphs; recording.py: which part of a cycle is recorded
fused.py       layers of the LLaMA shape by few kernels, inside CUDA graphs
compiled.py    other layers by torch.compile, inside CUDA graphs
attention.py   grouped-query attention over trees without copies of keys and values

The model's own forward without any of these is `core.target.ModelRunner`.
"""

from __future__ import annotations

import logging
import warnings
from copy import copy

import torch

from eyas.core.target import ModelRunner, Target
from eyas.errors import OptionError, near
from eyas.kernels import WeightFormat, available, has_vnni
from eyas.nn import FP8_CAPABILITY
from eyas.runners.compiled import CompiledLayers
from eyas.runners.cpu import UnsuitedError, runner
from eyas.runners.cpu_ops import CycleKernels
from eyas.runners.fused import fused_layers
from eyas.runners.graphs import GraphRunner

__all__ = ["UnsuitedError", "prepared", "runner"]

log = logging.getLogger(__name__)
KERNELS = ("auto", "on", "compile", "off")
WEIGHTS, ACTIVATIONS = ("exact", "bfloat16", "int8", "int4"), ("exact", "bfloat16", "int16", "int8")
DRAFT_WEIGHTS = ("exact", "fp8", "int4")


def prepared(
    target: Target,
    kernels: str = "auto",
    own: bool = True,
    weights: str = "exact",
    activations: str = "exact",
    draft_weights: str = "exact",
) -> Target:
    """The target with its fastest runner.

    Args:
        kernels: auto: compiled kernels where they suit; on: a warning says why they do not, and CUDA graphs on a GPU; compile: these with
            layers by torch.compile, on a GPU only; off: the model's own forward.
        own: eyas loaded the model, so nobody else changes its weights; else auto is off, as kernels keep a copy of them.
        weights: exact: as they are; bfloat16, int8, int4: rounded, by kernels only: a target of its own (`formats.WeightFormat`).
            With int4 the lm_head is int8.
        activations: what weights are multiplied by. exact: as exact as float32; rounded, by kernels only, as a target of its own:
            bfloat16, for weights kept as bfloat16; int16, int8, for those kept as int8 or int4.
        draft_weights: of draft nets; fp8: rounded, on GPUs that multiply it; int4: by kernels, which round a draft's to int8 anyway.

    Raises:
        OptionError: an unknown value; rounded weights or activations that no kernel here supports.
    """
    for name, word, words in (
        ("weights", weights, WEIGHTS), ("activations", activations, ACTIVATIONS), ("draft_weights", draft_weights, DRAFT_WEIGHTS),
        ("kernels", kernels, KERNELS),
    ):  # fmt: skip
        if word not in words:
            raise OptionError(f"unknown {name} {word!r}; {near(word, words)}")
    if draft_weights == "fp8" and not _multiplies_fp8(target.device):
        least = ".".join(map(str, FP8_CAPABILITY))
        raise OptionError(f"draft weights fp8 need a GPU of compute capability {least} or more; the target lies on {target.device}")
    _without_cudnn_attention(target.device)
    made = copy(_run_by(target, kernels, own, WeightFormat(weights, activations)))  # type: ignore[arg-type]
    if draft_weights == "int4" and not ("int4" in made.run.ops.draft_formats and has_vnni()):
        own_model = "" if own or kernels != "auto" else "; a model that you loaded gets kernels with kernels='on'"
        raise OptionError(f"draft weights int4 are for compiled kernels on a CPU that adds up products of bytes (AVX-512 VNNI){own_model}")
    made.draft_weights = draft_weights
    return made


def _run_by(target: Target, kernels: str, own: bool, form: WeightFormat) -> Target:
    if not form.exact:
        asked = f"weights {form.weights}" if form.activations == "exact" else f"activations {form.activations}"
        if kernels == "off":
            raise OptionError(f"{asked} are for the compiled kernels: leave kernels off out")
        try:
            return target.run_with(runner(target, form))
        except UnsuitedError as why:
            raise OptionError(f"{asked} are for the compiled kernels, and there are none for this model: {why}") from why
    if kernels == "off":
        return target
    if kernels == "auto" and not own:
        return _with_cycle_kernels(target)
    if target.device.type == "cuda":
        return _by_graphs(target, kernels, own)
    if kernels == "compile":
        raise OptionError(f"kernels compile is for GPUs, and the target lies on {target.device}: leave it out")
    try:
        return target.run_with(runner(target))
    except UnsuitedError as why:
        if kernels == "on":
            warnings.warn(f"the model runs by its own forward: {why}", stacklevel=4)
        return _with_cycle_kernels(target)


def _with_cycle_kernels(target: Target) -> Target:
    """The model's own forward; draws, paths and commits by compiled kernels where there are any for its device."""
    if target.device.type != "cpu" or not available():
        return target
    return target.run_with(ModelRunner(CycleKernels()))


def _by_graphs(target: Target, kernels: str, own: bool) -> Target:
    if kernels == "auto":  # not yet run on a GPU, so only where it is asked for
        return target
    if rope := _growing_rope(target):
        warnings.warn(f"no CUDA graphs: {rope} rotary positions depend on the length, which the host has to look at", stacklevel=5)
        return target
    fused = fused_layers(target, joins=own)
    if kernels == "on":
        return target.run_with(GraphRunner(target, fused=fused))
    log.info("layers are compiled at their first passes: a minute or so, once; torch keeps what it makes on disk")
    return target.run_with(GraphRunner(target, compiled=CompiledLayers(target.family.layers), fused=fused))


def _without_cudnn_attention(device: torch.device) -> None:
    """Switch torch's cuDNN attention off, for this process, where a target lies on a GPU.

    It makes a plan for every new shape, and the shapes of growing texts are always new; and with fewer than 8 key-value heads cuDNN 9.19
    has returned wrong numbers (pytorch issue 193893, on another generation of GPUs). Other backends of attention stay.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(False)
        log.debug("attention by cuDNN is off in this process")


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _growing_rope(target: Target) -> str:
    """The kind of RoPE whose frequencies depend on the length of the text ("dynamic", "longrope"); "" if there is none."""
    rope = getattr(target.model.config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, dict)}
    return next((kind for kind in ("dynamic", "longrope") if kind in kinds), "")
