"""EAGLE-3 heads in our form, and what their published formats share: names, vocabulary maps, layer ids, refusals.

It does not know in which format a head came: the files of the formats say where a setting stands in config.json and what it means there.

Our tensors (D draft width, T target width, F = num_features * T, V vocabulary, Vd draft vocabulary):

    fc.weight [D, F]                                  fc.bias [D], if fc_bias
    layer.embed_norm.weight [D]                       over the token embedding (published: input_layernorm)
    layer.hidden_norm.weight [D]                      over the state
    layer.attention.{q,k,v}.weight [rows, 2D]         over [embedding, state]; biases [rows], if qkv_bias
    layer.attention.o.weight [D, heads * head_dim]
    layer.mlp_norm.weight [D]                         layer.mlp.{gate,up}.weight [I, D], layer.mlp.down.weight [D, I]
    norm.weight [D]
    head.weight [Vd, D]                               unless head is "target"
    draft_ids [Vd], int64, increasing                 the target's ids of the draft tokens; absent when Vd = V
    embed.weight [V, D]                               may be absent when D = T: the target's is used
    fc_norm.0.weight [T], ...                         if fc_norm
    input_norm.weight [F]                             if norm_before_fc

Our config: the keys of an EAGLE-1 head (`safeailab`) and

    draft_vocab_size, target_hidden_size, num_features    int
    feature_layers           tuple: k is HF's hidden_states[k], the INPUT of layer k; None for the default 2, L//2, L-3
    layer_ids_as_published   {"ids": [...], "meaning": "input" or "output"}, or None when config.json named none
    norm_before_fc           one norm over all features before fc
    fc_norm                  one norm over each feature before fc
    norm_before_residual     the layer's residual is the normed state instead of the raw one
    carries                  "raw" or "normed": what is fed back as the next state, before or after the final norm
    head                     "own", or "target" for a head that uses the target's
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints._llama import count, flag, mapping, number, read_layer, read_scaling
from eyas.checkpoints._weights import Shape, differences
from eyas.errors import CheckpointError

__all__ = [
    "CARRIES", "IDS", "NAME_THE_FORM", "SGLANG", "VLLM", "architecture", "assemble", "choice", "complete", "is_eagle3", "layer_ids",
    "names_of", "read_flat", "refuse", "shapes",
]  # fmt: skip

SGLANG, VLLM = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
NAME_THE_FORM = f'"architectures": ["{SGLANG}"] (SpecForge, SGLang, ModelOpt) or ["{VLLM}"] (vLLM)'
"""What to write into a config.json that does not say whose form it has."""

IDS = "eagle_aux_hidden_state_layer_ids"
CARRIES, MEANINGS = ("raw", "normed"), ("input", "output")

SETTINGS = frozenset(
    {"carries", "layer_ids", "feature_layers", "layer_ids_as_published", "norm_before_fc", "fc_norm", "norm_before_residual", "head"}
    | {"draft_vocab_size"}
)
"""Keys of the "eyas" object that say how a head is computed; all others are the writer's record, which is handed on."""

