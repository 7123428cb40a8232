"""Small random models in files in GGUF format, as llama.cpp's converter would write them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel

import zoo
from eyas.targets.gguf_files import ADDS_ONE, OF_LAYERS
from quantised_models import SIZES

__all__ = ["write_gguf"]

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}  # of GGUF files, where they have another name
LAYER_NORMS = ("nemotron", "stablelm", "starcoder2")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
# where types that the package gguf cannot write have numbers in float16, and factors that give weights of about 1
SUPER = {"Q4_K": ((0, 1 / 147), (2, 7.5 / 147)), "Q5_K": ((0, 1 / 295), (2, 15.5 / 295)), "Q6_K": ((208, 1 / 1314),)}


TOKENS = ("<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ab")  # a vocabulary of bytes


def write_gguf(
    path: Path,
    kind: str = "Q8_0",
    tokens: Sequence[str] = (),
    seed: int = 0,
    ends: Mapping[str, int] | None = None,
    template: str = "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    others: Mapping[str, str] | None = None,
    family: str = "llama",
    **options: Any,
) -> PreTrainedModel:
    """Write a llama, or a model of another family of ARCHITECTURES; return the model with the numbers of the file.

    tokens: its vocabulary, byte-level BPE whose first token ends a text and whose digits are split.
    ends: further tokens that end something: "eot" a turn, "eom" a message.
    others: other kinds of matrices, by the ends of their names there, such as "attn_v".
    options: of the model (`zoo.tiny`).
    """
    gguf = pytest.importorskip("gguf", reason="needs gguf (the extra quantised)")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate")
    model = zoo.tiny(family, seed=seed, **SIZES | ({"vocab_size": len(tokens)} if tokens else {}) | options)
    arch, config = ARCHITECTURES.get(family, family), model.config
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper().replace("-", "_")], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    set_common(writer, config, family)
    if family == "gemma4_text":
        set_gemma_4(writer, config)
    elif family == "gpt_oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    elif family.startswith("lfm2"):
        set_lfm2(writer, config)
    elif hasattr(config, "linear_num_key_heads"):
        set_delta_net(writer, config)
    if tokens:
        set_tokens(writer, tokens, ends or {}, template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = in_gguf(name, tensor, family, config, known)
        places = in_gguf(name, torch.arange(tensor.numel()).view_as(tensor), family, config, known)
        for there, part in parts.items():
            x = part.float().numpy()
            adds_one = arch in ADDS_ONE and there.endswith("norm.weight") and "ssm" not in there
            x = x + 1 if adds_one else -np.exp(x) if there.endswith("ssm_a") else x
            if x.ndim == 1 or there.endswith(("bias", "ffn_gate_inp.weight", "conv1d.weight", "conv.weight")):
                form, data = gguf.GGMLQuantizationType.F32, np.ascontiguousarray(x)
            else:
                own = next((one for end, one in (others or {}).items() if there.endswith(f"{end}.weight")), kind)
                form = gguf.GGMLQuantizationType[own]
                data = blocks(np.ascontiguousarray(x), form)
            writer.add_tensor(there, data, raw_dtype=form)
            x = np.array(gguf.quants.dequantize(data, form), np.float32).reshape(x.shape)
            x = x - 1 if adds_one else np.log(-x) if there.endswith("ssm_a") else x
            tensor.view(-1)[places[there].flatten()] = torch.from_numpy(x.flatten())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks(x: np.ndarray, form: Any) -> np.ndarray:
    """A matrix in blocks of this type, or random ones for the types that the package gguf cannot write."""
    import gguf

    if form.name not in SUPER:
        return gguf.quants.quantize(x, form)
    size, count = gguf.GGML_QUANT_SIZES[form]
    generator = np.random.default_rng(x.size)
    data = generator.integers(0, 256, (x.size // size, count), np.uint8)
    for at, factor in SUPER[form.name]:
        scale = (generator.uniform(0.5, 1.5, len(data)) * factor * x.std()).astype(np.float16)
        data[:, at : at + 2] = scale[:, None].view(np.uint8)
    return data.reshape(*x.shape[:-1], -1)


def in_gguf(name: str, x: Tensor, family: str, config: Any, known: Any) -> dict[str, Tensor]:
    """A tensor in the order of a file, by its name there; several where the file has parts of it."""
    at, last = re.search(r"layers\.(\d+)\.(.*)", name), name.rpartition(".")[2]
    layer, inside = (f"blk.{at[1]}.", at[2]) if at else ("", name)
    if inside in OF_LAYERS:
        there = layer + OF_LAYERS[inside]
    elif ".experts." in name:
        parts = {"down": x}
        if "gate_up_proj" in name:
            rows = x.mT if family == "gpt_oss" and last == "gate_up_proj" else x
            gate, up = (rows[:, ::2], rows[:, 1::2]) if family == "gpt_oss" else rows.chunk(2, 1)
            parts = {"gate_up": x} if family == "gemma4_text" else {"gate": gate, "up": up}
        elif family == "gpt_oss" and last == "down_proj":
            parts = {"down": x.mT}
        ending = "bias" if last.endswith("bias") else "weight"
        return {f"{layer}ffn_{part}_exps.{ending}": of_experts for part, of_experts in parts.items()}
    else:
        there = known.get_name(name, try_suffixes=(".weight", ".bias"))
    if family == "llama" and inside.endswith(("q_proj.weight", "k_proj.weight")):
        # llama.cpp pairs neighbouring dimensions for RoPE
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
    if "linear_attn" in name:
        keys, width = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // keys
        if "in_proj_qkvz" in name:
            own = values * config.linear_value_head_dim
            q, k, v, z = (
                part.flatten(0, 1) for part in x.view(keys, -1, x.shape[1]).split([width, width, own, own], 1)
            )
            return {f"{layer}attn_qkv.weight": torch.cat([q, k, v]), f"{layer}attn_gate.weight": z}
        if family.startswith("qwen3_5") and not name.endswith("norm.weight"):  # first values of all heads of keys first
            begin = 2 * keys * width if "qkv" in name or "conv1d" in name else 0
            if "out_proj" in name:
                x = x.view(len(x), keys, values, -1).transpose(1, 2).reshape(x.shape)
            else:
                own = x[begin:].reshape(keys, values, -1, *x.shape[1:]).transpose(0, 1).reshape(x[begin:].shape)
                x = torch.cat([x[:begin], own])
    return {there: x.squeeze() if "conv" in there or ("shexp" in there and len(x) == 1) else x}


def set_common(writer: Any, config: Any, family: str) -> None:
    """Write the settings that most architectures have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if family != "gemma4_text":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        if not family.startswith("lfm2"):
            writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        share = config.rope_parameters.get("partial_rotary_factor", 1) if "qwen3_" in family else 1
        writer.add_rope_dimension_count(int(share * width))
    writer.add_head_count(config.num_attention_heads)
    eps = next(getattr(config, name) for name in EPSILONS if hasattr(config, name))
    writer.add_layer_norm_eps(eps) if family in LAYER_NORMS else writer.add_layer_norm_rms_eps(eps)
    if "linear_num_key_heads" not in vars(config) and not family.startswith("lfm2"):
        writer.add_sliding_window(zoo.WINDOW)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    experts = next(
        (getattr(config, name, None) for name in ("num_experts", "num_local_experts") if hasattr(config, name)), None
    )
    if experts:
        top = getattr(config, "top_k_experts", None) or config.num_experts_per_tok
        writer.add_expert_count(experts)
        writer.add_expert_used_count(top)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def set_delta_net(writer: Any, config: Any) -> None:
    """Write what llama.cpp's converter writes for gated delta nets."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([3, 3, 2, 0])
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def set_lfm2(writer: Any, config: Any) -> None:
    """Write what llama.cpp's converter writes for LFM2."""
    import gguf

    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def set_tokens(writer: Any, tokens: Sequence[str], ends: Mapping[str, int], template: str) -> None:
    """Write a vocabulary."""
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(token) for token in tokens[1:] if len(token) == 2])
    writer.add_eos_token_id(0)
    for name, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template(template)


def set_gemma_4(writer: Any, config: Any) -> None:
    """Write what llama.cpp's converter writes for Gemma 4 alone."""
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    of_layers = list(config.per_layer_config)
    near, full = (of_layers[is_sliding.index(kind)] for kind in (True, False))
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(is_sliding)
    for width, ending in ((full.head_dim, ""), (near.head_dim, "_swa")):
        for kind in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{kind}{ending}")(width)
    wide = 2 if config.use_double_wide_mlp else 1
    writer.add_feed_forward_length(
        [config.intermediate_size * (wide if n >= first_shared else 1) for n in range(config.num_hidden_layers)]
    )
    writer.add_head_count_kv([one.num_key_value_heads for one in of_layers])
    writer.add_rope_freq_base_swa(5000.0)
    writer.add_final_logit_softcapping(30.0)
    rotated = full.head_dim // 8
    factors = np.array([1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
