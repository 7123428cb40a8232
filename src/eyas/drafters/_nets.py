"""Helpers of methods with a trained net: make a net, load it from a checkpoint, check it against
the target.

This module knows no net. Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.target import Target
from eyas.errors import CheckpointError, OptionError
from eyas.nn import Attention, LayerShape, rope_factor
from eyas.targets.fingerprints import fingerprint

__all__ = [
    "EMBEDDING", "MARGIN", "check_head", "init_matrices", "layer_config", "layer_numbers", "layer_shape",
    "load_head", "load_tensors", "mask_token", "place_net", "random_net", "saved_head", "seeded",
    "target_layer_shape", "target_sizes",
]  # fmt: skip

EMBEDDING = "embed.weight"  # the head's own embedding table in a checkpoint
MARGIN = 256  # slots that a recorded cycle reserves after the committed ones: enough for most drafts
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_eps", "rope_theta",
    "rope_scaling", "qkv_bias", "qk_norm",
)  # fmt: skip
NetT = TypeVar("NetT", bound=nn.Module)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Make new tensors on the device within this context, with torch's random numbers from `seed`; the random
    state of torch stays as it was. On a GPU a head of a billion weights takes a moment, on a CPU half a
    minute."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), device:
        torch.manual_seed(seed)
        yield


def random_net(make: Callable[[], NetT], target: Target, seed: int) -> NetT:
    """Return the net that `make` returns, with random matrices, on the target's device."""
    with seeded(seed, target.device):
        net = make()
        init_matrices(net)
    return place_net(net, target)


def init_matrices(net: nn.Module) -> None:
    """Fill the matrices with random numbers that keep the variance of their inputs; set biases to zero, and
    leave norms as they are."""
    for name, weight in net.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)


def place_net(net: NetT, target: Target) -> NetT:
    """Return the net on the target's device, in its dtype, for inference."""
    return net.to(device=target.device, dtype=target.dtype).eval()


def check_head(weights: Weights | None, method: str, label: str, sizes: Mapping[str, tuple[str, int]]) -> Weights:
    """Return the weights; raise CheckpointError if there are none, or if they are of another method or for another
    target.

    Args:
        label: the method's name for people.
        sizes: key of the head's config -> (name for people, the target's size). A size that the
            config leaves open fits.
    """
    if weights is None:
        raise CheckpointError("this method needs a trained head: pass its folder or hub id with --draft")
    if weights.method != method:
        raise CheckpointError(f"{weights.source} holds a head of {weights.method}, not of {label}")
    for key, (name, expected) in sizes.items():
        size = weights.config[key]
        if size is not None and size != expected:
            raise CheckpointError(
                f"{weights.source}: the head's {name} is {size}, the target's {expected}: it was made for another model"
            )
    return weights


def target_sizes(target: Target) -> dict[str, tuple[str, int]]:
    """Return the `sizes` of `check_head` for a head of the target's width and vocabulary."""
    return {"hidden_size": ("hidden size", target.hidden_size), "vocab_size": ("vocabulary", target.vocab_size)}


