"""Tiny random models of any model type of transformers, and what eyas can do with one. For runs/families.py.

A type's own default configuration is made small: sizes by the names of their fields, lists with an entry per layer,
token ids. Types that need more have a line in OVERRIDES, or are made by tests/zoo.py.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import modeling_auto

from eyas import drafters as methods
from eyas.core.engine import Decoder, Request
from eyas.core.families import KIND_LISTS, REFUSED_KINDS, SPARSE, STATE_KINDS
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter
from eyas.errors import ModelError
from eyas.runners import UnsuitedError, make_cpu_runner

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import zoo
from reference import Oracle, run

L = zoo.LAYERS
SIZES: dict[str, Any] = {
    "n_embd": 48, "n_layer": L, "n_head": 4, "n_positions": 512, "n_ctx": 512, "d_model": 48, "n_heads": 4, "n_layers": L,
    "num_layers": L, "ffn_dim": 80, "d_ff": 80, "dim": 48, "ffn_hidden_size": 80, "max_seq_len": 512, "max_target_positions": 512,
    "decoder_layers": L, "decoder_attention_heads": 4, "decoder_ffn_dim": 80, "encoder_layers": 1, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 80, "sliding_window": zoo.WINDOW, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 12,
    "attention_chunk_size": zoo.WINDOW, "type_vocab_size": 2, "embedding_size": 48, "attention_window_size": zoo.WINDOW,
    "first_k_dense_replace": 1, "mlp_hidden_size": 80, "rotary_dim": 8,
}  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}  # multi-head latent attention
ROBERTAS = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"pad_token_id": 1} for name in ROBERTAS},
    "cpmant": {"prompt_types": 4, "prompt_length": 4, "dim_ff": 80, "dim_head": 12},
    "ctrl": {"dff": 80},
    "deepseek_v2": {"num_experts_per_tok": 2, **LATENT},
    "dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4},
    "gemma3n_text": {
        "layer_types": zoo.ALTERNATING * 2, "num_hidden_layers": 8, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": zoo.VOCAB,
        "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 8, "intermediate_size": [80] * 8, "laurel_rank": 8,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": zoo.VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 24, "layer_types": zoo.ALTERNATING
    },
    "gemma4_unified_text": {"global_head_dim": 24},
    "llama4_text": {
        "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"] * 2
    },
    "longcat_flash": {"zero_expert_num": 2},
    "roc_bert": {"shape_vocab_size": 50, "shape_embed_dim": 16, "pronunciation_vocab_size": 50, "pronunciation_embed_dim": 16},
    "rembert": {"input_embedding_size": 48, "output_embedding_size": 48},
    "stablelm": {"rope_parameters": {**zoo.ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
}  # fmt: skip
RECURRENT = ("minimax", "recurrent_gemma", "rwkv", "xlstm", "qwen4_exp_text")
DRAFTERS = ("gemma4_assistant", "gemma4_unified_assistant")
SPECIAL = ("_token_id", "_token_index", "_id", "_token")
MOST_PARAMETERS = 30_000_000
PROMPTS = (5, 23, 40)  # tokens; the last is longer than two sliding windows
NEW = 12


def causal_types() -> list[str]:
    """The model types of AutoModelForCausalLM, without those that only draft for another model."""
    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(DRAFTERS))


def multimodal_types() -> list[str]:
    """The model types of AutoModelForImageTextToText."""
    return sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def text_type(model_type: str) -> str:
    """The type of the text model inside a model of this type; the type itself if it cannot be told."""
    try:
        return str(AutoConfig.for_model(model_type).get_text_config(decoder=True).model_type)
    except Exception:  # some configurations have no defaults
        return model_type


def small_options(model_type: str) -> dict[str, Any]:
    """The options that make the default configuration of a type that of a tiny model."""
    config = AutoConfig.for_model(model_type)
    fields = config.to_dict()
    known = set(fields) | set(type(config).attribute_map)
    layers = next((fields[name] for name in LAYER_COUNTS if name in fields), 0)
    options = {name: size for name, size in SIZES.items() if name in known and fields.get(name, size) is not None}
    for name, value in fields.items():
        if isinstance(value, list | tuple) and layers and len(value) == layers:
            options[name] = _some(list(value))
        elif name.endswith(SPECIAL) and isinstance(value, int) and value >= zoo.VOCAB:
            options[name] = 3
        elif name == "rope_parameters" and isinstance(value, dict):
            options[name] = _small_rope(value)
    if fields.get("kv_lora_rank"):
        options |= LATENT
    if "is_decoder" in known:
        options["is_decoder"] = True
    return options | OVERRIDES.get(model_type, {})


def _some(values: list[Any]) -> list[Any]:
    """As many entries as there are layers, of every kind that occurs."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return [kinds[i % len(kinds)] for i in range(L)] if len(kinds) <= L else values[:L]


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    small = {key: _small_rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = zoo.CONTEXT // 4
    return small


def tiny_model(model_type: str) -> PreTrainedModel:
    """A tiny random model, the same in every run; `NotTinyError` if the configuration cannot be shrunk."""
    makers = {**zoo.FAMILIES, **zoo.HYBRIDS, **zoo.REFUSED}
    by_type = {maker.args[0]: maker for maker in makers.values()}  # type: ignore[attr-defined]
    if model_type in by_type:
        return by_type[model_type]()
    try:
        options = small_options(model_type)
        count = _parameters(model_type, options)
        if count > MOST_PARAMETERS:
            raise NotTinyError(f"its smallest model here has {count / 1e6:.0f}M parameters")
        try:
            return zoo.tiny(model_type, **options)
        except (ValueError, ImportError) as error:
            if "scaled_dot_product" not in str(error) and "sdpa" not in str(error):
                raise
            return zoo.tiny(model_type, eager=True, **options)
    except NotTinyError:
        raise
    except Exception as error:
        raise NotTinyError(_one_line(error)) from error


class NotTinyError(Exception):
    """No tiny model of this type could be made."""


def _parameters(model_type: str, options: dict[str, Any]) -> int:
    common = {name: value for name, value in zoo.COMMON.items() if name in zoo._fields(model_type)}
    config = AutoConfig.for_model(model_type, **common | options)
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# --- the attention ---------------------------------------------------------------------------------------

SPARSE_NAMES = ("index_topk", "indexer_budget", "sparse_attention_config", "dsa_layers")
ALIBI_TYPES = ("bloom", "mpt")


def attention_of(model_type: str) -> str:
    """The kind of attention, of which the table has a section each."""
    config = AutoConfig.for_model(model_type)
    text = config.get_text_config(decoder=True)
    kinds = {kind for name in KIND_LISTS for kind in getattr(text, name, None) or ()}
    if model_type in zoo.HYBRIDS or model_type in RECURRENT or kinds & set(STATE_KINDS):
        return "recurrent"
    if kinds & {kind for kind, why in REFUSED_KINDS.items() if why == SPARSE} or any(
        getattr(text, name, None) for name in SPARSE_NAMES
    ):
        return "sparse"
    if "chunked_attention" in kinds or getattr(text, "attention_chunk_size", None):
        return "chunked"
    if getattr(text, "kv_lora_rank", None):
        return "latent"
    if getattr(text, "alibi", False) or model_type in ALIBI_TYPES:
        return "alibi"
    if getattr(config, "is_encoder_decoder", False) or "is_decoder" in config.to_dict():
        return "encoder"
    if "sliding_attention" in kinds or getattr(text, "sliding_window", None):
        return "sliding"
    return "full"


# --- the trials ------------------------------------------------------------------------------------------


def trial(model_type: str) -> dict[str, Any]:
    """Try a tiny random model of this type: load it, decode plainly, with trees, and with two methods.

    Returns:
        verdict: "trees", "chains", "wrong" (other tokens than plain decoding), "refused", "fails" or "not made"; why;
        parameters; tau of a drafter that knows the answers; whether the kernels run it; methods: "ok" or the fault.
    """
    try:
        model = tiny_model(model_type)
    except NotTinyError as error:
        return {"verdict": "not made", "why": str(error)}
    size: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    try:
        target = Target(model)
    except ModelError as error:
        return {**size, "verdict": "refused", "why": str(error).partition(" cannot be served: ")[2] or str(error)}
    except Exception as error:
        return {**size, "verdict": "fails", "why": f"when it is loaded: {_one_line(error)}"}
    try:
        return {**size, **_decoded(target)}
    except Exception as error:
        return {**size, "verdict": "fails", "why": f"in decoding: {_one_line(error)}"}


def _decoded(target: Target) -> dict[str, Any]:
    dice = random.Random(0)
    requests = [Request(tuple(dice.randrange(3, target.vocab_size) for _ in range(length)), NEW) for length in PROMPTS]
    requests.append(Request(requests[0].prompt * 4, NEW))  # prompt lookup finds something here
    answers = [generated(target.model, request) for request in requests]
    plain = methods.find("vanilla")(target)
    if decoded(target, plain, requests)[0] != answers:
        return {"verdict": "wrong", "why": "plain decoding by eyas gives other tokens than transformers' generate"}
    oracle = Oracle(target, {request.prompt: answer for request, answer in zip(requests, answers, strict=True)}, 12, 5)
    tokens, tau = decoded(target, oracle, requests, 3)
    trees = tokens == answers
    by_method = {name: _try_method(target, name, requests, answers) for name in ("prompt_lookup", "eagle3")}
    figures = {"tau": round(tau, 2), "methods": by_method, **_kernels(target)}
    if not trees:
        chains = by_method["prompt_lookup"] == "ok"
        return {"verdict": "chains" if chains else "wrong", "why": "a branching tree changes the tokens", **figures}
    faults = [f"{name}: {result}" for name, result in by_method.items() if result != "ok"]
    return {"verdict": "trees", "why": "; ".join(faults), **figures}


def generated(model: PreTrainedModel, request: Request) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    ids = torch.tensor([request.prompt])
    ends: dict[str, Any] = {"eos_token_id": -1, "forced_eos_token_id": None, "forced_bos_token_id": None}
    limits = {"do_sample": False, "max_new_tokens": request.max_new_tokens, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **ends)
    return [int(token) for token in out[0, len(request.prompt) :]]


def decoded(target: Target, drafter: Drafter, requests: list[Request], rows: int = 1) -> tuple[list[list[int]], float]:
    """The new tokens of each request, and tau."""
    tokens, steps = run(Decoder(target, drafter, rows), requests)
    cycles = [step for step in steps if not step.prefill]
    return tokens, sum(len(step.tokens) for step in cycles) / len(cycles)


def _try_method(target: Target, name: str, requests: list[Request], answers: list[list[int]]) -> str:
    try:
        kind = methods.find(name)
        options = {"head.layers": (0, 2, target.num_layers - 1)} if name == "eagle3" else {}
        tokens, _ = decoded(target, kind.random(target, build_options(kind.Options, options), seed=1), requests, 2)
    except Exception as error:
        return _one_line(error)
    return "ok" if tokens == answers else "other tokens than plain decoding"


def _kernels(target: Target) -> dict[str, Any]:
    """Whether the C++ kernels run models of this type, with widths that they know."""
    config = target.model.config
    try:
        make_cpu_runner(target)
    except UnsuitedError as why:
        if "do not know the family" in str(why):
            return {"kernels": False}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    if config.model_type == "lfm2_moe":
        sizes |= {
            name: getattr(config, name)
            for name in ("layer_types", "num_dense_layers", "num_experts", "num_experts_per_tok")
        }
    if config.model_type == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = zoo.VOCAB
    try:
        make_cpu_runner(Target(zoo.tiny(config.model_type, eager=config._attn_implementation == "eager", **sizes)))
    except UnsuitedError as why:
        return {"kernels": False, "why_no_kernels": str(why)}
    return {"kernels": True}
