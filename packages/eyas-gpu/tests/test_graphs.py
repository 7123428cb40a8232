"""Cycles and passes as graphs: their fixed inputs and state, tried on a CPU with a capture that
runs the work again; and operations that no graph can hold."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from covers import pairs
from eyas import drafters
from eyas.core.cache import ALIGNED, KVCache
from eyas.core.dormant import Decision, Policy, with_policy
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import CycleInput, Drafter, TreeSize
from eyas_gpu.graphs import BUCKET, GraphRunner, tensors_of
from eyas_gpu.recording import CycleReplay
from eyas_lab.bench.simulate import simulated
from fake_graphs import captured_without_gpu, prompt
from reference import plain_decode, run
from test_lossless import OPTIONS

T = TypeVar("T")


pytestmark = pytest.mark.usefixtures("without_cpu_kernels")


def drafter_of(name: str, target: Target) -> Drafter:
    kind = drafters.find(name)
    return kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)


LOSSLESS = ["vanilla", "eagle1", "eagle2", "eagle3", "seagle", "medusa", "suffix", "small_model"]


@pytest.mark.cover(name=5)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "family", "temperature"), pairs(LOSSLESS, ["llama", "gemma2"], [0.0, 1.0]))
def test_graphs_are_lossless(name: str, family: str, temperature: float) -> None:
    """Guards the static inputs: rows of different ages, windows, texts that grow over a bucket's
    edge, whose cache then lies elsewhere. Each pair of method, family and temperature comes once."""
    model = zoo.FAMILIES[family]()
    target = Target(model)
    graphs = GraphRunner(target, captured_without_gpu)
    drafter = drafter_of(name, target.run_with(graphs))
    requests = [Request(prompt(n), 20, Sampling(temperature, seed=n)) for n in (7, BUCKET - 9, 30)]
    tokens, _ = run(decoder := Decoder(drafter.target, drafter, 2), requests)
    # the seed's text is a matter of the trees, and cycles are not recorded
    if temperature and drafter.samples_children:
        return
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
    assert isinstance(decoder.cycle_runner, CycleReplay)
    assert {key[0] for key in decoder.cycle_runner.recorder._recorded} == {BUCKET, 2 * BUCKET}, "both widths were run"


@pytest.mark.cover
@pytest.mark.quick("False-seagle")
@pytest.mark.parametrize("name", ["vanilla", "eagle3", "seagle", "small_model"])
@pytest.mark.parametrize("graphs", [True, False])
def test_aligned_widths_are_lossless(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the widths of a GPU, multiples of 64: masks, keys and the slots that are reserved
    agree, with recordings and without."""
    monkeypatch.setattr(KVCache, "align_width", lambda cache, width: -(-width // ALIGNED) * ALIGNED)
    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    drafter = drafter_of(name, target.run_with(GraphRunner(target, captured_without_gpu)) if graphs else target)
    requests = [Request(prompt(n), 12, Sampling(seed=n)) for n in (7, BUCKET - 5)]
    decoder = Decoder(drafter.target, drafter, 2)
    tokens, _ = run(decoder, requests)
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
    assert decoder.target_session.cache.width % ALIGNED == 0


def test_a_shape_that_cannot_be_captured_runs_as_it_is() -> None:
    """Guards models whose forward waits for the device: a warning, once, and the right text."""

    def refuse(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    target = target.run_with(GraphRunner(target, refuse))
    request = Request((5, 6, 7), 8, Sampling())
    with pytest.warns(UserWarning, match="cannot be captured"):
        tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target), 1), [request])
    assert list(tokens[0]) == list(plain_decode(model, request))


WITH_ITS_DRAFT = ("vanilla", "eagle1", "eagle2", "eagle3", "seagle", "medusa", "hydra", "dflash", "dspark", "peagle")


