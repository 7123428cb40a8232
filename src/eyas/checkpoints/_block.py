"""Block heads (DFlash, DSpark) in our names, and what their published formats share: tensor names,
layer ids, refusals.

Our tensors (D width of target and head, F = features x D, V vocabulary, r rank, h width of an
attention head; i from 0):

    fc.weight [D, F]                                  hidden_norm.weight [D]
    layers.i.input_norm.weight [D]                    layers.i.mlp_norm.weight [D]
    layers.i.attention.{q,k,v}.weight [rows, D]       layers.i.attention.o.weight [D, heads * h]
    layers.i.attention.{q,k}_norm.weight [h]          layers.i.mlp.{gate,up}.weight [I, D], layers.i.mlp.down.weight [D, I]
    norm.weight [D]
    markov.before.weight, markov.after.weight [V, r]  if markov_rank
    confidence.weight [1, D or D + r], .bias [1]      unless confidence is none
    embed.weight, head.weight [V, D]                  DSpark only, may be absent: the target's are used

Our config: the keys of an EAGLE-1 head's layer (`safeailab`) and

    layers              int: decoder layers of the head
    feature_layers      tuple: k is HF's hidden_states[k], the INPUT of layer k; published is the OUTPUT, k - 1
    target_layers       int or None: layers of the target that the head was trained for
    block, mask_token   int
    from_anchor         bool: slot i predicts the next token, not the one at its own place
    markov_rank         int; 0: no Markov head
    confidence          "none", "hidden" or "hidden+markov": what the confidence head reads

**Which token a slot predicts** is shown by no tensor, and a head that is read the wrong way accepts
next to nothing. `sample_from_anchor` says it (`shift_label` in heads of the speculators library).
Where config.json has neither, the class under `architectures` decides, as its authors' code knows
one way only: DFlashDraftModel the token at its own place, Qwen3DSparkModel the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import architecture
from eyas.checkpoints._llama import Shape, count, flag, layer_names, read_layer, read_rope
from eyas.checkpoints._weights import differences, refuse_dtypes
from eyas.errors import CheckpointError

__all__ = [
    "CLASSES",
    "DFLASH",
    "DSPARK",
    "is_block_head",
    "read_common",
    "read_tensors",
    "tensor_shapes",
    "write_common",
    "write_tensors",
]

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
CLASSES = (DFLASH, DSPARK, "DSparkDraftModel", "DFlash2DraftModel", "Gemma4DSparkModel")
FROM_ANCHOR = {DFLASH: False, DSPARK: True}

_MUST_BE: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "the attention has biases"),
    "is_causal": (False, "slots of a block see earlier slots only"),
    "dflash_query_causal": (False, "slots of a block see earlier slots only"),
    "use_sliding_window": (False, "layers have a sliding window"),
    "input_embedding_scale": (1, "the embeddings are scaled"),
    "output_multiplier": (1, "the logits are scaled"),
    "final_logit_softcapping": (0, "the logits are capped"),
    "partial_rotary_factor": (1, "RoPE turns a part of each head only"),
    "log_snr_conditioning": (False, "the net reads the level of noise"),
    "conv_kernel_size": (0, "the layers have convolutions (DFlash 2)"),
    "selector_rank": (0, "a selector chooses the candidates (DFlash 2)"),
}
"""Settings that change the computation: the value that is supported, and the meaning of any other."""


def is_block_head(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a DFlash or DSpark head, readable or not."""
    has_tensors = {"fc.weight", "hidden_norm.weight"} <= set(names)
    return "speculators_model_type" not in config and (architecture(config) in CLASSES or has_tensors)


# --- reading -----------------------------------------------------------------------------------------


