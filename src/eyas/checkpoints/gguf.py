"""Heads in GGUF files, as llama.cpp writes them, turned into forms in which heads are published in folders: their readers
check names, shapes and settings. docs/reference/head_formats.md lists the architectures.

Keys and names come from llama.cpp's converter (convert_hf_to_gguf.py), whose changes are undone here. Queries
and keys of EAGLE-3 heads have their channels in pairs, and d2t holds the target's ids themselves. Norms of
Qwen's modules have 1 added, and the factors of llama3's RoPE are a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.checkpoints import _gguf_names as names
from eyas.checkpoints._block import DFLASH, DFLASH2, DSPARK, SECOND_PARTS, SLIDING
from eyas.checkpoints._eagle3 import IDS, VLLM
from eyas.checkpoints._files import GGUF as SUFFIX
from eyas.checkpoints._files import check_finite, check_sum
from eyas.checkpoints._llama import halves
from eyas.checkpoints._weights import Published
from eyas.checkpoints.mtp import MODEL_TYPE
from eyas.errors import CheckpointError, first_line

__all__ = ["ARCHITECTURE", "SUFFIX", "File", "unpack"]

ARCHITECTURE = "general.architecture"
INTEGERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}

# settings and tensors of block heads that compute something else, and what they mean
_OTHER_BLOCKS = {
    "dflash.hyper_connection.count": "the layers are DeepSeek-V4's",
    "dflash.attention.value_scale": "the values of the attention have a factor",
    "dflash.attention.scale": "the scores of the attention have a factor of their own (Gemma 4's layers)",
    "blk.0.post_attention_norm.weight": "the layers are Gemma 4's",
    "blk.0.attn_sinks.weight": "the attention has sinks",
}

_UNUSED_TABLES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # copies of the target's


class File:
    """One file. Tensors are computed when they are asked for, also from quantised ones, as float32."""

    def __init__(self, path: Path) -> None:
        """Raise CheckpointError for a file that is damaged, or one of several parts; raise OptionError where the
        package that reads such files is missing."""
        from eyas.targets.gguf_files import check_gguf_packages

        check_gguf_packages()
        import gguf

        check_sum(path)
        self.name = path.name
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"{path.name} is corrupt or truncated: {first_line(error, 200)}") from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self._unused = set(self._tensors)
        self._said: dict[str, Any] = {}  # settings beside the file's
        self.architecture = str(self.get(ARCHITECTURE, ""))
        if int(self.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{path.name} is one of {self.get('split.count')} parts: join them with llama-gguf-split --merge"
            )

    # --- settings

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; ARCH in it stands for the architecture. Floats, which the file holds
        in 32 bits, are rounded to the 7 digits that those have."""
        if key in self._said:
            return self._said[key]
        field = self.reader.get_field(key.replace("ARCH", getattr(self, "architecture", "")))
        if field is None:
            return default
        value = field.contents()
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Return the value that `get` returns; raise CheckpointError where the file has no such key."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.name} has no {key.replace('ARCH', self.architecture)}")
        return value

    def translate(self, name_of: Callable[[str], str], settings: Mapping[str, Any]) -> None:
        """Read tensors under other names, and these settings before the file's."""
        self._tensors = {name_of(name): tensor for name, tensor in self._tensors.items()}
        self._unused, self._said = set(self._tensors), dict(settings)

    def vocab_size(self) -> int:
        """Return the number of tokens that the file names, or of which it has a table."""
        size = self.stated_vocab_size()
        if size is None:
            raise CheckpointError(f"{self.name} has neither {self.architecture}.vocab_size nor tokens")
        return size

    def stated_vocab_size(self) -> int | None:
        """Return the same; None for a file that leaves it to the target."""
        stated = self.get("ARCH.vocab_size")
        if stated is not None:
            return int(stated)
        field = self.reader.get_field("tokenizer.ggml.tokens")
        if field is not None:
            return len(field.data)
        tables = [self._tensors[name] for name in ("token_embd.weight", "markov_w1.weight") if name in self]
        return int(tables[0].shape[-1]) if tables else None

    # --- tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, in torch's order: int64 where the file holds whole numbers, else float32, all of it finite.
        Raise CheckpointError where the file has no such tensor."""
        import gguf

        if name not in self._tensors:
            raise CheckpointError(f"{self.name} has no tensor {name}")
        stored = self._tensors[name]
        shape = tuple(int(size) for size in reversed(stored.shape))
        self._unused.discard(name)
        if stored.tensor_type.name in INTEGERS:
            return torch.from_numpy(np.array(stored.data, dtype=np.int64)).reshape(shape)
        try:
            values = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.name}: tensor {name} is stored as {stored.tensor_type.name}, which is not read"
            ) from error
        check_finite(self.name, name, values)
        return values.reshape(shape)

    def unused(self, prefix: str = "") -> list[str]:
        """Return the names, with this prefix, of tensors that were not asked for."""
        return sorted(name for name in self._unused if name.startswith(prefix))

    def expect_no_more(self) -> None:
        """Raise CheckpointError for tensors that were not asked for."""
        if left := self.unused():
            some = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
            raise CheckpointError(f"{self.name} holds tensors that a head of this kind does not have: {some}")


def unpack(path: Path) -> Published:
    """Return the head in a file in GGUF format as config.json and tensors of another form. Raise CheckpointError for a
    file without a head, and for a head that cannot be computed."""
    file = File(path)
    if file.architecture in _READERS:
        return _READERS[file.architecture](file)
    if file.architecture == "dspark" or file.architecture.endswith("dflash-draft"):
        return _read_fork(file)
    if file.get("ARCH.nextn_predict_layers"):
        return _read_mtp(file)
    raise CheckpointError(
        f"{file.name} has the architecture {file.architecture!r} and no module of multi-token prediction: it is a model, not a "
        f"head; heads have {', '.join(_READERS)}, targets with a module that is read {', '.join(names.MTP_TYPES)}"
    )


# --- kinds of heads ----------------------------------------------------------------------------------


def _read_eagle3(file: File) -> Published:
    if file.need("ARCH.block_count") != 1:
        raise CheckpointError(
            f"{file.name} has {file.need('ARCH.block_count')} layers; EAGLE-3 heads of llama.cpp have one"
        )
    config = {
        **_layer_config(file),
        "vocab_size": file.vocab_size(),
        "architectures": [VLLM],
        "rope_scaling": _rope_scaling(file),
        "target_hidden_size": file.need("ARCH.target_hidden_size"),
        IDS: [int(layer) for layer in file.need("ARCH.target_layers")],  # inputs, as in vLLM's form
        **{key: bool(file.get(f"ARCH.{key}", False)) for key in ("norm_before_residual", "norm_before_fc")},
    }
    tensors = _tensors(file, names.eagle3_names())
    for name in ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"):
        if name in tensors:
            tensors[name] = halves(tensors[name], config["head_dim"])
    tensors |= _draft_vocabulary(file, config["vocab_size"])
    file.expect_no_more()
    return {**config, "draft_vocab_size": len(tensors.get("d2t", ())) or config["vocab_size"]}, tensors


def _read_block(file: File) -> Published:
    for fact, meaning in _OTHER_BLOCKS.items():
        if fact in file or file.get(fact) is not None:
            raise CheckpointError(f"{file.name} has {fact}: {meaning}, which is not computed here")
    layers = int(file.need("ARCH.block_count"))
    config = {
        **_layer_config(file),
        "num_hidden_layers": layers,
        "rope_scaling": _rope_scaling(file),
        "block_size": file.need("ARCH.block_size"),
        "mask_token_id": file.need("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [
            int(layer) - 1 for layer in file.need("ARCH.target_layers")
        ],  # outputs, as z-lab names them
        **_windows(file, layers),
        **_factors(file),
    }
    tensors = _tensors(file, names.block_names(layers))
    if (bias := file.get("ARCH.dspark.confidence_bias")) is not None:
        tensors["confidence_head.proj.bias"] = torch.tensor([bias], dtype=torch.float32)
    maps = _draft_vocabulary(file, config["vocab_size"])
    file.expect_no_more()
    return _block_form(file, config, tensors, maps)


def _read_fork(file: File) -> Published:
    """Read a block head in a file of llama.cpp's forks: `dflash-draft` and `dspark`. Their settings have a name more, their
    layers are outputs, and tokens are left out."""

    def told(*keys: str) -> Any:
        places = (f"ARCH.{fork}{key}" for key in keys for fork in ("dflash.", "dspark.", ""))
        return next((value for place in places if (value := file.get(place)) is not None), None)

    if told("log_snr_conditioning"):
        raise CheckpointError(
            f"{file.name} has log_snr_conditioning: the net reads the level of noise, which is not computed here"
        )
    if file.get("ARCH.rope.scaling.factor") is not None and file.get("ARCH.rope.scaling.type") is None:
        raise CheckpointError(f"{file.name} has a factor of RoPE, but does not say which scaling it belongs to")
    mask, layers = told("mask_token_id"), told("target_layer_ids", "target_layers")
    next_token = file.architecture == "dspark" or told("markov_rank") or told("confidence_head")
    said = {
        "ARCH.block_size": told("block_size"),
        "tokenizer.ggml.mask_token_id": file.get("tokenizer.ggml.mask_token_id") if mask is None else mask,
        "ARCH.target_layers": layers and [int(layer) + 1 for layer in layers],
        "ARCH.attention.layer_norm_rms_epsilon": told("attention.layer_norm_rms_epsilon") or 1e-6,  # Qwen3's
        "ARCH.context_length": told("context_length") or 2048,
        "ARCH.sample_from_anchor": bool(next_token),
    }
    file.translate(names.in_dflash, said)
    return _read_block(file)


def _block_form(
    file: File, config: dict[str, Any], tensors: dict[str, Tensor], maps: Mapping[str, Tensor]
) -> Published:
    """Return a block head in the form that has a place for its parts."""
    anchor = {"sample_from_anchor": bool(file.get("ARCH.sample_from_anchor", "markov_w1.weight" in file))}
    markov = tensors.get("markov_head.markov_w1.weight")
    confident = "confidence_head.proj.weight" in tensors
    dspark = {
        "markov_rank": 0 if markov is None else int(markov.shape[1]),
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and markov is not None,
    }
    if maps:
        return _speculators_form(config, {**dspark, **anchor}, {**tensors, **maps}, len(maps["d2t"]))
    if "candidate_selector.predecessor_codebook" in tensors:
        second = {key: int(file.need(f"ARCH.{key}")) for key in SECOND_PARTS.values()}
        return {**config, "architectures": [DFLASH2], **second, **anchor}, tensors
    if markov is None and not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        return {**config, "architectures": [DFLASH], **anchor}, tensors
    return {**config, "architectures": [DSPARK], **dspark, **anchor}, tensors


def _speculators_form(
    config: dict[str, Any], dspark: Mapping[str, Any], tensors: dict[str, Tensor], drafted: int
) -> Published:
    """Return a head over a draft vocabulary in the form of the speculators library."""
    for key in ("layer_types", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if config.get(key) not in (None, 1.0):
            raise CheckpointError(
                f"the head has a draft vocabulary and {key} {config[key]!r}. The speculators library "
                "and z-lab read these differently, but the file does not say whose it is: use the folder that it was made from"
            )
    layer_keys = [key for key in config if key not in ("block_size", "mask_token_id", "target_layer_ids", "is_causal")]
    return {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {key: config[key] for key in layer_keys} | {"model_type": "qwen3"},
        "draft_vocab_size": drafted,
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        **dspark,
    }, tensors


def _read_mtp(file: File) -> Published:
    if file.architecture not in names.MTP_TYPES:
        raise CheckpointError(
            f"{file.name} has the MTP module of a {file.architecture}, whose layer is stored in another way than transformers' "
            f"class has it. eyas reads modules of {', '.join(names.MTP_TYPES)}: use the target's checkpoint in Hugging Face layout"
        )
    behind = int(file.need("ARCH.block_count")) - int(file.need("ARCH.nextn_predict_layers"))
    prefix = f"blk.{behind}."
    tensors = _tensors(file, names.mtp_names(file.architecture, behind))
    if "layers.0.post_norm.weight" not in tensors:  # llama.cpp takes the target's last norm
        tensors["layers.0.post_norm.weight"] = file.tensor("output_norm.weight")
    halves = [f"{prefix}ffn_{x}_exps.weight" for x in ("gate", "up")]
    if halves[0] in file:
        tensors["layers.0.mtp_block.mlp.experts.gate_up_proj"] = torch.cat(
            [file.tensor(half) for half in halves], dim=1
        )
    gate = "layers.0.mtp_block.mlp.shared_expert_gate.weight"
    if gate in tensors:
        tensors[gate] = tensors[gate].reshape(1, -1)
    if file.architecture != "glm4moe":  # Qwen's norms multiply by 1 + weight, llama.cpp's by the weight
        tensors = {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    left = [name for name in file.unused(prefix) if not name.endswith(_UNUSED_TABLES)]
    if left:
        raise CheckpointError(f"{file.name}: the MTP module has tensors that are not known here: {', '.join(left)}")
    return {
        "model_type": MODEL_TYPE,
        "target_model_type": names.MTP_TYPES[file.architecture],
        "hidden_size": file.need("ARCH.embedding_length"),
        "vocab_size": file.vocab_size(),
        "max_position_embeddings": file.need("ARCH.context_length"),
        "eyas": {},
    }, tensors


_READERS: Mapping[str, Callable[[File], Published]] = {"eagle3": _read_eagle3, "dflash": _read_block}


# --- parts -------------------------------------------------------------------------------------------


def _tensors(file: File, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors that `names` lists and the file has, under their new names."""
    return {ours: file.tensor(theirs) for theirs, ours in names.items() if theirs in file}


