"""Parts of draft nets: LLaMA layers (`_layers`), attention over packed documents for training
(`_packed`), and faster variants.

This package knows no method and no target.
"""

from eyas.nn._compiled import Backend, Compiled
from eyas.nn._cpu_kernels import KernelLinear, with_cpu_kernels
from eyas.nn._fp8 import FP8_CAPABILITY, Fp8Linear, fp8
from eyas.nn._gpu_kernels import GpuLayer, with_gpu_kernels
from eyas.nn._layers import (
    Attention,
    CacheContents,
    CpuLayer,
    DecoderLayer,
    DraftCache,
    DraftSlots,
    KeysValues,
    LayerShape,
    RMSNorm,
    SwiGLU,
    grouped_attention,
    join_normed,
    rope,
    rope_frequencies,
)  # fmt: skip
from eyas.nn._matrices import JoinedFp8Linears, JoinedLinears
from eyas.nn._packed import Documents, QueryRows, packed_attention

__all__ = [
    "FP8_CAPABILITY",
    "Attention",
    "Backend",
    "CacheContents",
    "Compiled",
    "CpuLayer",
    "DecoderLayer",
    "Documents",
    "DraftCache",
    "DraftSlots",
    "Fp8Linear",
    "GpuLayer",
    "JoinedFp8Linears",
    "JoinedLinears",
    "KernelLinear",
    "KeysValues",
    "LayerShape",
    "QueryRows",
    "RMSNorm",
    "SwiGLU",
    "fp8",
    "grouped_attention",
    "join_normed",
    "packed_attention",
    "rope",
    "rope_frequencies",
    "with_cpu_kernels",
    "with_gpu_kernels",
]
