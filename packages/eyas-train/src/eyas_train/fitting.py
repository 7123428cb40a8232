"""The first weights of a draft net, fitted to some of the training data by least squares before the first update.

A net drafts the token after the next one: at slot t it reads the target's features of token t and the embedding of
token t+1, and predicts token t+2. Weights that pass the features on predict token t+1, which the net has read already.
The fit gives weights that predict token t+2 from the start:

    g   = A [features of token t]                        close to the target's final feature of token t
    out = r(g) + S [norm(embedding of token t+1) ; norm(g)]
                                                         close to the target's own state at token t+1

An MTP module and EAGLE-1's net compute S by a matrix of their own. EAGLE-3's net has none, so S is computed by
attention of each slot to itself. Queries and keys are one random projection, so a slot's score with itself is
the highest. Values and output matrix are the factors of S with the most explained variance. `out` is
the target's state after its last layer, or, where the net has n further layers, the input of the target's layer
L-n. These further layers begin as copies of the target's last n.

`start` lists the fits of each method. Letters: M samples, X inputs, Y outputs, D hidden, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.target import Target
from eyas.nn import Attention, DecoderLayer, Documents

__all__ = [
    "attend_to_itself",
    "before_others",
    "copy_layer",
    "final_scale",
    "least_squares",
    "norm_scale",
    "own_attention",
    "sample_tokens",
    "told",
]

RIDGE = 0.01  # of the inputs' mean variance: the weights of inputs that hardly vary stay small
# deviation of queries and keys: a slot's score with itself is its square times the root of the head size
SHARPNESS = 2.0
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
MLP_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def before_others(documents: Documents, device: torch.device) -> Tensor:
    """Return the indices [M] of packed tokens that have a next token in their document."""
    order_N = torch.arange(documents.tokens, device=device)
    return (order_N + 1 < documents.end_N(device)).nonzero()[:, 0]


def sample_tokens(inputs: int) -> int:
    """Return the tokens that a fit with this number of inputs reads: four samples for each, 20,000 or more."""
    return max(20_000, 4 * inputs)


def least_squares(inputs_MX: Tensor, goals_MY: Tensor) -> Tensor:
    """Return the matrix [Y, X] that maps the inputs to the goals with the least squared error (ridge regression)."""
    x, y = inputs_MX.double(), goals_MY.double()
    squares_XX = x.T @ x
    squares_XX.diagonal().add_(RIDGE * squares_XX.diagonal().mean())
    solution: Tensor = torch.linalg.solve(squares_XX, x.T @ y).T
    return solution.to(goals_MY.dtype)


def told(predicted_MY: Tensor, goals_MY: Tensor) -> str:
    """Return, in words, the share of the goals' variance that a fit explains."""
    error, spread = (predicted_MY - goals_MY).square().sum(), (goals_MY - goals_MY.mean(0)).square().sum()
    return f"the first weights explain {float(1 - error / spread):.0%} of the variance of the target's next state"


@torch.no_grad()
def attend_to_itself(attention: Attention, map_YX: Tensor, inputs_MX: Tensor) -> None:
    """Let attention compute `map` of each slot's own input, as far as its rank goes (reduced-rank regression)."""
    shape = attention.shape
    K, h, groups = shape.num_kv_heads, shape.head_dim, shape.num_heads // shape.num_kv_heads
    outputs_MY = inputs_MX.double() @ map_YX.double().T
    variance_Y, basis_YY = torch.linalg.eigh(outputs_MY.T @ outputs_MY / len(outputs_MY))
    rank = min(K * h, len(variance_Y))
    basis_Yr, deviation_r = basis_YY[:, -rank:], variance_Y[-rank:].clamp(min=1e-12).sqrt()
    values_rX = (basis_Yr / deviation_r).T @ map_YX.double()
    output_Yr = basis_Yr * deviation_r / groups
    attention.v.weight.zero_()
    attention.v.weight[:rank] = values_rX.to(attention.v.weight)
    full_YKh = output_Yr.new_zeros(len(output_Yr), K * h)
    full_YKh[:, :rank] = output_Yr
    by_head = full_YKh.view(-1, K, 1, h).expand(-1, K, groups, h)  # the query heads of a group read the same values
    attention.o.weight.copy_(by_head.reshape(len(full_YKh), -1))
    # of a generator of its own: several processes must make the same ones
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(attention.k.weight.shape, generator=generator, dtype=torch.float32, device="cpu")
    keys = keys.to(attention.k.weight) * SHARPNESS * map_YX.shape[1] ** -0.5
    attention.k.weight.copy_(keys)
    attention.q.weight.copy_(keys.view(K, 1, h, -1).expand(K, groups, h, -1).reshape_as(attention.q.weight))
    for bias in (attention.q.bias, attention.k.bias, attention.v.bias):
        if bias is not None:
            bias.zero_()
    if shape.qk_norm:
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(SHARPNESS)


