"""Losses against the plain formula, against the reference's numbers, and their memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints.safeailab import NAMES
from eyas.drafters import _options
from eyas.drafters.eagle1 import Method
from eyas.nn import Documents
from eyas.targets.loading import load_target
from eyas_train.losses import OBJECTIVES, FrozenHead, draft_losses, smooth_l1, soft_cross_entropy, soft_cross_entropy_of
from eyas_train.method_losses import packed

GOLDEN = Path(__file__).parents[5] / "shared" / "golden"


def plain_smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    difference = (predicted - true).abs()
    each = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5)
    return each.mean(-1).sum()


def plain_cross_entropy(predicted: Tensor, true: Tensor) -> Tensor:
    p, log_q = true.exp() / true.exp().sum(-1, keepdim=True), predicted - predicted.exp().sum(-1, keepdim=True).log()
    return -(p * log_q).sum()


def arguments(seed: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randn(rows, width, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
    return predicted, torch.randn(rows, width, generator=generator, dtype=torch.float64).mul_(2)


@pytest.mark.parametrize(
    ("ours", "plain", "more"),
    [
        (smooth_l1, plain_smooth_l1, ()),
        *((soft_cross_entropy, plain_cross_entropy, (chunk,)) for chunk in (1, 40, 10**6)),
    ],
)
@pytest.mark.parametrize("rows", [0, 21])
def test_values_and_gradients_are_those_of_the_formula(ours, plain, more, rows) -> None:
    """Guards the closed-form gradient, and chunks, of which the last may be smaller."""
    predicted, true = arguments(0, rows, 11)
    mine, theirs = ours(predicted, true, *more), plain(predicted, true)
    torch.testing.assert_close(mine, theirs)
    gradients = (torch.autograd.grad(3 * value, predicted)[0] for value in (mine, theirs))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
@pytest.mark.parametrize("rows", [0, 21])
def test_through_the_head(chunk: int, rows: int) -> None:
    """From features through a head, value and gradient equal those with all logits at once, and the agreement counts equal
    argmaxes. The head gets no gradient, although the weights of a freshly loaded model ask for one."""
    predicted, true = arguments(3, rows, 5)
    linear = nn.Linear(5, 13, dtype=torch.float64)

    def head(hidden: Tensor) -> Tensor:
        return 3 * torch.tanh(linear(hidden))  # with a softcap: more than one matrix

    mine, agree = soft_cross_entropy_of(head, predicted, true, 13, chunk)
    expected = plain_cross_entropy(head(predicted), head(true))
    torch.testing.assert_close(mine, expected)
    (2 * mine).backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(predicted.grad, torch.autograd.grad(2 * expected, predicted)[0])
    assert int(agree) == int((head(predicted).argmax(-1) == head(true).argmax(-1)).sum())
    with torch.no_grad():
        torch.testing.assert_close(soft_cross_entropy_of(head, predicted, true, 13, chunk)[0], expected.detach())


def test_half_precision_is_summed_in_float32() -> None:
    """bfloat16 has 8 bits: a sum over a vocabulary kept in it would be off by percents. Also under autocast."""
    generator = torch.Generator().manual_seed(4)
    predicted, true = (torch.randn(8, 500, generator=generator).bfloat16() for _ in range(2))
    expected = plain_cross_entropy(predicted.double(), true.double())
    with torch.autocast("cpu", torch.bfloat16):
        value = soft_cross_entropy(predicted, true)
        distance = smooth_l1(predicted, true)
    assert value.dtype == distance.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        distance.double(), plain_smooth_l1(predicted.double(), true.double()), rtol=1e-5, atol=1e-5
    )


def test_extreme_logits_stay_finite() -> None:
    """exp overflows float32 at 89; logits of real heads with large scales reach it."""
    predicted = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    loss = soft_cross_entropy(predicted, torch.tensor([[900.0, -900.0, 899.0]]))
    loss.backward()
    assert loss.isfinite()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


def test_memory_does_not_grow_with_the_vocabulary_times_the_positions() -> None:
    """The head sees a chunk of rows at a time, each row once, and what waits for the backward has
    the size of the features."""
    predicted, true = arguments(5, 100, 4)
    head, rows = nn.Linear(4, 3000, dtype=torch.float64), list[int]()

    def counting(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        result: Tensor = head(hidden)
        return result

    loss, _ = soft_cross_entropy_of(counting, predicted, true, 3000, 30_000)
    assert max(rows) == 10
    assert sum(rows) == 2 * 100
    kept = [value.shape for value in loss.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert kept == [(100, 4), (0, 4)], "more than gradients, and the frozen head's is empty"


@pytest.mark.skipif(
    not (GOLDEN / "train_losses.json").exists(), reason="the reference's numbers are not beside this checkout"
)
@pytest.mark.parametrize("chunked", [False, True])
def test_reference_losses_and_gradients_of_eagle1(chunked: bool) -> None:
    """The net of eagle1 with the reference's head on its batch (no noise, its mask and normalizer):
    predicted features, both losses and every gradient to 1e-4. Both ways to the cross-entropy."""
    said = json.loads((GOLDEN / "train_losses.json").read_text())["eagle1"]
    tensors = load_file(GOLDEN / "train_losses.safetensors")
    target = load_target(GOLDEN / "target_a", dtype="float32", device="cpu")
    net = Method.load(checkpoints.load(GOLDEN / "head_eagle1_a"), target).net.float()
    features, ids, mask = tensors["eagle1.hidden_states"], tensors["eagle1.input_ids"], tensors["eagle1.loss_mask"]
    documents, every = Documents((ids.shape[1],) * len(ids)), torch.arange(ids.numel())
    with torch.enable_grad():
        predicted = packed(
            net, features.flatten(0, 1), target.embed(ids).float().flatten(0, 1), every, documents
        ).view_as(features)
        valid = tensors["eagle1.attention_mask"].bool()
        torch.testing.assert_close(predicted[valid], tensors["eagle1.predict"][valid], atol=1e-4, rtol=0)
        predicted, true = predicted[mask.bool()], tensors["eagle1.target"][mask.bool()]
        if chunked:
            ploss, _ = soft_cross_entropy_of(target.head, predicted, true, target.vocab_size, 1000)
        else:
            ploss = soft_cross_entropy(target.head(predicted), target.head(true))
        vloss, ploss = (loss / (mask.sum() + 1e-5) for loss in (smooth_l1(predicted, true), ploss))
        loss = vloss + 0.1 * ploss
        loss.backward()
    for mine, theirs in ((vloss, "vloss"), (ploss, "ploss"), (loss, "loss")):
        assert mine.item() == pytest.approx(said[theirs], abs=1e-4)
    gradients = {
        ours: tensors[f"eagle1.grad.{theirs}"] for theirs, ours in NAMES.items() if f"eagle1.grad.{theirs}" in tensors
    }
    parameters = dict(net.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(
            parameters[name].grad, expected, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def plain_objective(name: str, p: Tensor, share: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the overlap of each row by their formulas, for autograd."""
    q = logits.exp() / logits.exp().sum(-1, keepdim=True)
    overlap = torch.stack(
        [torch.minimum(row_p * part, row_q).sum() for row_p, part, row_q in zip(p, share, q, strict=True)]
    )
    if name == "distribution":
        return -(p * q.log()).sum(-1), overlap
    if name == "acceptance":
        return -overlap.log(), overlap
    weight = torch.exp(-3 * overlap.detach())
    return weight * (p * (p / q).log()).sum(-1) + (1 - weight) * (1 - overlap), overlap


