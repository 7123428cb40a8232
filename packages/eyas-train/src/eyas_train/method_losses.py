"""The training losses of eyas' own methods, and other parts that `eyas.drafters` and eyas-lab ask for by name.

Letters: N packed tokens, M of them that count, K predictions of all steps, U target positions (tokens that count), R
documents, T tokens of the longest, D hidden, F features, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.blocks import BlockMethod
from eyas.core import families
from eyas.drafters import Batch, DraftMethod, Loss, eagle1, eagle3, mtp, peagle, small_model
from eyas.errors import CheckpointError, OptionError
from eyas.nn import Documents
from eyas_train.block_loss import block_loss
from eyas_train.losses import (
    DraftLosses,
    FrozenHead,
    draft_losses,
    smooth_l1,
    soft_cross_entropy,
    soft_cross_entropy_of,
)
from eyas_train.new_heads import new_head
from eyas_train.own_outputs import Predictions, in_parallel, module_steps, training_time_test
from eyas_train.packed import QueryRows, attend_packed

__all__ = ["QueryRows", "attend_packed", "draft_losses", "hidden_by_step", "loss", "new_head", "packed", "ttt_losses"]


@singledispatch
def loss(method: DraftMethod, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Return the training loss of a batch; see `DraftMethod.loss`."""
    raise NotImplementedError(f"{type(method).__module__} cannot be trained")


