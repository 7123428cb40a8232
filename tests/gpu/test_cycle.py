"""The Triton kernels of verification and of dynamic trees, by Triton's interpreter, against `core`
and `drafters._grow`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from eyas import drafters, kernels
from eyas.core.cache import commit_path
from eyas.core.engine import Decoder, Request
from eyas.core.ops import REFERENCE, Ops
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.gpu import _ops, keep_best
from eyas.runners.fused import GpuModelLayers
from eyas.runners.gpu_ops import GpuOps
from eyas.runners.gpu_proof import fault_of_kernels
from eyas.runners.graphs import GraphRunner
from eyas_lab.bench.simulate import simulated
from fake_graphs import captured_without_gpu
from reference import plain_decode, run

pytest.importorskip("triton")
from interpreted import interpreted

CYCLE, GROWTH, SCORES = (interpreted(f"eyas.gpu._{name}_kernels") for name in ("cycle", "growth", "score"))
OPS = GpuOps(on_cpu=True)
TREE = Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 0, 3, 4]]), 4)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(_ops, "kernels", {"cycle": CYCLE, "growth": GROWTH, "score": SCORES}.__getitem__)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # products of random words wrap around
        yield


def noise_of(*temperatures: float) -> GumbelNoise:
    return GumbelNoise.from_sampling([Sampling(t, seed=7 + n) for n, t in enumerate(temperatures)])


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (1.0, 1.0), (0.0, 0.7)])
@pytest.mark.parametrize("vocab", [50, 2500])
def test_draws(temperatures: tuple[float, float], vocab: int) -> None:
    """Guards noise (SplitMix64 and two logarithms, bit by bit), blocks of the vocabulary, excluded
    tokens, ties and mixed rows: the draws of the reference, whose rounding differs in one draw of a
    million."""
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
        if (
            len({(b, int(p), int(t)) for b in range(2) for p, t in zip(TREE.parents_BN[b], tokens[b], strict=True)})
            < 14
        ):
            continue
        scores, noise, position = (
            torch.nn.functional.one_hot(drawn, 60).float(),
            noise_of(0.0, 0.0),
            torch.tensor([11, 2**20]),
        )
        same_verdict(draft, scores, position, noise)
        scores[1, 3, 40] = math.nan
        found = OPS.verify_deterministic(draft, scores, position, noise)
        assert found.host_result_BX is not None
        assert found.host_result_BX[:, 2].tolist() == [0, 1]
    same_verdict(Draft(Tree.chain(2, 1), tokens[:, :1]), scores[:, :1], position, noise)


def same_verdict(draft: Draft, scores: Tensor, position: Tensor, noise: GumbelNoise) -> None:
    expected, found = (ops.verify_deterministic(draft, scores, position, noise) for ops in (REFERENCE, OPS))
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
        scores, position, noise = (
            torch.randn(*draft.tokens_BN.shape, 500, generator=die),
            torch.tensor([turn, 2**20 - turn]),
            noise_of(0.0, 0.0),
        )
        expected, found = (decide(draft, scores, position, noise, ops) for ops in (REFERENCE, OPS))
        for name in ("path_BP", "tokens_BP", "length_B", "bonus_B"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
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


def decoded(name: str, options: dict[str, object], ops: Ops, sampling: Sampling) -> tuple[list[list[int]], list[Draft]]:
    target, kind = Target(zoo.tiny("llama", num_hidden_layers=7)), drafters.find(name)
    target = target.run_with(
        GraphRunner(target, captured_without_gpu, fused=GpuModelLayers(target, join_weights=True), ops=ops)
    )
    ids = torch.arange(3, zoo.VOCAB, 2) if name == "eagle3" else None
    drafter = kind.random(
        target, build_options(kind.Options, options), seed=1, **({} if ids is None else {"draft_ids_v": ids})
    )
    requests = [Request(tuple(range(5, 5 + n)), 3, sampling) for n in (9, 30)]
    tokens, steps = run(Decoder(drafter.target, drafter, 2), requests)
    return [list(t) for t in tokens], [s.draft for s in steps if s.draft is not None]


GREEDY, SAMPLED = Sampling(), Sampling(0.8, seed=3)


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cover(options=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, GREEDY),
        ({}, SAMPLED),
        ({"tree.noise": "none", "tree.confidence_temperature": 1.0}, SAMPLED),
        ({"tree.expand": "confidence", "tree.rerank": False}, GREEDY),
        ({"tree.stop": 0.05, "tree.nodes": 20}, GREEDY),
        ({"tree.stop": 0.05, "tree.nodes": 20}, SAMPLED),
        ({"window.size": 9, "window.sink": 2}, SAMPLED),
    ],
    ids=["greedy", "sampled", "as in the paper", "expanded nodes", "stopped", "stopped, sampled", "a window"],
)
def test_dynamic_trees(options: dict[str, object], sampling: Sampling) -> None:
    """Guards trees grown by kernels: the nodes, tokens, values and masks of `grow_dynamic`, and the
    text of plain decoding."""
    options = {"tree.nodes": 12, "tree.depth": 3, "tree.branch": 3, **options}
    name = "eagle2" if "tree.stop" in options else "eagle3"
    if name == "eagle2" and not sampling.greedy:
        sampling = replace(sampling, min_p=0.01)  # thresholds that are searched take a second a node here: test_filters
    (text, trees), (expected_text, expected_trees) = (decoded(name, options, ops, sampling) for ops in (OPS, REFERENCE))
    assert text == expected_text
    model = zoo.tiny("llama", num_hidden_layers=7)
    assert text == [plain_decode(model, Request(tuple(range(5, 5 + n)), 3, sampling)) for n in (9, 30)]
    assert len(trees) == len(expected_trees) > 0
    for found, expected in zip(trees, expected_trees, strict=True):
        assert torch.equal(found.tokens_BN, expected.tokens_BN)
        for name in ("parents_BN", "acceptable_BN", "depth_BN", "mask_BNN"):
            assert torch.equal(getattr(found.tree, name), getattr(expected.tree, name)), name
        close(found.log_q_BN, expected.log_q_BN)
        close(found.value_BN, expected.value_BN)
        assert (found.drafted is None) == (expected.drafted is None)
        if found.drafted is not None and expected.drafted is not None:
            assert torch.equal(found.drafted.parents_BX, expected.drafted.parents_BX)
            close(found.drafted.value_BX, expected.drafted.value_BX)


CPU = torch.device("cpu")


@pytest.mark.exhaustive
def test_kernels_prove_themselves() -> None:
    """Guards the trial that every machine makes before it uses the kernels: right ones pass."""
    assert fault_of_kernels(CPU, OPS) == ""


def wrong_paths(*inputs: Any) -> None:
    inputs[-1].zero_()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("module", "name", "kernel", "fault"),
    [
        ("cycle", "choose", wrong_paths, "a path gives other numbers"),
        ("growth", "keep_best", lambda values, keep: keep.fill_(1), "a tree gives other numbers"),
        ("cycle", "commit", lambda *_: None, "commit gives other numbers"),
        ("cycle", "draw", lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_kernels_are_found(
    module: str, name: str, kernel: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards texts: a kernel that a compiler breaks, or that does not compile, is not used."""
    # thresholds are searched for seconds here, and their kernel is right in each of these cases
    monkeypatch.setattr(type(OPS), "scores", staticmethod(REFERENCE.scores))
    right = _ops.kernels
    wrong = SimpleNamespace(**{**vars(right(module)), name: kernel})
    monkeypatch.setattr(_ops, "kernels", lambda asked: wrong if asked == module else right(asked))
    assert fault_of_kernels(CPU, OPS) == fault


def test_the_best_drafted_nodes() -> None:
    """Guards ties, as of nodes that are impossible: the earlier one is kept."""
    values = torch.tensor([[0.0, -1.0, -math.inf, -1.0, -2.0, -1.0, -math.inf], [0.0, *[-math.inf] * 6]])
    assert keep_best(values, 2).tolist() == [[1, 3], [1, 2]]
    assert keep_best(values, 5).tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert keep_best(values, 6).tolist() == [[1, 2, 3, 4, 5, 6]] * 2
