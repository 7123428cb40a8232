"""Heads in GGUF files, as llama.cpp reads them: the output that its converter (convert_hf_to_gguf.py) would write.

A file has the vocabulary of its target, which is taken from the target's own file in GGUF format; an MTP module is
written into a copy of that file. Names, and the changes of tensors, are those by which eyas reads such files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget, mtp
from eyas.checkpoints.tools import ARCHITECTURE, SECOND_PARTS, File, Published, gguf_names
from eyas.errors import CheckpointError
from eyas_train.formats.vllm import publish
from eyas_train.formats.vllm_block import write_common, write_tensors

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

NAME, SUFFIX = "gguf", ".gguf"
EXPORTS = ("eagle3", "dflash", "dflash2", "dspark", "mtp")
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Numbers in which matrices are stored -> general.file_type."""

DTYPES = tuple(FILE_TYPES)
OWN_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # as llama.cpp's converter has it
QUANTISATION_VERSION = 2  # version of the form of q8_0 blocks


class Field(NamedTuple):
    """A setting of a file, with its type there, so that it can be copied."""

    value: Any
    kind: Any
    inner: Any
    """The type of an array's elements."""


def export(method: str, config: Config, tensors: Tensors, target: ExportTarget) -> Published:
    """Return the settings and tensors of a file. Raise CheckpointError for settings that llama.cpp does not
    compute."""
    if method == "mtp":
        _check_module(config, tensors)
    file = _target_file(target)
    width = config.get("target_hidden_size") or config["hidden_size"]
    theirs = (int(file.need("ARCH.embedding_length")), file.vocab_size())
    if theirs != (width, config["vocab_size"]):
        raise CheckpointError(
            f"{file.name} has the hidden size {theirs[0]} and {theirs[1]} tokens, the head's target {width} and {config['vocab_size']}"
        )
    if method == "mtp":
        return _module(config, tensors, file)
    settings, named = _eagle3(config, tensors, file) if method == "eagle3" else _block(method, config, tensors, file)
    architecture = "eagle3" if method == "eagle3" else "dflash"
    whole = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": settings[key] for key in settings}
    general = {
        ARCHITECTURE: architecture,
        "general.type": "model",
        "general.name": method,
        "general.quantization_version": QUANTISATION_VERSION,
    }
    return {**general, **fields(file, "tokenizer."), **whole}, named


def write_file(path: Path, settings: Config, tensors: Tensors, target: ExportTarget, dtype: str) -> None:
    """Write the result of `export`; `dtype` is one of DTYPES, or empty for the head's own."""
    sample = next(tensor for name, tensor in tensors.items() if name.endswith(("fc.weight", "eh_proj.weight")))
    dtype = dtype or OWN_DTYPES[sample.dtype]
    if settings[ARCHITECTURE] in gguf_names.MTP_TYPES:
        _store(path, settings, tensors, dtype, _target_file(target))
    else:
        _store(path, {**settings, "general.file_type": FILE_TYPES[dtype]}, tensors, dtype)


