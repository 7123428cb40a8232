"""torch.compile for the layers of a model: small operations become few kernels, whatever the number of layers.

A layer is compiled once for all layers that are alike: it is handed its own keys and values in place of the cache (`cache.Part`), so
nothing in what is traced says which layer it is. Two compilations serve a model, for single tokens (plain decoding) and for more of them;
two more where there are several rows. The model's modules are put back as they were.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from eyas.cache import KVCache
from eyas.nn import Backend, Compiled

__all__ = ["CompiledLayers"]


class CompiledLayers:
    """The decoder layers of one model."""

    def __init__(self, layers: nn.ModuleList, backend: Backend = "inductor") -> None:
        self.layers, self.backend = layers, backend
        self._by_type = {kind: _compiled(kind, backend) for kind in dict.fromkeys(map(type, layers))}

    @contextmanager
    def storing_in(self, cache: KVCache) -> Iterator[None]:
        """Forwards of the model that store into `cache` take the compiled layers."""
        free = [(number, layer) for number, layer in enumerate(self.layers) if "forward" not in layer.__dict__]  # else: somebody else's
        for number, layer in free:
            layer.__dict__["forward"] = self._forward(layer, number, cache)
        try:
            yield
        finally:
            for _, layer in free:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Module, number: int, cache: KVCache) -> Callable[..., Any]:
        compiled = self._by_type[type(layer)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            held = cache.part(number) if cache.stores_of(number) else cache
            args = tuple(held if x is cache else x for x in args)
            return compiled(layer, *args, **{name: held if x is cache else x for name, x in kwargs.items()})

        return forward


def _compiled(kind: type[nn.Module], backend: Backend) -> Compiled:
    plain: Callable[..., Any] = kind.forward

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:  # of its own, so that models do not share a count of compilations
        return plain(layer, *args, **kwargs)

    return Compiled(forward, backend, f"the layers ({kind.__name__})")
