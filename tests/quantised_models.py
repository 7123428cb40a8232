"""Small random llamas, quantised by the libraries that transformers loads; each function skips the
test where its library is absent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

import zoo
from eyas.targets.gguf_files import ADDS_ONE

__all__ = ["KINDS", "SIZES", "load", "write_compressed", "write_gguf", "write_packed"]

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "qwen3_moe": "qwen3moe",
}  # of GGUF files, where they have another name
LAYER_NORMS = ("nemotron", "stablelm", "starcoder2")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@contextmanager
def quiet() -> Iterator[None]:
    """These libraries warn, when they are imported and used, of things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(folder: Path, **options: Any) -> PreTrainedModel:
    with quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})
    return model.eval()


def plain_folder(folder: Path) -> Path:
    zoo.tiny("llama", **SIZES).save_pretrained(folder)
    return folder


def _torchao(make: Callable[[Any], Any], **options: Any) -> Callable[[Path], PreTrainedModel]:
    def made(folder: Path) -> PreTrainedModel:
        with quiet():
            library = pytest.importorskip("torchao.quantization", reason="needs torchao")
            return load(plain_folder(folder), quantization_config=TorchAoConfig(make(library), **options))

    return made


def _bitsandbytes(**options: Any) -> Callable[[Path], PreTrainedModel]:
    def made(folder: Path) -> PreTrainedModel:
        with quiet():
            pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
            return load(plain_folder(folder), quantization_config=BitsAndBytesConfig(**options))

    return made


def _compressed(preset: str) -> Callable[[Path], PreTrainedModel]:
    def made(folder: Path) -> PreTrainedModel:
        write_compressed(folder, preset)
        return load(folder)

    return made


