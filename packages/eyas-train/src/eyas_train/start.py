"""The first weights of a new head, fitted to a sample of the training data (`fitting` says how, and the letters)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from eyas.drafters import Batch, DraftMethod, eagle1, eagle3, mtp
from eyas.nn import Documents
from eyas_train.data import Batches, Example
from eyas_train.features import encode
from eyas_train.fitting import (
    attend_to_itself,
    before_others,
    copy_layer,
    final_scale,
    least_squares,
    norm_scale,
    own_attention,
    sample_tokens,
    told,
)

__all__ = ["Fit", "fit_of", "fit_start"]


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
    wanted, tokens = sample_tokens(len(found.layers) * drafter.target.hidden_size), 0
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
