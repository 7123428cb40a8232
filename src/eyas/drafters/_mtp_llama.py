"""The net of `mtp` by eyas' own layer, which kernels compute, for modules whose layer is LLaMA's:
it gives the numbers of `_mtp_net.Net`.

This module knows no session. Letters: R rows of a forward, N pairs, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.families import SLIDING
from eyas.drafters._mtp_net import Net
from eyas.nn import DecoderLayer, DraftKVCache, LayerShape, RMSNorm, join_normed

__all__ = ["LlamaNet", "llama_net"]

# transformers' layer classes that compute the same
CLASSES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
NAMES = {  # ours -> those of transformers' module
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "fc": "eh_proj",
    "input_norm": "mtp_block.input_layernorm",
    **{f"layer.attention.{x}": f"mtp_block.self_attn.{x}_proj" for x in "qkvo"},
    "layer.mlp_norm": "mtp_block.post_attention_layernorm",
    **{f"layer.mlp.{x}": f"mtp_block.mlp.{x}_proj" for x in ("gate", "up", "down")},
    "norm": "post_norm",
}


class LlamaNet(nn.Module):
    """An MTP module with a LLaMA layer, as an `_eagle.EagleNet`."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        D = shape.hidden_size
        self.embed_norm, self.hidden_norm, self.input_norm, self.norm = (RMSNorm(D, shape.rms_eps) for _ in range(4))
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layer = DecoderLayer(shape)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's features after the final norm [..., D], unchanged."""
        return features

    def join(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the layer [..., D]."""
        joined: Tensor = self.fc(join_normed(self.embed_norm, embeddings, self.hidden_norm, hidden))
        return joined

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> None:
        self.layer.attention.store(self.input_norm(self.join(hidden_RND, embeddings_RND)), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> Tensor:
        """See `EagleNet.__call__`. Positions count from 0 at the first pair, and from 1 in
        transformers: RoPE reads differences only."""
        x_RND = self.join(hidden_RND, embeddings_RND)
        output: Tensor = self.norm(self.layer.decode(self.input_norm(x_RND), x_RND, position_RN, cache))
        return output


def llama_net(net: Net) -> LlamaNet | None:
    """Return the same module by eyas' own layer, with copies of its weights; None for one whose layer
    computes something else."""
    module: Any = net.module
    config = net.config
    rope = getattr(config, "rope_parameters", None) or {}
    is_llama = (
        type(module.mtp_block).__name__ in CLASSES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in ("default", "llama3")
    )
    changed = (
        getattr(config, "mtp_hidden_states_first", False) or net.shared_norm is not None or module.post_norm is None
    )
    if not is_llama or changed or net.kind == SLIDING:
        return None
    attention = module.mtp_block.self_attn
    if attention.o_proj.bias is not None or module.mtp_block.mlp.up_proj.bias is not None:
        return None
    weight = module.eh_proj.weight
    shape = LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rms_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        qkv_bias=attention.q_proj.bias is not None,
    )
    with torch.device(weight.device):
        own = LlamaNet(shape).to(weight.dtype)
    theirs = module.state_dict()
    own.load_state_dict({name: theirs[_published(name)] for name in own.state_dict()})
    return own.eval()


def _published(name: str) -> str:
    part, _, kind = name.rpartition(".")
    return f"{NAMES[part]}.{kind}"
