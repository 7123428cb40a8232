"""Write files in GGUF format with random weights at the shapes of known models, for measurements of loading and speed.

    python runs/sized_gguf.py --shape llama-1b --type q4_0 --tokenizer SmolLM2-135M-Instruct.Q4_1.gguf --output FILE.gguf

Such a model writes noise. It has the size and the shapes of the real model, and a pass takes as long. Blocks hold random
integers. Their scales give weights a standard deviation of about 0.02. q4_k_m mixes types as llama.cpp does:
Q6_K for the output and for values and downward matrices of half of the layers, Q4_K for the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter


class Shape(NamedTuple):
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    theta: float


SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, True, 5e5),
    "llama-3b": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256, True, 5e5),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True, 1e6),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, 1e6),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 5e5),
}
SPREAD = 0.02  # of weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--type", choices=("q4_0", "q8_0", "q4_k_m", "q4_1", "q6_k", "bf16"), default="q4_0")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file whose tokenizer is copied")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.output, SHAPES[options.shape], options.type, options.tokenizer, options.seed)


def write(path: Path, shape: Shape, kind: str, tokenizer: Path, seed: int) -> None:
    writer, generator = GGUFWriter(path, shape.arch, use_temp_file=False), np.random.default_rng(seed)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_vocab_size(shape.vocabulary)
    copy_tokenizer(writer, tokenizer, shape.vocabulary)
    tensors = dict(tensors_of(shape, kind))
    for name, (sizes, type_) in tensors.items():
        block, size = GGML_QUANT_SIZES[type_]
        rows = int(np.prod(sizes[:-1]))
        raw_shape = (*sizes[:-1], sizes[-1] // block * size)
        count = rows * (sizes[-1] // block)
        writer.add_tensor_info(name, raw_shape, np.dtype(np.uint8), count * size, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for sizes, type_ in tensors.values():
        writer.write_tensor_data(weights(sizes, type_, generator))
    writer.close()
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


def copy_tokenizer(writer: GGUFWriter, source: Path, vocabulary: int) -> None:
    """Copy the tokenizer of a file, with further tokens that no text has."""
    for name, field in GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<|unused_{n}|>" for n in range(len(value), vocabulary))]
        if name in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            value = [*value, *([5 if name.endswith("type") else 0.0] * (vocabulary - len(value)))]  # 5: unused
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)


def tensors_of(shape: Shape, kind: str) -> list[tuple[str, tuple[tuple[int, ...], GGMLQuantizationType]]]:
    """Return name, sizes and type of each tensor, outputs before inputs."""
    T = GGMLQuantizationType
    base = T.Q4_K if kind == "q4_k_m" else T[kind.upper()]
    better = T.Q6_K if kind in ("q4_k_m", "q4_0", "q4_1") else base
    D, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: list[tuple[str, tuple[tuple[int, ...], GGMLQuantizationType]]] = [
        ("token_embd.weight", ((shape.vocabulary, D), better if shape.tied else base))
    ]
    for n in range(shape.layers):
        more = kind == "q4_k_m" and (n < shape.layers // 8 or n >= 7 * shape.layers // 8 or n % 3 == 2)
        high = better if more else base
        matrices = {
            "attn_q": ((queries, D), base), "attn_k": ((keys, D), base), "attn_v": ((keys, D), high),
            "attn_output": ((D, queries), base), "ffn_gate": ((shape.inner, D), base), "ffn_up": ((shape.inner, D), base),
            "ffn_down": ((D, shape.inner), high),
        }  # fmt: skip
        found += [(f"blk.{n}.{name}.weight", value) for name, value in matrices.items()]
        norms = ["attn_norm", "ffn_norm"]
        found += [(f"blk.{n}.{name}.weight", ((D,), T.F32)) for name in norms]
        if shape.arch == "qwen3":
            found += [(f"blk.{n}.{name}.weight", ((shape.head_dim,), T.F32)) for name in ("attn_q_norm", "attn_k_norm")]
    found.append(("output_norm.weight", ((D,), T.F32)))
    if not shape.tied:
        found.append(("output.weight", ((shape.vocabulary, D), better)))
    return found


def weights(sizes: tuple[int, ...], type_: GGMLQuantizationType, generator: np.random.Generator) -> np.ndarray:
    """Return random weights in the bytes of their type."""
    T = GGMLQuantizationType
    if type_ == T.F32:  # norms
        return np.ones(sizes, np.float32)
    if type_ == T.BF16:
        numbers = generator.standard_normal(sizes, np.float32) * np.float32(SPREAD)
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = GGML_QUANT_SIZES[type_]
    count = int(np.prod(sizes)) // block
    data = generator.integers(0, 256, (count, size), np.uint8)

    def scale(at: int, largest: float, negative: bool = False) -> None:
        value = (generator.uniform(0.5, 1.5, count) * SPREAD / largest * (-1 if negative else 1)).astype(np.float16)
        data[:, at : at + 2] = value.view(np.uint8).reshape(count, 2)

    if type_ == T.Q4_0:
        scale(0, 4.6)
    elif type_ == T.Q4_1:
        scale(0, 4.6)
        data[:, 2:4] = (-7.5 * data[:, :2].copy().view(np.float16)).astype(np.float16).view(np.uint8)
    elif type_ == T.Q8_0:
        scale(0, 73)
    elif type_ == T.Q6_K:
        scale(208, 18 * 73)
    elif type_ == T.Q4_K:
        scale(0, 4.6 * 32)
        scale(2, 4.6 * 32 / 7.5)
    return data.reshape(*sizes[:-1], -1)


if __name__ == "__main__":
    main()