def _layer_config(file: File) -> dict[str, Any]:
    """Return the keys of a LLaMA config.json."""
    optional = {"num_key_value_heads", "rope_theta", "head_dim"}
    found = {
        ours: (file.get if ours in optional else file.need)(f"ARCH.{theirs}")
        for ours, theirs in names.LAYER_KEYS.items()
    }
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    found["rope_theta"] = found["rope_theta"] or 10000.0
    turned = file.get("ARCH.rope.dimension_count")
    found["head_dim"] = width = int(found["head_dim"] or turned or found["hidden_size"] // found["num_attention_heads"])
    if turned is not None and int(turned) != width:
        raise CheckpointError(
            f"{file.name}: RoPE turns {turned} of the {width} channels of a head, but eyas turns all or none"
        )
    return {**found, "hidden_act": file.get("ARCH.hidden_activation", "silu"), "vocab_size": file.stated_vocab_size()}


def _rope_scaling(file: File) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a config.json."""
    kind = file.get("ARCH.rope.scaling.type", "none")
    if "rope_freqs.weight" in file:
        if kind != "none":
            raise CheckpointError(f"{file.name} has both rope_freqs and a RoPE of type {kind}")
        return _llama3_of(file.tensor("rope_freqs.weight").double(), file)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": file.need("ARCH.rope.scaling.factor")}
    if kind != "yarn":
        return scaling  # its reader refuses a type that it does not know
    if file.get("ARCH.rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise CheckpointError(f"{file.name} has a YaRN with an extrapolation factor other than 1")
    found = {ours: file.get(f"ARCH.rope.scaling.{theirs}") for ours, theirs in names.YARN_KEYS.items()}
    return scaling | {ours: value for ours, value in found.items() if value is not None}


def _llama3_of(factors: Tensor, file: File) -> dict[str, Any]:
    """Return the llama3 scaling whose frequencies are divided by these factors [h/2]. The file holds no more of it.

    With wavelengths w, factors are 1 / ((1 - s) / factor + s). Here s = (length / w - low) / (high - low), cut
    to 0 ... 1. Only the ratios of length, low and high matter, so low is 1. Raise CheckpointError for factors
    of another form."""
    theta, width = float(file.get("ARCH.rope.freq_base", 10000.0)), 2 * len(factors)
    turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)  # 1 / w
    factor = float(factors.max())
    inner = (factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6))
    if bool(torch.isclose(factors, torch.ones_like(factors)).all()) or int(inner.sum()) < 2:
        raise CheckpointError(f"{file.name} has rope_freqs from which no scaling of RoPE follows that is known here")
    smooth = (1 / factors[inner] - 1 / factor) / (1 - 1 / factor)
    lines = torch.stack([turns[inner], torch.ones_like(smooth)], dim=1)  # s = slope / w + offset
    slope, offset = torch.linalg.lstsq(lines, smooth[:, None]).solution[:, 0].tolist()
    high = 1 - 1 / offset
    length = slope * (high - 1)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    if not torch.allclose(names.llama3_factors(scaling, theta, width), factors, rtol=1e-4):
        raise CheckpointError(f"{file.name} has rope_freqs of another scaling than llama3, the only one that is read")
    return scaling


def _draft_vocabulary(file: File, vocabulary: int) -> dict[str, Tensor]:
    """Return d2t with offsets; the file holds the target's ids themselves."""
    if "d2t" not in file:
        return {}
    ids = file.tensor("d2t").reshape(-1)
    return {"d2t": ids - torch.arange(len(ids))} if len(ids) != vocabulary else {}


def _windows(file: File, layers: int) -> dict[str, Any]:
    """Return the keys of sliding windows, and whether slots see earlier slots only."""
    keys: dict[str, Any] = {}
    if (causal := file.get("ARCH.attention.causal")) is not None:
        keys["is_causal"] = bool(causal)
    window = int(file.get("ARCH.attention.sliding_window", 0))
    if not window:
        return keys
    pattern = file.need("ARCH.attention.sliding_window_pattern")
    slides = list(pattern) if isinstance(pattern, list) else [True] * layers
    kinds = [SLIDING if slid else "full_attention" for slid in slides]
    return keys | {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _factors(file: File) -> dict[str, Any]:
    """Return the factors of embeddings and logits, and the cap of these."""
    found = {ours: file.get(f"ARCH.{theirs}") for ours, theirs in names.FACTOR_KEYS.items()}
    return {ours: value for ours, value in found.items() if value}
