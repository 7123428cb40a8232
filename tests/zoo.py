"""Tiny random models, one per family, for every test that needs a target.

A model here is float32, in eval mode, and the same in every run: its weights come from a seed. They
are larger than those that Hugging Face initialises with, so that next-token distributions have
clear winners and differ from prefix to prefix; weights that would be all ones or zeros (norms,
biases, sinks) are changed too, because no test would see a bias that is forgotten while it is zero.
Sliding windows are 16 tokens, shorter than the sequences of the tests; the context is 512.

    FAMILIES    model types that eyas serves
    SWITCHING   served up to the length at which their rotary frequencies change
    HYBRIDS     with recurrent or convolutional state
    REFUSED     refused, because their state lies where it cannot be put back
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = [
    "COMMON", "CONTEXT", "FAMILIES", "HYBRIDS", "LAYERS", "REFUSED", "SWITCH", "SWITCHING", "VOCAB", "WINDOW",
    "llama_dynamic", "phi3_longrope", "tiny",
]  # fmt: skip

VOCAB = 160
CONTEXT = 512
WINDOW = 16
LAYERS = 4
HIDDEN = 48
GAIN = 1.3
SWITCH = 64  # positions at which the models of SWITCHING change their frequencies

# Options of nearly every configuration of transformers.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False,
}  # fmt: skip
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MIXED: dict[str, Any] = {**SLIDING, "layer_types": ALTERNATING}
ROPE: dict[str, Any] = {"rope_theta": 10000.0}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _family(model_type: str, *, eager: bool = False, seed: int = 0, **options: Any) -> Callable[[], PreTrainedModel]:
    return functools.partial(tiny, model_type, eager=eager, seed=seed, **options)


def tiny(model_type: str, *, eager: bool = False, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A small random model of this type; `options` override the common configuration."""
    known = _fields(model_type)
    config = AutoConfig.for_model(model_type, **{k: v for k, v in COMMON.items() if k in known} | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
        )
        _initialise(model, seed)
    return model.eval()


def _fields(model_type: str) -> set[str]:
    """The options of a configuration class, by its own names and by those that it maps to them."""
    config = AutoConfig.for_model(model_type)
    return set(config.to_dict()) | set(type(config).attribute_map)


