"""Block drafters: a block is read in drafting as in training; trees from its laws; anchors and losses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads
import zoo
from eyas import checkpoints, drafters
from eyas.blocks._method import BlockMethod, BlockSession, BlockTraining
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch
from eyas.errors import OptionError
from eyas.nn import Documents
from eyas_train import block_loss
from eyas_train.block_loss import choose_anchors, forward_packed
from reference import run

NAMES = ("dflash", "dflash2", "dspark")
SIZES = {
    "dflash": {},
    "dflash2": {"head.channels": 8, "head.selector_rank": 8, "head.candidates": 40},
    "dspark": {"head.markov_rank": 8},
}
SMALL = {"head.layers": "1,2", "head.depth": 2, "head.block": 5, "tree.nodes": 9, "tree.branch": 3}
PROMPT = (3, 17, 80, 41, 5, 99, 150, 12, 64)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.FAMILIES["llama"]())


def made(name: str, target: Target, **options: Any) -> BlockMethod:
    kind = drafters.find(name)
    drafter = kind.random(target, build_options(kind.Options, {**SMALL, **SIZES[name], **options}), seed=1)
    assert isinstance(drafter, BlockMethod)
    return drafter


def batch_of(drafter: BlockMethod, documents: tuple[tuple[int, ...], ...], counted_N: Tensor | None = None) -> Batch:
    """Packed documents with the features that the loss reads."""
    ids = [torch.tensor(document) for document in documents]
    features = [drafter.target.encode(part[None], drafter.train_feature_layers)[0] for part in ids]
    tokens_N = torch.cat(ids)
    counted_N = torch.ones(len(tokens_N), dtype=torch.bool) if counted_N is None else counted_N
    return Batch(tokens_N, torch.cat(features), counted_N, Documents(tuple(map(len, documents))))


@pytest.mark.quick("dspark")
@pytest.mark.parametrize("name", NAMES)
def test_drafting_computes_what_was_trained(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards positions, context and slots: each cycle's block has training's hidden states, in rows of several ages."""
    drafter, seen = made(name, target), []
    plain = BlockSession._read_block

    def spy(session: BlockSession, cycle_input: Any) -> Tensor:
        hidden_BnD = plain(session, cycle_input)
        seen.extend((tuple(cycle_input.row_tokens[row]), hidden_BnD[row]) for row in cycle_input.active_rows)
        return hidden_BnD

    monkeypatch.setattr(BlockSession, "_read_block", spy)
    run(Decoder(target, drafter, 2), [Request(PROMPT, 12), Request(PROMPT[:4], 9), Request(PROMPT[2:], 10)])
    assert len(seen) > 20
    layers = len(drafter.feature_layers) * target.hidden_size
    for text, hidden_nD in seen:
        other = PROMPT[:3]  # a document before it: none of it may be seen
        batch = batch_of(drafter, (other, text))
        root = torch.tensor([len(other) + len(text) - 1])
        ids_1n = torch.tensor([[text[-1]] + [drafter.block_format.mask_token] * (drafter.block_format.block - 1)])
        with torch.no_grad():
            trained_1nD = forward_packed(
                drafter.net, batch.features_NF[:, :layers], drafter.embed(ids_1n), root, batch.documents
            )
        torch.testing.assert_close(hidden_nD, trained_1nD[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "first"), [("dflash", 1), ("dflash2", 1), ("dspark", 0)])
