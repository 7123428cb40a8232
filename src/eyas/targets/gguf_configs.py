"""Configurations of models in files in GGUF format that transformers reads in part, or not at all.

A table names the settings that files and configurations share. Source of the files' names: llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from eyas.errors import ModelError
from eyas.targets.gguf_header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["ARCHITECTURE", "own_config"]

ARCHITECTURE = "general.architecture"
MODEL_TYPES = {  # of architectures whose configuration the table gives
    "gpt-oss": "gpt_oss", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next", "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
}  # fmt: skip
SETTINGS = {  # names in configurations -> in files
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), "attention.layer_norm_rms_epsilon"),
    **dict.fromkeys(("num_experts", "num_local_experts"), "expert_count"), "sliding_window": "attention.sliding_window",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache", "linear_conv_kernel_dim": "ssm.conv_kernel",
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), "ssm.state_size"),
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
}  # fmt: skip
UNREAD = ("rope.scaling.type", "attention.sliding_window")  # settings with which a hybrid is another model


def own_config(header: Header, path: Path) -> PreTrainedConfig | None:
    """Return the configuration of a file; None where transformers reads it. Raise ModelError for one that is not read."""
    arch = str(header.values.get(ARCHITECTURE))
    if arch == "gemma4":
        return _gemma4_config(header, path)
    return _config_by_table(header, path, arch) if arch in MODEL_TYPES else None


def _config_by_table(header: Header, path: Path, arch: str) -> PreTrainedConfig:
    """Return the configuration of a gpt-oss, or of a hybrid, some of whose layers have states instead of attention."""
    values = {name.removeprefix(f"{arch}."): value for name, value in header.values.items()}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    kind, kv_heads = MODEL_TYPES[arch], values["attention.head_count_kv"]
    layers = values["block_count"] - values.get("nextn_predict_layers", 0)  # without modules that draft
    rope = {"rope_type": "default", "rope_theta": values["rope.freq_base"]}
    if kind == "gpt_oss":
        of_layers = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
        rope |= {
            "rope_type": "yarn", "factor": values["rope.scaling.factor"], "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
        }  # fmt: skip
    elif other := next((name for name in UNREAD if values.get(name, "none") not in ("none", 0)), None):
        raise ModelError(f"it has {arch}.{other} {values[other]}, which eyas does not read")
    elif isinstance(kv_heads, list):
        of_layers, kv_heads = ["full_attention" if heads else "conv" for heads in kv_heads], max(kv_heads)
    else:
        interval = values.get("full_attention_interval", 4)
        has_state = values.get("attention.recurrent_layers") or [(n + 1) % interval for n in range(layers)]
        of_layers = ["linear_attention" if one else "full_attention" for one in has_state]
    if kind.startswith("qwen"):
        rope["partial_rotary_factor"] = values["rope.dimension_count"] / values["attention.key_length"]
    if sections := values.get("rope.dimension_sections"):
        rope |= {"mrope_interleaved": True, "mrope_section": sections[:3]}
    known = AutoConfig.for_model(kind)
    return AutoConfig.for_model(
        kind,
        name_or_path=str(path.parent),
        vocab_size=tensors["token_embd.weight"].shape[0],
        **{ours: values[theirs] for ours, theirs in SETTINGS.items() if hasattr(known, ours) and theirs in values},
        **_special_tokens(values),
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        layer_types=of_layers[:layers],
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in tensors,
        **({"block_auto_adjust_ff_dim": False} if kind == "lfm2" else {}),  # its width is the final one
    )


def _special_tokens(values: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{ours}_token_id": values.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _gemma4_config(header: Header, path: Path) -> PreTrainedConfig:
    """Return the configuration of a Gemma 4, for which transformers 5.23 fails or reads a part."""
    values = {name.removeprefix("gemma4."): value for name, value in header.values.items()}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    is_sliding = [bool(one) for one in values["attention.sliding_window_pattern"]]
    full, heads, inner = is_sliding.index(False), values["attention.head_count_kv"], values["feed_forward_length"]
    of_layers = heads if isinstance(heads, list) else [heads] * len(is_sliding)
    widths = inner if isinstance(inner, list) else [inner]
    factors = tensors["rope_freqs.weight"]  # of the angles of layers without a window: 1, or 1e30 where nothing rotates
    with path.open("rb") as file:
        file.seek(factors.offset)
        rotated = struct.unpack(f"<{factors.shape[0]}f", file.read(4 * factors.shape[0])).count(1.0)
    rope = {"rope_type": "proportional", "partial_rotary_factor": rotated / factors.shape[0]}
    numbers = values.get("embedding_length_per_layer_input") or 0
    return AutoConfig.for_model(
        "gemma4_text",
        name_or_path=str(path.parent),
        vocab_size=tensors["token_embd.weight"].shape[0],
        **_special_tokens(values),
        hidden_size=values["embedding_length"],
        intermediate_size=widths[0],
        use_double_wide_mlp=widths[-1] == 2 * widths[0],
        num_hidden_layers=len(is_sliding),
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=of_layers[is_sliding.index(True)],
        num_global_key_value_heads=of_layers[full],
        head_dim=values["attention.key_length_swa"],
        global_head_dim=values["attention.key_length"],
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in tensors,
        num_kv_shared_layers=values.get("attention.shared_kv_layers", 0),
        layer_types=["sliding_attention" if one else "full_attention" for one in is_sliding],
        sliding_window=values["attention.sliding_window"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": values["rope.freq_base_swa"]},
            "full_attention": {**rope, "rope_theta": values["rope.freq_base"]},
        },
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        final_logit_softcapping=values.get("final_logit_softcapping"),
        max_position_embeddings=values["context_length"],
        hidden_size_per_layer_input=numbers,
        vocab_size_per_layer_input=tensors["per_layer_token_embd.weight" if numbers else "token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
        enable_moe_block=bool(values.get("expert_count")),
        num_experts=values.get("expert_count"),
        top_k_experts=values.get("expert_used_count"),
        moe_intermediate_size=values.get("expert_feed_forward_length"),
    )
