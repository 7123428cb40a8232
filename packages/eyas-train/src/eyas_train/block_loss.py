"""The loss of block drafters (DFlash, section 3; DSpark, section 3.3): blocks at random anchors of
the training text.

An anchor is a token used as a block's root; it and the next token must both be in the loss mask.
The block sees the target's features of the tokens before the anchor and, but for the anchor, no
token. Its prediction of depth d is the token d places after the anchor; it counts while all
predictions before it in the block do. It weighs exp(-(d - 1) / gamma), or, with D-PACE (arXiv 2605.18810), as
much as it adds to the accepted length. With s = (1 - smoothing) q(token) + smoothing that is the sum over the
predictions from it on of the product of s up to each of them.

    tokens or distribution   cross-entropy with the token of the data, or with the target's distribution
    selection                the same among the tokens that the selector scores, by the selector (DFlash 2)
    overlap                  sum of |q - p|: twice the chance that a draft token of q is rejected
    confidence               binary cross-entropy of the confidence head against 1 - that chance (DSpark)

Letters: N packed tokens, A anchors, n slots, S levels, M slots of all blocks, K predictions that count (of keys and values:
heads), C of them in a chunk, D hidden, h head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eyas.blocks import BlockMethod, BlockNet, BlockTraining
from eyas.drafters import Batch, Loss
from eyas.nn import Documents
from eyas_train.packed import QueryRows, packed_attention

CHUNK_ELEMENTS = 1 << 22  # logits in memory at a time: 16 MiB in float32, a few times over


def block_loss(method: BlockMethod, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Return the loss of blocks at random anchors. The count is the number of blocks; its figures are of the
    first level.

    Args:
        batch: with the features of the fused layers, then the target's final ones.
        generator: chooses the anchors.
    """
    net, block_format, training = method.net, method.block_format, method.training
    tokens_N, device = batch.tokens_N, batch.tokens_N.device
    anchor_A = choose_anchors(batch, training.anchors, generator)
    if not len(anchor_A):
        return Loss(net.norm.weight.sum() * 0, torch.zeros((), dtype=torch.long, device=net.norm.weight.device), {})
    final = method.target.hidden_size
    hidden_AnD = forward_packed(
        net,
        batch.features_NF[:, :-final].to(method.dtype),
        method.embed(_blocks(tokens_N, anchor_A, block_format.block, block_format.mask_token)),
        anchor_A,
        batch.documents,
    )
    goal_AS = anchor_A[:, None] + 1 + torch.arange(block_format.levels, device=device)
    counts_AS = batch.counted_N[goal_AS.clamp(max=len(tokens_N) - 1)] & (
        goal_AS < batch.documents.end_N(device)[anchor_A][:, None]
    )
    counts_AS = counts_AS.int().cumprod(1)
    block_K, level_K = counts_AS.nonzero(as_tuple=True)
    goal_K = goal_AS[block_K, level_K]
    hidden_KD = hidden_AnD[block_K, level_K + block_format.first_slot]

    def guesses(part: slice, hidden_CD: Tensor, before_C: Tensor) -> Tensor:
        logits_CV = method.head(hidden_CD)
        if net.markov is not None:
            logits_CV = logits_CV + net.markov(before_C)
        with torch.no_grad():
            true_CV = method.target.head(batch.features_NF[goal_K[part] - 1, -final:].to(method.target.dtype)).float()
        confidence_logit_C = net.accepted(hidden_CD, before_C).float() if net.confidence is not None else None
        token_C = tokens_N[goal_K[part]]
        losses_C4 = _losses(logits_CV.float(), true_CV, token_C, confidence_logit_C, training)
        if net.selector is None:
            return losses_C4
        selected_CV = net.selector(logits_CV[:, None], hidden_CD[:, None], before_C[:, None])[:, 0].float()
        return _with_selection(losses_C4, selected_CV, true_CV, token_C, training)

    losses_K4 = _in_chunks(guesses, hidden_KD, tokens_N[goal_K - 1], method.target.vocab_size)
    if training.smoothing is None:
        weight_K = torch.exp(-level_K / training.gamma)
    else:
        chance_AS = torch.zeros(counts_AS.shape, dtype=torch.float32, device=device)
        chance_AS[block_K, level_K] = losses_K4[:, 3].detach()
        weight_K = _pace_weights(chance_AS, counts_AS, training.smoothing)[block_K, level_K]
    total = (losses_K4[:, 0] * weight_K).sum()
    figures_K2, first_K, last_K = losses_K4[:, 1:3].detach(), level_K == 0, level_K == block_format.levels - 1
    sums = {"accuracy": figures_K2[first_K, 0].sum(), "overlap": figures_K2[first_K, 1].sum()}
    if block_format.levels > 1:
        sums[f"accuracy at level {block_format.levels}"] = figures_K2[last_K, 0].sum()
    return Loss(total, torch.tensor(len(anchor_A), device=device), sums)