def test_which_token_a_slot_predicts(name: str, first: int, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the off-by-one between the two: a loss of the first level alone has gradients for one slot."""
    drafter = made(name, target)
    assert drafter.block_format.first_slot == first
    assert drafter.block_format.levels == 5 - first
    batch, slots = batch_of(drafter, (PROMPT,)), list[Tensor]()
    plain = block_loss.forward_packed

    def keep(*inputs: Any) -> Tensor:
        hidden_AnD = plain(*inputs)
        hidden_AnD.retain_grad()
        slots.append(hidden_AnD)
        return hidden_AnD

    monkeypatch.setattr(block_loss, "forward_packed", keep)
    only_last_N = torch.zeros(len(PROMPT), dtype=torch.bool)
    only_last_N[-2:] = True  # the anchor and one token behind it
    loss = drafter.loss(Batch(batch.tokens_N, batch.features_NF, only_last_N, batch.documents))
    loss.total.backward()
    gradient_AnD = slots[0].grad
    assert int(loss.count) == 1
    assert gradient_AnD.abs().sum(-1)[0].nonzero()[:, 0].tolist() == [first]


def test_anchors(target: Target) -> None:
    """Guards the choice: counted tokens and their next, none begins a document, fair shares, one seed one choice."""
    drafter = made("dflash", target)
    counted_N = torch.tensor([1] * 9 + [1, 1, 0, 1, 1, 1] + [0, 1, 0, 1], dtype=torch.bool)
    batch = batch_of(drafter, (PROMPT, (1, 2, 3, 4, 5, 6), (7, 8, 9, 10)), counted_N)
    all_A = choose_anchors(batch, 100, torch.Generator().manual_seed(0)).tolist()
    assert all_A == [1, 2, 3, 4, 5, 6, 7, 12, 13]
    few_A = choose_anchors(batch, 2, torch.Generator().manual_seed(0)).tolist()
    assert [a for a in few_A if a < 9] == few_A[:2]
    assert len(few_A) == 4
    assert set(few_A) <= set(all_A)
    assert few_A == choose_anchors(batch, 2, torch.Generator().manual_seed(0)).tolist()
    assert len({tuple(choose_anchors(batch, 2, torch.Generator().manual_seed(seed)).tolist()) for seed in range(8)}) > 1


@pytest.mark.parametrize(("name", "options"), [
    ("dflash", {}), ("dflash", {"train.weights": "pace", "train.smoothing": 0.3}),
    ("dflash2", {"train.weights": "pace"}), ("dflash2", {"train.objective": "tokens"}),
    ("dspark", {}), ("dspark", {"train.weights": "pace", "train.smoothing": 1}),
])  # fmt: skip
def test_the_loss_is_the_plain_formula(
    name: str, options: dict[str, Any], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards labels, weights and chunks, against a loop over anchors and levels."""
    monkeypatch.setattr("eyas_train.block_loss.CHUNK_ELEMENTS", 3 * target.vocab_size)
    counted_N = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    drafter = made(name, target, **options)
    batch, training, block_format = batch_of(drafter, (PROMPT,), counted_N), drafter.training, drafter.block_format
    loss, total = drafter.loss(batch), 0.0
    D = target.hidden_size
    anchors = [2, 3, 6, 7]
    with torch.no_grad():
        for anchor in anchors:
            ids_1n = torch.tensor([[PROMPT[anchor]] + [block_format.mask_token] * (block_format.block - 1)])
            hidden_nD = forward_packed(
 drafter.net, 
                batch.features_NF[:, :-D], drafter.embed(ids_1n), torch.tensor([anchor]), batch.documents
            )[0]  # fmt: skip
            values, chances = list[float](), list[float]()
            for depth in range(1, block_format.levels + 1):
                goal = anchor + depth
                if goal >= len(PROMPT) or not counted_N[goal]:
                    break
                hidden_D, before = hidden_nD[depth - 1 + block_format.first_slot], torch.tensor(PROMPT[goal - 1])
                logits_V = target.head(hidden_D)
                if drafter.net.markov is not None:
                    logits_V = logits_V + drafter.net.markov.after.weight @ drafter.net.markov.before.weight[before]
                q_V, p_V = logits_V.softmax(-1), target.head(batch.features_NF[goal - 1, -D:]).softmax(-1)
                entropy = -q_V[PROMPT[goal]].log() if training.objective == "tokens" else -(p_V * q_V.log()).sum()
                value = training.cross_entropy * entropy + training.overlap * (q_V - p_V).abs().sum()
                if drafter.net.confidence is not None:
                    sure, rate = drafter.net.accepted(hidden_D, before).sigmoid(), torch.minimum(p_V, q_V).sum()
                    value = value - training.confidence * (rate * sure.log() + (1 - rate) * (1 - sure).log())
                if drafter.net.selector is not None:
                    value = value + selection_loss(drafter, logits_V, hidden_D, before, p_V, PROMPT[goal])
                values.append(float(value))
                chances.append(float(q_V[PROMPT[goal]]))
            total += sum(value * weight for value, weight in zip(values, weights_of(chances, training), strict=True))
    assert int(loss.count) == len(anchors)
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)


def weights_of(chances: list[float], training: BlockTraining) -> list[float]:
    """The weight of each prediction of a block."""
    if training.smoothing is None:
        return [2.718281828459045 ** (-level / training.gamma) for level in range(len(chances))]
    smooth = [(1 - training.smoothing) * chance + training.smoothing for chance in chances]
    reached = [math.prod(smooth[: level + 1]) for level in range(len(chances))]
    return [sum(reached[level:]) for level in range(len(chances))]


