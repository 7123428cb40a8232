"""Names of tensors and settings in GGUF files of heads, as llama.cpp's converter (convert_hf_to_gguf.py) writes
them, and its changes of tensors. One table serves both directions: reading (`gguf`) and writing (eyas-train,
which finds this module in `tools`).

A table has the file's name first, then the name in the published form. Settings belong to the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FACTOR_KEYS", "LAYER_KEYS", "MTP_TYPES", "YARN_KEYS", "block_names", "eagle3_names", "in_dflash",
    "llama3_factors", "mtp_names",
]  # fmt: skip

MTP_TYPES = {
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "glm4moe": "glm4_moe",
}
"""Architectures of files whose MTP module is known -> model_type of the target."""

# --- settings: key of config.json -> key of the file ---------------------------------------------------

LAYER_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
YARN_KEYS = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
FACTOR_KEYS = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}

# --- tensors: name in the file -> published name -------------------------------------------------------

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
_TABLES = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
_CONVOLUTIONS = {
    f"{theirs}_conv_{part}": f"{ours}_conv.{name}"
    for theirs, ours in (("attn", "attention"), ("ffn", "mlp"))
    for part, name in (("base", "base_kernel"), ("proj.weight", "kernel_projection.weight"))
}
_OUTER = {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", **_TABLES}
_SELECTOR = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
_MARKOV = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
_MTP = {
    **{f"nextn.{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
    "nextn.shared_head_norm.weight": "post_norm.weight",
}
_MTP_LAYER = {
    **{theirs: ours for theirs, ours in _LAYER.items() if theirs != "ffn_norm.weight"},
    **_HEAD_NORMS,
    **{f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
}


_IN_DFLASH = {
    **{f"{fork}fc": "fc" for fork in ("dflash_", "dflash.", "dspark.")},
    **{f"{fork}hidden_norm": "enc.output_norm" for fork in ("dflash_", "dflash.", "dspark.")},
    "dspark.markov_head_a": "markov_w1",
    "dspark.markov_head_b": "markov_w2",
    **{f"dflash.dspark.markov.w{i}": f"markov_w{i}" for i in (1, 2)},
    **{name: "conf_proj" for name in ("confidence_proj", "dspark.confidence_head", "dflash.dspark.confidence")},
}
"""Names of tensors of block heads in files of llama.cpp's forks -> llama.cpp's own, without the last part."""


def in_dflash(name: str) -> str:
    """Return llama.cpp's name of a tensor in a fork's file of a block head."""
    stem, _, kind = name.rpartition(".")
    known = _IN_DFLASH.get(stem, stem)
    if known.startswith("blk.") and known.endswith(".post_attention_norm"):
        known = known.replace("post_attention_norm", "ffn_norm")
    return f"{known}.{kind}" if stem else name


def eagle3_names() -> dict[str, str]:
    """Return the names of an EAGLE-3 head, without d2t."""
    names = {f"blk.0.{theirs}": f"layers.0.{ours}" for theirs, ours in _LAYER.items()}
    norms = {"blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight", "enc.output_norm.weight": "input_norm.weight"}
    return {**names, **norms, **_OUTER}


def block_names(layers: int) -> dict[str, str]:
    """Return the names of a block head with so many layers, without d2t."""
    names = {"enc.output_norm.weight": "hidden_norm.weight", **_OUTER, **_SELECTOR, **_MARKOV}
    for i in range(layers):
        parts = {**_LAYER, **_HEAD_NORMS, **_CONVOLUTIONS}
        names |= {f"blk.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in parts.items()}
    return names


def mtp_names(architecture: str, layer: int) -> dict[str, str]:
    """Return the names of an MTP module that is this layer of the file."""
    names = _MTP | {theirs: f"mtp_block.{ours}" for theirs, ours in _MTP_LAYER.items()}
    shared = "shared_experts" if architecture == "glm4moe" else "shared_expert"
    names |= {f"ffn_{x}_shexp.weight": f"mtp_block.mlp.{shared}.{x}_proj.weight" for x in ("gate", "up", "down")}
    return {f"blk.{layer}.{theirs}": f"layers.0.{ours}" for theirs, ours in names.items()}


def llama3_factors(scaling: Mapping[str, Any], theta: float, width: int) -> Tensor:
    """Return the factors [width / 2] by which the frequencies of RoPE are divided under a llama3 scaling."""
    length, low, high = (
        float(scaling[key]) for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    turns = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)  # 1 / wavelength
    share = ((length * turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / float(scaling["factor"]) + share)
