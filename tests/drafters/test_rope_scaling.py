"""RoPE that is scaled in a head: as transformers computes it, kernels and caches included."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import zoo
from eyas.blocks._net import BlockAttention
from eyas.checkpoints import Weights
from eyas.core.target import Target
from eyas.drafters._nets import load_tensors, saved_head
from eyas.nn import Attention, LayerShape, rope

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0},
    "yarn": {"factor": 32.0, "original_max_position_embeddings": 64.0},
    "yarn of gpt-oss": {
        "factor": 32.0, "original_max_position_embeddings": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "yarn with its own factor": {"factor": 4.0, "original_max_position_embeddings": 64.0, "attention_factor": 1.3},
}  # fmt: skip


def shape(name: str) -> LayerShape:
    scaling = {"rope_type": name.split()[0], **SCALINGS[name]}
    return LayerShape(48, 80, 4, 2, 12, rope_theta=1000.0, rope_scaling=scaling, qkv_bias=True)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("kind", [Attention, BlockAttention])
def test_scores_are_those_of_transformers(name: str, kind: type[Attention]) -> None:
    """Guards frequencies and YaRN's factor of a loaded layer by transformers' sines; saved, it is what was loaded."""
    torch.manual_seed(0)
    made = shape(name)
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, head_dim=12, max_position_embeddings=2048,
        rope_parameters={**(made.rope_scaling or {}), "rope_theta": made.rope_theta},
    )  # fmt: skip
    plain = kind(made)
    tensors = {key: torch.randn_like(value) for key, value in plain.state_dict().items()}
    plain.load_state_dict(tensors)
    x, position = torch.randn(1, 9, 48), torch.arange(9)[None] * 40
    zero = torch.zeros_like(position)
    q, k = plain.query(x, zero), rope(plain.key_value(x)[0], zero, plain.frequency(x.device))
    cos, sin = LlamaRotaryEmbedding(config)(x, position)
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    target = Target(zoo.tiny("llama"))
    net = torch.nn.ModuleDict({"attention": kind(made)})
    named = {f"attention.{key}": value for key, value in tensors.items()}
    loaded = load_tensors(net, Weights("", {}, named, ""), target)
    own: Any = loaded["attention"]
    own_q = own.query(x, position).transpose(1, 2)
    own_k = rope(own.key_value(x)[0], position, own.frequency(x.device)).transpose(1, 2)
    scores, theirs = (a @ b.repeat_interleave(2, 1).mT for a, b in ((own_q, own_k), (q, k)))
    torch.testing.assert_close(scores, theirs, atol=1e-3, rtol=1e-4)
    saved = saved_head("", {}, loaded, target).tensors
    for name, value in named.items():
        torch.testing.assert_close(saved[name], value)
