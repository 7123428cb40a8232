"""EAGLE-3 heads in our names, and the common parts of their published formats: tensor names, vocabulary maps,
layer ids, refusals.

This module does not know in which format a head was published: the format's module knows where a setting is in
    config.json and its meaning there.

Our tensors (D draft width, T target width, F = num_features * T, V vocabulary, Vd draft vocabulary):

    fc.weight [D, F]                                  fc.bias [D], if fc_bias
    layer.embed_norm.weight [D]                       norm of the token embedding (published: input_layernorm)
    layer.hidden_norm.weight [D]                      norm of the hidden state
    layer.attention.{q,k,v}.weight [rows, 2D]         over [embedding, hidden state]; biases [rows], if qkv_bias
    layer.attention.o.weight [D, heads * head_dim]
    layer.attention.{q,k}_norm.weight [head_dim]      if qk_norm
    layer.mlp_norm.weight [D]                         layer.mlp.{gate,up}.weight [I, D], layer.mlp.down.weight [D, I]
    later.i.input_norm.weight [D]                     i from 0: the layers after the first, which read hidden states only;
    later.i.attention.{q,k,v}.weight [rows, D]        the others of their tensors are named as the first layer's
    norm.weight [D]
    head.weight [Vd, D]                               unless head is "target"
    draft_ids [Vd], int64, increasing                 the target's ids of the draft tokens; absent when Vd = V
    embed.weight [V, D]                               may be absent when D = T: the target's is used
    fc_norm.0.weight [T], ...                         if fc_norm
    input_norm.weight [F]                             if norm_before_fc

Our config: the keys of an EAGLE-1 head (`safeailab`) and

    draft_vocab_size, target_hidden_size, num_features    int
    layers                   int: decoder layers of the head
    feature_layers           tuple: k is HF's hidden_states[k], the INPUT of layer k; None for the default 2, L//2, L-3
    layer_ids_as_published   {"ids": [...], "meaning": "input" or "output"}, or None when config.json named none
    norm_before_fc           one norm over all features before fc
    fc_norm                  one norm over each feature before fc
    norm_before_residual     the layer's residual is the normed hidden state instead of the raw one
    qk_norm                  the layers are Qwen3's: a norm over each head of queries and keys
    carries                  "raw" or "normed": whether the next state is taken before or after the final norm
    head                     "own", or "target" for a head that uses the target's
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints._llama import (
    Shape,
    are_rising,
    count,
    flag,
    in_halves,
    layer_names,
    layer_shapes,
    mapping,
    read_layer,
    read_rope,
    write_layer,
)
from eyas.checkpoints._weights import differences, refuse_dtypes
from eyas.errors import CheckpointError

__all__ = [
    "CARRIES", "DEEPSPEC", "IDS", "MASK", "NAME_THE_FORM", "SGLANG", "VLLM", "architecture", "assemble", "check_dtypes",
    "choice", "draft_ids", "dtype_of", "is_eagle3", "is_parallel", "layer_config", "layer_ids", "publish_tensors",
    "read_flat", "refuse", "sliding_window",
]  # fmt: skip

SGLANG, VLLM, DEEPSPEC = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model"
NAME_THE_FORM = f'"architectures": ["{SGLANG}"] (SpecForge, SGLang, ModelOpt) or ["{VLLM}"] (vLLM)'
"""The line that a config.json needs if it does not say whose format it has."""

IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"  # the tensor by which P-EAGLE heads are known
CARRIES, MEANINGS = ("raw", "normed"), ("input", "output")

SETTINGS = {
    "carries", "draft_vocab_size", "fc_norm", "feature_layers", "head", "layer_ids", "layer_ids_as_published", "layers",
    "norm_before_fc", "norm_before_residual", "qk_norm",
}  # fmt: skip
"""Keys of the "eyas" object that define the computation; all others are the writer's record and are
kept as they are."""

_LATER_LAYER = r"layers\.(\d{1,9})"
_COMMON_NAMES = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "embed_tokens.weight": "embed.weight",
    "input_norm.weight": "input_norm.weight",
}

_MUST_BE: dict[str, tuple[Any, str]] = {
    "use_aux_hidden_state": (True, "the head reads the target's last state only"),
    "use_input_layernorm_in_first_layer": (True, "the layer has no norm over the embedding"),
    "use_last_layernorm": (True, "nothing is normed before lm_head"),
    "use_mtp_layernorm": (False, "the head has the norms of multi-token prediction"),
    "next_layer_regular": (True, "further layers are of another kind"),
    "parallel_draft_step": (1, "several tokens are drafted at once"),
    "parallel_drafting": (False, "several tokens are drafted at once"),
    "mlp_bias": (False, "the MLP has biases"),
    "is_causal": (True, "the layer looks ahead"),
    "logit_scale": (1, "the logits are scaled"),
    "partial_rotary_factor": (1, "RoPE turns a part of each head only"),
}
"""Settings that change the computation: the value that is supported, and the meaning of any other."""

_NORMS = frozenset({"norm_before_fc", "fc_norm", "use_aux_norm", "norm_before_residual", "norm_output"})
_IN_EAGLE_CONFIG = frozenset({IDS, "parallel_draft_heads_num_layers"}) | _NORMS | _MUST_BE.keys()


# --- recognition -------------------------------------------------------------------------------------


def is_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is an EAGLE-3 head of any format, readable or not."""
    return (
        "speculators_model_type" in config
        or "eagle3" in architecture(config).lower()
        or any(name in ("d2t", "t2d") or name.startswith("midlayer.") or ".hidden_norm." in name for name in names)
    )


