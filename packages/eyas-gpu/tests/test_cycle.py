"""The Triton kernels of verification, by Triton's interpreter, against `core`; and the trial of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas import kernels
from eyas.core.cache import commit_path
from eyas.core.ops import REFERENCE
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, Tree, Verdict
from eyas_gpu import _draft_net, _trial, operators
from eyas_gpu._trial import fault_of_kernels
from eyas_gpu.cycle import GpuOps
from eyas_lab.bench.simulate import simulated

pytest.importorskip("triton")
from interpreted import interpreted

CYCLE, SCORES = (interpreted(f"eyas_gpu._{name}_kernels") for name in ("cycle", "score"))
OPS = GpuOps(on_cpu=True)
TREE = Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 0, 3, 4]]), 4)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(operators, "kernels", {"cycle": CYCLE, "score": SCORES}.__getitem__)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # products of random words wrap around
        yield


def noise_of(*temperatures: float) -> GumbelNoise:
    return GumbelNoise.from_sampling([Sampling(t, seed=7 + n) for n, t in enumerate(temperatures)])


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (1.0, 1.0), (0.0, 0.7)])
@pytest.mark.parametrize("vocab", [50, 2500])
def test_draws(temperatures: tuple[float, float], vocab: int) -> None:
    """Guards noise (SplitMix64 and two logarithms, bit by bit), blocks of the vocabulary, excluded tokens, ties and
    mixed rows: the draws of the reference, whose rounding differs in one draw of a million."""
    noise, position = noise_of(*temperatures), torch.tensor([11, 2**20])
    scores = 2 * torch.randn(2, 7, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[:, :, ::3] = -math.inf
    scores[:, 2] = 1.0  # ties: the first
    expected, _ = REFERENCE.draw(scores, TREE, position, noise)
    drawn, broken = OPS.draw(scores, TREE, position, noise)
    assert torch.equal(drawn, expected)
    assert broken is not None
    assert broken.tolist() == [False, False]
    scores[1, 3, vocab - 1] = math.nan
    broken = OPS.draw(scores, TREE, position, noise)[1]
    assert broken is not None
    assert broken.tolist() == [False, True]


@pytest.mark.slow
def test_paths() -> None:
    """Guards the descent: every prefix of a path, a drawn token that no child has, children that
    may not be accepted; NaN; one node."""
    die = torch.Generator().manual_seed(0)
    for _ in range(12):
        tokens = torch.randint(0, 4, (2, 7), generator=die)
        tokens[:, [2, 4]] = tokens[:, [1, 3]] + 4  # siblings differ
        candidate = torch.rand(2, 7, generator=die) < 0.9
        candidate[:, 0] = True
        tree = Tree(TREE.parents_BN, candidate, TREE.depth_BN, TREE.mask_BNN, TREE.max_depth)
        drawn = torch.randint(0, 5, (2, 7), generator=die)
        draft = Draft(tree, tokens)
        children = {(b, int(p), int(t)) for b in range(2) for p, t in zip(TREE.parents_BN[b], tokens[b], strict=True)}
        if len(children) < 14:
            continue
        scores, noise = torch.nn.functional.one_hot(drawn, 60).float(), noise_of(0.0, 0.0)
        position = torch.tensor([11, 2**20])
        assert_same(*(ops.verify_deterministic(draft, scores, position, noise) for ops in (REFERENCE, OPS)))
        scores[1, 3, 40] = math.nan
        found = OPS.verify_deterministic(draft, scores, position, noise)
        assert found.host_result_BX is not None
        assert found.host_result_BX[:, 2].tolist() == [0, 1]
    draft, scores = Draft(Tree.chain(2, 1), tokens[:, :1]), scores[:, :1]
    assert_same(*(ops.verify_deterministic(draft, scores, position, noise) for ops in (REFERENCE, OPS)))


def assert_same(expected: Verdict, found: Verdict) -> None:
    for name in ("path_BP", "tokens_BP", "length_B", "bonus_B"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


FILTERS = [
    {"top_p": 0.9}, {"top_p": 0.35}, {"top_p": 1e-6}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 60, "top_p": 0.8, "min_p": 0.02}, {},
]  # fmt: skip


@pytest.mark.cover(options=1)
@pytest.mark.quick("options4-dtype4")
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.bfloat16) for options in FILTERS), (FILTERS[1], torch.float32), (FILTERS[5], torch.float32)],
)
def test_filters(options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards thresholds that are found bit by bit: negative logits, ties (bfloat16 has many; the
    reference excludes the first of those at the border), excluded tokens, several blocks; a row
    that is nearly certain, and one with NaN."""
    logits = (3 * torch.randn(2, 2, 2100, generator=torch.Generator().manual_seed(1)) - 4).to(dtype)
    logits[0, 0, ::3] = -math.inf
    logits[0, 1, 2099] = 30.0
    logits[1, 0] = logits[1, 0].round()
    law, sort = (Sampling(0.7, **options),) * 2, Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda x, dim: sort(x, dim=dim, stable=True))  # as large sorts are on a GPU
    expected, found = REFERENCE.scores(logits, law, None), OPS.scores(logits, law, None)
    assert torch.equal(found, expected)
    logits[1, 1, 40] = math.nan
    assert OPS.scores(logits[1:, 1:], law[1:], None)[0, 0, 40].isnan()