@loss.register
def _(method: eagle1.Method, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Smooth L1 between features + 0.1 x cross-entropy between the distributions that the
    target's lm_head makes of them (section 4.2).

    Slot t reads feature t (with noise U(-0.1, 0.1)) and token t+1, or the inputs of
    `head.inputs`. Its output is compared with feature t+1, which predicts token t+2: the slot
    counts if token t+2 counts.
    """
    tokens_N, features_ND = batch.tokens_N, batch.features_NF.to(method.dtype)
    order_N = torch.arange(len(tokens_N), device=tokens_N.device)
    goal_N = (order_N + 2).clamp(max=len(tokens_N) - 1)
    rows_M = (batch.counted_N[goal_N] & (order_N + 2 < batch.documents.end_N(tokens_N.device))).nonzero()[:, 0]
    embeddings_ND = method.embed(tokens_N.roll(-1)).to(method.dtype)
    hidden_ND = method.net_inputs(tokens_N, features_ND + _training_noise(method, batch, generator))
    predicted_MD = packed(method.net, hidden_ND, embeddings_ND, rows_M, batch.documents)
    true_MD = batch.features_NF[rows_M + 1]
    feature_loss = smooth_l1(predicted_MD, true_MD)
    token_loss, right = soft_cross_entropy_of(method.head, predicted_MD, true_MD, method.target.vocab_size)
    sums = {
        "feature_loss": feature_loss.detach(),
        "token_loss": token_loss.detach(),
        "accuracy": right,  # teacher-forced: the draft's best token is the target's
    }
    return Loss(feature_loss + 0.1 * token_loss, torch.tensor(len(rows_M), device=tokens_N.device), sums)


def _training_noise(method: eagle1.Method, batch: Batch, generator: torch.Generator | None) -> Tensor:
    """Return the noise to add to the features, [N, D]; a scalar zero in evaluation, or with `noise` none."""
    device = batch.features_NF.device
    if method.options.noise == "none" or not method.net.training:
        return torch.zeros((), dtype=method.dtype, device=device)
    noise_ND = (torch.rand(batch.features_NF.shape, dtype=torch.float32, generator=generator) - 0.5).to(
        device=device, dtype=method.dtype
    ) * 0.2
    if method.options.noise == "reference":
        lengths = torch.tensor(batch.documents.lengths, device=device)
        noise_ND = noise_ND * (512 / lengths.repeat_interleave(lengths))[:, None]
    return noise_ND


def packed(net: eagle1.Net, hidden_ND: Tensor, embeddings_ND: Tensor, rows_M: Tensor, documents: Documents) -> Tensor:
    """Return the predicted features [M, D] at the slots `rows_M` of packed documents."""
    x_ND, position_N = net.join(hidden_ND, embeddings_ND), documents.position_N(hidden_ND.device)
    attention, x_MD = net.layer.attention, x_ND[rows_M]
    keys = attention.rotated_key_value(x_ND, position_N)
    return net.layer.finish(
        x_MD, attend_packed(attention, x_MD, position_N[rows_M], QueryRows(rows_M, documents.lengths), keys)
    )


@loss.register
def _(method: eagle3.Method, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Return the objective, by default the cross-entropy with the target's distribution over the draft
    vocabulary, summed over the steps of the training-time test (section 3.2).

    Step i at slot t predicts token t+2+i. It counts when that token counts and the target's own
    best token is in the draft vocabulary. The loss counts as step 0 does: each token
    once.
    """
    test = _test_of(method)
    predictions = Predictions.from_batch(batch, test.steps)
    losses, normed_KD = ttt_losses(method, batch, predictions, test)
    total, sums = losses.total, predictions.figures(losses, test.steps)
    if test.feature:
        if method.shape.hidden_size != method.target.hidden_size:
            raise OptionError("ttt.feature needs a head of the target's own hidden size; leave it at 0")
        true_KD = batch.features_NF[predictions.before_U[predictions.position_K], -method.target.hidden_size :]
        weight_K = test.decay**predictions.step_K * losses.is_counted_K
        feature_loss = smooth_l1(normed_KD, true_KD, weight_K)
        total = total + test.feature * feature_loss
        sums["feature_loss"] = feature_loss.detach()
    return Loss(total, losses.is_counted_K[predictions.step_K == 0].sum(), sums)


def ttt_losses(
    method: eagle3.Method, batch: Batch, predictions: Predictions, test: eagle3.TrainingTimeTest
) -> tuple[DraftLosses, Tensor]:
    """Run the training-time test.

    Returns:
        the losses of the K predictions, weighted by decay ** step; and the normed hidden [K, D]
        from which they are made.
    """
    step_K, rows_M = predictions.step_K, predictions.rows_M
    features_NF = batch.features_NF[:, : len(method.feature_layers) * method.target.hidden_size].to(method.dtype)
    assert method.net.head is not None, "train_feature_layers refuses such a head"
    hidden = hidden_by_step(method, batch, features_NF, rows_M, test.steps)
    normed_KD = method.net.head_input(torch.stack(hidden)[step_K, predictions.row_K])
    losses = draft_losses(
        normed_KD,
        method.net.head.weight,
        predictions.position_K,
        test.decay**step_K,
        len(predictions.before_U),
        predictions.target_logits(batch.features_NF, method.target),
        method.draft_ids_v,
        objective=test.objective,
    )
    return losses, normed_KD


def _test_of(method: eagle3.Method) -> eagle3.TrainingTimeTest:
    """Return how the net is trained on several predictions from each slot."""
    if isinstance(method, peagle.Method):
        train = method.options.train
        levels = method.levels or method.options.head.levels
        return eagle3.TrainingTimeTest(levels, train.decay, objective=train.objective)
    test: eagle3.TrainingTimeTest = method.options.ttt
    return test


def hidden_by_step(
    method: eagle3.Method, batch: Batch, features_NF: Tensor, rows_M: Tensor, steps: int
) -> list[Tensor]:
    """Return the hidden [M, D] at the slots `rows_M` from which each step predicts."""
    checkpointing = bool(method.gradient_checkpointing)

    def embed(index_M: Tensor) -> Tensor:
        return method.embed(batch.tokens_N[index_M]).to(method.dtype)

    if not isinstance(method, peagle.Method):
        return training_time_test(method.net, features_NF, embed, rows_M, batch.documents, steps, checkpointing)
    mask_D = method.embed(torch.tensor([method.mask_token], device=features_NF.device))[0].to(method.dtype)
    return in_parallel(method.net, features_NF, embed, mask_D, rows_M, batch.documents, steps, checkpointing)


@loss.register
def _(method: mtp.Method, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Return the objective, by default the cross-entropy with the target's distribution, summed over
    the steps of the training-time test (EAGLE-3, section 3.2). The target's own lm_head reads
    the module's outputs, and does not learn.

    Step i at slot t predicts token t+2+i, and counts when that token counts. The count of the
    loss is step 0's: each token once.
    """
    test = method.options.ttt
    predictions = Predictions.from_batch(batch, test.steps)
    step_K, features_ND = predictions.step_K, batch.features_NF.to(method.dtype)
    embed = lambda index: method.embed(batch.tokens_N[index]).to(method.dtype)  # noqa: E731
    outputs = module_steps(method.net, features_ND, embed, predictions.rows_M, batch.documents, test.steps)
    losses = draft_losses(
        torch.stack(outputs)[step_K, predictions.row_K], FrozenHead(method.head, method.target.vocab_size),
        predictions.position_K, test.decay**step_K, len(predictions.before_U),
        predictions.target_logits(batch.features_NF, method.target), objective=test.objective,
    )  # fmt: skip
    return Loss(losses.total, (step_K == 0).sum(), predictions.figures(losses, test.steps))


@loss.register
def _(method: small_model.Method, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Return the cross-entropy from the target's distribution to the model's, at every token whose successor
    counts."""
    tokens_N, documents, device = batch.tokens_N, batch.documents, batch.tokens_N.device
    order_N = torch.arange(len(tokens_N), device=device)
    next_N = (order_N + 1).clamp(max=len(tokens_N) - 1)
    rows_M = (batch.counted_N[next_N] & (order_N + 1 < documents.end_N(device))).nonzero()[:, 0]
    # causal: padding is never seen
    tokens_RT = pad_sequence(list(torch.split(tokens_N, list(documents.lengths))), batch_first=True)
    inside_RT = (
        torch.arange(tokens_RT.shape[1], device=device) < torch.tensor(documents.lengths, device=device)[:, None]
    )
    hidden_RTD = method.draft_model.family.base(input_ids=tokens_RT, use_cache=False)[0]
    logits_MV = families.head(method.draft_model.family, hidden_RTD[inside_RT][rows_M])[:, : method.vocab_size]
    with torch.no_grad():
        true_MV = method.target.head(batch.features_NF[rows_M].to(method.target.dtype))[:, : method.vocab_size]
    total = soft_cross_entropy(logits_MV, true_MV)
    right = (logits_MV.detach().argmax(-1) == true_MV.argmax(-1)).sum()
    return Loss(total, torch.tensor(len(rows_M), device=device), {"accuracy": right})


@loss.register
def _(method: BlockMethod, batch: Batch, generator: torch.Generator | None) -> Loss:
    """Raise CheckpointError for a head whose parts are not trained."""
    if not method.block_format.is_plain or method.draft_ids_v is not None:
        raise CheckpointError("this head has windows or a vocabulary of its own, and such heads are not trained here")
    return block_loss(method, batch, generator)
