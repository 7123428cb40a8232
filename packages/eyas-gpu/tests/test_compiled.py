"""Layers by torch.compile: how often something is compiled, what a model is left as, and texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import zoo
from eyas import drafters, kernels
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.drafters import Drafter
from eyas.nn import Compiled
from eyas_gpu.compiled import CompiledLayers
from eyas_gpu.graphs import BUCKET, GraphRunner
from fake_graphs import captured_without_gpu, prompt
from reference import plain_decode, run
from test_lossless import OPTIONS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "available", lambda: False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(target: Target, backend: Any) -> Target:
    return target.run_with(GraphRunner(target, captured_without_gpu, CompiledLayers(target.family.layers, backend)))


def drafter_of(name: str, target: Target) -> Drafter:
    kind = drafters.find(name)
    return kind.random(target, build_options(kind.Options, OPTIONS[name]), seed=1)


@pytest.mark.exhaustive
def test_compilations_do_not_grow_with_layers() -> None:
    """Guards against a layer's number in what is traced: each layer would be compiled for itself,
    and from the 64th on none would be. Nine layers: more than the compilations that are allowed.
    Passes of one node, of few, of many; one row and two; short texts and longer ones."""
    target, counter = Target(zoo.tiny("llama", num_hidden_layers=9)), CompileCounter()
    with_cpu_kernels = compiled(target, counter)
    largest = 0.0
    for rows, length in ((1, 20), (1, 2 * BUCKET - 50), (2, 30)):
        sessions = [t.open(rows) for t in (target, with_cpu_kernels)]
        for nodes in (5, 1, 3, 8):
            tokens, tree = torch.tensor([prompt(nodes)] * rows), Tree.chain(rows, nodes)
            found = []
            for session in sessions:
                for row in range(rows):
                    session.truncate(row, 0)
                    session.prefill(row, prompt(length))
                found.append(session.forward(tokens, tree).logits_BNV)
            largest = max(largest, float((found[0] - found[1]).abs().max()))
        if rows == 1:
            assert counter.frame_count <= 3, "one for single nodes, one for more"
    assert counter.frame_count <= 4, "two more for several rows"
    assert largest < 1e-3


# unlike in what is traced
@pytest.mark.cover(family=1)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "cohere2", "gpt2", "gpt_oss"])
def test_compiled_layers_are_lossless(family: str) -> None:
    """Guards each family's layers: how they get their part of the cache, features on the way, and
    that nothing breaks what is traced."""
    model, counter = zoo.FAMILIES[family](), CompileCounter()
    target = compiled(Target(model), counter)
    before = [dict(layer.__dict__) for layer in target.family.layers]
    requests = [
        Request(prompt(n), 12, Sampling(temperature, seed=n))
        for n, temperature in ((7, 0.0), (BUCKET - 9, 0.8), (30, 0.0))
    ]
    tokens, _ = run(Decoder(target, drafter_of("medusa", target), 2), requests)
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
    assert 0 < counter.frame_count <= 8
    assert [dict(layer.__dict__) for layer in target.family.layers] == before, "the model stays the user's"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["eagle1", "seagle", "self_speculative"])
def test_compiled_drafts(name: str) -> None:
    """Guards draft nets, of which each level is compiled: the same trees as without, few compilations, windows too. Bug:
    layers got their part of the cache by their place in a list, which is another one's where a draft skips layers."""
    target, found, counter = Target(zoo.FAMILIES["llama"]()), [], CompileCounter()
    for is_compiled in (False, True):
        used = compiled(target, counter) if is_compiled else target.run_with(GraphRunner(target, captured_without_gpu))
        drafter = drafter_of(name, used)
        steps = run(Decoder(used, drafter, 2), [Request(prompt(n), 12, Sampling()) for n in (7, 40)])[1]
        drafts = [(step.draft, step.row) for step in steps if step.draft is not None]
        found.append([(d.tokens_BN[row].tolist(), d.tree.parents_BN[row].tolist()) for d, row in drafts])
    assert found[0] == found[1]
    assert counter.frame_count <= 8
    if name != "self_speculative":
        assert drafter.compiled is not None
        assert not drafter.compiled.failed


def test_models_do_not_share_compilations() -> None:
    """Bug: the code of one function is compiled for every model in turn, until torch gives up for all."""

    def more(x: Tensor) -> Tensor:
        return x + 1

    counters = [CompileCounter() for _ in range(3)]
    functions = [Compiled(more, counter, "more") for counter in counters]
    for dtype in (torch.float32, torch.float64):
        for function in functions:
            assert function(torch.ones(3, dtype=dtype)).tolist() == [2, 2, 2]
    assert [counter.frame_count for counter in counters] == [2, 2, 2]


@pytest.mark.exhaustive
def test_by_inductor() -> None:
    """The backend that is used: generated code, which must write keys and values where they lie."""
    model, request = zoo.FAMILIES["llama"](), Request(prompt(7), 12, Sampling())
    target = compiled(Target(model), "inductor")
    with warnings.catch_warnings(action="error", category=UserWarning):
        tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target)), [request])
    assert list(tokens[0]) == list(plain_decode(model, request))


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """Guards backends that fail (no compiler on the machine) and layers that look at values: one
    warning, and the right text."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    model, request = zoo.FAMILIES["llama"](), Request(prompt(7), 12, Sampling())
    target = compiled(Target(model), broken)
    with pytest.warns(UserWarning, match=r"the layers \(LlamaDecoderLayer\) cannot be compiled"):
        tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target)), [request])
    assert list(tokens[0]) == list(plain_decode(model, request))

    def looks(x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x

    function = Compiled(looks, "eager", "looking")
    with pytest.warns(UserWarning, match="looking cannot be compiled"):
        assert function(torch.ones(2)).tolist() == [2, 2]
    assert function(-torch.ones(2)).tolist() == [-1, -1]


def test_a_forward_of_somebody_else_stays() -> None:
    """Guards layers whose forward another library has replaced: it is what runs, and it stays."""
    target, calls = Target(zoo.FAMILIES["llama"]()), []
    layer: Any = target.family.layers[1]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(layer).forward(layer, *args, **kwargs)

    layer.forward = theirs
    session = compiled(target, "eager").open(1)
    session.prefill(0, prompt(9))
    before = len(calls)
    session.forward(torch.tensor([[5]]), Tree.chain(1, 1))
    assert len(calls) > before
    assert layer.__dict__["forward"] is theirs