def is_parallel(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a P-EAGLE head, an EAGLE-3 head that drafts in parallel (`peagle`)."""
    return config.get("speculators_model_type") == "peagle" or MASK in names


def architecture(config: Mapping[str, Any]) -> str:
    """Return the first name under `architectures`; empty when there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


# --- our names ----------------------------------------------------------------------------------------


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our config with every key; absent ones get the published formats' default."""
    layers = config.get("feature_layers")
    defaults = {
        **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_before_residual", "qk_norm"), False),
        "layer_ids_as_published": None,
        "window": None,
        "layers": 1,
        "carries": "raw",
        "head": "own",
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": config["hidden_size"],
    }
    return {
        **config,
        **{key: config.get(key) or default for key, default in defaults.items()},
        "num_features": len(layers) if layers else config.get("num_features") or 3,
        "feature_layers": tuple(layers) if layers else None,
    }


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return our tensor names and their shapes, from our complete config; `embed.weight` may be absent where D = T."""
    hidden, vocab, draft_vocab = (config[key] for key in ("hidden_size", "vocab_size", "draft_vocab_size"))
    target = config["target_hidden_size"]
    features = config["num_features"] * target
    out: dict[str, Shape] = {
        "fc.weight": (hidden, features),
        "layer.embed_norm.weight": (hidden,),
        "layer.hidden_norm.weight": (hidden,),
        **layer_shapes(config, 2 * hidden),
        "norm.weight": (hidden,),
        "embed.weight": (vocab, hidden),
    }
    for i in range(config["layers"] - 1):
        out |= {f"later.{i}.input_norm.weight": (hidden,), **layer_shapes(config, hidden, f"later.{i}")}
    if config["fc_bias"]:
        out["fc.bias"] = (hidden,)
    if config["head"] == "own":
        out["head.weight"] = (draft_vocab, hidden)
    if draft_vocab != vocab:
        out["draft_ids"] = (draft_vocab,)
    if config["fc_norm"]:
        out |= {f"fc_norm.{i}.weight": (target,) for i in range(config["num_features"])}
    if config["norm_before_fc"]:
        out["input_norm.weight"] = (features,)
    return out


def names_of(layer: str, features: int, layers: int = 1) -> dict[str, str]:
    """Return our name of each published tensor; without the vocabulary maps."""
    names = layer_names(layer, "layer")
    names[f"{layer}.input_layernorm.weight"] = "layer.embed_norm.weight"
    names[f"{layer}.hidden_norm.weight"] = "layer.hidden_norm.weight"
    for i in range(layers - 1):
        names |= layer_names(f"layers.{i + 1}", f"later.{i}")
        names[f"layers.{i + 1}.input_layernorm.weight"] = f"later.{i}.input_norm.weight"
    return names | _COMMON_NAMES | {name: name for name in (f"fc_norm.{i}.weight" for i in range(features))}


# --- reading -----------------------------------------------------------------------------------------


def read_flat(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], meaning: str | None, carries: str, several: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a head whose settings are in config.json itself and in its `eagle_config` object, as SGLang and vLLM
    publish it."""
    inner = mapping(config, "eagle_config")
    for key, value in inner.items():
        if key not in _IN_EAGLE_CONFIG and value not in (None, False):
            raise CheckpointError(
                f"config.json has eagle_config.{key} {value!r}, which is not known here; remove it if the head is computed without it"
            )
    merged = _merge(config, inner)
    settings = {
        **layer_ids(config, merged.get(IDS), meaning),
        **{key: flag(merged, key, False) for key in ("norm_before_fc", "norm_before_residual")},
        "fc_norm": flag(merged, "fc_norm", False) or flag(merged, "use_aux_norm", False),
        "carries": choice(mapping(config, "eyas"), "carries", CARRIES) or carries,
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    features = settings["num_features"]
    if count(merged, "num_aux_hidden_states", features) != features:
        raise CheckpointError(
            f"config.json has num_aux_hidden_states {merged['num_aux_hidden_states']} and names {features} layers (three where it names "
            f"none): name all of them under eagle_config.{IDS}"
        )
    return assemble(merged, tensors, settings, ("midlayer", "layers.0"), mapping(config, "eyas"), several=several)


def assemble(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    layers: Sequence[str],
    record: Mapping[str, Any],
    strict: bool = False,
    several: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our config and tensors, made of the published ones and of the settings that the format has read.

    Args:
        layers: the names that the first layer may have.
        record: the "eyas" object of config.json.
        strict: lm_head must be there, as in SafeAILab's heads, and a bias exists only where its tensor does,
            even against config.json.
        several: whether there may be layers after the first.
    """
    refuse(config)
    if not settings.get("qk_norm") and any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in tensors):
        raise CheckpointError(
            "the layer of this EAGLE-3 head is Qwen3's, with norms of queries and keys, which readers of this form do not compute. "
            f'If the head is one of DeepSpec, write "architectures": ["{DEEPSPEC}"]'
        )
    layer, count_of_layers = _layers_of(tensors, layers, several)
    if count_of_layers > 1 and count(config, "num_hidden_layers", count_of_layers) != count_of_layers:
        raise CheckpointError(
            f"config.json has num_hidden_layers {config['num_hidden_layers']}, but the file holds {count_of_layers} layers"
        )
    ours = _our_config(config, tensors, {**settings, "layers": count_of_layers}, layer, strict)
    reduced = ours["draft_vocab_size"] != ours["vocab_size"]
    same_width = ours["target_hidden_size"] == ours["hidden_size"]
    if not strict and "lm_head.weight" not in tensors and not reduced and same_width:
        ours["head"] = "target"
    names, our_shapes = names_of(layer, ours["num_features"], ours["layers"]), shapes(ours)
    expected = {name: our_shapes[our_name] for name, our_name in names.items() if our_name in our_shapes}
    expected |= {"d2t": (ours["draft_vocab_size"],), "t2d": (ours["vocab_size"],)}
    optional = {"t2d"} if reduced else {"d2t", "t2d"}  # d2t says the same as t2d
    optional |= {"embed_tokens.weight"} if same_width else set()
    faults = differences(tensors, expected, optional)
    if faults:
        raise CheckpointError(f"the tensors of this EAGLE-3 head differ from config.json: {faults}")
    check_dtypes(tensors)
    ids = draft_ids(tensors, ours["vocab_size"], ours["draft_vocab_size"])
    renamed = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    our_tensors = in_halves(renamed, config, ours["head_dim"])
    if ids is not None:
        our_tensors["draft_ids"] = ids
    other_entries = {key: value for key, value in record.items() if key not in SETTINGS}
    return ({**ours, "eyas": other_entries} if other_entries else ours), our_tensors


def _our_config(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], settings: Mapping[str, Any], layer: str, strict: bool
) -> dict[str, Any]:
    has_qkv_bias = any(f"{layer}.self_attn.{x}_proj.bias" in tensors for x in "qkv")
    qkv_key = "qkv_bias" if config.get("qkv_bias") is not None else "attention_bias"
    base = {
        **read_layer(config),
        **read_rope(config),
        "fc_bias": _bias(config, "bias", "fc.bias" in tensors, strict),
        "qkv_bias": _bias(config, qkv_key, has_qkv_bias, strict),
    }
    ours = complete({**base, **settings, "window": sliding_window(config, base["max_positions"], settings["layers"])})
    _check_sizes(ours, tensors)
    return ours


def layer_ids(config: Mapping[str, Any], published: Any, meaning: str | None) -> dict[str, Any]:
    """Return feature_layers, layer_ids_as_published and num_features, from the published layer ids."""
    eyas = mapping(config, "eyas")
    override = choice(eyas, "layer_ids", MEANINGS)
    meaning = override or meaning
    added = eyas.get("feature_layers")
    if added is not None and published is not None:
        raise CheckpointError(f"config.json has layer ids twice, in {IDS} and in eyas.feature_layers: remove one")
    if added is not None and override is None:
        raise CheckpointError(
            'config.json has eyas.feature_layers without their meaning: add "layer_ids": "input" or "output" to eyas'
        )
    ids = published if added is None else added
    if ids is None:
        return {"feature_layers": None, "layer_ids_as_published": None, "num_features": 3}
    if not are_rising(ids, 0):
        raise CheckpointError(
            f"config.json has layer ids {ids!r}; they must be whole numbers from 0 on, each greater than the one before"
        )
    if meaning is None:
        raise CheckpointError(
            f"config.json has layer ids {ids} and does not tell whether they mean the input or the output of a layer: "
            f'add "eyas": {{"layer_ids": "input"}} (hidden_states[{ids[0]}]) or {{"layer_ids": "output"}} (hidden_states[{ids[0] + 1}])'
        )
    as_published = {"ids": ids, "meaning": meaning} if added is None else eyas.get("layer_ids_as_published")
    layers = tuple(i + 1 for i in ids) if meaning == "output" else tuple(ids)
    return {"feature_layers": layers, "layer_ids_as_published": as_published, "num_features": len(layers)}


def choice(config: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    """Return the value of a key of the "eyas" object, one of the allowed words; None when absent."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise CheckpointError(f"config.json has eyas.{key} {value!r}; it must be {' or '.join(allowed)}")
    return value


def _merge(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the settings of its eagle_config, which must not contradict it."""
    settings = {key: value for key, value in inner.items() if value is not None}
    for key, value in settings.items():
        if config.get(key) is not None and config[key] != value:
            raise CheckpointError(
                f"config.json has {key} {config[key]!r}, but {value!r} in its eagle_config: remove the wrong one"
            )
    return {**config, **settings}


def _bias(config: Mapping[str, Any], key: str, present: bool, strict: bool) -> bool:
    """Return whether the head has a bias. config.json decides, so that the tensors are checked
    against it; when silent, the tensors do."""
    claimed = flag(config, key, present)
    return claimed and present if strict else claimed


def draft_ids(tensors: Mapping[str, Tensor], vocab: int, draft_vocab: int) -> Tensor | None:
    """Return the target's ids of the draft tokens, int64 [Vd]; None when the vocabularies are the same.

    d2t holds target id - draft id for each draft token, t2d marks the same target ids as booleans.
    """
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    draft_tokens = torch.arange(draft_vocab)
    ids = draft_tokens if offsets is None else draft_tokens + offsets.long()
    marked = ids if marks is None else marks.nonzero().flatten()
    if offsets is not None and marks is not None and draft_vocab != vocab and torch.equal(offsets.long(), marked):
        raise CheckpointError("d2t holds the target's ids themselves; it must hold offsets, target id - draft id")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        span = f"{int(ids.min())} ... {int(ids.max())}"
        raise CheckpointError(
            f"d2t leads out of the vocabulary of {vocab}, to {span}; it must hold offsets, target id - draft id"
        )
    if bool((ids.diff() <= 0).any()):
        at = int((ids.diff() <= 0).nonzero()[0])
        raise CheckpointError(
            f"d2t must lead to increasing ids, but draft tokens {at}, {at + 1} lead to {int(ids[at])}, {int(ids[at + 1])}"
        )
    if not torch.equal(ids, marked):
        first = min(set(ids.tolist()) ^ set(marked.tolist()))
        raise CheckpointError(
            f"d2t and t2d disagree: {len(ids)} ids by d2t, {len(marked)} by t2d, and id {first} is in one of them only"
        )
    return None if draft_vocab == vocab else ids


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for tensors of a dtype that a head of this kind has not."""
    refuse_dtypes(tensors, but=("d2t", "t2d"))
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    if offsets is not None and offsets.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"d2t is {offsets.dtype}; it must be int64")
    if marks is not None and marks.dtype != torch.bool:
        raise CheckpointError(f"t2d is {marks.dtype}; it must be bool")


def _layers_of(names: Collection[str], allowed: Sequence[str], several: bool) -> tuple[str, int]:
    """Return the published name of the first layer, and the number of layers, counted from the
    tensors: published num_hidden_layers are often wrong where there is one layer."""
    layers = sorted({match[1] for name in names if (match := re.match(r"(midlayer|layers\.\d+)\.", name))})
    first = [name for name in layers if name in allowed]
    later = sorted(
        int(match[1]) for name in layers if name not in first and (match := re.fullmatch(_LATER_LAYER, name))
    )
    if len(first) != 1 or len(layers) != 1 + len(later):
        raise CheckpointError(
            f"the first layer of an EAGLE-3 head of this form is {' or '.join(allowed)}; this file has {', '.join(layers) or 'no layer'}"
        )
    if later and not several:
        raise CheckpointError(
            f"an EAGLE-3 head of this form has one layer, {first[0]}. This file has {', '.join(layers)}, which readers compute in "
            f'different ways. If it is for vLLM or the speculators library, write "architectures": ["{VLLM}"]'
        )
    if later != list(range(1, 1 + len(later))):
        raise CheckpointError(
            f"the layers of an EAGLE-3 head are numbered without gaps; this file has {', '.join(layers)}"
        )
    return first[0], 1 + len(later)


# --- refusing ----------------------------------------------------------------------------------------


def refuse(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for settings whose computation is not supported."""
    for key, (wanted, why) in _MUST_BE.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise CheckpointError(f"config.json has {key} {value!r}: {why}; heads of that kind are not read")
    for key, value in config.items():
        if "norm" in key and value is True and key not in _NORMS | _MUST_BE.keys() | {"norm_topk_prob"}:
            raise CheckpointError(
                f"config.json has {key} true, which is not known here; remove it if the head is computed without it"
            )
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise CheckpointError(
                f"config.json has a {key}: quantised heads are not read; give the head in bfloat16 or float32"
            )
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise CheckpointError("config.json has both fc_norm and norm_before_fc; a head has one or the other")


def _check_sizes(ours: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if sizes are not whole numbers or contradict each other."""
    vocab, draft_vocab = count(ours, "vocab_size"), count(ours, "draft_vocab_size")
    count(ours, "target_hidden_size")
    if draft_vocab > vocab:
        raise CheckpointError(f"config.json has draft_vocab_size {draft_vocab}, more than its vocab_size {vocab}")
    if ours["head"] == "target" and (draft_vocab != vocab or ours["target_hidden_size"] != ours["hidden_size"]):
        raise CheckpointError(
            "config.json says that the head is the target's, but names another vocabulary or hidden size than the target's"
        )
    if draft_vocab == vocab and "d2t" in tensors and len(tensors["d2t"]) != vocab:
        size = len(tensors["d2t"])
        raise CheckpointError(
            f'config.json names no smaller draft vocabulary, but d2t has {size} entries: add "draft_vocab_size": {size}'
        )


def sliding_window(config: Mapping[str, Any], positions: int, layers: int) -> int | None:
    """Return the sliding window in tokens, where it is shorter than the trained length.
    Raise CheckpointError if layers have different ones."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if isinstance(kinds, list) and len({str(kind) for kind in kinds[:layers]}) > 1:
        raise CheckpointError(
            f"config.json has layer_types {kinds[:layers]}: heads whose layers all are of one type are read"
        )
    slides = isinstance(kinds, list) and kinds[:1] == ["sliding_attention"]
    windowed = slides or config.get("use_sliding_window") is True
    return window if windowed and isinstance(window, int) and 0 < window < positions else None


# --- writing -----------------------------------------------------------------------------------------


def publish_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our config with every key, and the tensors under their published names; `layer` is the published name of
    the first layer.

    A smaller draft vocabulary becomes d2t (offsets, target id - draft id) and t2d (marks of the
    same ids).
    """
    ours = complete(config)
    optional = {"embed.weight"} if ours["target_hidden_size"] == ours["hidden_size"] else set()
    faults = differences(tensors, shapes(ours), optional)
    assert not faults, faults
    names = names_of(layer, ours["num_features"], ours["layers"])
    published = {name: tensors[our_name] for name, our_name in names.items() if our_name in tensors}
    if "draft_ids" in tensors:
        ids = tensors["draft_ids"].cpu()
        assert 0 <= int(ids.min()) <= int(ids.max()) < ours["vocab_size"], "draft_ids leave the vocabulary"
        assert bool((ids.diff() > 0).all()), "draft_ids do not increase"
        published["d2t"] = ids - torch.arange(len(ids))
        published["t2d"] = torch.zeros(ours["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return ours, published


def layer_config(ours: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the keys of a LLaMA config.json, with the head's record, for the options that `publish_tensors`
    returns."""
    window = ours["window"]
    keys = {**write_layer(ours), "torch_dtype": dtype_of(tensors["fc.weight"])}
    if window:
        kinds = ["sliding_attention"] * ours["layers"]
        keys |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    return {**keys, "eyas": dict(ours["eyas"])} if ours.get("eyas") else keys


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as a config.json has it, like float16."""
    return str(tensor.dtype).removeprefix("torch.")
