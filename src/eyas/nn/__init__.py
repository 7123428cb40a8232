"""What draft nets are built from: LLaMA's parts (`_layers`), and attention over packed documents for training (`_packed`).

This room knows no method and no target.
"""

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
from eyas.nn._quick import QuickLinear, quick

__all__ = [
    "Asking", "Attention", "DecoderLayer", "Documents", "DraftCache", "FusedLayer", "Keys", "LayerShape", "QuickLinear", "RMSNorm",
    "SwiGLU", "grouped_attention", "packed_attention", "quick", "rope", "rope_frequencies",
]  # fmt: skip
