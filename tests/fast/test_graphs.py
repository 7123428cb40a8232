"""Passes as graphs: their fixed inputs, tried on a CPU with a capture that runs the work again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import zoo
from eyas import drafters
from eyas.decode import Decoder, Request
from eyas.drafters._base import options_from
from eyas.fast.graphs import BUCKET, Captured, GraphRunner
from eyas.sampling import Sampling
from eyas.target import Target
from eyas.tree import Seen
from reference import plain_decode, run
from test_lossless import OPTIONS


def again(work: Callable[[], Seen]) -> Captured:
    """Like a graph: what it leaves lies where it lay the first time, and everything comes from the inputs that it was captured with."""
    seen = work()
    left = Seen(seen.logits_BNV.clone(), seen.features_BNF.clone())

    def replay() -> None:
        found = work()
        left.logits_BNV.copy_(found.logits_BNV)
        left.features_BNF.copy_(found.features_BNF)

    return left, replay


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", ["vanilla", "eagle1", "eagle2", "eagle3", "medusa", "suffix", "small_model"])
def test_graphs_are_lossless(name: str, family: str) -> None:
    """Guards the static inputs: rows of different ages, windows, texts that grow over a bucket's edge, whose cache then lies elsewhere."""
    model = zoo.FAMILIES[family]()
    target = Target(model)
    graphs = GraphRunner(target, again)
    kind = drafters.find(name)
    drafter = kind.random(target.run_with(graphs), options_from(kind.Options, OPTIONS.get(name, {})), seed=1)
    prompts = [tuple(torch.randint(3, zoo.VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in (7, BUCKET - 9, 30)]
    requests = [Request(prompt, 20, Sampling()) for prompt in prompts]
    tokens, _ = run(Decoder(drafter.target, drafter, 2), requests)
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
    assert {key[3] for key in graphs._graphs} == {BUCKET, 2 * BUCKET}, "both widths were run"


def test_a_shape_that_cannot_be_captured_runs_as_it_is() -> None:
    """Guards models whose forward waits for the device: a warning, once, and the right text."""

    def refuse(work: Callable[[], Seen]) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    target = target.run_with(GraphRunner(target, refuse))
    request = Request((5, 6, 7), 8, Sampling())
    with pytest.warns(UserWarning, match="cannot be captured"):
        tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target), 1), [request])
    assert list(tokens[0]) == list(plain_decode(model, request))
