"""Parts of draft nets in plain torch: LLaMA layers (`_layers`), their cache (`_cache`), packed documents of training
(`_documents`).

Runners replace layers by faster ones (`DecoderLayer.fused`, `RMSNorm.by_kernel`). This package
knows no method and no target.
"""

from eyas.nn._cache import DraftKVCache, DraftLayerCache
from eyas.nn._compiled import Compiled
from eyas.nn._documents import Documents
from eyas.nn._layers import (
    Attention,
    CacheContents,
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
    rope_factor,
    rope_frequencies,
)  # fmt: skip

__all__ = [
    "Attention", "CacheContents", "Compiled", "DecoderLayer", "Documents", "DraftCache", "DraftKVCache",
    "DraftLayerCache", "DraftSlots", "KeysValues", "LayerShape", "RMSNorm", "SwiGLU", "grouped_attention",
    "join_normed", "rope", "rope_factor", "rope_frequencies",
]  # fmt: skip
