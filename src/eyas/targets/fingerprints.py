"""Fingerprints of models: short texts that tell eyas whether a draft head was trained for this target. A head
without one is doubted by its embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.extensions import TargetExtension
from eyas.core.target import Target
from eyas.targets import quantised
from eyas.targets.placement import value_of

__all__ = [
    "Origin", "base_has_fingerprint", "doubts", "fingerprint", "fingerprint_of", "has_fingerprint",
    "same_weights",
]  # fmt: skip


@dataclass(frozen=True)
class Origin(TargetExtension):
    """The weights of a target as they were without the adapters that eyas added.

    Attributes:
        base: fingerprint of the weights without an adapter; "": none was added.
        digest: `targets.adapters.digest` of the adapter that is always in use, merged into the
            weights or not; "": there is none.
    """

    base: str = ""
    digest: str = ""


def _origin(target: Target) -> Origin:
    return next((one for one in target.extensions if isinstance(one, Origin)), Origin())


def fingerprint(target: Target) -> str:
    """Return a short identification of the weights, which is saved with draft heads. If adapters are
    switched between, it is the base model's."""
    origin = _origin(target)
    if target.adapters is not None and origin.base:
        return origin.base
    own = fingerprint_of(target.model)
    return f"{origin.digest}+{own}" if origin.digest else own


def has_fingerprint(target: Target, recorded: str) -> bool:
    """Return whether `recorded` belongs to these weights, up to the rounding of dtypes."""
    return same_weights(recorded, fingerprint(target))


def base_has_fingerprint(target: Target, recorded: str) -> bool:
    """Return whether `recorded` belongs to the weights before an adapter was added."""
    base = _origin(target).base
    return bool(base) and same_weights(recorded, base)


def doubts(method: Any, draft: str, target: Target) -> Iterator[str]:
    """Yield warnings about a head that may draft little for the target."""
    if method.needs_weights and not target.head_is_exact:
        yield f"the lm_head of {target.name} does something that eyas does not know: fewer drafts may be accepted"
    if method.target_fingerprint:
        if doubt := _other_weights(method, draft, target):
            yield doubt
    elif _knows_other_tokens(method, target):
        yield (
            f"the token embeddings in {draft} are not those of {target.name}: the head was made for another model, so little of "
            "the text may be drafted; the text stays the same"
        )


def _other_weights(method: Any, draft: str, target: Target) -> str:
    """Return a warning if the head was trained for other weights than the target's."""
    recorded = method.target_fingerprint
    if base_has_fingerprint(target, recorded):
        if not method.needs_weights:
            return ""
        return f"{draft} was trained for {target.name} alone: with an adapter less of the text may be drafted"
    if has_fingerprint(target, recorded):
        return ""
    known = "other weights than these quantised ones" if quantised.library_of(target.model) else "another target"
    return f"{draft} was trained for {known}: the text stays the same, but less of it may be drafted"


def _knows_other_tokens(method: Any, target: Target) -> bool:
    """Return whether a head brings an embedding table of the target's width that is another model's. Training
    and rounding leave most of a table's directions as they were; two models' tables are unrelated."""
    table = getattr(method, "embed_tokens", None)
    if table is None or table.shape[1] != target.hidden_size:
        return False
    ids = torch.arange(len(table), device=table.device)[:: max(1, len(table) // 4096)]
    own, theirs = table[ids].float(), target.embed(ids).float()
    return bool(nn.functional.cosine_similarity(own, theirs, dim=-1).mean() < 0.5)


def fingerprint_of(model: Any) -> str:
    """Return a hash of the names and shapes of all 2-D weights, and sums over three of them.

    For a quantised model: the library's name, a hash of its layers' names, classes and sizes, and sums over the
    outputs of three of these layers. The weights themselves are stored in many ways.
    """
    if library := quantised.library_of(model):
        return _of_quantised(model, library)
    weights: dict[str, Any] = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    modules = ((name, getattr(module, "stored_rows", None)) for name, module in model.named_modules())
    stored = {f"{name}.weight": rows for name, rows in modules if rows is not None}  # weights that stay in their files
    if stored and model.config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    shapes = sorted((name, tuple(weight.shape)) for name, weight in (weights | stored).items())
    samples = []
    for name, (outputs, inputs) in _three(shapes):
        step = max(1, outputs * inputs // 4096)
        samples.append(
            stored[name].sample(step) if name in stored else value_of(model, name).detach().flatten()[::step]
        )
    return _format(shapes, samples)


def same_weights(fingerprint: str, own: str) -> bool:
    """Return whether two fingerprints belong to the same weights, up to the rounding of dtypes."""
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
    returned = [quantised.reference_output(layer, dtype) for _, layer in _three(layers)]
    # GPTQModel has a class for each kernel; the checkpoint is the same target with each of them
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
    return f"{library}+{_format(kinds, [x for x in returned if x is not None])}"


def _three(items: list[Any]) -> tuple[Any, Any, Any]:
    return items[0], items[len(items) // 2], items[-1]


def _format(shapes: list[Any], samples: list[Tensor]) -> str:
    """Return "hash:sum,sum,...": the sums are over signed values, divided by their norm."""
    sums = []
    for values in samples:
        values = values.double()
        signs = torch.arange(len(values), device=values.device) % 3 - 1
        sums.append(float((values * signs).sum() / values.norm().clamp(min=1e-30)))
    return f"{hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}:{','.join(f'{value:.3f}' for value in sums)}"
