"""Runners: ways to run the target's forward. `with_fastest_runner` chooses one for a target and a machine.

cpu.py         compiled C++ kernels for some model types; cpu_ops.py, cpu_grow.py: the rest of the cycle
warm_up.py     decodes a little before the first answer, for whatever is compiled
tools.py       what other distributions use

The model's own forward without any of these is `core.target.ModelRunner`. CUDA graphs, and kernels for GPUs, are a
distribution of their own, eyas-gpu.
"""

from __future__ import annotations

import logging
import warnings
from copy import copy
from dataclasses import asdict
from typing import cast

import torch

from eyas import elsewhere
from eyas.core.target import ModelRunner, Target
from eyas.errors import OptionError, near
from eyas.kernels import WeightFormat, available, has_dots
from eyas.runners._packing import weights_that_fit
from eyas.runners.cpu import UnsuitedError, make_cpu_runner
from eyas.runners.cpu_ops import CpuCycleOps
from eyas.runners.warm_up import warm_up

__all__ = ["UnsuitedError", "make_cpu_runner", "warm_up", "with_fastest_runner"]

log = logging.getLogger(__name__)
KERNELS = ("auto", "on", "fixed", "compile", "off")
WEIGHTS, ACTIVATIONS = ("exact", "auto", "bfloat16", "int8", "int4"), ("exact", "bfloat16", "int16", "int8")
KV, DRAFT_WEIGHTS = ("exact", "bfloat16", "int8"), ("auto", "fp8", "int4")
FP8_CAPABILITY = (8, 9)  # the least CUDA compute capability that multiplies fp8


def with_fastest_runner(
    target: Target,
    kernels: str = "auto",
    own: bool = True,
    weights: str = "exact",
    activations: str = "exact",
    kv: str = "exact",
    draft_weights: str = "auto",
) -> Target:
    """Return the target with its fastest runner.

    Args:
        kernels: "auto": compiled kernels on a CPU for the model types that they support, CUDA graphs
            on a GPU, by eyas-gpu. "on": as "auto", also for a model that the caller loaded, and with a warning
            where they are not used. "fixed": as "on", by kernels whose sums have one order, so that ids
            equal plain decoding's in every dtype; an OptionError where there are none. "compile": on a
            GPU only, as "on", with torch.compile for layers that eyas has no kernels for. "off": the
            model's own forward.
        own: eyas loaded the model, so nobody else changes its weights. Otherwise "auto" means "off",
            as kernels keep a copy of the weights.
        weights: "exact", or rounded to "bfloat16", "int8" or "int4", which only kernels do; the output
            is then the rounded model's (`formats.WeightFormat`). With "int4" the lm_head is int8.
        activations: "exact", or rounded to "bfloat16" (for bfloat16 weights), "int16" or "int8" (for
            int8 and int4 weights); the output is then the rounded model's.
        kv: keys and values of the cache. "exact": in the target's dtype; "bfloat16" or "int8": rounded to that by
            kernels, which makes another target, too.
        draft_weights: format of draft nets, which changes guesses and never the text. "auto": as stored, but
            kernels on a CPU round to int8; "exact" is read as "auto". "int4": by these kernels. "fp8": by
            eyas-gpu, on GPUs with fp8 matrix products.

    Raises:
        OptionError: an unknown value; rounded numbers, or a fixed order, that no kernel here supports.
    """
    draft_weights = "auto" if draft_weights == "exact" else draft_weights
    for name, word, words in (
        ("weights", weights, WEIGHTS),
        ("activations", activations, ACTIVATIONS),
        ("kv", kv, KV),
        ("draft_weights", draft_weights, DRAFT_WEIGHTS),
        ("kernels", kernels, KERNELS),
    ):
        if word not in words:
            raise OptionError(f"unknown {name} {word!r}; {near(word, words)}")
    if draft_weights == "fp8" and not _multiplies_fp8(target.device):
        least = ".".join(map(str, FP8_CAPABILITY))
        raise OptionError(
            f"draft weights fp8 need a GPU of compute capability {least} or more; the target is on {target.device}"
        )
    _disable_cudnn_attention(target.device)
    _warn_of_caveats(target)
    if weights == "auto" and (weights := weights_that_fit(target, kv)) != "exact":
        log.info("weights auto: %s, as exact ones do not fit into the free memory", weights)
    weight_format = WeightFormat(weights, activations, kv)  # type: ignore[arg-type]
    made = copy(_with_runner(target, kernels, own, weight_format))
    if draft_weights == "int4" and not ("int4" in made.runner.ops.draft_formats and has_dots()):
        own_model = "" if own or kernels != "auto" else "; a model that you loaded gets kernels with kernels='on'"
        raise OptionError(
            f"draft weights int4 need compiled kernels on a CPU with integer dot products (AVX2, or ARM's dotprod){own_model}"
        )
    if draft_weights == "fp8" and "fp8" not in made.runner.ops.draft_formats:
        made.runner = ModelRunner(elsewhere.part("gpu", "draft weights fp8").TORCH)
    made.draft_weights = draft_weights
    return made


