"""torch.compile for the layers of a model: small operations become few kernels, whatever the number of layers.

A layer is compiled once for all layers that are alike: it is handed its own keys and values in place of the cache (`cache.LayerCache`), so
nothing in what is traced says which layer it is. Two compilations serve a model, for single tokens (plain decoding) and for more of them;
two more where there are several rows. The model's modules are put back as they were.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from eyas.core.cache import KVCache
from eyas.nn import Backend, Compiled

__all__ = ["CompiledLayers"]


class CompiledLayers:
    """The decoder layers of one model."""

    def __init__(self, layers: nn.ModuleList, backend: Backend = "inductor") -> None:
        self.layers, self.backend = layers, backend
        self.numbers = {layer: _number(layer, place) for place, layer in enumerate(layers)}
        self._by_type = {kind: _compiled(kind, backend) for kind in dict.fromkeys(map(type, layers))}

    @contextmanager
    def storing_in(self, cache: KVCache) -> Iterator[None]:
        """Forwards of the model that store into `cache` take the compiled layers."""
        free = [layer for layer in self.layers if "forward" not in layer.__dict__]  # in others somebody else has put something
        for layer in free:
            layer.__dict__["forward"] = self._forward(layer, self.numbers[layer], cache)
        try:
            yield
        finally:
            for layer in free:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Module, number: int, cache: KVCache) -> Callable[..., Any]:
        compiled = self._by_type[type(layer)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            held = cache.part(number) if cache.stores_of(number) else cache
            args = tuple(held if x is cache else x for x in args)
            return compiled(layer, *args, **{name: held if x is cache else x for name, x in kwargs.items()})

        return forward


def _number(layer: nn.Module, place: int) -> int:
    """By which it looks its keys and values up: its own, also where other layers are left out."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), place)


def _compiled(kind: type[nn.Module], backend: Backend) -> Compiled:
    plain: Callable[..., Any] = kind.forward

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(layer, *args, **kwargs)

    return Compiled(forward, backend, f"the layers ({kind.__name__})")
