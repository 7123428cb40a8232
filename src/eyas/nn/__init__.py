"""What draft nets are built from: LLaMA's parts (`_layers`), and attention over packed documents for training (`_packed`).

This room knows no method and no target.
"""

from eyas.nn._compiled import Backend, Compiled
from eyas.nn._fp8 import FP8_CAPABILITY, Fp8Linear, fp8
from eyas.nn._layers import (
    Attention,
    DecoderLayer,
    DraftCache,
    FusedLayer,
    Keys,
    LayerShape,
    RMSNorm,
    SwiGLU,
    grouped_attention,
    rope,
    rope_frequencies,
)  # fmt: skip
from eyas.nn._packed import Asking, Documents, packed_attention
from eyas.nn._quick import QuickLinear, with_cpu_kernels

__all__ = [
    "FP8_CAPABILITY",
    "Asking",
    "Attention",
    "Backend",
    "Compiled",
    "DecoderLayer",
    "Documents",
    "DraftCache",
    "Fp8Linear",
    "FusedLayer",
    "Keys",
    "LayerShape",
    "QuickLinear",
    "RMSNorm",
    "SwiGLU",
    "fp8",
    "grouped_attention",
    "packed_attention",
    "rope",
    "rope_frequencies",
    "with_cpu_kernels",
]  # fmt: skip
