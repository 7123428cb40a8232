"""torch.compile for the decoder layers of a model, which fuses their small operations into few kernels.

Layers of one class share one compilation. For that, each layer gets its own keys and values
(`cache.LayerCache`) in place of the whole cache, so the traced code does not depend on the layer's
index. A model needs two compilations, for one token (plain decoding) and for several; two more with
several rows. After each forward the model's modules are as they were.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from eyas.core.cache import KVCache
from eyas.core.ops import Backend
from eyas.nn import Compiled

__all__ = ["CompiledLayers"]


class CompiledLayers:
    """The decoder layers of one model."""

    def __init__(self, layers: nn.ModuleList, backend: Backend = "inductor") -> None:
        self.layers, self.backend = layers, backend
        self.numbers = {layer: _number(layer, place) for place, layer in enumerate(layers)}
        self._by_type = {kind: _compiled(kind, backend) for kind in dict.fromkeys(map(type, layers))}

    @contextmanager
    def storing_in(self, cache: KVCache) -> Iterator[None]:
        """Within this context the model's forwards run the compiled layers and store keys and
        values in `cache`."""
        # layers whose forward was already replaced are left alone
        layers = [layer for layer in self.layers if "forward" not in layer.__dict__]
        for layer in layers:
            layer.__dict__["forward"] = self._forward(layer, self.numbers[layer], cache)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Module, number: int, cache: KVCache) -> Callable[..., Any]:
        compiled = self._by_type[type(layer)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            layer_view = cache.layer_view(number) if cache.stores_of(number) else cache
            args = tuple(layer_view if x is cache else x for x in args)
            return compiled(layer, *args, **{name: layer_view if x is cache else x for name, x in kwargs.items()})

        return forward


def _number(layer: nn.Module, place: int) -> int:
    """Return the index of the layer in the cache: its `layer_idx`, which is not its place where other
    layers are left out; else its place."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), place)


def _compiled(kind: type[nn.Module], backend: Backend) -> Compiled:
    plain: Callable[..., Any] = kind.forward

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(layer, *args, **kwargs)

    return Compiled(forward, backend, f"the layers ({kind.__name__})")
