"""Block heads (DFlash, DFlash 2, DSpark) in our names, and the common parts of their published formats: tensor
names, layer ids, windows, refusals.

Our tensors (D width of target and head, F = features x D, V vocabulary, r rank, h width of an
attention head; i from 0):

    fc.weight [D, F]                                  hidden_norm.weight [D]
    layers.i.input_norm.weight [D]                    layers.i.mlp_norm.weight [D]
    layers.i.attention.{q,k,v}.weight [rows, D]       layers.i.attention.o.weight [D, heads * h]
    layers.i.attention.{q,k}_norm.weight [h]          layers.i.mlp.{gate,up}.weight [I, D], layers.i.mlp.down.weight [D, I]
    norm.weight [D]
    markov.before.weight [V, r], .after.weight [Vd, r]   if markov_rank
    confidence.weight [1, D or D + r], .bias [1]      unless confidence is none
    embed.weight [V, D], head.weight [Vd, D]          in some formats, may be absent: the target's are used
    draft_ids [Vd], int64, increasing                 the target's ids of the draft tokens, where Vd is less than V
    layers.i.{attention,mlp}_conv.base [2, taps, D], .kernel.weight [2 * taps * D / group, D]     if taps
    selector.{before,after}.weight [V, s], selector.hidden.weight [s, D]                          if selector_rank s

Our config: the keys of an EAGLE-1 head's layer (`safeailab`) and

    layers              int: decoder layers of the head
    feature_layers      tuple: k is HF's hidden_states[k], the INPUT of layer k; published is the OUTPUT, k - 1
    target_layers       int or None: layers of the target that the head was trained for
    block, mask_token   int
    from_anchor         bool: slot i predicts the next token, not the one at its own place
    markov_rank         int; 0: no Markov head
    confidence          "none", "hidden" or "hidden+markov": what the confidence head reads
    draft_vocab         int: Vd; 0: V
    windows, causal     tuples, by layer: tokens of the sliding window or None; whether slots see earlier slots only
    anchored            bool: windows are counted from the root, for all slots
    embed_scale, logit_scale, logit_cap    factors of embeddings and logits, and their cap; scales None: as the target's own
    taps, group, selector_rank, candidates    int; 0: no convolutions, no selector

**Which token a slot predicts.** The tensors do not show it, and the target accepts almost no draft of a head that is
read the wrong way. `sample_from_anchor` says it (`shift_label` in heads of the speculators library). If config.json has
neither, the class under `architectures` decides, because its authors' code knows one way only. Slots of
DFlashDraftModel predict the token at their own place, slots of Qwen3DSparkModel the next token.

**Which halves RoPE turns.** Heads with "rope_is_neox_style": false turn neighbouring channels. Their
queries and keys are put into LLaMA's order when they are read, which leaves all products as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import architecture
from eyas.checkpoints._llama import (
    Shape,
    are_rising,
    count,
    flag,
    in_halves,
    layer_names,
    number,
    read_layer,
    read_rope,
)
from eyas.checkpoints._weights import differences, refuse_dtypes
from eyas.core.params import is_whole
from eyas.errors import CheckpointError, first_line

__all__ = [
    "CLASSES", "DFLASH", "DFLASH2", "DSPARK", "SECOND_PARTS", "SLIDING", "attention_kinds", "base", "block_names",
    "block_shapes", "dspark_parts", "is_block_head", "read_common", "read_tensors", "refuse",
]  # fmt: skip

DFLASH, DFLASH2, DSPARK, LFM2 = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "Lfm2DSparkDraftModel"
CLASSES = (DFLASH, DSPARK, LFM2, "DSparkDraftModel", DFLASH2, "Gemma4DSparkModel")
FROM_ANCHOR = {DFLASH: False, DFLASH2: False, DSPARK: True, LFM2: True}
SLIDING = "sliding_attention"
SECOND_PARTS = {
    "taps": "conv_kernel_size",
    "group": "conv_group_size",
    "selector_rank": "selector_rank",
    "candidates": "selector_top_k",
}
"""Our keys for the sizes of DFlash 2's convolutions and selector -> the published ones."""

