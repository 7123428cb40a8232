"""The same head with one setting changed, as a publisher, a converter or a training may have changed it.

This module measures nothing, and it does not know where a published file says a setting. Some variants are impossible
for a head or its target: loading them fails.

Letters: V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.target import Target
from eyas.drafters.tools import target_layer_shape
from eyas_lab.examine.acceptance import AsGiven, Inputs

__all__ = ["Variant", "variants"]

NO_FIELD = (
    "no field of the file says this: train the head again with the inputs that engines give, or mend the exporter"
)
LOST = "the file has lost {}, which training learned: ask for it, or add it with ones"
THETAS = (10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0)
TURNED = re.compile(r"(?:self_attn|attention)\.([qk])(?:_proj|_norm)?\.(?:weight|bias)$")
SWITCHES: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("carries", "normed", "raw", "the next step reads the normed state", "the next step reads the raw state"),
    ("norm_before_residual", True, False, "the residual starts after the norm", "the residual starts before the norm"),
    ("from_anchor", True, False, "a slot predicts the next token", "a slot predicts the token at its own place"),
    ("inputs", "unshifted", "shifted", "each state with its own token", "each state with the next token"),
)
"""Settings with two values: our key, the values, and their names."""


class Variant(NamedTuple):
    """A head with one setting changed."""

    name: str
    weights: Weights
    inputs: Inputs = AsGiven
    by_hand: str = ""  # how to change the file where no field says the setting


def variants(weights: Weights, layers: tuple[int, ...], target: Target, inputs: Inputs = AsGiven) -> Iterator[Variant]:
    """Yield the variants of a head that reads these layers of the target with these inputs."""
    for name, config in _settings(weights.config, layers, target):
        yield Variant(name, replace(weights, config={**weights.config, **config}), inputs)
    for name, changes, by_hand in (
        *_orders(weights, layers),
        *_norms(weights, layers, target),
        *_rope(weights, target),
        *_vocabulary(weights),
        *_tables(weights),
        *_pairs(weights),
    ):
        config = {key: value for key, value in changes.items() if not isinstance(value, Tensor) and "." not in key}
        tensors = {**weights.tensors, **{key: value for key, value in changes.items() if key not in config}}
        kept = {key: value for key, value in tensors.items() if value is not None}
        yield Variant(name, replace(weights, config={**weights.config, **config}, tensors=kept), inputs, by_hand)
    for name, changed in _inputs(weights, layers, target, inputs):
        yield Variant(name, weights, changed, NO_FIELD)


def _settings(
    config: Mapping[str, Any], layers: tuple[int, ...], target: Target
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings that are a value of the config."""
    moved = [tuple(k + shift for k in layers) for shift in (-2, -1, 1, 2)]
    moved += [(*layers[:i], k + shift, *layers[i + 1 :]) for i, k in enumerate(layers) for shift in (-1, 1)]
    for ids in moved if "feature_layers" in config else ():
        if list(ids) == sorted(set(ids)) and ids[0] >= 0:
            yield f"layers {', '.join(map(str, ids))}", {"feature_layers": ids, "num_features": len(ids)}
    for key, one, other, one_name, other_name in SWITCHES:
        if key in config and config[key] in (one, other):
            yield (other_name, {key: other}) if config[key] == one else (one_name, {key: one})
    thetas = {*THETAS, target_layer_shape(target).rope_theta} if "rope_theta" in config else set()
    for theta in sorted(thetas - {config.get("rope_theta")}):
        yield f"RoPE theta {theta:,.0f}", {"rope_theta": theta}
    if config.get("rope_scaling") is not None:
        yield "RoPE without scaling", {"rope_scaling": None}
    if "block" not in config:
        return
    text: Any = target.model.config.get_text_config()
    tokens = {getattr(text, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")} | {0, target.vocab_size - 1}
    for token in sorted(token for token in tokens - {config["mask_token"]} if isinstance(token, int)):
        yield f"mask token {token}", {"mask_token": token}
    causal = any(config.get("causal") or ())
    seen = "all of the block" if causal else "earlier slots only"
    yield f"slots see {seen}", {"causal": (not causal,) * config["layers"]}
    if any(config.get("windows") or ()):
        yield "no sliding window", {"windows": (None,) * config["layers"]}
    for factor in sorted({1.0, float(target.hidden_size) ** 0.5} - {config.get("embed_scale") or 1.0}):
        yield f"embeddings times {factor:g}", {"embed_scale": factor}


# --- variants of tensors: a name, the changed tensors (None: taken away) and settings, and the change by hand

_Changes = tuple[str, dict[str, Any], str]


def _orders(weights: Weights, layers: tuple[int, ...]) -> Iterator[_Changes]:
    """Yield other orders of the fused layers."""
    count = len(layers) if "feature_layers" in weights.config else 0
    orders = permutations(range(count)) if count <= 3 else [tuple(reversed(range(count)))]
    for order in orders:
        if list(order) == sorted(order):
            continue
        parts, named = weights.tensors["fc.weight"].chunk(count, dim=1), ", ".join(map(str, order))
        norms = {f"fc_norm.{i}.weight": weights.tensors.get(f"fc_norm.{k}.weight") for i, k in enumerate(order)}
        too = " and the norms fc_norm" if any(norm is not None for norm in norms.values()) else ""
        by_hand = f"put the blocks of columns of fc.weight, one for each layer,{too} into the order {named}"
        yield f"features in the order {named}", {"fc.weight": torch.cat([parts[i] for i in order], 1), **norms}, by_hand


def _norms(weights: Weights, layers: tuple[int, ...], target: Target) -> Iterator[_Changes]:
    """Yield the other norms before fc of EAGLE-3."""
    config, one = weights.config, torch.ones(len(layers) * target.hidden_size, dtype=torch.float32)
    if "carries" not in config:
        return
    each = {f"fc_norm.{i}.weight": part for i, part in enumerate(one.chunk(len(layers)))}
    off = dict.fromkeys([*each, "input_norm.weight"]) | {"fc_norm": False, "norm_before_fc": False}
    if config["fc_norm"] or config["norm_before_fc"]:
        yield "no norm before fc", off, "remove the norms before fc, and the field that names them"
    if not config["fc_norm"]:
        yield "a norm for each layer before fc", off | each | {"fc_norm": True}, LOST.format("fc_norm.0.weight, ...")
    if not config["norm_before_fc"]:
        all_layers = {"input_norm.weight": one, "norm_before_fc": True}
        yield "one norm before fc", off | all_layers, LOST.format("input_norm.weight")


def _rope(weights: Weights, target: Target) -> Iterator[_Changes]:
    """Yield queries and keys whose channels are in the other order."""
    half = (weights.config.get("head_dim") or target_layer_shape(target).head_dim) // 2
    for name, sizes in (("neighbouring channels", (half, 2)), ("the halves of a head", (2, half))):
        turned = {
            key: rows.reshape(-1, *sizes, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
            for key, rows in weights.tensors.items()
            if TURNED.search(key)
        }
        by_hand = f"reorder the rows of q_proj and k_proj within each head: they are for a RoPE that turns {name}"
        yield f"RoPE turns {name}", turned, by_hand


def _vocabulary(weights: Weights) -> Iterator[_Changes]:
    """Yield other maps from the draft vocabulary to the target's."""
    ids_v = weights.tensors.get("draft_ids")
    if ids_v is None:
        return
    order_v = torch.arange(len(ids_v))
    others = {
        "draft tokens one id higher": ids_v + 1,
        "draft tokens one id lower": ids_v - 1,
        "draft tokens of the row before": torch.cat([ids_v[:1] - 1, ids_v[:-1]]),
        "draft tokens of the row after": torch.cat([ids_v[1:], ids_v[-1:] + 1]),
        "d2t holds ids instead of offsets": ids_v - order_v,
        "d2t is missing: the first tokens": order_v,
    }
    for name, other_v in others.items():
        if (
            bool((other_v.diff() > 0).all())
            and int(other_v[0]) >= 0
            and int(other_v[-1]) < weights.config["vocab_size"]
        ):
            yield name, {"draft_ids": other_v}, f"write d2t and t2d again: {name}"


def _tables(weights: Weights) -> Iterator[_Changes]:
    """Yield the target's tables in place of the head's."""
    if "embed.weight" in weights.tensors:
        yield "the target's embeddings", {"embed.weight": None}, "remove embed_tokens.weight"
    if "head.weight" in weights.tensors and "draft_ids" not in weights.tensors:
        own = {"head": "target"} if "head" in weights.config else {}
        yield "the target's lm_head", {"head.weight": None, **own}, "remove lm_head.weight"


def _pairs(weights: Weights) -> Iterator[_Changes]:
    """Yield the two inputs of EAGLE-1 and MTP in the other order, and the norms of MTP's exchanged."""
    name = {"eagle1": "fc.weight", "mtp": "module.eh_proj.weight"}.get(weights.method, "")
    if name not in weights.tensors:
        return
    swapped = {name: torch.cat(weights.tensors[name].chunk(2, dim=1)[::-1], dim=1)}
    by_hand = f"swap the halves of columns of {name.removeprefix('module.')}"
    yield "hidden state and embedding swapped", swapped, by_hand
    if weights.method == "mtp":
        one, other = "module.enorm.weight", "module.hnorm.weight"
        norms = {one: weights.tensors[other], other: weights.tensors[one]}
        yield "norms of the two inputs exchanged", norms, "exchange enorm and hnorm"
        yield "inputs and their norms swapped", swapped | norms, f"exchange enorm and hnorm, and {by_hand}"


def _inputs(weights: Weights, layers: tuple[int, ...], target: Target, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield the inputs that no field sets, each changed alone."""
    if target.num_layers in layers:
        kind = "after" if inputs.raw else "before"
        yield f"the last hidden state {kind} the final norm", inputs._replace(raw=not inputs.raw)
    yield "features one token late", inputs._replace(late=inputs.late + 1)
    for offset in (-1, 1):
        positions = "the block's positions" if "block" in weights.config else "the step of positions in a chain"
        yield f"{positions} {offset:+d}", inputs._replace(offset=inputs.offset + offset)