def address(tensor: Tensor) -> int:
    """Where it lies; 0: nowhere (a tensor of another test that is a fake one)."""
    if isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class Strangers(TorchDispatchMode):
    """Notes what no graph can hold: values that the host reads, shapes that depend on values, and tensors that were
    made from the host's numbers, i.e. that no operation made and that were not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {address(t) for t in gc.get_objects() if issubclass(type(t), Tensor)}
        self.alive: list[Any] = []  # so that no address is used twice
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh")):
            self.found.append(name)
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        strange = [t for t in given if t.ndim and address(t) not in self.known and t.numel()]
        if strange:
            self.found.append(f"{name} reads {[tuple(t.shape) for t in strange]} from the host")
        result = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.alive += made
        self.known |= {address(t) for t in made}
        return result


def operations(name: str, sampling: Sampling, decide: Any = None) -> tuple[list[str], list[bool]]:
    """Returns the operations on foreign tensors in a recorded cycle of the method, and for each
    recording whether it holds its draft."""
    target, found = Target(zoo.FAMILIES["llama"]()), list[str]()

    def watched(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
        for _ in range(2):  # what is made once is there now
            work()
            undo()
        with Strangers() as strangers:
            work()
        undo()
        found.extend(strangers.found)
        return captured_without_gpu(work, undo)

    drafter = drafter_of(name, target.run_with(GraphRunner(target, watched)))
    decoder = Decoder(drafter.target, drafter, 2, **({"verify": decide} if decide else {}))
    run(decoder, [Request(prompt(n), 6, sampling) for n in (5, 9)])
    assert isinstance(decoder.cycle_runner, CycleReplay)
    return found, [key[4] is None for key in decoder.cycle_runner.recorder._recorded]


@pytest.mark.cover(name=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITH_ITS_DRAFT, "suffix", "small_model"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, top_k=9, top_p=0.9, min_p=0.01)], ids=["greedy", "sampled"]
)
def test_no_graph_waits_for_the_host(name: str, sampling: Sampling) -> None:
    """Guards the capture: one `.item()`, one index from a list, and nothing can be captured on a
    GPU. Which methods are recorded whole."""
    if name in ("eagle1", "small_model") and sampling.temperature:
        pytest.skip("its children are drawn: judged on the host")
    found, whole = operations(name, sampling)
    assert found == []
    assert set(whole) == {name in WITH_ITS_DRAFT}


@pytest.mark.slow
def test_simulated_acceptance_is_recorded() -> None:
    """Guards what a GPU is measured with: random weights, given rates. The lot is drawn on the device."""
    found, whole = operations("eagle2", Sampling(), simulated((0.8, 0.7)))
    assert found == []
    assert whole
    assert all(whole)


@pytest.mark.quick("item")
@pytest.mark.parametrize("how", ["item", "list"])
def test_strangers_are_noticed(how: str) -> None:
    """A test of the test."""
    x = torch.arange(6)
    with Strangers() as strangers:
        y = x[[1, 2]] if how == "list" else x + int(x.max())
    assert strangers.found, y


@pytest.mark.slow
def test_recordings_serve_every_request() -> None:
    """Guards the keys: requests that differ in prompt, length and seed share recordings, and a
    decoder that goes on records nothing new."""
    target = Target(zoo.FAMILIES["llama"]())
    drafter = drafter_of("eagle2", target.run_with(GraphRunner(target, captured_without_gpu)))
    decoder = Decoder(drafter.target, drafter, 1)
    for seed in range(3):
        run(decoder, [Request(prompt(5 + 9 * seed), 8, Sampling(0.7, seed=seed))])
    assert isinstance(decoder.cycle_runner, CycleReplay)
    assert len(decoder.cycle_runner.recorder._recorded) == 1


class Moods(Policy):
    """By lot: trees of any size, a fallback, plain cycles."""

    def __init__(self, seed: int, drafter: Drafter, fallback: Drafter) -> None:
        self.dice, self.largest, self.fallback = random.Random(seed), drafter.max_tree, fallback

    def decide(self, roots: CycleInput) -> Decision:
        if self.dice.random() < 0.6:
            return Decision(self.largest and TreeSize(*(self.dice.randint(1, most) for most in self.largest)))
        rows = frozenset(b for b in roots.active_rows if self.dice.random() < 0.7)
        return Decision(plain=rows) if self.dice.random() < 0.5 else Decision(plain=rows - {0}, fallback=self.fallback)

    def observe(self, steps: Any) -> None:
        pass


@pytest.mark.cover(name=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle2", "eagle3", "seagle", "medusa", "eagle1"])
def test_sleep_over_graphs(name: str) -> None:
    """Guards sessions that sleep, wake and are relieved by another method, whose cycles are
    recorded from the draft on: every change between these leaves the state where the next recording
    looks for it, in a shape that it knows. A draft that is right in loops."""
    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    drafter = drafter_of(name, target.run_with(GraphRunner(target, captured_without_gpu)))
    if name in ("eagle1", "eagle2"):
        with torch.no_grad():
            for weight in drafter.net.parameters():
                weight.zero_()
            drafter.net.fc.weight[:, target.hidden_size :] = torch.eye(target.hidden_size)
    for seed in range(2):
        policy = Moods(seed, drafter, drafter_of("suffix", target))
        requests = [Request(p, 30, Sampling()) for p in ((5,), (11,), prompt(40))]
        tokens, steps = run(decoder := Decoder(drafter.target, with_policy(drafter, policy), 2), requests)
        assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
        assert isinstance(decoder.cycle_runner, CycleReplay)
        assert {key[4] is None for key in decoder.cycle_runner.recorder._recorded} == {True, False}
        assert {"plain", "suffix"} < {s.drafted_by for s in steps}
    assert max(s.accepted for s in steps if s.drafted_by not in ("plain", "suffix")) > 0 or name not in (
        "eagle1",
        "eagle2",
    )


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("crop", ["halves", "last", "none"])
@pytest.mark.parametrize("window", [(2, 9), (0, 12), (4, BUCKET + 4)])
def test_windows_over_graphs(crop: str, window: tuple[int, int]) -> None:
    """Guards SEAGLE's windows in recordings, which trim in every cycle or in none: the trees that
    are drafted without them, for texts that fill a window before, within and never in a bucket;
    rows of different ages, and a second request in a used row."""
    target, found = Target(zoo.FAMILIES["llama"]()), []
    kind, (sink, size) = drafters.find("seagle"), window
    options = build_options(
        kind.Options, {**OPTIONS["seagle"], "window.sink": sink, "window.size": size, "window.crop": crop}
    )
    for graphs in (False, True):
        used = target.run_with(GraphRunner(target, captured_without_gpu)) if graphs else target
        requests = [Request(prompt(n), 20, Sampling(0.7, seed=n)) for n in (7, BUCKET - 9, 30, BUCKET + 3)]
        tokens, steps = run(decoder := Decoder(used, kind.random(used, options, seed=1), 2), requests)
        # what an idle row would draft is nobody's business
        drafted = [(step.draft, step.row) for step in steps if step.draft is not None]
        found.append((tokens, [(d.tokens_BN[row].tolist(), d.tree.parents_BN[row].tolist()) for d, row in drafted]))
    assert isinstance(decoder.cycle_runner, CycleReplay)
    assert True in {key[4] is None for key in decoder.cycle_runner.recorder._recorded}, (
        "cycles were recorded with their drafts"
    )
    assert found[0] == found[1]


@pytest.mark.quick("token")
@pytest.mark.parametrize("inputs", ["unshifted", "feature", "token"])
def test_eagle1s_other_inputs_over_graphs(inputs: str) -> None:
    """Guards sessions whose state is wider than the base's."""
    model, requests = zoo.FAMILIES["llama"](), [Request(prompt(n), 16, Sampling()) for n in (7, 30)]
    kind, target = drafters.find("eagle1"), Target(model)
    options = build_options(kind.Options, {**OPTIONS["eagle1"], "head.inputs": inputs})
    drafter = kind.random(target.run_with(GraphRunner(target, captured_without_gpu)), options, seed=1)
    tokens, _ = run(decoder := Decoder(drafter.target, drafter, 2), requests)
    assert [list(t) for t in tokens] == [list(plain_decode(model, r)) for r in requests]
    assert isinstance(decoder.cycle_runner, CycleReplay)
    assert decoder.cycle_runner.recorder._recorded


@pytest.mark.slow
def test_two_decoders_by_turns() -> None:
    """Guards what a cycle leaves for the next one: another decoder's replay may overwrite all that
    a recording left."""
    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    scratch = list[Any]()

    def shared(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
        found, replay = captured_without_gpu(work, undo)
        scratch.append(found)

        def noisy() -> None:
            replay()
            for other in scratch:  # a pool of memory that all recordings share
                if other is not found:
                    for tensor in tensors_of(other):
                        tensor.zero_()

        return found, noisy

    drafter = drafter_of("eagle2", target.run_with(GraphRunner(target, shared)))
    decoders = [Decoder(drafter.target, drafter) for _ in range(2)]
    requests, found = [Request(prompt(n), 12, Sampling()) for n in (7, 30)], [list[int](), list[int]()]
    for decoder, request in zip(decoders, requests, strict=True):
        decoder.add(request)
    while not all(decoder.finished for decoder in decoders):
        for decoder, tokens in zip(decoders, found, strict=True):
            for step in decoder.step():
                tokens += step.tokens
    assert found == [list(plain_decode(model, r)) for r in requests]
