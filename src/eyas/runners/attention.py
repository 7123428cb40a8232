"""Grouped-query attention over a tree without copies of keys and values.

transformers' sdpa repeats keys and values for every query head as soon as more than one token is verified: at 4,000 tokens of context and
four heads a group that is four times the cache, read and written, in every layer of every pass. Here keys and values are read where they
lie (`nn.grouped_attention`). Registered with transformers under NAME, for models whose attention is sdpa; `packed` puts it in their place
for a while.

Letters: B rows, K key-value heads, G query heads that share one, N new nodes, W slots, h width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from eyas.nn import grouped_attention

__all__ = ["NAME", "attend", "packed"]

NAME = "eyas_packed"
UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")  # what this attention does not know


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What transformers calls: query [B, K x G, N, h], key and value [B, K, W, h], an additive mask [B, 1, N, W]; returns [B, N, K x G, h].

    Whatever is not a masked forward with heads in groups is left to sdpa.
    """
    odd = dropout or any(more.get(name) is not None for name in UNKNOWN)
    if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[1] == key.shape[1] or odd:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    found = grouped_attention(query, key, value, attention_mask[..., : key.shape[2]], scaling)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def packed(layers: nn.ModuleList) -> Iterator[None]:
    """Decoder layers whose attention is sdpa attend without copies; they are put back as they were."""
    found: list[Any] = [getattr(module, "config", None) for module in layers.modules()]
    configs = {id(config): config for config in found if getattr(config, "_attn_implementation", None) == "sdpa"}
    for config in configs.values():
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = "sdpa"
