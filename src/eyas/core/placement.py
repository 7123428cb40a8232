"""Models that accelerate has spread with a `device_map`: some weights wait in memory or on a disk until their layer computes.

accelerate puts a hook on each module, which fetches the module's weights before its forward and moves its inputs to the device that it
computes on. All modules must compute on one device: the keys and values of all layers, and the trees, lie there. So weights may wait
anywhere, but layers on two GPUs are refused.

This module knows accelerate's hooks and nothing else of it; it is imported by transformers where a device map is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import ModelError

__all__ = ["device_of", "has_waiting_weights", "value_of"]


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


def _device(place: Any) -> torch.device:
    """A device as accelerate writes it; a number is that of a GPU."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def value_of(model: nn.Module, name: str) -> Tensor:
    """The value of a weight, by its name among the model's parameters; one that waits is read."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    weight: Tensor = getattr(module, last)
    waiting = next((hook.weights_map for hook in _hooks_of(module) if getattr(hook, "weights_map", None) is not None), None)
    return weight if weight.device.type != "meta" or waiting is None else waiting[last]


def _hooks(model: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on all modules of the model."""
    for module in model.modules():
        yield from _hooks_of(module)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on this module; several stand in one that holds them."""
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,))) if hook is not None else ()