def usage(method: str, config: Config, folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which llama.cpp runs the head."""
    if method == "mtp":
        return [f"llama-server -m {folder} --spec-type draft-mtp --spec-draft-n-max 3"]
    kind = "dflash" if method == "dflash2" else method
    levels = config["block"] - (0 if config["from_anchor"] else 1) if config.get("block") else 3
    return [f"llama-server -m {target} -md {folder} --spec-type draft-{kind} --spec-draft-n-max {levels}"]


def _target_file(target: ExportTarget) -> File:
    """Return the target's own file."""
    path = Path(target.name).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        raise CheckpointError(
            "such a file has the target's vocabulary: pass the target's file in GGUF format with --target, which llama-server gets with -m"
        )
    return File(path)


# --- kinds of heads ----------------------------------------------------------------------------------


def _eagle3(config: Config, tensors: Tensors, file: File) -> tuple[dict[str, Any], dict[str, Tensor]]:
    ours, published, theirs = publish(config, tensors, "layers.0", "llama.cpp")
    layers = _own_layers(file)
    features = list(ours["feature_layers"] or (2, layers // 2, layers - 3))
    _refuse(
        {
            f"{ours['layers']} layers": ours["layers"] > 1,
            f"features of {len(features)} layers": len(features) != 3,
            "a norm of each feature (fc_norm)": ours["fc_norm"],
            "a normed state that is carried": ours["carries"] == "normed",
            "a window": ours["window"],
        }
    )
    _refuse_last(features, layers)
    settings = {
        **_layer_settings(published),
        "block_count": 1,
        "vocab_size": ours["vocab_size"],
        "rope.dimension_count": ours["head_dim"],
        "target_layers": features,
        "target_hidden_size": ours["target_hidden_size"],
        **{key: bool(ours[key]) for key in ("norm_before_residual", "norm_before_fc")},
    }
    for x, heads in (("q", "num_heads"), ("k", "num_kv_heads")):
        name = f"layers.0.self_attn.{x}_proj.weight"
        theirs[name] = _in_pairs(theirs[name], ours[heads])
    return settings, _renamed(theirs, gguf_names.eagle3_names()) | _vocabulary(tensors) | _rope_factors(published)


def _block(method: str, config: Config, tensors: Tensors, file: File) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layers, has_markov = config["layers"], bool(config["markov_rank"])
    windows, causal = config.get("windows") or (), config.get("causal") or (False,) * layers
    tables = {"embed.weight", "head.weight"} & tensors.keys()
    _refuse(
        {
            "windows that are counted from the root": any(windows) and config.get("anchored"),
            "layers that see earlier slots only beside others that see all": len(set(causal)) > 1,
            "no Markov head, by which DSpark is told from DFlash": method == "dspark" and not has_markov,
            "a confidence head that does not read the Markov head": config["confidence"] == "hidden",
            "slots that predict the next token, and no Markov head": config["from_anchor"] and not has_markov,
            "a draft vocabulary, and no Markov head": config.get("draft_vocab") and not has_markov,
            "embeddings or an lm_head of its own": method != "dspark" and tables,
            "embeddings of its own, and no lm_head": tables == {"embed.weight"},
        }
    )
    _refuse_last(config["feature_layers"], _own_layers(file))
    published = write_common({**config, "draft_vocab": 0, "anchored": False}, "")
    settings = {
        **_layer_settings(published),
        "block_count": layers,
        "block_size": config["block"],
        "target_layers": list(config["feature_layers"]),
        "tokenizer.ggml.mask_token_id": config["mask_token"],
        **{theirs: float(published[ours]) for ours, theirs in gguf_names.FACTOR_KEYS.items() if ours in published},
    }
    factor = _target_factor(file)
    if config.get("embed_scale") is None and factor != 1.0:
        settings["embedding_scale"] = factor
    if any(windows) or any(causal):
        settings["attention.causal"] = causal[0]
    if any(windows):
        settings["attention.sliding_window"] = next(filter(None, windows))
        settings["attention.sliding_window_pattern"] = [window is not None for window in windows]
    if method == "dflash2":
        settings |= {theirs: config[ours] for ours, theirs in SECOND_PARTS.items()}
    if method == "dspark":
        settings |= {
            "sample_from_anchor": config["from_anchor"],
            "has_confidence_head": config["confidence"] != "none",
        }
    named = _renamed(write_tensors(config, tensors, tables=True), gguf_names.block_names(layers))
    return settings, named | _vocabulary(tensors) | _rope_factors(published)


def _check_module(config: Config, tensors: Tensors) -> None:
    if _plain(config["target_model_type"]) not in map(_plain, gguf_names.MTP_TYPES.values()):
        raise CheckpointError(
            f"the module's target is a {config['target_model_type']}, for which eyas knows no multi-token prediction in llama.cpp "
            f"(only for {', '.join(gguf_names.MTP_TYPES.values())}). Run the module with eyas, or train an EAGLE-3 head, which llama.cpp "
            "runs too"
        )
    if any(name.startswith("shared_norm.") for name in tensors):
        raise CheckpointError("the module shares its last norm with others, which such files do not say")


def _module(config: Config, tensors: Tensors, file: File) -> Published:
    """Return the target's settings, one layer more, and the module as that layer."""
    if _plain(gguf_names.MTP_TYPES.get(file.architecture, "")) != _plain(config["target_model_type"]):
        raise CheckpointError(
            f"{file.name} is a {file.architecture}, but the module's target a {config['target_model_type']}"
        )
    layers = _own_layers(file)
    if int(file.get("ARCH.nextn_predict_layers", 0)) > 1:
        raise CheckpointError(f"{file.name} has several modules already, of which only one could be replaced")
    _, published = mtp.write("mtp", config, tensors)
    named, prefix = dict[str, Tensor](), f"blk.{layers}."
    ones = 0 if file.architecture == "glm4moe" else 1  # Qwen's norms multiply by 1 + weight, llama.cpp's by the weight
    for theirs, ours in gguf_names.mtp_names(file.architecture, layers).items():
        if ours in published:
            value = published.pop(ours)
            named[theirs] = value.float() + ones if theirs.endswith("norm.weight") else value
    assert not published, published.keys()
    both = named.pop(f"{prefix}ffn_gate_up_exps.weight", None)
    if both is not None:
        gate, up = both.chunk(2, dim=1)
        named |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    settings: dict[str, Any] = dict(fields(file))
    architecture = file.architecture
    settings |= {
        ARCHITECTURE: architecture,
        f"{architecture}.block_count": layers + 1,
        f"{architecture}.nextn_predict_layers": 1,
    }
    recurrent = settings.get(f"{architecture}.attention.recurrent_layers")
    if recurrent is not None:
        settings[f"{architecture}.attention.recurrent_layers"] = [*recurrent.value[:layers], False]
    return settings, named


# --- parts -------------------------------------------------------------------------------------------


def _own_layers(file: File) -> int:
    """Return how many layers the target has, without modules of multi-token prediction after them."""
    return int(file.need("ARCH.block_count")) - int(file.get("ARCH.nextn_predict_layers", 0))


def _refuse(facts: Config) -> None:
    """Raise CheckpointError for the first fact that is true of the head."""
    if fact := next((fact for fact, holds in facts.items() if holds), None):
        raise CheckpointError(f"the head has {fact}, which llama.cpp does not compute")


def _refuse_last(features: Any, layers: int) -> None:
    """Raise CheckpointError if the head reads the output of the target's last layer: llama.cpp gives inputs of layers."""
    if max(features) >= layers:
        raise CheckpointError(
            f"the head reads hidden_states[{max(features)}], but llama.cpp gives the inputs of the target's {layers} layers"
        )


def _layer_settings(published: Config) -> dict[str, Any]:
    """Return the settings of the keys of a LLaMA config.json."""
    settings = {theirs: published[ours] for ours, theirs in gguf_names.LAYER_KEYS.items()}
    for key in ("rope_theta", "rms_norm_eps"):
        settings[gguf_names.LAYER_KEYS[key]] = float(published[key])
    settings["attention.value_length"] = published["head_dim"]
    scaling = published["rope_scaling"] or {"rope_type": "llama3"}
    if scaling["rope_type"] == "llama3":  # a tensor says it
        return settings
    unknown = {"attention_factor", "mscale", "mscale_all_dim"} & scaling.keys()
    if unknown or scaling.get("truncate") is False:
        raise CheckpointError(
            f"the head's YaRN has {min(unknown, default='no truncation')}, which llama.cpp computes otherwise"
        )
    settings |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"])}
    for ours, theirs in gguf_names.YARN_KEYS.items():
        if ours in scaling:
            length = ours == "original_max_position_embeddings"
            settings[f"rope.scaling.{theirs}"] = int(scaling[ours]) if length else float(scaling[ours])
    return settings


def _rope_factors(published: Config) -> dict[str, Tensor]:
    scaling = published["rope_scaling"]
    if not scaling or scaling["rope_type"] != "llama3":
        return {}
    return {
        "rope_freqs.weight": gguf_names.llama3_factors(scaling, published["rope_theta"], published["head_dim"]).float()
    }


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors under the file's names, without maps of the vocabulary."""
    theirs = {ours: name for name, ours in names.items()}
    return {theirs[name]: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "draft_ids")}


def _vocabulary(tensors: Tensors) -> dict[str, Tensor]:
    """Return d2t, which holds the target's ids themselves."""
    return {"d2t": tensors["draft_ids"]} if "draft_ids" in tensors else {}


def _target_factor(file: File) -> float:
    """Return the factor by which the target multiplies its embeddings."""
    if file.architecture.startswith("gemma"):  # llama.cpp computes it, and its converter writes it into heads only
        return math.sqrt(file.need("ARCH.embedding_length"))
    return float(file.get("ARCH.embedding_scale", 1.0))


def _plain(kind: str) -> str:
    """Return a model_type without the ending of the text part of a model with images."""
    return kind.removesuffix("_text")


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys for a RoPE that turns neighbouring channels, as it does in files of EAGLE-3 heads."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


# --- files -------------------------------------------------------------------------------------------


def fields(file: File, prefix: str = "") -> dict[str, Field]:
    """Return the settings of a file with this prefix, for a copy."""
    found = {name: field for name, field in file.reader.fields.items() if name.startswith(prefix)}
    return {
        name: Field(field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in found.items()
        if not name.startswith("GGUF.")  # parts of the header, which the reader shows as settings
    }


def _store(path: Path, settings: Config, tensors: Tensors, dtype: str, other: File | None = None) -> None:
    """Write a file.

    Args:
        settings: by their whole names; values, or fields of another file.
        dtype: one of FILE_TYPES, for matrices; vectors, norms and routers are float32, as llama.cpp needs them.
        other: a file whose tensors are copied, except those that `tensors` has.
    """
    import gguf

    writer = gguf.GGUFWriter(path, str(settings[ARCHITECTURE]))
    for name, value in settings.items():
        field = value if isinstance(value, Field) else _field(value)
        if name != ARCHITECTURE:  # the writer has written it
            writer.add_key_value(name, field.value, field.kind, field.inner)
    for tensor in [] if other is None else other.reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        data, kind = _stored(name, values, dtype)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _field(value: Any) -> Field:
    """Return a setting with the type that the converter gives to such a value."""
    import gguf

    kinds = {
        bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY,
    }  # fmt: skip
    return Field(value, kinds[type(value)], None)


def _stored(name: str, values: Tensor, dtype: str) -> tuple[Any, Any]:
    """Return a tensor's bytes and their type."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if not values.is_floating_point():
        return values.to(torch.int64).numpy(), kinds.I64
    data = np.ascontiguousarray(values.detach().cpu().float().numpy())
    is_matrix = data.ndim > 1 and name.endswith(".weight") and not name.endswith(ALWAYS_F32)
    kind = kinds[dtype.upper()] if is_matrix else kinds.F32
    try:
        return gguf.quantize(data, kind), kind
    except gguf.QuantError:  # the length of a row is not a multiple of the block's
        return gguf.quantize(data, kinds.F16), kinds.F16