def own_attention(attention: Attention, inputs_MX: Tensor) -> Tensor:
    """Return attention's output [M, Y] where each slot attends to itself alone."""
    values_MKh = attention.v(inputs_MX).unflatten(-1, (attention.shape.num_kv_heads, attention.shape.head_dim))
    groups = attention.shape.num_heads // attention.shape.num_kv_heads
    output: Tensor = attention.o(values_MKh.repeat_interleave(groups, 1).flatten(1))
    return output


@torch.no_grad()
def copy_layer(layer: DecoderLayer, input_norm: nn.Module, theirs: nn.Module) -> bool:
    """Copy one of the target's layers into a layer of the net; return whether it is one that can be copied. Keys and
    values are repeated where the net has more heads of them."""
    pairs = _pairs(layer, theirs)
    if pairs is None:
        return False
    for ours, matrix in pairs:
        weight = matrix.weight
        if ours in (layer.attention.k, layer.attention.v) and ours.weight.shape != weight.shape:
            h = layer.attention.shape.head_dim
            heads, times = weight.view(-1, h, weight.shape[1]), ours.weight.shape[0] // weight.shape[0]
            weight = heads.repeat_interleave(times, 0).flatten(0, 1)
        ours.weight.copy_(weight)
    ones = torch.ones_like(layer.mlp_norm.weight)
    found: Any = theirs
    for norm, own in ((input_norm, found.input_layernorm), (layer.mlp_norm, found.post_attention_layernorm)):
        scale: Any = norm.weight
        scale.copy_(norm_scale(own, ones))
    return True


def _pairs(layer: DecoderLayer, theirs: nn.Module) -> Sequence[tuple[nn.Linear, nn.Linear]] | None:
    """Return the matrices of a layer, each with the target's; None where the target's layer is another one than LLaMA's,
    or has other sizes."""
    attention, mlp = getattr(theirs, "self_attn", None), getattr(theirs, "mlp", None)
    others = [name for name, _ in theirs.named_children()]
    if sorted(others) != ["input_layernorm", "mlp", "post_attention_layernorm", "self_attn"]:
        return None
    if layer.attention.shape.qk_norm != hasattr(attention, "q_norm") or hasattr(attention, "q_norm"):
        return None
    pairs = list[tuple[nn.Linear, nn.Linear]]()
    for own, parts, module in ((layer.attention, PARTS, attention), (layer.mlp, MLP_PARTS, mlp)):
        for name, part in parts.items():
            ours, matrix = getattr(own, name), getattr(module, part, None)
            if type(matrix) is not nn.Linear or matrix.bias is not None or ours.bias is not None:
                return None
            repeats = name in ("k", "v") and not ours.weight.shape[0] % matrix.weight.shape[0]
            same = ours.weight.shape == matrix.weight.shape
            if not same and not (repeats and ours.weight.shape[1] == matrix.weight.shape[1]):
                return None
            pairs.append((ours, matrix))
    return pairs


def norm_scale(norm: nn.Module, ones_D: Tensor) -> Tensor:
    """Return the factors [D] of a norm, be they its weight or 1 + its weight: measured on an input that a
    norm without weights leaves as it is."""
    signs_D = ones_D - 2 * (torch.arange(len(ones_D), device=ones_D.device) % 2)  # mean 0, mean square 1
    scale_1D: Tensor = norm(signs_D[None])
    return scale_1D[0].to(ones_D.device) * signs_D


def final_scale(target: Target) -> Tensor:
    """Return the scale [D] of the target's final norm; ones if that fails."""
    norms = [module for module in target.family.base.children() if "norm" in type(module).__name__.lower()]
    ones = torch.ones(target.hidden_size, device=target.device, dtype=target.dtype)
    scale = norm_scale(norms[-1], ones).to(target.device) if norms and target.hidden_size % 2 == 0 else ones
    return scale if bool(scale.isfinite().all()) else ones