LAYER_KEYS = ("layer_types", "max_window_layers", "num_hidden_layers", "sliding_window", "use_sliding_window")

_MUST_BE: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "the attention has biases"),
    "dflash_query_causal": (False, "slots of a block see earlier slots only"),
    "partial_rotary_factor": (1, "RoPE turns a part of each head only"),
    "log_snr_conditioning": (False, "the net reads the level of noise"),
    "use_swa": (False, "every layer has a sliding window, whatever layer_types says"),
    "attention_value_scale": (1, "the values of the attention are multiplied by a factor"),
    "attention_sink_bias": (False, "the attention has sinks"),
    "use_aux_hidden_state": (True, "the net does not read the target's layers"),
}
"""Settings that change the computation: the value that is supported, and the meaning of any other."""


def is_block_head(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a block head, readable or not, in another form than the speculators library's."""
    has_tensors = {"fc.weight", "hidden_norm.weight"} <= set(names)
    return "speculators_model_type" not in config and (architecture(config) in CLASSES or has_tensors)


def read_common(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return our config of the part that both formats share."""
    merged = {**config, **inner}
    refuse(merged)
    if merged.get("draft_vocab_size") not in (None, merged.get("vocab_size")):
        raise CheckpointError(
            f"config.json has draft_vocab_size {merged['draft_vocab_size']!r}; heads of this form draft the target's whole vocabulary"
        )
    ids = merged.get("target_layer_ids")
    if not are_rising(ids, -1):
        raise CheckpointError(
            f"config.json has target_layer_ids {ids!r}; they must be whole numbers from -1 on, each above the one before"
        )
    ours = {
        **base(config, merged, [i + 1 for i in ids]),
        "target_layers": None if merged.get("num_target_layers") is None else count(merged, "num_target_layers"),
        "from_anchor": _from_anchor(merged),
        "draft_vocab": 0,
        **attention_kinds(merged),
        "anchored": False,
        **_scales(merged),
        **_second_parts(merged),
    }
    if ours["block"] < 2:
        raise CheckpointError("config.json has block_size 1; a block has the root's slot and one more at least")
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def base(layer: Mapping[str, Any], settings: Mapping[str, Any], feature_layers: Sequence[int]) -> dict[str, Any]:
    """Return the part of our config that all forms say alike, in the config of the layers and in their settings."""
    unnamed = {"vocab_size": None} if layer.get("vocab_size", 0) is None else {}  # a file without tokens or tables
    return {
        **read_layer({**layer, "vocab_size": 1} if unnamed else layer),
        **unnamed,
        **read_rope(layer),
        "qkv_bias": False,
        "layers": count(layer, "num_hidden_layers"),
        "feature_layers": tuple(feature_layers),
        "target_layers": None,
        "block": count(settings, "block_size"),
        "mask_token": _mask_token(settings),
        "markov_rank": 0,
        "confidence": "none",
    }


def dspark_parts(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `markov_rank` and `confidence`; `defaults`: the meaning of absent keys in this form."""
    told = {**defaults, **config}
    rank = told["markov_rank"]
    if not is_whole(rank) or not 0 <= rank < 2**31:
        raise CheckpointError(f"config.json has markov_rank {rank!r}; it must be a whole number, 0 or more")
    if rank and told.get("markov_head_type") != "vanilla":
        raise CheckpointError(
            f"config.json has markov_head_type {told.get('markov_head_type')!r}, but eyas reads type 'vanilla' only"
        )
    confident, with_markov = (
        flag(told, key, defaults[key]) for key in ("enable_confidence_head", "confidence_head_with_markov")
    )
    if confident and with_markov and not rank:
        raise CheckpointError("config.json has a confidence head that reads the Markov head, but markov_rank 0")
    return {"markov_rank": rank, "confidence": ("hidden+markov" if with_markov else "hidden") if confident else "none"}


def read_tensors(
    ours: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: bool, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return our tensors. Raise CheckpointError for a name that is missing or unknown, a wrong shape, and quantised
    weights."""
    names, our_shapes = block_names(ours, tables), block_shapes(ours, tables)
    may_miss = ("embed.weight",) if ours.get("draft_vocab") else ("embed.weight", "head.weight")
    optional = [name for name, our_name in names.items() if our_name in may_miss]
    faults = differences(tensors, {name: our_shapes[our_name] for name, our_name in names.items()}, optional)
    if faults:
        raise CheckpointError(f"the tensors of this head differ from config.json: {faults}")
    refuse_dtypes(tensors, but=("draft_ids",))
    return in_halves({names[name]: tensor for name, tensor in tensors.items()}, config, ours["head_dim"])


def block_shapes(ours: Mapping[str, Any], tables: bool) -> dict[str, Shape]:
    """Return our tensor names and their shapes, from our config."""
    D, inner, V, r, h = (
        ours[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "markov_rank", "head_dim")
    )
    query, key, drafted = ours["num_heads"] * h, ours["num_kv_heads"] * h, ours.get("draft_vocab") or V
    taps, rank = ours.get("taps") or 0, ours.get("selector_rank") or 0
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
    for part in ("attention", "mlp") if taps else ():
        layer[f"{part}_conv.base"] = (2, taps, D)
        layer[f"{part}_conv.kernel.weight"] = (2 * taps * (D // ours["group"]), D)
    for i in range(ours["layers"]):
        out |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if r:
        out |= {"markov.before.weight": (V, r), "markov.after.weight": (drafted, r)}
    if rank:
        out |= {
            "selector.before.weight": (V, rank),
            "selector.after.weight": (V, rank),
            "selector.hidden.weight": (rank, D),
        }
    if ours["confidence"] != "none":
        out |= {
            "confidence.weight": (1, D + (r if ours["confidence"] == "hidden+markov" else 0)),
            "confidence.bias": (1,),
        }
    if tables:
        out |= {"embed.weight": (V, D), "head.weight": (drafted, D)}
    return out | ({"draft_ids": (drafted,)} if drafted != V else {})


def block_names(ours: Mapping[str, Any], tables: bool) -> dict[str, str]:
    """Return our name of each published tensor."""
    names = {
        "markov_head.markov_w1.weight": "markov.before.weight",
        "markov_head.markov_w2.weight": "markov.after.weight",
        "confidence_head.proj.weight": "confidence.weight",
        "confidence_head.proj.bias": "confidence.bias",
        "embed_tokens.weight": "embed.weight",
        "lm_head.weight": "head.weight",
        "candidate_selector.predecessor_codebook": "selector.before.weight",
        "candidate_selector.successor_codebook": "selector.after.weight",
        "candidate_selector.hidden_projection.weight": "selector.hidden.weight",
    }
    for i in range(ours["layers"]):
        names |= layer_names(f"layers.{i}", f"layers.{i}")
        names[f"layers.{i}.input_layernorm.weight"] = f"layers.{i}.input_norm.weight"
        for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            names |= {
                f"{conv}.base_kernel": f"{conv}.base",
                f"{conv}.kernel_projection.weight": f"{conv}.kernel.weight",
            }
    known = block_shapes(ours, tables)
    renamed = {published: name for published, name in names.items() if name in known}
    return renamed | {name: name for name in known if name not in renamed.values()}


def _from_anchor(merged: Mapping[str, Any]) -> bool:
    """Return whether slot i predicts the next token. Raise CheckpointError where config.json does not say it."""
    settings = {
        key: flag(merged, key, False) for key in ("sample_from_anchor", "shift_label") if merged.get(key) is not None
    }
    if len(set(settings.values())) > 1:
        raise CheckpointError(f"config.json has {settings}, which contradict each other: remove the wrong one")
    if settings:
        return next(iter(settings.values()))
    if architecture(merged) not in FROM_ANCHOR:
        raise CheckpointError(
            "config.json does not say which token a slot of the block predicts, and no tensor shows it. Add "
            '"sample_from_anchor": true (the next token, as DeepSpec trains) or false (the token at its own place, as z-lab trains)'
        )
    return FROM_ANCHOR[architecture(merged)]


def attention_kinds(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return `windows` and `causal` of the layers, as z-lab's class has them: layers with a window see earlier slots
    only, unless is_causal says it for all. vLLM's `causal` in dflash_config means the same, where is_causal is not there."""
    from transformers import Qwen3Config  # its rules decide which layers have a window

    kinds, layers = merged.get("layer_types"), count(merged, "num_hidden_layers")
    known = kinds is None or (isinstance(kinds, list) and all(kind in (SLIDING, "full_attention") for kind in kinds))
    if not known or (kinds is not None and len(kinds) < layers):
        raise CheckpointError(
            f"config.json has layer_types {kinds!r}; heads whose {layers} layers have full or sliding attention are read"
        )
    settings = {key: merged[key] for key in LAYER_KEYS if merged.get(key) is not None}
    if kinds is not None:  # a copied config may list more layers than the head has
        settings["layer_types"] = kinds[:layers]
    try:
        resolved: Any = Qwen3Config(**settings)
    except Exception as error:  # transformers checks the values in its own ways
        raise CheckpointError(f"config.json has windows that cannot be read: {first_line(error, 200)}") from error
    slides = [kind == SLIDING for kind in resolved.layer_types[:layers]]
    told = "causal" if merged.get("is_causal") is None else "is_causal"
    causal = slides if merged.get(told) is None else [flag(merged, told, False)] * layers
    window = None if resolved.sliding_window is None else count(vars(resolved), "sliding_window")
    windows = tuple(window if slid else None for slid in slides)
    return {"windows": windows if any(windows) else (), "causal": tuple(causal) if any(causal) else ()}


def _scales(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of embeddings and logits. Heads that eyas wrote before it had these keys read the target's
    own ones."""
    cap = merged.get("final_logit_softcapping") or 0.0
    default = None if "eyas" in merged else 1.0
    scales = {"embed_scale": "input_embedding_scale", "logit_scale": "output_multiplier"}
    found = {ours: number(merged, key) if merged.get(key) is not None else default for ours, key in scales.items()}
    if cap:
        found["logit_scale"] = found["logit_scale"] or 1.0
    return {**found, "logit_cap": number({"final_logit_softcapping": cap}, "final_logit_softcapping") if cap else 0.0}


def _second_parts(merged: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of DFlash 2's convolutions and selector; 0 where there are none."""
    sizes = {ours: count(merged, key) if merged.get(key) else 0 for ours, key in SECOND_PARTS.items()}
    if bool(sizes["taps"]) != bool(sizes["group"]) or bool(sizes["selector_rank"]) != bool(sizes["candidates"]):
        raise CheckpointError(
            f"config.json has {', '.join(f'{key} {merged.get(key)!r}' for key in SECOND_PARTS.values())}: each pair is there, or none of it"
        )
    if sizes["taps"] and count(merged, "hidden_size") % sizes["group"]:
        raise CheckpointError(
            f"config.json has conv_group_size {sizes['group']}, which does not divide the hidden size"
        )
    return sizes


def refuse(merged: Mapping[str, Any]) -> None:
    """Raise CheckpointError for settings whose computation is not supported."""
    if architecture(merged).startswith("Gemma4") or merged.get("model_type") in ("gemma4", "gemma4_text"):
        raise CheckpointError("the layers of this head are Gemma 4's, which are not computed here")
    for key, (expected, meaning) in _MUST_BE.items():
        value = merged.get(key)
        if value is not None and value != expected:
            raise CheckpointError(f"config.json has {key} {value!r}: {meaning}, which is not computed here")
    if merged.get("model_type") not in (None, "qwen3"):
        raise CheckpointError(
            f"the layers of this head are of model_type {merged.get('model_type')!r}; heads with qwen3 layers are read"
        )


def _mask_token(config: Mapping[str, Any]) -> int:
    value = config.get("mask_token_id")
    if not is_whole(value) or not 0 <= value < 2**31:
        raise CheckpointError(f"config.json has mask_token_id {value!r}; it must be the id of a token")
    return value