def choose_anchors(batch: Batch, max_anchors: int, generator: torch.Generator | None) -> Tensor:
    """Return, int64 and ascending, up to `max_anchors` random tokens of each document that count themselves, as the
    next ones do, and begin no document."""
    counted_N, documents = batch.counted_N.cpu(), batch.documents
    begin_N, end_N = documents.begin_N(), documents.end_N()
    place_N = torch.arange(len(counted_N))
    fits_N = counted_N & counted_N.roll(-1) & (place_N + 1 < end_N) & (place_N > begin_N)
    order_A = fits_N.nonzero()[:, 0]
    draw_A = torch.rand(len(counted_N), dtype=torch.float32, generator=generator)[order_A].double()
    order_A = order_A[(begin_N[order_A] + draw_A).argsort(stable=True)]  # by document, at random within each
    first_A = torch.searchsorted(begin_N[order_A].contiguous(), begin_N[order_A].contiguous())
    return order_A[torch.arange(len(order_A)) - first_A < max_anchors].sort().values.to(batch.tokens_N.device)


def forward_packed(
    net: BlockNet, features_NF: Tensor, hidden_AnD: Tensor, anchor_A: Tensor, documents: Documents
) -> Tensor:
    """Return, for the training of nets without windows, the normed hidden [A, n, D] of blocks that begin at these
    tokens of a packed sequence.

    Args:
        hidden_AnD: embeddings of the blocks.
        anchor_A: int64, ascending; none is the first token of its document. A block sees the
            tokens before its anchor.
    """
    (A, n, _), device = hidden_AnD.shape, features_NF.device
    position_N, context_ND = documents.position_N(device), net.context(features_NF)
    position_M = (position_N[anchor_A][:, None] + torch.arange(n, device=device)).flatten()
    queries = QueryRows((anchor_A - 1).repeat_interleave(n), documents.lengths)

    def attend(attention: Any, x_AnD: Tensor) -> Tensor:
        x_MD = x_AnD.flatten(0, 1)
        keys_MKh, values_MKh = attention.rotated_key_value(x_MD, position_M)
        block = _of_each_slot(keys_MKh, A, n), _of_each_slot(values_MKh, A, n)
        keys_NKh, values_NKh = attention.rotated_key_value(context_ND, position_N)
        out_MHh = packed_attention(attention.query(x_MD, position_M), keys_NKh, values_NKh, queries, block)
        return attention.o(out_MHh.flatten(1)).unflatten(0, (A, n))  # type: ignore[no-any-return]

    for layer in net.typed_layers:
        hidden_AnD = layer(hidden_AnD, partial(attend, layer.attention))
    return net.norm(hidden_AnD)  # type: ignore[no-any-return]


def _of_each_slot(x_MKh: Tensor, A: int, n: int) -> Tensor:
    """Return [n, M, K, h]: for each slot, the tensors of all n slots of its block."""
    x_nAKh = x_MKh.view(A, n, *x_MKh.shape[1:]).transpose(0, 1)
    return x_nAKh[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2)


