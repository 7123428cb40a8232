"""Grouped-query attention over a tree without copies of keys and values.

With a mask and more than one query token, transformers' sdpa repeats keys and values for every query head. With
four query heads for each key-value head, every layer of every forward then reads and writes four times the
cache. This attention reads keys and values in place (`nn.grouped_attention`). It is registered with
transformers under NAME; within `grouped_attention_enabled`, models with sdpa attention use it.

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

__all__ = ["NAME", "attend", "grouped_attention_enabled"]

NAME = "eyas_packed"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")  # keyword arguments of other kinds of attention


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as an attention function of transformers does; call sdpa unless the forward has a mask and
    grouped heads.

    Args:
        query: [B, K x G, N, h].
        key, value: [B, K, W, h].
        attention_mask: [B, 1, N, W], added to the attention logits.

    Returns:
        [B, N, K x G, h]; None, as no attention weights are returned.
    """
    unsupported = dropout or any(more.get(name) is not None for name in UNSUPPORTED)
    if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[1] == key.shape[1] or unsupported:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    attended = grouped_attention(query, key, value, attention_mask[..., : key.shape[2]], scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def grouped_attention_enabled(layers: nn.ModuleList) -> Iterator[None]:
    """Within this context, layers with sdpa attention use `attend`."""
    all_configs: list[Any] = [getattr(module, "config", None) for module in layers.modules()]
    configs = {id(config): config for config in all_configs if getattr(config, "_attn_implementation", None) == "sdpa"}
    for config in configs.values():
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = "sdpa"
