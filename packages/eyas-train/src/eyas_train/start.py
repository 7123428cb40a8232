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

Letters: M samples, X inputs, Y outputs, D hidden, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.core.target import Target
from eyas.drafters import Batch, DraftMethod, eagle1, eagle3, mtp
from eyas.nn import Attention, DecoderLayer, Documents
from eyas_train.data import Batches, Example
from eyas_train.features import encode

RIDGE = 0.01  # of the inputs' mean variance: the weights of inputs that hardly vary stay small
# deviation of queries and keys: a slot's score with itself is its square times the root of the head size
SHARPNESS = 2.0
PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
MLP_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Fit(NamedTuple):
    """How a new net is fitted before its training."""

    layers: tuple[int, ...]  # whose features the fit reads, ascending
    fit: Callable[[Batch], str]  # with these features; returns the result in words


def fit_of(drafter: DraftMethod) -> Fit | None:
    """Return the fit of a new head; None for a method without one, and for a module that is already trained."""
    if isinstance(drafter, eagle1.Method) and drafter.net.inputs == "shifted":
        return Fit(drafter.feature_layers, partial(_fit_eagle1, drafter))
    if isinstance(drafter, eagle3.Method):  # the fused ones, the input of the first copied layer, the final norm
        L = drafter.target.num_layers
        return Fit((*drafter.feature_layers, L - len(drafter.net.later_layers), L), partial(_fit_eagle3, drafter))
    if isinstance(drafter, mtp.Method) and drafter.is_new:
        return Fit(drafter.feature_layers, partial(_fit_mtp, drafter))
    return None


def begins_fitted(drafter: DraftMethod) -> bool:
    """Return whether new heads of this method are fitted, also for a head that is trained already."""
    return isinstance(drafter, eagle1.Method | eagle3.Method | mtp.Method)


def fit_start(
    drafter: DraftMethod,
    examples: Sequence[Example],
    batch_tokens: int,
    seed: int,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Fit a new head's first weights; return the result in words, "" for a method that has no such fit.

    It reads the first examples of the first epoch, so that another process finds the same ones.

    Args:
        on_tokens: called with the tokens that are read, and their number in all.
    """
    if (found := fit_of(drafter)) is None:
        return ""
    wanted, tokens = max(20_000, 4 * len(found.layers) * drafter.target.hidden_size), 0  # four samples for each input
    batches, chosen = Batches(examples, batch_tokens, seed), list[Sequence[int]]()
    for batch in batches.plan(0):
        chosen.append(batch)
        tokens += batches.tokens(batch)
        if tokens >= wanted:
            break
    parts = list(map(batches.load, chosen))
    features, done = [], 0
    for ids_N, _, documents in parts:
        features.append(encode(drafter.target, ids_N, documents, found.layers))
        done += len(ids_N)
        on_tokens(done, tokens)
    features_NF = torch.cat(features)
    ids_N = torch.cat([ids_N for ids_N, _, _ in parts]).to(features_NF.device)
    counted_N = torch.cat([counted_N for _, counted_N, _ in parts]).to(features_NF.device)
    documents = Documents(tuple(length for _, _, documents in parts for length in documents.lengths))
    net: nn.Module = drafter.net  # type: ignore[assignment]
    dtype = next(net.parameters()).dtype
    net.float()  # of a target in half precision
    result = found.fit(Batch(ids_N, features_NF, counted_N, documents))
    net.to(dtype)
    return result


@torch.no_grad()
def _fit_eagle1(method: eagle1.Method, batch: Batch) -> str:
    """fc gives the next feature, to which the layer adds nothing yet."""
    now_M = before_others(batch.documents, batch.tokens_N.device)
    features_MD, goal_MD = batch.features_NF[now_M].float(), batch.features_NF[now_M + 1].float()
    inputs_MX = torch.cat([method.embed(batch.tokens_N[now_M + 1]).float(), features_MD], dim=1)
    map_DX = least_squares(inputs_MX, goal_MD)
    projection: Any = method.net.fc
    projection.weight.copy_(map_DX)
    for added in (method.net.layer.attention.o, method.net.layer.mlp.down):
        added.weight.zero_()
    return told(inputs_MX @ map_DX.T, goal_MD)


@torch.no_grad()
def _fit_eagle3(method: eagle3.Method, batch: Batch) -> str:
    """A net that has no head of its own, or another width than the target, keeps its weights."""
    net, D, L = method.net, method.target.hidden_size, method.target.num_layers
    if net.head is None or method.shape.hidden_size != D:
        return ""
    features_NF, state_ND, final_ND = torch.split(
        batch.features_NF.float(), [len(method.feature_layers) * D, D, D], dim=1
    )
    last_layers = method.target.family.layers[L - len(net.later_layers) :]
    copied = [
        copy_layer(layer, layer.input_norm, theirs) for layer, theirs in zip(net.later_layers, last_layers, strict=True)
    ]
    is_copied = bool(copied) and all(copied)
    for layer in () if is_copied else net.later_layers:  # as new: they add nothing
        layer.attention.o.weight.zero_()
        layer.mlp.down.weight.zero_()
    scale_D = final_scale(method.target).float()
    before_norm_ND = final_ND / scale_D
    goal_ND = state_ND if is_copied else before_norm_ND
    read_ND = final_ND if net.architecture.norm_output else before_norm_ND
    net.fc.weight.copy_(least_squares(net.fc_input(features_NF), read_ND))
    now_M = before_others(batch.documents, batch.tokens_N.device)
    following_MD = method.embed(batch.tokens_N[now_M + 1]).to(features_NF.dtype)
    inputs_MX, residual_MD = net.join(net.fuse(features_NF[now_M]), following_MD)
    change_MD = goal_ND[now_M + 1] - residual_MD
    attend_to_itself(net.layer.attention, least_squares(inputs_MX, change_MD), inputs_MX)
    out_MD = residual_MD + own_attention(net.layer.attention, inputs_MX)
    net.layer.mlp.down.weight.zero_()
    if goal_ND is before_norm_ND:  # predictions have less variance than their goal: so the head is less sure
        net.norm.weight.copy_(scale_D * out_MD.square().mean().sqrt())
    return told(out_MD, goal_ND[now_M + 1])


@torch.no_grad()
def _fit_mtp(method: mtp.Method, batch: Batch) -> str:
    """eh_proj gives the target's next feature, to which the layer adds nothing yet. A copy of the target's last
    layer after a fit of its input predicted less (docs/lab/log.md)."""
    now_M = before_others(batch.documents, batch.tokens_N.device)
    goal_MD = batch.features_NF[now_M + 1].float()
    inputs_MX = method.net.joined(batch.features_NF[now_M].float(), method.embed(batch.tokens_N[now_M + 1]).float())
    map_DX = least_squares(inputs_MX, goal_MD)
    predicted_MD = inputs_MX @ map_DX.T
    module: Any = method.net.module
    module.eh_proj.weight.copy_(map_DX)
    last_norm: Any = module.post_norm if method.net.shared_norm is None else method.net.shared_norm
    if last_norm is not None:  # predictions have less variance than their goal: so the head is less sure
        last_norm.weight += predicted_MD.square().mean().sqrt() - norm_scale(last_norm, torch.ones_like(goal_MD[0]))
    return told(predicted_MD, goal_MD)


# --- least squares, and attention of a slot to itself


def before_others(documents: Documents, device: torch.device) -> Tensor:
    """Return the indices [M] of packed tokens that have a next token in their document."""
    order_N = torch.arange(documents.tokens, device=device)
    return (order_N + 1 < documents.end_N(device)).nonzero()[:, 0]


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