def load_head(
    net: NetT, weights: Weights, target: Target, others: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[NetT, Tensor | None]:
    """Return the net with the tensors of a checkpoint, and the head's embedding table [V, D], which a
    checkpoint may have; None where it has none, or the target's. As `load_tensors` otherwise."""
    shapes = {EMBEDDING: (target.vocab_size, weights.config["hidden_size"]), **(others or {})}
    return load_tensors(net, weights, target, shapes, frozenset({EMBEDDING})), _own_embedding(weights, target)


def load_tensors(
    net: NetT,
    weights: Weights,
    target: Target,
    others: Mapping[str, tuple[int, ...]] | None = None,
    optional: frozenset[str] = frozenset(),
) -> NetT:
    """Return the net with the tensors of a checkpoint, on the target's device.

    Args:
        others: names and shapes of tensors in the checkpoint that are not the net's; those in
            `optional` may be missing.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    checkpoints.expect(weights, {**shapes, **(others or {})}, set(optional))
    net.load_state_dict({name: value for name, value in weights.tensors.items() if name in shapes})
    parameters = dict(net.named_parameters())
    for name, factor in _query_factors(net).items():
        parameters[name].data.mul_(factor)
    return place_net(net, target)


def _query_factors(net: nn.Module) -> dict[str, float]:
    """Return parameters of queries by name, and their factors when a net is loaded: YaRN's attention factor, of
    queries and keys. So all code that computes the layer, kernels too, knows frequencies only."""
    found = dict[str, float]()
    for path, module in net.named_modules():
        if isinstance(module, Attention) and (factor := rope_factor(module.shape)) != 1.0:
            last = "q_norm" if hasattr(module, "q_norm") else "q"
            parameters = module.get_submodule(last).named_parameters()
            found |= {f"{path}.{last}.{name}": factor**2 for name, _ in parameters}
    return found


def saved_head(
    method: str, config: Mapping[str, Any], net: nn.Module, target: Target, embed_tokens: Tensor | None = None
) -> Weights:
    """Return a head to save: its config with the target's fingerprint, the net's tensors, and the head's own embedding
    table where it has one."""
    tensors = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, factor in _query_factors(net).items():
        tensors[name] /= factor
    if embed_tokens is not None:
        tensors[EMBEDDING] = embed_tokens
    record = {"target_fingerprint": fingerprint(target)}
    return Weights(method, {**config, "eyas": record}, tensors, "memory")


def _own_embedding(weights: Weights, target: Target) -> Tensor | None:
    """Return the head's embedding table [V, D], unless it is the target's up to the rounding of storage."""
    table = weights.tensors.get(EMBEDDING)
    if table is None:
        return None
    table = table.to(device=target.device, dtype=target.dtype)
    if table.shape[1] != target.hidden_size:
        return table
    every_V = torch.arange(target.vocab_size, device=target.device)
    return None if torch.allclose(table, target.embed(every_V), rtol=1e-2, atol=1e-3) else table


def layer_shape(config: Mapping[str, Any]) -> LayerShape:
    """Return the sizes of the decoder layer that a checkpoint's config describes."""
    return LayerShape(**{name: config[name] for name in LAYER_KEYS if name in config})


def layer_numbers(layers: str | Sequence[int], target: Target) -> tuple[int, ...]:
    """Return the layers of the target that a head fuses, from `head.layers` or a checkpoint. Raise OptionError unless
    they are rising numbers of hidden_states before the final norm."""
    L = target.num_layers
    try:
        numbers = tuple(int(part) for part in (layers.split(",") if isinstance(layers, str) else layers))
    except ValueError as error:
        raise OptionError(f"head.layers must be auto or whole numbers separated by commas, got {layers!r}") from error
    if not numbers or sorted(set(numbers)) != list(numbers) or not all(0 <= k < L for k in numbers):
        raise OptionError(f"head.layers must be rising numbers from 0 to {L - 1}, the target's layers; got {layers!r}")
    return numbers


def mask_token(asked: int | None, target: Target, counts_V: Tensor | None) -> int:
    """Return the token that was asked for, or the padding token, or the one that counts least."""
    if asked is not None:
        if asked >= target.num_embeddings:
            raise OptionError(f"head.mask_token is {asked}, but the target has {target.num_embeddings} embeddings")
        return asked
    pad = getattr(target.model.config.get_text_config(), "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < target.num_embeddings:
        return pad
    return target.vocab_size - 1 if counts_V is None else int(counts_V.argmin())


def layer_config(shape: LayerShape) -> dict[str, Any]:
    """Return the entries of a checkpoint's config that describe this layer."""
    return {name: getattr(shape, name) for name in LAYER_KEYS}


def target_layer_shape(target: Target, **sizes: Any) -> LayerShape:
    """Return a layer of the target's sizes, where all of its layers have the same; `sizes` replaces some of them."""
    config = target.model.config.get_text_config(decoder=True)
    heads = _size(config, "num_attention_heads") or max(1, target.hidden_size // 64)
    head_dim = _size(config, "head_dim") or max(2, target.hidden_size // heads)
    rope = getattr(config, "rope_parameters", None) or {}
    like = {
        "hidden_size": target.hidden_size,
        "intermediate_size": _size(config, "intermediate_size") or 4 * target.hidden_size,
        "num_heads": heads,
        "num_kv_heads": _size(config, "num_key_value_heads") or heads,
        "head_dim": head_dim + head_dim % 2,
        "rms_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10_000.0),
    }
    return LayerShape(**{**like, **sizes})


def _size(config: Any, name: str) -> int | None:
    """Return a size of the configuration; None if there is none, or if it differs from layer to layer (Gemma 3n and
    4)."""
    try:
        size = getattr(config, name, None)
    except RuntimeError:  # transformers raises one for a size that differs from layer to layer
        return None
    return size if isinstance(size, int) else None