def selection_loss(
    drafter: BlockMethod, logits_V: Tensor, hidden_D: Tensor, before: Tensor, p_V: Tensor, token: int
) -> float:
    """The cross-entropy of the selector among the tokens that it scores."""
    selector: Any = drafter.net.selector
    best_K = logits_V.topk(selector.candidates).indices
    added_K = selector.after.weight[best_K] @ (selector.before.weight[before] * selector.hidden(hidden_D))
    log_q_K = (logits_V[best_K] + added_K).log_softmax(-1)
    if drafter.training.objective == "tokens":
        return -float(log_q_K[best_K == token].sum())
    return -float((p_V[best_K] / p_V[best_K].sum() * log_q_K).sum())


def test_children_of_dspark_depend_on_their_parent(target: Target) -> None:
    """Guards the Markov head in trees: siblings' children differ, DFlash's do not."""

    def second_level(name: str) -> set[tuple[int, ...]]:
        drafter, drafts = made(name, target, **{"tree.depth": 2, "tree.nodes": 13, "tree.branch": 3}), []
        plain = drafter.grow
        drafter.grow = lambda *inputs: drafts.append(plain(*inputs)) or drafts[-1]  # type: ignore[method-assign, func-returns-value]
        run(Decoder(target, drafter, 1), [Request(PROMPT, 2)])
        tree, tokens = drafts[0].tree, drafts[0].tokens_BN[0].tolist()
        families: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents_BN[0].tolist()):
            if tree.depth_BN[0, node] == 2:
                families.setdefault(parent, []).append(tokens[node])
        assert len(families) == 3
        return {tuple(sorted(children)) for children in families.values()}

    assert len(second_level("dflash")) == 1
    assert len(second_level("dspark")) > 1


def test_stop(target: Target) -> None:
    """Guards the confidence head's threshold: with one that nothing reaches no child; with 0 it is not asked."""
    for stop, any_child in ((0.0, True), (0.999999, False)):
        drafter, drafts = made("dspark", target, min_confidence=stop), []
        with torch.no_grad():
            drafter.net.confidence.bias.fill_(-5.0)  # type: ignore[union-attr]
            drafter.net.confidence.weight.zero_()  # type: ignore[union-attr]
        plain = drafter.grow
        drafter.grow = lambda *inputs: drafts.append(plain(*inputs)) or drafts[-1]  # type: ignore[method-assign, func-returns-value]  # noqa: B023
        run(Decoder(target, drafter, 1), [Request(PROMPT, 3)])
        assert bool(drafts[0].tree.acceptable_BN[0, 1:].any()) == any_child


@pytest.mark.parametrize(("name", "options", "message"), [
    ("dflash", {"head.block": 1}, "head.block"),
    ("dflash", {"head.layers": "2,1"}, "rising"),
    ("dflash", {"head.layers": "0,9"}, "from 0 to 3"),
    ("dflash", {"head.mask_token": 160}, "160 embeddings"),
    *(("dflash", {f"train.{name}": wrong}, f"train.{name}") for name, wrong in
      {"gamma": 0, "objective": "law", "weights": "even", "smoothing": 0}.items()),
    ("dspark", {"min_confidence": 1}, "min_confidence"),
    ("dspark", {"head.markov_rank": 0}, "head.confidence"),
    ("dspark", {"train.overlap": -1}, "train.overlap"),
])  # fmt: skip
def test_impossible_options(name: str, options: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(OptionError, match=message):
        made(name, target, **options)


@pytest.mark.cover(name=1)
@pytest.mark.parametrize("name", NAMES)
def test_trained_a_little(name: str, target: Target, tmp_path: Path) -> None:
    """Guards the way through the trainer: the held-out loss falls, drafts are accepted, the head is read back."""
    kind = drafters.find(name)
    options = build_options(kind.Options, {**SMALL, "train.anchors": 8, **SIZES[name]})
    drafter = kind.init_for_training(target, options, 1)
    first, losses, figures = heads.short_training(drafter, tmp_path)
    assert losses[-1]["loss"] < min(losses[0]["loss"], 0.9 * first)
    assert {"0-alpha", "chain tau", "tau"} <= figures.keys()
    again: Any = kind.load(checkpoints.load(tmp_path), target, options)
    assert again.block_format == drafter.block_format  # type: ignore[attr-defined]
    assert all(torch.equal(value, again.net.state_dict()[key]) for key, value in drafter.net.state_dict().items())  # type: ignore[union-attr]