def test_every_field_of_sampling_is_served() -> None:
    """Guards a new filter, which the kernel of scores would leave out: the text would not be the target's."""
    by_the_kernel = {"temperature", "top_k", "top_p", "min_p"}
    by_torch = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}  # adjustments
    assert {field.name for field in fields(Sampling)} == by_the_kernel | by_torch | {"seed"}


@pytest.mark.slow
def test_paths_by_lot() -> None:
    """Guards simulated acceptance by its kernel: the paths of the reference, whose lots depend on
    position and root."""
    decide, die, lengths = simulated((0.9, 0.6, 0.8), seed=3), torch.Generator().manual_seed(0), set()
    for turn in range(12):
        candidate = torch.rand(2, 7, generator=die) < 0.8
        candidate[:, 0] = True
        candidate &= candidate.gather(1, TREE.parents_BN.clamp(min=0))
        draft = Draft(replace(TREE, acceptable_BN=candidate), 30 * turn + torch.arange(14).view(2, 7))
        if not turn:
            draft = Draft(Tree.chain(2, 1), draft.tokens_BN[:, :1])  # plain decoding
        scores, position = torch.randn(*draft.tokens_BN.shape, 500, generator=die), torch.tensor([turn, 2**20 - turn])
        expected, found = (decide(draft, scores, position, noise_of(0.0, 0.0), ops) for ops in (REFERENCE, OPS))
        assert_same(expected, found)
        lengths |= set(found.length_B.tolist())
    assert len(lengths) > 2


def test_commits() -> None:
    """Guards paths whose places overlap with nodes that are still to be read."""
    store = torch.randn(4, 3, 2, 30, 12, generator=torch.Generator().manual_seed(0))
    expected, length = store.clone(), torch.tensor([5, 0, 11])
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 2, -1], [0, 5, -1, -1]])
    commit_path(expected, length, path)
    OPS.commit(store, length, path)
    for row, (begin, nodes) in enumerate(zip(length.tolist(), (4, 3, 2), strict=True)):
        assert torch.equal(store[:, row, :, : begin + nodes], expected[:, row, :, : begin + nodes])


CPU = torch.device("cpu")


@pytest.mark.exhaustive
def test_kernels_prove_themselves() -> None:
    """Guards the trial that every machine makes before it uses the kernels: right ones pass."""
    assert fault_of_kernels(CPU, OPS) == ""


def wrong_paths(*inputs: Any) -> None:
    inputs[-1].zero_()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "kernel", "fault"),
    [
        ("choose", wrong_paths, "a path gives other numbers"),
        ("commit", lambda *_: None, "commit gives other numbers"),
        ("draw", lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_kernels_are_found(name: str, kernel: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards texts: a kernel that a compiler breaks, or that does not compile, is not used."""
    # thresholds are searched for seconds here, and their kernel is right in each of these cases
    monkeypatch.setattr(type(OPS), "scores", staticmethod(REFERENCE.scores))
    wrong = SimpleNamespace(**{**vars(CYCLE), name: kernel})
    monkeypatch.setattr(operators, "kernels", {"cycle": wrong, "score": SCORES}.__getitem__)
    assert fault_of_kernels(CPU, OPS) == fault


@pytest.mark.parametrize("name", ["attention", "join_norms", "rms_norm", "add_norm", "swiglu", "rotate_and_store"])
def test_wrong_layers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafts, whose kernels no comparison of a target's layers sees. Each operator of a layer returns zeros."""
    right = getattr(_draft_net, name)

    def wrong(*inputs: Any) -> Any:
        found = right(*inputs)
        return tuple(map(torch.zeros_like, found)) if isinstance(found, tuple) else torch.zeros_like(found)

    monkeypatch.setattr(_draft_net, name, wrong)
    assert _trial._draft_layers(CPU, OPS) == "a draft's layer"
