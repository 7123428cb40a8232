"""Make a `Target` of a checkpoint, of a loaded model, or of either with adapters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.core.target import Target
from eyas.errors import EyasError, ModelError, OptionError, first_line, one_line
from eyas.targets.pretrained import DeviceMap, is_peft_model, read_model

__all__ = ["AdapterFolders", "hooks_of", "load_target", "pick_device", "pick_dtype", "target_of", "version_of"]

SCALES = ("scaling", "attention_scaling", "variance_epsilon", "eps")  # numbers of layers that kernels copy
AdapterFolders = str | Path | Mapping[str, str | Path] | None  # a folder to merge, or folders by name to switch between


def load_target(
    path: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    role: str = "target",
    adapters: AdapterFolders = None,
    device_map: DeviceMap | None = None,
    name: str = "",
) -> Target:
    """Load from a local folder or the hub. dtype auto: float32 on a CPU, the checkpoint's own
    on an accelerator or if it is quantised.

    `role`: the name of the model in error messages. `adapters`: see `target_of`. `device_map`: where
    the weights go, instead of one device. `name`: the target's name, if it is not the path.
    """
    place = torch.device(pick_device(device))
    own_dtype = dtype == "auto"
    model: Any = read_model(
        path, pick_dtype(dtype, place), trust_remote_code, role, device_map, device=place, own_dtype=own_dtype
    )
    return target_of(model, name or str(path), adapters, role)


def target_of(model: Any, name: str = "", adapters: AdapterFolders = None, role: str = "target") -> Target:
    """Return a target from a model or a PeftModel. Raise ModelError if it cannot be run.

    `adapters` change the model. A single one, by its folder, is merged into the weights, or added in its own
    layers if the weights are quantised. Several, by name, are switched between.
    """
    try:
        if not adapters and not is_peft_model(model):
            return Target(model, name)
        from eyas.targets.adapters import target_with_adapters

        return target_with_adapters(model, name, adapters)
    except (EyasError, AssertionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code: its layers may be edited, its configuration broken
        reason = one_line(error, 200)
        raise ModelError(f"{role} {name!r} cannot be run: {type(error).__name__}: {reason}") from error


def version_of(model: torch.nn.Module) -> tuple[Hashable, ...]:
    """Return a key that changes when weights or buffers are replaced, moved, cast or written to in place (except through
    `.data`). It also changes when scales, hooks or other forwards come or go. Kernels and kept keys do not
    follow these changes."""
    everywhere = torch.nn.modules.module
    parts: list[Any] = [getattr(model.config, "_attn_implementation", None), getattr(model, "eyas_state", tuple)()]
    parts += [*everywhere._global_forward_hooks, *everywhere._global_forward_pre_hooks]
    for module in model.modules():
        parts += [id(module), vars(module).get("forward"), type(module).forward]
        parts += hooks_of(module)
        parts += [_version(parameter) for parameter in module._parameters.values() if parameter is not None]
        if not any(kind in str(vars(module).get("rope_type")) for kind in ("dynamic", "longrope")):
            parts += map(vars(module).get, SCALES)
            parts += [_version(buffer) for buffer in module._buffers.values() if buffer is not None]
    return tuple(parts)


def hooks_of(module: torch.nn.Module) -> list[int]:
    """Return the numbers of a module's hooks. transformers' own, which record outputs and stay after the first call with
    output_hidden_states, do not count: they change nothing."""
    recorders = "transformers.utils.output_capturing"
    hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    return [number for number, hook in hooks if getattr(hook, "__module__", "") != recorders]


def _version(parameter: torch.Tensor) -> tuple[object, ...]:
    if parameter.is_meta:  # accelerate puts a new one there after each forward
        return ()
    version = 0 if parameter.is_inference() else parameter._version
    return id(parameter), parameter.data_ptr(), version, parameter.dtype


def pick_device(device: str) -> str:
    """Return the torch device of a name; "auto" is CUDA if available, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used here: {first_line(error)}") from error
    return device


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Return the torch dtype of a name; "auto" is float32 on a CPU, else the checkpoint's own ("auto")."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in known:
        raise OptionError(f"unknown dtype {dtype!r}; known: auto, {', '.join(known)}")
    return known[dtype]
