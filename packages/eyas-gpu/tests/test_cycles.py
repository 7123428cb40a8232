"""The operations around the target's forward by GPU kernels: the same trees, draws and texts as by the reference.

On a CPU the kernels' references run in their place; the kernels themselves are in the other files."""

from __future__ import annotations

import pytest

import zoo
from covers import turn
from eyas import drafters
from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request
from eyas.core.ops import REFERENCE, Ops
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas_gpu._fp8 import TORCH, Fp8Linear
from eyas_gpu.cycle import GpuOps
from eyas_gpu.graphs import GraphRunner
from eyas_gpu.layers import GpuModelLayers
from fake_graphs import captured_without_gpu, prompt
from fp8_support import needs_fp8
from reference import plain_decode, run
from test_lossless import OPTIONS

Drawn = list[tuple[list[int], list[int]]]


pytestmark = pytest.mark.usefixtures("without_cpu_kernels")


def decoded(
    name: str, ops: Ops, requests: list[Request], draft_weights: str = "auto"
) -> tuple[list[list[int]], Drawn, Drafter]:
    """Texts; tokens and parents of every tree; the drafter."""
    target, kind = Target(zoo.FAMILIES["llama"]()), drafters.find(name)
    target.draft_weights = draft_weights
    target = target.run_with(
        GraphRunner(target, captured_without_gpu, fused=GpuModelLayers(target, join_weights=True), ops=ops)
    )
    drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
    tokens, steps = run(Decoder(drafter.target, drafter, 2), requests)
    drafts = [(s.draft, s.row) for s in steps if s.draft is not None]
    trees = [(d.tokens_BN[row].tolist(), d.tree.parents_BN[row].tolist()) for d, row in drafts]
    return [list(t) for t in tokens], trees, drafter


METHODS = [
    "vanilla", "eagle1", "eagle2", "eagle3", "seagle", "hydra", "medusa", "suffix", "dflash", "dspark", "peagle"
]  # fmt: skip


@pytest.mark.cover(name=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_same_trees_and_texts(name: str) -> None:
    """Guards drafts by kernels: their slots, positions, windows and norms; draws, paths and commits.
    By turns from method to method: greedy rows, drawn ones, or both kinds beside each other."""
    laws = turn(name, METHODS, ((0.0, 0.0, 0.0), (0.8, 0.8, 0.8), (0.0, 0.8, 0.0)))
    requests = [Request(prompt(n), 14, Sampling(law, seed=n)) for n, law in zip((7, 60, 30), laws, strict=True)]
    by_torch, by_kernels = (decoded(name, ops, requests)[:2] for ops in (REFERENCE, GpuOps()))
    assert by_kernels == by_torch
    for request, ids in zip(requests, by_kernels[0], strict=True):
        if request.sampling.greedy or name != "eagle1":
            assert ids == plain_decode(zoo.FAMILIES["llama"](), request)


@pytest.mark.cover(name=2)
@needs_fp8
@pytest.mark.slow
@pytest.mark.parametrize("ops", [TORCH, GpuOps()], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "hydra", "medusa"])
def test_drafts_in_fp8(name: str, ops: Ops) -> None:
    """Guards rounded drafts, as far as a CPU can: other guesses, the same text, and nothing that a graph cannot hold."""
    requests = [Request(prompt(n), 20, Sampling()) for n in (7, 30)]
    (text, guesses, _), (rounded_text, rounded, drafter) = (
        decoded(name, ops, requests, form) for form in ("exact", "fp8")
    )
    assert text == rounded_text == [plain_decode(zoo.FAMILIES["llama"](), request) for request in requests]
    assert rounded != guesses
    assert any(isinstance(module, Fp8Linear) for module in drafter.decoding_net.modules())
