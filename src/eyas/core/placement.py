"""Models whose weights are not whole on one device: layers compute on several devices, or weights
are offloaded to memory or to a disk (both by a `device_map`), or processes share them (`tp_plan`).

accelerate puts a hook on each module, which fetches the module's weights before its forward and
moves its inputs to the device that it computes on. The hook of the whole model returns the logits
to the device that the token ids came from. That is the main device: trees, masks, positions,
features and the draft are there, and the keys and values of each layer are where the layer
computes.

    cuda:0   token ids, trees, masks, draft   | embedding, layers 0 to 15, their keys and values
    cuda:1                                    | layers 16 to 31, their keys and values, norm, LM head

With a `tp_plan` each process computes a part of every layer. All get the same logits, and draw with
the same seeds, so all reach the same verdict, as long as nothing depends on a process's own clock.

This module knows accelerate's hooks and torch's DTensor, and imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import ModelError

__all__ = [
    "check_layers",
    "device_of",
    "has_offloaded_weights",
    "has_several_devices",
    "is_tensor_parallel",
    "value_of",
]


def has_offloaded_weights(model: nn.Module) -> bool:
    """Whether some weights of the model are fetched by hooks, so that its own forward is the only
    way to compute."""
    return any(getattr(hook, "offload", False) for hook in _hooks(model))


def has_several_devices(model: nn.Module) -> bool:
    """Whether the modules of the model compute on several devices."""
    return len(_places(model)) > 1


def device_of(model: nn.Module) -> torch.device:
    """The main device: the one that all modules compute on, or else the one of the hook of the
    whole model.

    Raises:
        ModelError: there are several devices and no such hook, or weights without values.
    """
    places = _places(model)
    if torch.device("meta") in places:
        raise ModelError(f"the model lies on {_listed(places)}, where weights have no values: load it with its weights")
    if len(places) == 1:
        return places.pop()
    for hook in _hooks_of(model):
        if getattr(hook, "io_same_device", False) and hook.execution_device is not None:
            return _device(hook.execution_device)
    raise ModelError(
        f"the model lies on {_listed(places)}, and nothing moves hidden states between them: load it whole on one device, "
        "or with a device_map"
    )


def check_layers(layers: Iterable[nn.Module]) -> None:
    """ModelError if the parts of some layer compute on several devices, which no layer of
    transformers can: nothing moves its residuals."""
    for number, layer in enumerate(layers):
        if len(places := _places(layer)) > 1:
            raise ModelError(
                f"the parts of layer {number} lie on {_listed(places)}: write a device_map that keeps each layer whole"
            )


def _places(module: nn.Module) -> set[torch.device]:
    """The devices that the parts of a module compute on."""
    hooks = list(_hooks(module))
    places = {_device(hook.execution_device) for hook in hooks if getattr(hook, "execution_device", None) is not None}
    return places if has_offloaded_weights(module) else places | {weight.device for weight in module.parameters()}


def _listed(places: Iterable[torch.device]) -> str:
    return ", ".join(sorted(map(str, places)))


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether the weights are split over processes (`tp_plan` of transformers), each of which
    computes a part of every layer."""
    # torch's DTensor, whose module takes seconds to import
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


def _device(place: Any) -> torch.device:
    """The device that accelerate names; a number is that of a GPU."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def value_of(model: nn.Module, name: str) -> Tensor:
    """The value of a weight, by its name among the model's parameters. An offloaded weight is read.
    The parts of a split weight are gathered, so all processes must call this."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    weight: Tensor = getattr(module, last)
    offloaded = next(
        (hook.weights_map for hook in _hooks_of(module) if getattr(hook, "weights_map", None) is not None), None
    )
    value: Tensor = weight if weight.device.type != "meta" or offloaded is None else offloaded[last]
    gathered: Any = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def _hooks(model: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on all modules of the model."""
    for module in model.modules():
        yield from _hooks_of(module)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on this module; several hooks are wrapped in one SequentialHook."""
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,))) if hook is not None else ()