@torch.no_grad()
def _initialise(model: PreTrainedModel, seed: int) -> None:
    """Matrices of one gain, so that a layer matters as much as the residual stream; vectors changed
    a little from their initial values."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(noise * GAIN / HIDDEN**0.5)
        else:
            parameter.add_(noise * 0.1)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        embedding.weight.mul_(2.0 / float(getattr(embedding, "embed_scale", 1.0)) ** 0.5)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _family("llama"),
    "mistral": _family("mistral", **SLIDING),
    "mixtral": _family("mixtral", **SLIDING, **EXPERTS),
    "qwen2": _family("qwen2", use_sliding_window=True, **MIXED),
    "qwen3": _family("qwen3"),
    "qwen3_moe": _family("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True),
    "gemma2": _family(
        "gemma2", eager=True, **MIXED, query_pre_attn_scalar=12, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
    ),
    "gemma3": _family("gemma3_text", **MIXED, query_pre_attn_scalar=12),
    "phi3": _family("phi3", **SLIDING, original_max_position_embeddings=CONTEXT),
    "olmo2": _family("olmo2", seed=3),
    "granite": _family(
        "granite", embedding_multiplier=3.0, logits_scaling=0.7, residual_multiplier=0.6, attention_multiplier=0.2
    ),
    "cohere2": _family("cohere2", **MIXED, logit_scale=0.4, tie_word_embeddings=True),
    "gpt_neox": _family("gpt_neox", seed=3),
    "gpt2": _family("gpt2", seed=2),
    "gpt_oss": _family(
        "gpt_oss", eager=True, **MIXED, **EXPERTS,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4},
    ),
    "gemma4": _family(
        "gemma4_text", **MIXED, num_kv_shared_layers=2, head_dim=12, global_head_dim=24,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, final_logit_softcapping=4.0,
    ),
    "llama4": _family(
        "llama4_text", attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"] * (LAYERS // 2),
        intermediate_size_mlp=40, interleave_moe_layer_step=2, **EXPERTS,
    ),
    "deepseek_v3": _family(
        "deepseek_v3", head_dim=8, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=12, first_k_dense_replace=1,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=40,
    ),
}  # fmt: skip

LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
llama_dynamic = _family(
    "llama", max_position_embeddings=SWITCH, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 4.0}
)
phi3_longrope = _family(
    "phi3", original_max_position_embeddings=SWITCH, rope_parameters={**ROPE, **LONG, "factor": CONTEXT / SWITCH}
)
SWITCHING: dict[str, Callable[[], PreTrainedModel]] = {"llama_dynamic": llama_dynamic, "phi3_longrope": phi3_longrope}

STATE_THEN_ATTENTION = ["linear_attention", "full_attention"] * (LAYERS // 2)
CONV_THEN_ATTENTION = ["conv", "full_attention"] * (LAYERS // 2)
DELTA_NET: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA_1: dict[str, Any] = {"mamba_d_state": 8, "mamba_dt_rank": 4}
MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
}  # fmt: skip
LATENT: dict[str, Any] = {  # multi-head latent attention
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 12, "topk_group": 1, "num_experts": 4, "moe_intermediate_size": 40,
}  # fmt: skip
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2), "attention_hidden_size": 96, "attention_head_dim": 24,
}  # fmt: skip

HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "lfm2": _family("lfm2", layer_types=CONV_THEN_ATTENTION),
    "qwen3_next": _family("qwen3_next", layer_types=STATE_THEN_ATTENTION, **SHARED_EXPERT, **DELTA_NET),
    "falcon_h1": _family("falcon_h1", mamba_d_ssm=96, **MAMBA_2),
    "jamba": _family("jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=2, **MAMBA_1),
    "mamba2": _family("mamba2", eager=True, state_size=8, num_heads=4, head_dim=24, n_groups=1, chunk_size=16),
    "qwen3_5": _family("qwen3_5_text", layer_types=STATE_THEN_ATTENTION, **DELTA_NET),
    "qwen3_5_moe": _family("qwen3_5_moe_text", layer_types=STATE_THEN_ATTENTION, **SHARED_EXPERT, **DELTA_NET),
    "lfm2_moe": _family(
        "lfm2_moe", layer_types=CONV_THEN_ATTENTION, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, num_dense_layers=1
    ),
    "mamba": _family("mamba", eager=True, state_size=8),
    "falcon_mamba": _family("falcon_mamba", eager=True, state_size=8),
    "bamba": _family("bamba", attn_layer_indices=[1, 3], **MAMBA_2),
    "granitemoehybrid": _family(
        "granitemoehybrid", layer_types=["mamba", "attention"] * (LAYERS // 2), shared_intermediate_size=40, **EXPERTS, **MAMBA_2
    ),
    "nemotron_h": _family(
        "nemotron_h", layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=4, mamba_head_dim=24,
        ssm_state_size=8, n_groups=1, chunk_size=16,
    ),
    "zamba": _family("zamba", n_mamba_heads=2, **MAMBA_1, **ZAMBA),
    "zamba2": _family(
        "zamba2", n_mamba_heads=4, mamba_d_state=8, mamba_headdim=24, mamba_ngroups=1, chunk_size=16, num_mem_blocks=1, adapter_rank=8,
        **ZAMBA,
    ),
    "olmo_hybrid": _family("olmo_hybrid", layer_types=STATE_THEN_ATTENTION, **{**DELTA_NET, "linear_num_key_heads": 4}),
    "kimi_linear": _family(
        "kimi_linear", layer_types=STATE_THEN_ATTENTION, linear_num_heads=2, linear_head_dim=8,
        num_experts_per_token=2, num_expert_group=1, num_shared_experts=1, **LATENT,
    ),
    "bailing_hybrid": _family("bailing_hybrid", layer_types=STATE_THEN_ATTENTION, num_experts_per_tok=2, n_group=1, head_dim=8, **LATENT),
    "zaya": _family("zaya"),
}  # fmt: skip

REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "recurrent_gemma": _family("recurrent_gemma", eager=True, attention_window_size=WINDOW),
    "minimax": _family("minimax", layer_types=STATE_THEN_ATTENTION, **EXPERTS),
}
