"""Runs layers of the LLaMA shape on a GPU by few kernels: ten a layer, where the model's own code
launches forty.

    residual + norm        1    attention to the tree   2 (one for prompts)    residual + norm   1    SwiGLU   1
    queries, keys, values  1    output                  1                      gate and up       1    down     1
    rotation and cache     1

A layer has this shape if its modules are norm, attention with rotary positions, norm, and a gated MLP or any
other module in its place (experts). Norms of heads and biases are optional. When the layers are made, logits
and features are compared with the model's own forward; if they differ, the layers are refused. So an operation
between these modules that no module shows is noticed.

**Weights.** In a model that eyas loaded, the matrices of queries, keys and values become one, and so do gate
and up. The parameters become views of the common matrix, layer by layer, so nothing is stored twice and every
parameter keeps its values. A model that the user loaded is left
alone: its matrices are multiplied one by one, with three more kernels a layer.

Hooks of the model's modules are not called.
Letters: R rows, Q new nodes, T nodes in slots, D hidden, X outputs of several matrices, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core import families
from eyas.core.target import ForwardInput, ModelRunner, Target
from eyas.core.tree import TargetOutput
from eyas.runners.tools import UnsuitedError, compare, layer_windows, norm_eps
from eyas.targets.loading import hooks_of
from eyas_gpu._matrices import JoinedLinears
from eyas_gpu._tables import RotaryTables
from eyas_gpu.operators import add_norm, attention, rotate_and_store, swiglu

__all__ = ["FusedRunner", "GpuModelLayers", "check"]

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass(frozen=True)
class _Layer:
    number: int  # its index in the cache
    window: int  # positions that it attends to; 0: all
    scale: float  # attention scale
    norm_D: Tensor
    mlp_norm_D: Tensor
    eps: float
    qkv: JoinedLinears
    q_norm_h: Tensor | None
    k_norm_h: Tensor | None
    output: nn.Module
    gate_up: JoinedLinears | None  # None: `mlp` is called as a whole
    mlp: Any
    down: nn.Module | None  # of a gated MLP


class GpuModelLayers:
    """The layers of one target, run by eyas' own loop.

    Args:
        join_weights: whether matrices with the same input are joined: for models that nobody else
            uses.

    Raises:
        UnsuitedError: the layers have another shape. `check` finds out whether they compute
            something else.
    """

    def __init__(self, target: Target, join_weights: bool) -> None:
        _refuse(target)
        base: Any = target.family.base
        windows = layer_windows(target)
        self.target = target
        self.norm_D, self.eps = base.norm.weight.detach(), norm_eps(base.norm)
        self.layers = [
            _layer(layer, place, windows[place], join_weights) for place, layer in enumerate(target.family.layers)
        ]
        self._rotary: nn.Module = base.rotary_emb
        self.tables = RotaryTables(self._cosines, target.context)

    def _cosines(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [P, h / 2] by the model's own rotary module."""
        like = torch.empty(1, 1, 1, dtype=self.target.dtype, device=self.target.device)
        cosine, sine = self._rotary(like, torch.arange(positions, device=self.target.device)[None])
        half = cosine.shape[-1] // 2
        return cosine[0, :, :half], sine[0, :, :half]

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        target, features = self.target, dict[int, Tensor]()
        tables = self.tables(inputs.width)
        update, residual = target.embed(inputs.tokens_RQ), None
        for place, layer in enumerate(self.layers):
            hidden, normed = add_norm(update, residual, layer.norm_D, layer.eps)
            features[place] = hidden
            attended = self._attend(layer, normed, inputs, tables)
            hidden, normed = add_norm(layer.output(attended), hidden, layer.mlp_norm_D, layer.eps)
            update, residual = _mlp(layer, normed), hidden
        features[target.num_layers] = last = add_norm(update, residual, self.norm_D, self.eps)[1]
        logits = families.head(target.family, last[:, -1:] if inputs.last_only else last)
        read = [features[k] for k in inputs.feature_layers] or [last[..., :0]]
        return TargetOutput(logits, torch.cat(read, dim=-1) if len(read) > 1 else read[0])

    def _attend(self, layer: _Layer, normed: Tensor, inputs: ForwardInput, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the heads' outputs [R, Q, heads x h], before the output matrix."""
        T, Q = inputs.visible_RQT.shape[2], inputs.tokens_RQ.shape[1]
        key, value = inputs.cache.keys_values(layer.number)
        q_RQHh = rotate_and_store(
            *layer.qkv(normed), *tables, inputs.position_RQ, inputs.length_R, T - Q, key, value,
            layer.q_norm_h, layer.k_norm_h, layer.eps, None,
        )  # fmt: skip
        seen = slice(0, inputs.width)
        visible_RQT = inputs.visible_RQT
        if 0 < layer.window < T:  # else no two nodes are farther apart than the window
            visible_RQT = visible_RQT & (inputs.depth_RT[:, T - Q :, None] - inputs.depth_RT[:, None] < layer.window)
        return attention(
            q_RQHh, key[:, :, seen], value[:, :, seen], inputs.length_R, visible_RQT, inputs.position_RQ, layer.scale, layer.window
        ).flatten(2)  # fmt: skip


def _mlp(layer: _Layer, x: Tensor) -> Tensor:
    if layer.gate_up is None or layer.down is None:
        return layer.mlp(x)
    return layer.down(swiglu(*layer.gate_up(x)))


def _layer(layer: Any, place: int, window: int, join_weights: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    gated = all(type(getattr(mlp, name, None)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj"))
    return _Layer(
        number=getattr(attention, "layer_idx", place),
        window=window,
        scale=float(attention.scaling),
        norm_D=layer.input_layernorm.weight.detach(),
        mlp_norm_D=layer.post_attention_layernorm.weight.detach(),
        eps=norm_eps(layer.input_layernorm),
        qkv=JoinedLinears((attention.q_proj, attention.k_proj, attention.v_proj), join_weights),
        q_norm_h=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        k_norm_h=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        output=attention.o_proj,
        gate_up=JoinedLinears((mlp.gate_proj, mlp.up_proj), join_weights) if gated else None,
        mlp=mlp,
        down=mlp.down_proj if gated else None,
    )


class FusedRunner(ModelRunner):
    """Runs forwards by fused layers, without graphs."""

    name = "fused"
    skips_rows = False
    skips_padding = False

    def __init__(self, fused: GpuModelLayers) -> None:
        super().__init__()
        self.fused = fused

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        return self.fused(inputs)


def check(fused: GpuModelLayers) -> None:
    """Compare with the model's own forward; raise UnsuitedError if logits or features differ."""
    compare(fused.target, FusedRunner(fused))


def _refuse(target: Target) -> None:
    """Raise UnsuitedError if a layer has another shape."""
    config, base = target.model.config, target.family.base
    rope = getattr(config, "rope_parameters", None) or {}
    if not all(hasattr(base, name) for name in ("norm", "rotary_emb")) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsuitedError("no rotary positions of whole heads, or no final norm, where LLaMA has them")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish") or getattr(
        config, "attn_logit_softcapping", None
    ):
        raise UnsuitedError("an activation other than silu, or a softcap of scores")
    for k, layer in enumerate(target.family.layers):
        if reason := _fault(layer):
            raise UnsuitedError(f"layer {k}: {reason}")


def _fault(layer: Any) -> str:
    """Return the reason for which a layer does not have this shape; "" if it has."""
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        return "its modules are not a norm, attention, a norm and an MLP"
    attention = layer.self_attn
    parts = {name for name, _ in attention.named_children()} - {"rotary_emb"}
    if parts - {"q_norm", "k_norm"} != ATTENTION_PARTS or any(True for _ in attention.parameters(recurse=False)):
        return "attention is not made of q_proj, k_proj, v_proj and o_proj"
    if any(type(getattr(attention, name)) is not nn.Linear for name in ATTENTION_PARTS):
        return "attention has matrices that are not plain linear layers"
    if len({getattr(attention, name).bias is None for name in ("q_proj", "k_proj", "v_proj")}) != 1:
        return "some of queries, keys and values have a bias"
    if any(getattr(attention, name).weight.shape != (attention.head_dim,) for name in parts & {"q_norm", "k_norm"}):
        return "its norms of queries and keys are not those of heads"
    if any(hooks_of(module) or "forward" in vars(module) for module in layer.modules()):
        return "somebody else has hooks in it, or has replaced its forward"
    return ""
