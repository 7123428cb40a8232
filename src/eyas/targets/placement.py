"""Models whose weights are not whole on one device. Layers compute on several devices, or weights are offloaded
to memory or to a disk (both by a `device_map`), or processes share them (`tp_plan`).

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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from eyas.core.cache import KVCache
from eyas.core.extensions import TargetExtension
from eyas.core.target import Target, TargetSession
from eyas.errors import ModelError

__all__ = [
    "Extension", "check_layers", "device_of", "devices_of", "has_offloaded_weights", "has_several_devices",
    "is_tensor_parallel", "value_of",
]  # fmt: skip


class Extension(TargetExtension):
    """Weights that are not whole on one device."""

    order = 10

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        waits = has_offloaded_weights(model) or is_tensor_parallel(model)
        return waits or model.device.type == "meta" or has_several_devices(model)

    def __init__(self, target: Target) -> None:
        model = target.model
        target.device = device_of(model)
        self.has_several_devices = has_several_devices(model)
        # the device of each layer's keys and values; (): all are on the main device
        self.layer_devices: tuple[torch.device | None, ...] = ()
        if self.has_several_devices:
            check_layers(target.family.layers)
            if target.family.shares_keys:  # logits_to_keep is a tensor then, which must be on the LM head's device
                target.family = replace(target.family, takes_logits_to_keep=False)
        self.own_forward_only = dict(_reasons(model, self.has_several_devices))

    def read_probe(self, cache: Cache) -> None:
        if self.has_several_devices:
            self.layer_devices = devices_of(cache)

    def open(self, session: TargetSession) -> None:
        target = session.target
        if self.layer_devices:
            session.cache = KVCache(
                target.layout, session.rows, target.dtype, target.device, target.runner.ops.commit, self.layer_devices
            )


def _reasons(model: nn.Module, several_devices: bool) -> Iterator[tuple[str, str]]:
    split, offloaded = is_tensor_parallel(model), has_offloaded_weights(model)
    if several_devices:
        yield "graphs", "no CUDA graphs: the model's layers are on several devices, and a graph belongs to one"
    elif split or offloaded:
        yield (
            "graphs",
            "no CUDA graphs: each forward fetches weights that wait, or exchanges results with other processes",
        )
    if split:
        yield "kernels", "the kernels compute whole layers, and its weights are split over processes (tp_plan)"
    elif several_devices:
        yield "kernels", "the kernels run whole models on one device, and a device_map puts its layers on several"
    elif offloaded:
        yield "kernels", "the kernels keep a copy of all weights, and a device_map lets some of them wait elsewhere"


def has_offloaded_weights(model: nn.Module) -> bool:
    """Return whether some weights of the model are fetched by hooks, so that its own forward is the only
    way to compute."""
    return any(getattr(hook, "offload", False) for hook in _hooks(model))


def has_several_devices(model: nn.Module) -> bool:
    """Return whether the modules of the model compute on several devices."""
    return len(_places(model)) > 1


def device_of(model: nn.Module) -> torch.device:
    """Return the main device: the one that all modules compute on, or else the one of the hook of the
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
        f"the model lies on {_listed(places)}, but nothing moves hidden states between them: load it whole on one device, "
        "or with a device_map"
    )


def check_layers(layers: Iterable[nn.Module]) -> None:
    """Raise ModelError if the parts of some layer compute on several devices, which no layer of
    transformers can: nothing moves its residuals."""
    for number, layer in enumerate(layers):
        if len(places := _places(layer)) > 1:
            raise ModelError(
                f"the parts of layer {number} lie on {_listed(places)}: write a device_map that keeps each layer whole"
            )


def devices_of(cache: Cache) -> tuple[torch.device | None, ...]:
    """Return the device of each layer's keys in a growing cache that a forward of the model has filled;
    None for a layer without keys."""
    stored = (getattr(layer, "keys", None) for layer in cache.layers)
    return tuple(None if keys is None else keys.device for keys in stored)


def _places(module: nn.Module) -> set[torch.device]:
    """Return the devices that the parts of a module compute on."""
    hooks = list(_hooks(module))
    places = {_device(hook.execution_device) for hook in hooks if getattr(hook, "execution_device", None) is not None}
    return places if has_offloaded_weights(module) else places | {weight.device for weight in module.parameters()}


def _listed(places: Iterable[torch.device]) -> str:
    return ", ".join(sorted(map(str, places)))


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether the weights are split over processes (`tp_plan` of transformers), each of which
    computes a part of every layer."""
    # torch's DTensor, whose module takes seconds to import
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


def _device(place: Any) -> torch.device:
    """Return the device that accelerate names; a number stands for a GPU."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def value_of(model: nn.Module, name: str) -> Tensor:
    """Return the value of a weight, by its name among the model's parameters. An offloaded weight is read.
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
    for module in model.modules():
        yield from _hooks_of(module)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of accelerate on this module; several hooks are wrapped in one SequentialHook."""
    hook = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,))) if hook is not None else ()