def write_compressed(folder: Path, preset: str, **scheme_inputs: Any) -> None:
    """A checkpoint of compressed-tensors, with the scales of rounding to nearest; `scheme_inputs`
    change how inputs are rounded."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (the extra quantised)")
    with quiet():
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams

        model, scheme = zoo.tiny("llama", **SIZES), preset_name_to_scheme(preset, ["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = 32
        for name, value in scheme_inputs.items():
            setattr(scheme.input_activations, name, value)
        settings = QuantizationConfig(config_groups={"group": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, settings)
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                weight = module.weight.data
                grouped = weight.unflatten(1, (-1, 32)) if scheme.weights.group_size else weight[:, None]
                scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
                module.weight_scale.data.copy_(scale)
        compressor = ModelCompressor(quantization_config=settings)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))


def _gptqmodel(method: str) -> Callable[[Path], PreTrainedModel]:
    def made(folder: Path) -> PreTrainedModel:
        with quiet():
            pytest.importorskip("gptqmodel", reason="needs GPTQModel")
            pytest.importorskip("optimum", reason="transformers reads GPTQ with optimum")
            return load(write_packed(folder, method))

    return made


def write_packed(folder: Path, method: str) -> Path:
    """A checkpoint of 4 bits, float16 where it is not packed, in the format of "gptq" or "awq", rounded to nearest.
    GPTQ has the same zero everywhere, and neighbouring inputs lie in different groups, as `desc_act` leaves them."""
    model, gptq = zoo.tiny("llama", **SIZES).half(), method == "gptq"
    state = model.state_dict()
    for name in [name for name in state if name.endswith("_proj.weight")]:
        weight_KN = state.pop(name).T.float()
        place_K = torch.arange(len(weight_KN))
        group_K = place_K % (len(weight_KN) // GROUP) if gptq else place_K // GROUP
        grouped = weight_KN[group_K.argsort(stable=True)].unflatten(0, (-1, GROUP))
        low_GN, high_GN = grouped.amin(1), grouped.amax(1)
        if gptq:
            high_GN = grouped.abs().amax(1)
            low_GN = -high_GN
        scale_GN = ((high_GN - low_GN) / 15).half()
        zero_GN = torch.full_like(scale_GN, 8) if gptq else (-low_GN / scale_GN).round()
        code_KN = (weight_KN / scale_GN[group_K] + zero_GN[group_K]).round().clamp(0, 15)
        packed = {
            "scales": scale_GN,
            "qweight": _packed(code_KN.T).T if gptq else _packed(code_KN, AWQ_ORDER),
            "qzeros": _packed(zero_GN - 1) if gptq else _packed(zero_GN, AWQ_ORDER),
            **({"g_idx": group_K.int()} if gptq else {}),
        }
        state |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in packed.items()}
    settings: dict[str, Any] = {"desc_act": True, "sym": True} if gptq else {"version": "gemm", "zero_point": True}
    model.config.dtype = torch.float16
    model.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": GROUP, **settings}
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of the last dimension in each integer, the first of them in its lowest bits."""
    words = codes.long().unflatten(-1, (-1, 8))[..., order] << 4 * torch.arange(8)
    return words.sum(-1).to(torch.int32)


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
) -> None:
    """A small model as a file in GGUF format: a llama, or a model of another family of ARCHITECTURES.

    tokens: its vocabulary, byte-level BPE whose first token ends a text and whose digits are split.
    ends: further tokens that end something: "eot" a turn, "eom" a message.
    others: other kinds of matrices, by the ends of their names there, such as "attn_v".
    options: of the model (`zoo.tiny`).
    """
    gguf = pytest.importorskip("gguf", reason="needs gguf (the extra quantised)")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate")
    model = zoo.tiny(family, seed=seed, **SIZES, **({"vocab_size": len(tokens)} if tokens else {}) | options)
    arch = ARCHITECTURES.get(family, family)
    config, names = (
        model.config,
        gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper().replace("-", "_")], model.config.num_hidden_layers),
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if family != "gemma4_text":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_head_count(config.num_attention_heads)
    eps = next(getattr(config, name) for name in EPSILONS if hasattr(config, name))
    writer.add_layer_norm_eps(eps) if family in LAYER_NORMS else writer.add_layer_norm_rms_eps(eps)
    writer.add_sliding_window(zoo.WINDOW)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "gemma4_text":
        set_gemma_4(writer, config)
    if family == "gpt_oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
        pairs = [token for token in tokens[1:] if len(token) == 2]
        writer.add_token_merges([" ".join(pair) for pair in pairs])
        writer.add_eos_token_id(0)
        for name, token in (ends or {}).items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if array.ndim == 1 and arch in ADDS_ONE and name.endswith("norm.weight"):
            array = array + 1
        if arch == "llama" and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):  # llama.cpp pairs neighbouring dimensions for RoPE
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if ".experts." in name:
            is_both, is_bias = "gate_up_proj" in name, name.endswith("bias")
            if family == "gpt_oss" and not is_bias:
                array = array.swapaxes(1, 2)
            gate, up = (array[:, ::2], array[:, 1::2]) if family == "gpt_oss" else np.split(array, 2, axis=1)
            parts = {"gate": gate, "up": up} if is_both else {"down": array}
            for part, of_experts in parts.items():
                form, data = gguf.GGMLQuantizationType[kind], np.ascontiguousarray(of_experts)
                there = f"blk.{name.split('.')[2]}.ffn_{part}_exps"
                if is_bias:
                    writer.add_tensor(f"{there}.bias", data)
                else:
                    writer.add_tensor(f"{there}.weight", gguf.quants.quantize(data, form), raw_dtype=form)
            continue
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        there += ".weight" if name.endswith(("sinks", "layer_scalar")) else ""
        if array.ndim == 2 and not there.endswith("ffn_gate_inp.weight"):
            own = next((one for end, one in (others or {}).items() if there.endswith(f"{end}.weight")), kind)
            form = gguf.GGMLQuantizationType[own]
            writer.add_tensor(there, gguf.quants.quantize(np.ascontiguousarray(array), form), raw_dtype=form)
        else:
            writer.add_tensor(there, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def set_gemma_4(writer: Any, config: Any) -> None:
    """Write what llama.cpp's converter writes for Gemma 4 alone."""
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    of_layers = list(config.per_layer_config)
    near, full = (of_layers[is_sliding.index(kind)] for kind in (True, False))
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(is_sliding)
    for width, add in ((full.head_dim, writer.add_key_length), (near.head_dim, writer.add_key_length_swa)):
        add(width)
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


def _intx(library: Any) -> Any:
    return library.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=library.PerGroup(32))


def _int8_dynamic_int4(library: Any) -> Any:
    return library.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=library.PerGroup(32)
    )


# Each treats every token by itself. Where inputs are not rounded, trees give exactly the text of
# plain decoding.
KINDS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "torchao int8": _torchao(lambda library: library.Int8WeightOnlyConfig(), include_input_output_embeddings=False),
    "torchao int4": _torchao(_intx),
    "torchao fp8": _torchao(lambda library: library.Float8WeightOnlyConfig()),
    "torchao int8, inputs by token": _torchao(lambda library: library.Int8DynamicActivationInt8WeightConfig()),
    "torchao int4, inputs by token": _torchao(_int8_dynamic_int4),
    "bitsandbytes 8 bit, inputs by token": _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "bitsandbytes fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "compressed-tensors W4A16": _compressed("W4A16"),
    "compressed-tensors W8A16": _compressed("W8A16"),
    "GPTQ 4 bit": _gptqmodel("gptq"),
    "AWQ 4 bit": _gptqmodel("awq"),
    "compressed-tensors W8A8, inputs by token": _compressed("W8A8"),
    "compressed-tensors FP8, inputs by token": _compressed("FP8_DYNAMIC"),
}
