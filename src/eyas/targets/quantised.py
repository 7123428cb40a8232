"""Models whose weights a library keeps quantised: torchao, bitsandbytes, compressed-tensors and
others that transformers loads.

    layers_of(model)     -> the quantised layers, by name
    library_of(model)    -> the library that computes them; "" for a model of plain weights
    mixing_layer(model)  -> a layer whose result for one token depends on the other tokens of the pass

Such layers are run by the library's own code: a pass over a draft tree calls them as plain decoding
does. The two give the same numbers, up to rounding, as long as a layer treats every token by
itself. A layer that rounds its inputs by one scale for the whole pass (per-tensor dynamic scales),
or that picks outlier columns from all tokens (bitsandbytes' LLM.int8), does not.

This module knows no tree and no drafter, and imports none of these libraries.
Letters: T tokens, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from eyas.core.extensions import TargetExtension
from eyas.core.target import Target

__all__ = ["Extension", "layers_of", "library_of", "mixing_layer", "reference_output"]

# tolerance, relative to the norm of a token's outputs; another order of summation changes less
TOLERANCE = {torch.float32: 1e-3}
CLOSE_ROUNDED = 0.05  # the same in bfloat16 and float16
OUTLIER = 100.0  # value of every input of the neighbouring tokens; far above the threshold of LLM.int8 (6)
PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")  # the modules of torch's quantize_dynamic
# largest input of the tested token, below that threshold, and the scale of its other inputs
PEAK, REST = 5.5, 0.05


class Extension(TargetExtension):
    """Layers that a library keeps quantised."""

    order = 20

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return bool(layers_of(model))

    def __init__(self, target: Target) -> None:
        self.model, self.library = target.model, library_of(target.model)
        self.own_forward_only = {
            # CUDA graphs have not been tested with quantised layers
            "graphs": f"the model runs by its own forward: its layers are computed by {self.library}",
            "kernels": f"its layers are kept quantised and are computed by {self.library}",
        }

    def caveat(self) -> str:
        if not (layer := mixing_layer(self.model)):
            return ""
        is_int8 = self.library == "bitsandbytes"
        way_out = "load with llm_int8_threshold=0.0" if is_int8 else "choose scales by token, or weights only"
        return (
            f"{self.library} rounds the inputs of {layer} by all tokens of a pass together, so a tree's tokens get other numbers "
            f"than single ones and the text may differ from plain decoding's: {way_out}"
        )


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with quantised weights, or with inputs that are rounded, by name."""
    return {name: module for name, module in model.named_modules() if _is_quantised(module)}


def library_of(model: nn.Module) -> str:
    """Return the name of the library that keeps the model's layers quantised; "" if none of them is."""
    layers = layers_of(model)
    if not layers:
        return ""
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    method = getattr(settings, "quant_method", None)
    if method is not None:
        return str(getattr(method, "value", method))
    kinds = (
        type(part).__module__.partition(".")[0]
        for layer in layers.values()
        for part in (layer, *layer.parameters(recurse=False))
    )
    return next((kind for kind in kinds if kind != "torch"), "torch")


@torch.no_grad()
def mixing_layer(model: nn.Module) -> str:
    """Return the name and the class of a quantised layer whose result for a token depends on the other
    tokens of the pass; "" if there is none.

    One layer of each kind is tested: on a token alone, and on the same token next to far larger
    ones.
    """
    tested = set[tuple[Any, ...]]()
    for name, layer in layers_of(model).items():
        kind = (
            type(layer),
            getattr(layer, "in_features", None),
            *(type(weight) for weight in layer.parameters(recurse=False)),
        )
        if kind not in tested and _mixes(layer, _dtype_of(model)):
            return f"{name} ({type(layer).__name__})"
        tested.add(kind)
    return ""


@torch.no_grad()
def reference_output(layer: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return the output of a layer for one fixed token, flat; None for a layer that is not a matrix
    product."""
    x_TK = _token(layer, dtype)
    if x_TK is None:
        return None
    returned: Tensor = layer(x_TK)
    return returned.flatten()


def _is_quantised(module: nn.Module) -> bool:
    if getattr(module, "quantization_scheme", None) is not None:  # compressed-tensors
        return True
    if type(module).__module__.startswith(PACKED) and hasattr(module, "in_features"):  # torch's own, without parameters
        return True
    stored: list[Tensor] = list(module.parameters(recurse=False))
    if hasattr(module, "in_features"):  # GPTQ and AWQ keep integers in buffers
        stored += list(module.buffers(recurse=False))
    return any(_is_packed(tensor) for tensor in stored)


def _is_packed(tensor: Tensor) -> bool:
    """Return whether a weight is an integer, a float of 8 bits, or a tensor of a library's own class."""
    if is_traceable_wrapper_subclass(tensor):
        return not type(tensor).__module__.startswith("torch.")  # torch's own: parts of a weight that processes share
    return tensor.dtype is not torch.bool and (not tensor.dtype.is_floating_point or tensor.element_size() == 1)


def _mixes(layer: nn.Module, dtype: torch.dtype) -> bool:
    alone_TK = _token(layer, dtype)
    if alone_TK is None:
        return False
    together_TK = torch.cat([alone_TK, torch.full_like(alone_TK, OUTLIER).expand(8, -1)])
    alone, together = layer(alone_TK[None])[0, 0].float(), layer(together_TK[None])[0, 0].float()
    return not bool((alone - together).norm() <= TOLERANCE.get(dtype, CLOSE_ROUNDED) * alone.norm())


def _token(layer: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return fixed inputs [1, K] of a layer: one large value, the others small."""
    width = getattr(layer, "in_features", None)
    place = next(_places(layer), torch.device("cpu"))  # torch's own layers have no parameters, and no other place
    if not isinstance(width, int):
        return None
    x_TK = REST * torch.randn(1, width, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    x_TK[0, 0] = PEAK
    # meta: the weight is offloaded, and is fetched when it is used
    return x_TK.to("cpu" if place.type == "meta" else place, dtype)


def _places(layer: nn.Module) -> Iterator[torch.device]:
    yield from (tensor.device for tensor in (*layer.parameters(), *layer.buffers()))


def _dtype_of(model: nn.Module) -> torch.dtype:
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
