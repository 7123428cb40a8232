"""Models whose weights are not whole on one device: some wait in memory or on a disk (`device_map`), or processes share them (`tp_plan`).

accelerate puts a hook on each module, which fetches the module's weights before its forward and moves its inputs to the device that it
computes on. All modules must compute on one device: the keys and values of all layers, and the trees, lie there. So weights may wait
anywhere, but layers on two GPUs are refused.

With a `tp_plan` each process computes a part of every layer. All get the same logits, and draw with the same seeds, so all reach the same
verdict, as long as nothing depends on a process's own clock.

This module knows accelerate's hooks and torch's DTensor, and imports neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import ModelError

__all__ = ["device_of", "has_waiting_weights", "is_split", "value_of"]


def has_waiting_weights(model: nn.Module) -> bool:
    """Whether some weights of the model are fetched by hooks, so that its own forward is the only way to compute."""
    return any(getattr(hook, "offload", False) for hook in _hooks(model))


def device_of(model: nn.Module) -> torch.device:
    """The device that all modules compute on.

    Raises:
        ModelError: there are several, or weights without values.
    """
    hooks = list(_hooks(model))
    places = {_device(hook.execution_device) for hook in hooks if getattr(hook, "execution_device", None) is not None}
    if not has_waiting_weights(model):
        places |= {weight.device for weight in model.parameters()}
    if len(places) != 1 or places == {torch.device("meta")}:
        listed = ", ".join(sorted(map(str, places)))
        raise ModelError(
            f"the model lies on {listed}: load it whole on one device, or with a device_map whose other places are cpu or disk, "
            "where weights wait until they are needed"
        )
    return places.pop()


def is_split(model: nn.Module) -> bool:
    """Whether the weights are split over processes (`tp_plan` of transformers), each of which computes a part of every layer."""
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())  # torch's DTensor, whose module takes seconds to import


def _device(place: Any) -> torch.device:
    """A device as accelerate writes it; a number is that of a GPU."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def value_of(model: nn.Module, name: str) -> Tensor:
    """The value of a weight, by its name among the model's parameters. One that waits is read. The parts of one that is split are gathered,
    so all processes must call this."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    weight: Tensor = getattr(module, last)
    waiting = next((hook.weights_map for hook in _hooks_of(module) if getattr(hook, "weights_map", None) is not None), None)
    value: Tensor = weight if weight.device.type != "meta" or waiting is None else waiting[last]
    gathered: Any = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def _hooks(model: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on all modules of the model."""
    for module in model.modules():
        yield from _hooks_of(module)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on this module; several stand in one that holds them."""
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,))) if hook is not None else ()
