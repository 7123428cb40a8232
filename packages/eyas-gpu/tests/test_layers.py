"""Layers by few kernels: the same text for every family that they suit, how many kernels, and what becomes of the
model's weights.

On a CPU the kernels' references run in their place; the kernels themselves are in the other files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from covers import turn
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.runners._comparison import CLOSE_ROUNDED, UnsuitedError, output_pairs
from eyas_gpu import layers as fused
from eyas_gpu.graphs import BUCKET, GraphRunner
from eyas_gpu.layers import FusedRunner, GpuModelLayers, check
from fake_graphs import captured_without_gpu, prompt
from interpreted import interpreted
from reference import plain_decode, run
from test_lossless import OPTIONS

SUITED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


pytestmark = pytest.mark.usefixtures("without_cpu_kernels")


def test_a_deep_model_in_bfloat16_may_differ_more_layer_by_layer() -> None:
    """Guards the tolerance: 5 % refused random models of 8B, whose own forward rounds away more. A wrong layer is
    still found, by its jump."""
    sizes = {"num_hidden_layers": 32, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.12}
    target = Target(zoo.tiny("llama", **sizes).to(torch.bfloat16))
    layers = GpuModelLayers(target, join_weights=False)
    expected, actual = output_pairs(target, FusedRunner(layers))[0]
    assert (expected - actual).norm() > CLOSE_ROUNDED * expected.norm(), "the case is gone"
    check(layers)
    layers.layers[30] = replace(layers.layers[30], mlp_norm_D=2 * layers.layers[30].mlp_norm_D)
    with pytest.raises(UnsuitedError, match="other numbers"):
        check(layers)


@pytest.mark.cover(family=4)
@pytest.mark.slow
@pytest.mark.parametrize("family", SUITED)
@pytest.mark.parametrize("number", [0, 1])
def test_fused_layers_are_lossless(family: str, number: int) -> None:
    """Guards rows of unlike length, windows of 16, biases, norms of heads, experts, features for
    drafts; within graphs and in prefill. Two of four methods for each family, by turns."""
    name = turn(family, SUITED, (("vanilla", "eagle3"), ("suffix", "medusa")))[number]
    model = zoo.FAMILIES[family]()
    target, kind = Target(model), drafters.find(name)
    target = target.run_with(
        GraphRunner(target, captured_without_gpu, fused=GpuModelLayers(target, join_weights=False))
    )
    drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
    samplings = (Sampling(), Sampling(0.8, seed=3), Sampling(0.7, top_p=0.9, repetition_penalty=1.2, seed=4))
    requests = [Request(prompt(n), 16, sampling) for n, sampling in zip((7, BUCKET - 9, 30), samplings, strict=True)]
    tokens, _ = run(Decoder(drafter.target, drafter, 2), requests)
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_other_layers_are_refused(family: str) -> None:
    """Guards families with other operations: seen from their modules, or, as with Granite's
    multipliers, from their numbers."""
    target = Target(zoo.FAMILIES[family]())
    if family in SUITED:
        check(GpuModelLayers(target, join_weights=False))
        return
    with pytest.raises(UnsuitedError):
        check(GpuModelLayers(target, join_weights=False))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_layers_by_the_kernels_themselves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards how layers call the kernels (Triton's interpreter runs them here): strides, slots, shapes of results."""
    pytest.importorskip("triton")
    attending, between = interpreted("eyas_gpu._attention_kernels"), interpreted("eyas_gpu._layer_kernels")

    def attention(*inputs: Any) -> Tensor:
        q_RQHh, window = inputs[0], inputs[7]
        parts, lse = torch.empty(3, *q_RQHh.shape), torch.empty(3, *q_RQHh.shape[:3])
        attending.parts(*inputs[:7], window, parts, lse)
        attending.combine(parts, lse, out := torch.empty_like(q_RQHh))
        return out

    def add_norm(x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        between.add_norm(x, *more, summed := torch.empty_like(x), normed := torch.empty_like(x))
        return summed, normed

    def rotate_and_store(q: Tensor, *more: Any) -> Tensor:
        between.rotate_and_store(q, *more, out := torch.empty(*q.shape[:2], 4, 12))
        return out

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        between.swiglu(gate, up, out := torch.empty(gate.shape))
        return out

    for kernel in (attention, add_norm, rotate_and_store, swiglu):
        monkeypatch.setattr(fused, kernel.__name__, kernel)
    check(GpuModelLayers(Target(zoo.FAMILIES[family]()), join_weights=True))


class Kernels(TorchDispatchMode):
    """Counts operations other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        if not all(alias is not None and not alias.is_write for alias in aliases):
            self.names[func._overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("join_weights", "kernels_a_layer"), [(True, 10), (False, 13)])
def test_kernels_a_layer(join_weights: bool, kernels_a_layer: int) -> None:
    """Guards the number of launches: two depths tell what a layer costs. More show as milliseconds on a GPU."""
    counts = []
    for layers in (2, 5):
        target = Target(zoo.tiny("llama", num_hidden_layers=layers))
        session = target.run_with(FusedRunner(GpuModelLayers(target, join_weights))).open(1)
        session.prefill(0, prompt(140))
        session.forward(torch.tensor([[5]]), Tree.chain(1, 1))  # tables of positions are made once
        with Kernels() as counted:
            session.forward(torch.tensor([[5, 6, 7]]), Tree.chain(1, 3))
        counts.append(counted.names)
    assert (counts[1] - counts[0]).total() == 3 * kernels_a_layer, counts[1] - counts[0]


@pytest.mark.parametrize("family", SUITED)
def test_joined_matrices_are_stored_once(family: str) -> None:
    """Guards the memory: parameters are views of the joined matrices, with the values they had. Bug: a second copy of most
    weights. A model that the user loaded keeps its storages and modules."""
    model = zoo.FAMILIES[family]()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    places = {name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()}
    check(GpuModelLayers(Target(model), join_weights=False))
    assert {name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()} == places
    layers = GpuModelLayers(Target(model), join_weights=True)
    check(layers)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    attention: Any = model.model.layers[1].self_attn
    joined = layers.layers[1].qkv.weight_XD
    assert joined is not None
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert {m.weight.untyped_storage().data_ptr() for m in parts} == {joined.untyped_storage().data_ptr()}
    stored = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(stored.values()) == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("change", ["hook", "forward", "class"])
def test_what_somebody_else_has_changed_is_refused(change: str) -> None:
    """Guards adapters and instrumented models, whose changes eyas' own loop would pass over."""
    target = Target(zoo.FAMILIES["llama"]())
    layer: Any = target.family.layers[2]
    if change == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif change == "forward":
        layer.self_attn.forward = lambda *_: None
    else:

        class Adapter(nn.Linear):
            pass

        layer.self_attn.q_proj = Adapter(48, 48, bias=False)
    with pytest.raises(UnsuitedError, match="layer 2"):
        GpuModelLayers(target, join_weights=False)