def test_the_options_name_all_objectives() -> None:
    """Guards the list of names in the engine, which does not import the objectives."""
    assert tuple(OBJECTIVES) == _options.OBJECTIVES


@pytest.mark.parametrize("chunk", [1, 60, 10**6])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_through_a_trained_head(chunk: int, reduced: bool, objective: str) -> None:
    """Against all logits at once: total, each guess, which count and which are right; gradients to
    hidden states and to the head."""
    generator = torch.Generator().manual_seed(4)
    answers, guesses, D, V = 6, 17, 5, 13
    ids = torch.tensor([0, 2, 3, 7, 8, 11, 12]) if reduced else None
    v = len(ids) if ids is not None else V
    hidden = torch.randn(guesses, D, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(v, D, generator=generator, dtype=torch.float64).requires_grad_()
    true = torch.randn(answers, V, generator=generator, dtype=torch.float64) * 2
    answer = torch.randint(answers - 1, (guesses,), generator=generator)  # nothing is compared with the last answer
    weight = torch.rand(guesses, generator=generator, dtype=torch.float64)
    mine = draft_losses(hidden, head, answer, weight, answers, lambda part: true[part], ids, chunk, objective)
    best = true.argmax(-1)
    p = (true if ids is None else true[:, ids]).softmax(-1)
    counts = torch.tensor([ids is None or int(b) in ids.tolist() for b in best])[answer]
    logits = hidden @ head.T
    share = torch.ones(answers, dtype=torch.float64) if ids is None else true.softmax(-1)[:, ids].sum(-1)
    each, overlap = plain_objective(objective, p[answer], share[answer], logits)
    total = (each * counts * weight).sum()
    torch.testing.assert_close(mine.total, total)
    torch.testing.assert_close(mine.loss_K, (each * counts).detach())
    torch.testing.assert_close(mine.overlap_K, (overlap * counts).detach())
    assert mine.is_counted_K.tolist() == counts.tolist()
    chosen = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
    assert mine.is_correct_K.tolist() == ((chosen == best[answer]) & counts).tolist()
    assert counts.any()
    assert bool(counts.all()) != reduced
    for one, other in zip(
        torch.autograd.grad(3 * mine.total, (hidden, head)), torch.autograd.grad(3 * total, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("chunk", [1, 60, 10**6])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_through_a_frozen_head(chunk: int, objective: str) -> None:
    """Against all logits at once, with a head that is more than a matrix (a softcap, as Gemma 2
    has): total and gradient."""
    generator = torch.Generator().manual_seed(5)
    answers, guesses, D, V = 6, 17, 5, 13
    hidden = torch.randn(guesses, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64).requires_grad_()
    true = torch.randn(answers, V, generator=generator, dtype=torch.float64) * 2
    answer = torch.randint(answers, (guesses,), generator=generator)
    weight = torch.rand(guesses, generator=generator, dtype=torch.float64)
    head = FrozenHead(lambda x: 3 * torch.tanh(x @ weight_VD.T / 3), V)
    mine = draft_losses(hidden, head, answer, weight, answers, lambda part: true[part], None, chunk, objective)
    logits = head.logits(hidden)
    each, overlap = plain_objective(
        objective, true.softmax(-1)[answer], torch.ones(guesses, dtype=torch.float64), logits
    )
    total = (each * weight).sum()
    torch.testing.assert_close(mine.total, total)
    torch.testing.assert_close(mine.overlap_K, overlap.detach())
    assert mine.is_correct_K.tolist() == (logits.argmax(-1) == true.argmax(-1)[answer]).tolist()
    torch.testing.assert_close(
        torch.autograd.grad(3 * mine.total, hidden)[0], torch.autograd.grad(3 * total, hidden)[0]
    )
    assert weight_VD.grad is None
    with torch.no_grad():
        torch.testing.assert_close(
            draft_losses(hidden, head, answer, weight, answers, lambda part: true[part], None, chunk, objective).total,
            total.detach(),
        )


def draft_of(logits: Tensor, true: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """The loss of draft logits [K, V] compared with the target's, row by row, and its gradient."""
    rows, D = torch.arange(len(logits)), logits.shape[-1]
    hidden = logits.clone().requires_grad_()
    found = draft_losses(
        hidden, torch.eye(D), rows, torch.ones(len(rows)), len(rows), lambda part: true[part], objective=objective
    )
    return found.loss_K, torch.autograd.grad(found.total, hidden)[0]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distributions_that_do_not_overlap(objective: str) -> None:
    """Logits so far apart that no probability is shared in float32: every loss and gradient stays finite."""
    true, logits = torch.tensor([[0.0, -400.0, -400.0]]), torch.tensor([[-400.0, 0.0, -1.0]])
    loss, gradient = draft_of(logits, true, objective)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_weighted_smooth_l1() -> None:
    predicted, true = arguments(5, 9, 4)
    weight = torch.rand(9, dtype=torch.float64)
    expected = sum(w * plain_smooth_l1(x[None], y[None]) for x, y, w in zip(predicted, true, weight, strict=True))
    torch.testing.assert_close(smooth_l1(predicted, true, weight), expected)