def _with_runner(target: Target, kernels: str, own: bool, weight_format: WeightFormat) -> Target:
    if target.adapters is not None:  # kernels and graphs would keep the weights of one adapter, or of none
        if kernels == "fixed":
            raise _no_fixed_order("requests switch its adapters; merge one")
        if not weight_format.exact:
            raise OptionError(
                f"{_rounded(weight_format)} are for the compiled kernels, which do not switch adapters: merge one"
            )
        if kernels in ("on", "compile"):
            warnings.warn(
                "the model runs by its own forward: requests switch its adapters; one that is merged runs by kernels",
                stacklevel=4,
            )
        return target if kernels == "off" else _with_cycle_kernels(target)
    if not weight_format.exact:
        asked = _rounded(weight_format)
        if kernels == "off":
            raise OptionError(f"{asked} are for the compiled kernels: remove kernels='off'")
        try:
            return target.run_with(make_cpu_runner(target, weight_format, own))
        except UnsuitedError as why:
            raise OptionError(
                f"{asked} are for the compiled kernels, but there are none for this model: {why}"
            ) from why
    if kernels == "off":
        return target
    if kernels == "auto" and not own:
        return _with_cycle_kernels(target)
    if target.device.type == "cuda":
        if kernels == "fixed":
            raise _no_fixed_order("on a GPU the order of a sum depends on the pass")
        return _on_gpu(target, kernels, own)
    if kernels == "compile":
        raise OptionError(f"kernels compile is for GPUs, but the target is on {target.device}: leave it out")
    try:
        return target.run_with(make_cpu_runner(target, own=own))
    except UnsuitedError as why:
        if kernels == "fixed":
            raise _no_fixed_order(str(why)) from why
        if kernels == "on":
            warnings.warn(f"the model runs by its own forward: {why}", stacklevel=4)
        return _with_cycle_kernels(target)


def _rounded(weight_format: WeightFormat) -> str:
    """Return the last format that rounds, with the name of its option: "weights int8"."""
    forms = {name: form for name, form in asdict(weight_format).items() if form != "exact"}
    name, form = forms.popitem()
    return f"{name} {form}"


def _warn_of_caveats(target: Target) -> None:
    for extension in target.extensions:
        if caveat := extension.caveat():
            warnings.warn(caveat, stacklevel=4)


def _with_cycle_kernels(target: Target) -> Target:
    """Return the model's own forward; draws, paths and commits by compiled kernels where there are any for
    its device."""
    if target.device.type != "cpu" or not available():
        return target
    return target.run_with(ModelRunner(CpuCycleOps()))


def _on_gpu(target: Target, kernels: str, own: bool) -> Target:
    """Return the target with the runner of eyas-gpu; as it is, with a note, if eyas-gpu is not installed."""
    gpu = elsewhere.part("gpu", "kernels compile") if kernels == "compile" else elsewhere.find_part("gpu")
    if gpu is not None:
        return cast(Target, gpu.with_graphs(target, kernels, own))
    reason = f"the model runs by its own forward; eyas-gpu has CUDA graphs and kernels: {elsewhere.command_of('gpu')}"
    if kernels == "auto":
        log.info(reason)
    else:
        warnings.warn(reason, stacklevel=5)
    return target


def _no_fixed_order(reason: str) -> OptionError:
    return OptionError(f"kernels fixed: this model has none whose sums have one order: {reason}")


def _disable_cudnn_attention(device: torch.device) -> None:
    """Switch torch's cuDNN attention off, for this process, if the target is on a GPU.

    It makes a plan for every new shape, and the shapes of growing texts are always new. With fewer than 8
    key-value heads cuDNN 9.19 has returned wrong numbers (pytorch issue 193893, on another generation of GPUs).
    Other backends of attention stay.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(False)
        log.debug("attention by cuDNN is off in this process")


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