_LAYER = {
    "input_layernorm.weight": "layer.embed_norm.weight",
    "hidden_norm.weight": "layer.hidden_norm.weight",
    **{f"self_attn.{x}_proj.{kind}": f"layer.attention.{x}.{kind}" for kind in ("weight", "bias") for x in "qkv"},
    "self_attn.o_proj.weight": "layer.attention.o.weight",
    "post_attention_layernorm.weight": "layer.mlp_norm.weight",
    **{f"mlp.{x}_proj.weight": f"layer.mlp.{x}.weight" for x in ("gate", "up", "down")},
}
_REST = {
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
"""Settings that change the computation: what they must be where they are given, and what they say otherwise."""

_NORMS = frozenset({"norm_before_fc", "fc_norm", "use_aux_norm", "norm_before_residual", "norm_output"})
_IN_EAGLE_CONFIG = frozenset({IDS, "parallel_draft_heads_num_layers"}) | _NORMS | _MUST_BE.keys()


# --- telling -----------------------------------------------------------------------------------------------------------------------------


def is_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a head of EAGLE-3, in any format, readable or not."""
    return (
        "speculators_model_type" in config
        or "eagle3" in architecture(config).lower()
        or any(name in ("d2t", "t2d") or name.startswith("midlayer.") or ".hidden_norm." in name for name in names)
    )


def architecture(config: Mapping[str, Any]) -> str:
    """The first name under `architectures`; empty when there is none."""
    given = config.get("architectures")
    return given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""


# --- our form ----------------------------------------------------------------------------------------------------------------------------


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our config with every key: what is absent or None gets the meaning that this has in published heads."""
    layers = config.get("feature_layers")
    return {
        **config,
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "num_features": len(layers) if layers else config.get("num_features") or 3,
        "feature_layers": tuple(layers) if layers else None,
        "layer_ids_as_published": config.get("layer_ids_as_published"),
        "norm_before_fc": config.get("norm_before_fc") or False,
        "fc_norm": config.get("fc_norm") or False,
        "norm_before_residual": config.get("norm_before_residual") or False,
        "carries": config.get("carries") or "raw",
        "window": config.get("window"),
        "head": config.get("head") or "own",
    }


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Our tensor names and their shapes, from our complete config; `embed.weight` may be absent where D = T."""
    hidden, inner, width, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim", "draft_vocab_size"))
    target, features = config["target_hidden_size"], config["num_features"] * config["target_hidden_size"]
    rows = {"q": config["num_heads"] * width, "k": config["num_kv_heads"] * width, "v": config["num_kv_heads"] * width}
    out: dict[str, Shape] = {"fc.weight": (hidden, features)}
    if config["fc_bias"]:
        out["fc.bias"] = (hidden,)
    out |= {"layer.embed_norm.weight": (hidden,), "layer.hidden_norm.weight": (hidden,)}
    for name, size in rows.items():
        out[f"layer.attention.{name}.weight"] = (size, 2 * hidden)
        if config["qkv_bias"]:
            out[f"layer.attention.{name}.bias"] = (size,)
    out |= {"layer.attention.o.weight": (hidden, rows["q"]), "layer.mlp_norm.weight": (hidden,)}
    out |= {"layer.mlp.gate.weight": (inner, hidden), "layer.mlp.up.weight": (inner, hidden), "layer.mlp.down.weight": (hidden, inner)}
    out["norm.weight"] = (hidden,)
    if config["head"] == "own":
        out["head.weight"] = (vocab, hidden)
    if vocab != config["vocab_size"]:
        out["draft_ids"] = (vocab,)
    out["embed.weight"] = (config["vocab_size"], hidden)
    if config["fc_norm"]:
        out |= {f"fc_norm.{i}.weight": (target,) for i in range(config["num_features"])}
    if config["norm_before_fc"]:
        out["input_norm.weight"] = (features,)
    return out


def names_of(layer: str, features: int) -> dict[str, str]:
    """Published tensor name -> ours, for the published name of the layer ("midlayer"); without the maps of the vocabulary."""
    inner = {f"{layer}.{name}": ours for name, ours in _LAYER.items()}
    return inner | _REST | {name: name for name in (f"fc_norm.{i}.weight" for i in range(features))}


# --- reading -----------------------------------------------------------------------------------------------------------------------------


def read_flat(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], meaning: str | None, carries: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head whose config.json is flat, with `eagle_config` in it, as SGLang and vLLM read it -> our config, our tensors.

    meaning: of layer ids; carries: as far as the format tells.
    """
    inner = mapping(config, "eagle_config")
    for key, value in inner.items():
        if key not in _IN_EAGLE_CONFIG and value not in (None, False):
            raise CheckpointError(
                f"config.json has eagle_config.{key} {value!r}, which is not known here; remove it if the head is computed without it"
            )
    given = _merged(config, inner)
    settings = {
        **layer_ids(config, given.get(IDS), meaning),
        **{key: flag(given, key, False) for key in ("norm_before_fc", "norm_before_residual")},
        "fc_norm": flag(given, "fc_norm", False) or flag(given, "use_aux_norm", False),
        "carries": choice(mapping(config, "eyas"), "carries", CARRIES) or carries,
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    named = settings["num_features"]
    if count(given, "num_aux_hidden_states", named) != named:
        raise CheckpointError(
            f"config.json has num_aux_hidden_states {given['num_aux_hidden_states']} and names {named} layers (three where it names none): "
            f"name all of them under eagle_config.{IDS}"
        )
    return assemble(given, tensors, settings, ("midlayer", "layers.0"), mapping(config, "eyas"))


def assemble(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    layers: Sequence[str],
    record: Mapping[str, Any],
    strict: bool = False,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors, and the settings that a format found -> our config, our tensors.

    layers: the names that the layer may have; record: the "eyas" object; strict: lm_head and t2d must be there, as the reference
    publishes them, and claims of biases are not read.
    """
    refuse(config)
    layer = _layer_of(tensors, layers)
    biases = [f"{layer}.self_attn.{x}_proj.bias" for x in "qkv"]
    attention = "qkv_bias" if config.get("qkv_bias") is not None else "attention_bias"
    base = {
        **read_layer(config),
        **_rope(config),
        "fc_bias": _bias(config, "bias", "fc.bias" in tensors, strict),
        "qkv_bias": _bias(config, attention, any(name in tensors for name in biases), strict),
    }
    ours = complete({**base, **settings, "window": _window(config, base["max_positions"])})
    _refuse_sizes(ours, tensors)
    reduced = ours["draft_vocab_size"] != ours["vocab_size"]
    alike = ours["target_hidden_size"] == ours["hidden_size"]
    if not strict and "lm_head.weight" not in tensors and not reduced and alike:
        ours["head"] = "target"
    names = names_of(layer, ours["num_features"])
    sizes = shapes(ours)
    wanted = {name: sizes[mine] for name, mine in names.items() if mine in sizes}
    wanted |= {"d2t": (ours["draft_vocab_size"],), "t2d": (ours["vocab_size"],)}
    optional = {"embed_tokens.weight"} if alike else set()
    optional |= set() if reduced and strict else {"t2d"} if reduced else {"d2t", "t2d"}
    found = differences(tensors, wanted, optional)
    if found:
        raise CheckpointError(f"the tensors of this EAGLE-3 head are not what config.json says: {found}")
    _refuse_dtypes(tensors)
    ids = _draft_ids(tensors, ours["vocab_size"], ours["draft_vocab_size"])
    renamed = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    kept = {key: value for key, value in record.items() if key not in SETTINGS}
    return ({**ours, "eyas": kept} if kept else ours), (renamed if ids is None else {**renamed, "draft_ids": ids})


def layer_ids(config: Mapping[str, Any], published: Any, meaning: str | None) -> dict[str, Any]:
    """Layer ids as published, and their meaning in this format if it has one -> feature_layers, layer_ids_as_published, num_features.

    "eyas" in config.json goes before the format: "layer_ids" says the meaning, "feature_layers" are ids where none are published.
    """
    eyas = mapping(config, "eyas")
    meaning = choice(eyas, "layer_ids", MEANINGS) or meaning
    added = eyas.get("feature_layers")
    if added is not None and published is not None:
        raise CheckpointError(f"config.json has layer ids twice, in {IDS} and in eyas.feature_layers: remove one")
    if added is not None and choice(eyas, "layer_ids", MEANINGS) is None:
        raise CheckpointError('config.json has eyas.feature_layers; say what they mean: "layer_ids": "input" or "output" beside them')
    ids = published if added is None else added
    if ids is None:
        return {"feature_layers": None, "layer_ids_as_published": None, "num_features": 3}
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    if not whole or not ids or ids != sorted(set(ids)):
        raise CheckpointError(f"config.json has layer ids {ids!r}; they must be whole numbers from 0 on, each greater than the one before")
    if meaning is None:
        raise CheckpointError(
            f"config.json has layer ids {ids} and does not tell whether they mean the input or the output of a layer: "
            f'add "eyas": {{"layer_ids": "input"}} (hidden_states[{ids[0]}]) or {{"layer_ids": "output"}} (hidden_states[{ids[0] + 1}])'
        )
    said = {"ids": ids, "meaning": meaning} if added is None else eyas.get("layer_ids_as_published")
    layers = tuple(i + (meaning == "output") for i in ids)
    return {"feature_layers": layers, "layer_ids_as_published": said, "num_features": len(layers)}


def choice(config: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    """One of the allowed words, or None when absent."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise CheckpointError(f"config.json has eyas.{key} {value!r}; it must be {' or '.join(allowed)}")
    return value


def _merged(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with what stands in its eagle_config; a setting that stands in both must be the same."""
    given = {key: value for key, value in inner.items() if value is not None}
    for key, value in given.items():
        if config.get(key) is not None and config[key] != value:
            raise CheckpointError(f"config.json has {key} {config[key]!r}, and {value!r} in its eagle_config: remove the wrong one")
    return {**config, **given}


def _bias(config: Mapping[str, Any], key: str, present: bool, strict: bool) -> bool:
    """Whether there is a bias: what config.json says, so that the tensors are then checked against it; if it says nothing, the tensors."""
    said = flag(config, key, present)
    return present if strict and said else said


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling; from `rope_theta`, `rope_scaling` and `rope_parameters`, which may not contradict each other."""
    places = [place for key in ("rope_scaling", "rope_parameters") if (place := mapping(config, key))]
    bases = {number(place, "rope_theta") for place in (config, *places) if place.get("rope_theta") is not None}
    if len(bases) > 1:
        raise CheckpointError(f"config.json has more than one rope_theta, {' and '.join(map(str, sorted(bases)))}: remove the wrong one")
    scalings = [read_scaling(place) for place in places]
    if any(scaling != scalings[0] for scaling in scalings):
        raise CheckpointError("config.json has a rope_scaling and rope_parameters that contradict each other: remove the wrong one")
    return {"rope_theta": bases.pop() if bases else 10000.0, "rope_scaling": scalings[0] if scalings else None}


def _draft_ids(tensors: Mapping[str, Tensor], vocab: int, draft_vocab: int) -> Tensor | None:
    """The target's ids of the draft tokens: d2t holds how far each is from its draft id, t2d marks them among all."""
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    plain = torch.arange(draft_vocab)
    ids = plain if offsets is None else plain + offsets.long()
    marked = ids if marks is None else marks.nonzero().flatten()
    if offsets is not None and marks is not None and draft_vocab != vocab and torch.equal(offsets.long(), marked):
        raise CheckpointError("d2t holds the target's ids themselves; it must hold offsets, target id - draft id")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        span = f"{int(ids.min())} ... {int(ids.max())}"
        raise CheckpointError(f"d2t leads out of the vocabulary of {vocab}, to {span}; it must hold offsets, target id - draft id")
    if bool((ids.diff() <= 0).any()):
        at = int((ids.diff() <= 0).nonzero()[0])
        raise CheckpointError(
            f"d2t must lead to increasing ids, and draft tokens {at}, {at + 1} lead to {int(ids[at])}, {int(ids[at + 1])}"
        )
    if not torch.equal(ids, marked):
        first = min(set(ids.tolist()) ^ set(marked.tolist()))
        raise CheckpointError(f"d2t and t2d disagree: {len(ids)} ids by d2t, {len(marked)} by t2d, and id {first} is in one of them only")
    return None if draft_vocab == vocab else ids


# --- refusing ----------------------------------------------------------------------------------------------------------------------------


def refuse(config: Mapping[str, Any]) -> None:
    """Settings that change the computation into one that is not served."""
    for key, (wanted, why) in _MUST_BE.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise CheckpointError(f"config.json has {key} {value!r}: {why}; heads of that kind are not read")
    for key, value in config.items():
        if "norm" in key and value is True and key not in _NORMS | _MUST_BE.keys() | {"norm_topk_prob"}:
            raise CheckpointError(f"config.json has {key} true, which is not known here; remove it if the head is computed without it")
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise CheckpointError(f"config.json has a {key}: quantised heads are not read; give the head in bfloat16 or float32")
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise CheckpointError("config.json has both fc_norm and norm_before_fc; a head has one or the other")


def _refuse_sizes(ours: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Sizes that are no whole numbers, or that contradict each other."""
    vocab, draft_vocab = count(ours, "vocab_size"), count(ours, "draft_vocab_size")
    count(ours, "target_hidden_size")
    if draft_vocab > vocab:
        raise CheckpointError(f"config.json has draft_vocab_size {draft_vocab}, more than its vocab_size {vocab}")
    if ours["head"] == "target" and (draft_vocab != vocab or ours["target_hidden_size"] != ours["hidden_size"]):
        raise CheckpointError(
            "config.json says that the head is the target's, and names another vocabulary or hidden size than the target's"
        )
    if draft_vocab == vocab and "d2t" in tensors and len(tensors["d2t"]) != vocab:
        size = len(tensors["d2t"])
        raise CheckpointError(f'config.json names no smaller draft vocabulary, and d2t has {size} entries: add "draft_vocab_size": {size}')


def _window(config: Mapping[str, Any], positions: int) -> int | None:
    """Tokens that the head's layer sees, where that is fewer than it was trained for."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    windowed = (isinstance(kinds, list) and kinds[:1] == ["sliding_attention"]) or config.get("use_sliding_window") is True
    return window if windowed and isinstance(window, int) and 0 < window < positions else None


def _refuse_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Quantised weights, and maps of the vocabulary that are none."""
    wrong = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if name not in ("d2t", "t2d") and not (tensor.is_floating_point() and tensor.element_size() > 1)
    ]
    if wrong:
        raise CheckpointError(f"tensors that are not floating point of 16 bits or more: {', '.join(wrong)}; quantised heads are not read")
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    if offsets is not None and offsets.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"d2t is {offsets.dtype}; it must be int64")
    if marks is not None and marks.dtype != torch.bool:
        raise CheckpointError(f"t2d is {marks.dtype}; it must be bool")


def _layer_of(names: Collection[str], allowed: Sequence[str]) -> str:
    """What the layer is called in this file. Counted from the tensors: published num_hidden_layers are not to be trusted."""
    layers = sorted({found[1] for name in names if (found := re.match(r"(midlayer|layers\.\d+)\.", name))})
    if len(layers) != 1 or layers[0] not in allowed:
        raise CheckpointError(
            f"an EAGLE-3 head of this form has one layer, {' or '.join(allowed)}; this file has {', '.join(layers) or 'none'}"
        )
    return layers[0]
