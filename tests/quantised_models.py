"""Small random llamas, quantised by the libraries that transformers loads; each function skips the
test where its library is absent."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

import zoo

__all__ = ["KINDS", "SIZES", "load", "write_compressed", "write_packed"]

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
