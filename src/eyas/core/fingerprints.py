"""Fingerprints of models: short texts by which a draft head finds out whether a target is the one
that it was trained for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core import quantised
from eyas.core.placement import value_of

__all__ = ["fingerprint_of", "same_weights"]


def fingerprint_of(model: nn.Module) -> str:
    """A hash of all shapes of weights, and sums over a few of them.

    For a quantised model: a hash of the library's name and of its layers' names and classes, and
    sums over what a few of these layers return, because their weights are stored in many ways.
    """
    if library := quantised.library_of(model):
        return _of_quantised(model, library)
    weights = [(name, weight) for name, weight in sorted(model.named_parameters()) if weight.ndim == 2]
    values = [value_of(model, name).detach() for name, _ in _three(weights)]
    some = [weight.flatten()[:: max(1, weight.numel() // 4096)] for weight in values]
    return _text([(name, tuple(weight.shape)) for name, weight in weights], some)


def same_weights(fingerprint: str, own: str) -> bool:
    """Whether two fingerprints are those of the same weights, up to the rounding of dtypes."""
    shapes, _, sums = fingerprint.partition(":")
    own_shapes, _, own_sums = own.partition(":")
    try:
        pairs = zip(map(float, sums.split(",")), map(float, own_sums.split(",")), strict=False)
        return shapes == own_shapes and all(abs(a - b) < 0.02 for a, b in pairs)
    except ValueError:  # not a fingerprint of eyas
        return False


def _of_quantised(model: Any, library: str) -> str:
    dtype = model.dtype if isinstance(getattr(model, "dtype", None), torch.dtype) else torch.float32
    layers = sorted(quantised.layers_of(model).items())
    returned = [quantised.response(layer, dtype) for _, layer in _three(layers)]
    # GPTQModel has a class for each kernel; by any of them the checkpoint is the same target.
    named = library not in ("gptq", "awq")
    kinds = [
        (
            name,
            type(layer).__name__ if named else "",
            getattr(layer, "in_features", 0),
            getattr(layer, "out_features", 0),
        )
        for name, layer in layers
    ]
    return f"{library}+{_text(kinds, [x for x in returned if x is not None])}"


def _three(items: list[Any]) -> tuple[Any, Any, Any]:
    """The first, the middle and the last."""
    return items[0], items[len(items) // 2], items[-1]


def _text(described: list[Any], some: list[Tensor]) -> str:
    """ "hash:sum,sum,...": the sums are over signed values, divided by their norm."""
    sums = []
    for values in some:
        values = values.double()
        signs = torch.arange(len(values), device=values.device) % 3 - 1
        sums.append(float((values * signs).sum() / values.norm().clamp(min=1e-30)))
    return f"{hashlib.sha256(repr(described).encode()).hexdigest()[:12]}:{','.join(f'{value:.3f}' for value in sums)}"