def _pace_weights(chance_AS: Tensor, counts_AS: Tensor, smoothing: float) -> Tensor:
    """Return D-PACE's weights [A, S] (arXiv 2605.18810): how much each prediction adds to the length that is accepted.

    Args:
        chance_AS: q of the data's tokens.
        counts_AS: 1 for predictions that count, which begin each block, then 0; those weigh 0.
    """
    reached_AS = ((1 - smoothing) * chance_AS + smoothing).cumprod(1) * counts_AS
    return reached_AS.flip(1).cumsum(1).flip(1) * counts_AS


def _blocks(tokens_N: Tensor, anchor_A: Tensor, block: int, mask_token: int) -> Tensor:
    """Return int64 [A, n]: the anchor, then masks."""
    roots_A1 = tokens_N[anchor_A][:, None]
    return torch.cat([roots_A1, torch.full_like(roots_A1, mask_token).expand(-1, block - 1)], dim=1)


def _losses(
    logits_CV: Tensor, true_CV: Tensor, token_C: Tensor, confidence_logit_C: Tensor | None, training: BlockTraining
) -> Tensor:
    """Return [C, 4]: the loss of each prediction, whether its best token is the target's, the overlap of q and p, and
    q of the token."""
    log_q_CV, p_CV = logits_CV.log_softmax(-1), true_CV.softmax(-1)
    distance_C = (log_q_CV.exp() - p_CV).abs().sum(-1)
    overlap_C = (1 - distance_C.detach() / 2).clamp(0, 1)
    log_q_C = log_q_CV.gather(1, token_C[:, None])[:, 0]
    entropy_C = -log_q_C if training.objective == "tokens" else -(p_CV * log_q_CV).sum(-1)
    loss_C = training.cross_entropy * entropy_C + training.overlap * distance_C
    if confidence_logit_C is not None:
        loss_C = loss_C + training.confidence * F.binary_cross_entropy_with_logits(
            confidence_logit_C, overlap_C, reduction="none"
        )
    right_C = (logits_CV.argmax(-1) == true_CV.argmax(-1)).float()
    return torch.stack([loss_C, right_C, overlap_C, log_q_C.detach().exp()], dim=1)


def _with_selection(
    losses_C4: Tensor, selected_CV: Tensor, true_CV: Tensor, token_C: Tensor, training: BlockTraining
) -> Tensor:
    """Return the columns of `_losses` with the selector's loss added, and its figures instead. `selected_CV` is minus
    infinity for tokens that it does not score; where the data's token is one of them, there is nothing to learn."""
    scored_CV = selected_CV > -torch.inf
    log_q_CV, p_CV = selected_CV.log_softmax(-1), true_CV.softmax(-1)
    if training.objective == "tokens":
        goal_CV = F.one_hot(token_C, selected_CV.shape[-1]) * scored_CV
    else:
        goal_CV = true_CV.masked_fill(~scored_CV, -torch.inf).softmax(-1)
    loss_C = losses_C4[:, 0] - (goal_CV * log_q_CV.masked_fill(~scored_CV, 0.0)).sum(-1)
    right_C = (selected_CV.argmax(-1) == true_CV.argmax(-1)).float()
    overlap_C = torch.minimum(log_q_CV.detach().exp(), p_CV).sum(-1)
    return torch.stack([loss_C, right_C, overlap_C, losses_C4[:, 3]], dim=1)


def _in_chunks(
    guesses: Callable[[slice, Tensor, Tensor], Tensor], hidden_KD: Tensor, before_K: Tensor, vocab_size: int
) -> Tensor:
    """Return the `guesses` of all predictions [K, 4]. Logits exist for one chunk at a time; the backward computes them
    again."""
    rows, parts = max(1, CHUNK_ELEMENTS // vocab_size), []
    for first in range(0, len(hidden_KD), rows):
        part = slice(first, first + rows)
        inputs = part, hidden_KD[part], before_K[part]
        if hidden_KD.requires_grad:
            parts.append(checkpoint(guesses, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(guesses(*inputs))
    return torch.cat(parts)