def read_common(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Our config of the part that both formats share.

    Args:
        inner: `dflash_config`; its entries have precedence over the same keys of `config`.
    """
    merged = {**config, **inner}
    _refuse(merged)
    ids = merged.get("target_layer_ids")
    are_ids = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= -1 for i in ids)
    if not are_ids or not ids or ids != sorted(set(ids)):
        raise CheckpointError(
            f"config.json has target_layer_ids {ids!r}; they must be whole numbers from -1 on, each above the one before"
        )
    ours = {
        **read_layer(config),
        **read_rope(config),
        "qkv_bias": False,
        "layers": count(config, "num_hidden_layers"),
        "feature_layers": tuple(i + 1 for i in ids),
        "target_layers": None if merged.get("num_target_layers") is None else count(merged, "num_target_layers"),
        "block": count(merged, "block_size"),
        "mask_token": _token(merged, "mask_token_id"),
        "from_anchor": _from_anchor(merged),
        "markov_rank": 0,
        "confidence": "none",
    }
    if ours["block"] < 2:
        raise CheckpointError("config.json has block_size 1; a block has the root's slot and one more at least")
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def read_tensors(ours: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: bool) -> dict[str, Tensor]:
    """Our tensors. CheckpointError for a name that is missing or unknown, a wrong shape, and
    quantised weights.

    Args:
        tables: whether the format has embeddings and an lm_head, which may be absent.
    """
    names, our_shapes = _names(ours, tables), tensor_shapes(ours, tables)
    optional = [name for name, our_name in names.items() if our_name in ("embed.weight", "head.weight")]
    faults = differences(tensors, {name: our_shapes[our_name] for name, our_name in names.items()}, optional)
    if faults:
        raise CheckpointError(f"the tensors of this head are not what config.json says: {faults}")
    refuse_dtypes(tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}


def tensor_shapes(ours: Mapping[str, Any], tables: bool) -> dict[str, Shape]:
    """Our tensor names and their shapes, from our config."""
    D, inner, V, r, h = (
        ours[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "markov_rank", "head_dim")
    )
    query, key = ours["num_heads"] * h, ours["num_kv_heads"] * h
    out: dict[str, Shape] = {
        "fc.weight": (D, len(ours["feature_layers"]) * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    layer: dict[str, Shape] = {
        "input_norm.weight": (D,), "mlp_norm.weight": (D,),
        "attention.q.weight": (query, D), "attention.k.weight": (key, D), "attention.v.weight": (key, D),
        "attention.o.weight": (D, query), "attention.q_norm.weight": (h,), "attention.k_norm.weight": (h,),
        "mlp.gate.weight": (inner, D), "mlp.up.weight": (inner, D), "mlp.down.weight": (D, inner),
    }  # fmt: skip
    for i in range(ours["layers"]):
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if r:
        out |= {"markov.before.weight": (V, r), "markov.after.weight": (V, r)}
    if ours["confidence"] != "none":
        out |= {
            "confidence.weight": (1, D + (r if ours["confidence"] == "hidden+markov" else 0)),
            "confidence.bias": (1,),
        }
    if tables:
        out |= {"embed.weight": (V, D), "head.weight": (V, D)}
    return out


def _names(ours: Mapping[str, Any], tables: bool) -> dict[str, str]:
    """Published tensor name -> ours."""
    names = {
        "markov_head.markov_w1.weight": "markov.before.weight",
        "markov_head.markov_w2.weight": "markov.after.weight",
        "confidence_head.proj.weight": "confidence.weight",
        "confidence_head.proj.bias": "confidence.bias",
        "embed_tokens.weight": "embed.weight",
        "lm_head.weight": "head.weight",
    }
    for i in range(ours["layers"]):
        names |= layer_names(f"layers.{i}", f"layers.{i}")
        names |= {f"layers.{i}.self_attn.{x}_norm.weight": f"layers.{i}.attention.{x}_norm.weight" for x in "qk"}
        names[f"layers.{i}.input_layernorm.weight"] = f"layers.{i}.input_norm.weight"
    known = tensor_shapes(ours, tables)
    renamed = {published: name for published, name in names.items() if name in known}
    return renamed | {name: name for name in known if name not in renamed.values()}


def _from_anchor(merged: Mapping[str, Any]) -> bool:
    """Return whether slot i predicts the next token. CheckpointError where config.json does not say it."""
    settings = {
        key: flag(merged, key, False) for key in ("sample_from_anchor", "shift_label") if merged.get(key) is not None
    }
    if len(set(settings.values())) > 1:
        raise CheckpointError(f"config.json has {settings}, which contradict each other: remove the wrong one")
    if settings:
        return next(iter(settings.values()))
    if architecture(merged) not in FROM_ANCHOR:
        raise CheckpointError(
            "config.json does not say which token a slot of the block predicts, and no tensor shows it: add "
            '"sample_from_anchor": true (the next token, as DeepSpec trains) or false (the one at its own place, as z-lab trains)'
        )
    return FROM_ANCHOR[architecture(merged)]


def _refuse(merged: Mapping[str, Any]) -> None:
    """Raise CheckpointError for settings whose computation is not supported."""
    for key, (expected, meaning) in _MUST_BE.items():
        value = merged.get(key)
        if value is not None and value != expected and not (key == "use_sliding_window" and not _slides(merged)):
            raise CheckpointError(f"config.json has {key} {value!r}: {meaning}, which is not computed here")
    if _slides(merged):
        raise CheckpointError(
            'config.json has layer_types other than "full_attention", and heads with those are not computed here'
        )
    size, vocabulary = merged.get("draft_vocab_size"), merged.get("vocab_size")
    if size is not None and size != vocabulary:
        raise CheckpointError(
            f"config.json has draft_vocab_size {size!r}; block heads over the target's whole vocabulary are read"
        )
    if merged.get("model_type") not in (None, "qwen3"):
        raise CheckpointError(
            f"the layers of this head are of model_type {merged.get('model_type')!r}; heads with qwen3 layers are read"
        )


def _slides(merged: Mapping[str, Any]) -> bool:
    """Return whether a layer has a sliding window, or is of another type than full attention."""
    kinds = merged.get("layer_types")
    if kinds is None:
        return bool(merged.get("use_sliding_window"))
    return not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)


def _token(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise CheckpointError(f"config.json has {key} {value!r}; it must be the id of a token")
    return value


# --- writing -----------------------------------------------------------------------------------------


def write_common(ours: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a Qwen3 config.json, and `sample_from_anchor`; `name` is the class under
    `architectures`."""
    published = {
        "architectures": [name],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": ours["hidden_size"],
        "intermediate_size": ours["intermediate_size"],
        "vocab_size": ours["vocab_size"],
        "num_hidden_layers": ours["layers"],
        "layer_types": ["full_attention"] * ours["layers"],
        "num_attention_heads": ours["num_heads"],
        "num_key_value_heads": ours["num_kv_heads"],
        "head_dim": ours["head_dim"],
        "rms_norm_eps": ours["rms_eps"],
        "rope_theta": ours["rope_theta"],
        "rope_scaling": ours["rope_scaling"],
        "max_position_embeddings": ours["max_positions"],
        "tie_word_embeddings": False,
        "num_target_layers": ours["target_layers"],
        "block_size": ours["block"],
        "sample_from_anchor": ours["from_anchor"],
    }
    return {**published, "eyas": ours["eyas"]} if "eyas" in ours else published


def write_tensors(ours: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: bool) -> dict[str, Tensor]:
    """Our tensors under their published names."""
    faults = differences(tensors, tensor_shapes(ours, tables), ("embed.weight", "head.weight"))
    assert not faults, faults
    return {name: tensors[our_name] for name, our_name in _names(ours, tables).items() if our_name in tensors}
