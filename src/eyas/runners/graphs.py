"""CUDA graphs: a whole cycle, or a pass of the target, replayed without the launches of its thousands of kernels.

A cycle (replay.py) is recorded with all levels of its draft, the pass, verification and both commits wherever the draft is a matter of the
device; else from the draft on. A pass alone is recorded where a cycle cannot be: rows whose children are drawn or that have a repetition
penalty, models that draft. Prompts, and trees that are larger than LARGEST, run as ever; so does what cannot be captured, with a warning.

A graph holds one shape: rows, nodes, and a width of the cache. What it reads is copied into tensors of its own, masks and slots are worked
out inside, results lie where the graph left them. Keys and values are read where they lie (attention.py).

Written and tested for its shapes on a CPU, where `capture` just runs the work again, and where a test looks for operations that wait for
the device or bring something from the host. Not yet run on a GPU.
Letters: R rows, Q new nodes, T nodes in slots.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from eyas.core.cycle import Cycle, CycleRunner
from eyas.core.ops import REFERENCE
from eyas.core.target import ForwardInput, ModelRunner, Target
from eyas.core.tree import TargetOutput
from eyas.kernels import EXACT, ThreadCount
from eyas.nn import Backend
from eyas.runners.attention import packed
from eyas.runners.compiled import CompiledLayers
from eyas.runners.recording import BUCKET, CycleReplay, State

__all__ = ["BUCKET", "Capture", "CudaCapture", "CycleRecorder", "GraphRunner", "tensors_of"]

LARGEST = 128  # new nodes
MOST = 48  # graphs that are kept; those that were not used for longest are forgotten
ALIGNED = 64  # slots: widths of recorded passes are multiples of this, which attention kernels ask of masks

T = TypeVar("T")


class Capture(Protocol):
    """How work becomes a recording: (work, what undoes a run of it) -> (its result, always in the same place; what runs it again). Nothing
    has been done when it returns."""

    def __call__(self, work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]: ...


class CudaCapture:
    """Capture on one device: three runs and the capture, which runs nothing, on a stream of its own; one pool of memory for all graphs, as
    what a graph leaves is read, or copied, before another one runs."""

    _of: ClassVar[dict[torch.device, tuple[Any, Any]]] = {}  # stream and pool
    _failed: ClassVar[list[Any]] = []  # graphs whose memory must not be given back: their capture broke off

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
        with torch.cuda.device(self.device):
            if self.device not in self._of:
                self._of[self.device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            stream, pool = self._of[self.device]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    work()
                    undo()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool, stream=stream):
                    found = work()
            except RuntimeError:
                self._failed.append(graph)
                del self._of[self.device]
                raise

        def again() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return found, again


def tensors_of(found: object) -> Iterator[Tensor]:
    """All tensors of a record of records."""
    if isinstance(found, Tensor):
        yield found
    elif is_dataclass(found):
        for field in fields(found):
            yield from tensors_of(getattr(found, field.name))


class CycleRecorder:
    """Records a decoder's cycles."""

    def __init__(self, capture: Capture, alone: Callable[[], Any]) -> None:
        """alone: a context in which the target's passes are not recorded for themselves."""
        self.capture, self.alone = capture, alone
        self._recorded: OrderedDict[Hashable, tuple[dict[str, Tensor], Cycle, Callable[[], None]] | None] = OrderedDict()
        self._state: dict[tuple[int, str], Tensor] = {}  # what sessions keep, where recordings expect it

    def __call__(
        self, key: Hashable, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> Cycle | None:  # fmt: skip
        for one in state:
            self._settle(one, getattr(one.holder, one.name))
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs, state, inplace_state, work)
            if len(self._recorded) > MOST:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        if (found := self._recorded[key]) is None:
            return None
        mine, cycle, again = found
        for name, tensor in inputs.items():
            mine[name].copy_(tensor)
        again()
        return cycle

    def _settle(self, one: State, value: Tensor) -> None:
        """The holder holds the recordings' own tensor, with this value."""
        place = id(one.holder), one.name
        if place not in self._state:
            self._state[place] = value.new_zeros(one.shape)
        mine = self._state[place]
        if value is not mine:
            mine[tuple(slice(size) for size in value.shape)].copy_(value)
        setattr(one.holder, one.name, mine)

    def _record(
        self, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> tuple[dict[str, Tensor], Cycle, Callable[[], None]] | None:  # fmt: skip
        mine = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in inputs.items()}
        before, as_it_lay = [getattr(one.holder, one.name).clone() for one in state], [tensor.clone() for tensor in inplace_state]

        def run() -> Cycle:
            cycle = work(mine)
            for one in state:
                self._settle(one, getattr(one.holder, one.name))
            return cycle

        def undo() -> None:
            for one, value in zip(state, before, strict=True):
                self._settle(one, value)
            for tensor, value in zip(inplace_state, as_it_lay, strict=True):
                tensor.copy_(value)

        try:
            with self.alone():
                return mine, *self.capture(run, undo)
        except RuntimeError as error:
            undo()
            warnings.warn(f"a cycle cannot be captured as a CUDA graph and runs as it is: {str(error).splitlines()[0]}", stacklevel=2)
            return None


@dataclass(frozen=True)
class _Inputs:
    """A graph's own."""

    tokens_RQ: Tensor
    position_RQ: Tensor
    length_R: Tensor
    depth_RT: Tensor
    visible_RQT: Tensor

    @classmethod
    def like(cls, work: ForwardInput) -> _Inputs:
        given = (work.tokens_RQ, work.position_RQ, work.length_R, work.depth_RT, work.visible_RQT)
        return cls(*(x.clone(memory_format=torch.contiguous_format) for x in given))

    def fill(self, work: ForwardInput) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(work, name))


class GraphRunner:
    """Runs a target's passes by graphs.

    Args:
        compiled: the layers of the model, if they are to be compiled.
    """

    form = EXACT
    threads: int | None = None
    team: ThreadCount = None
    ops = REFERENCE
    records_cycles = True

    def __init__(self, target: Target, capture: Capture | None = None, compiled: CompiledLayers | None = None) -> None:
        self.target, self.capture, self.own = target, capture or CudaCapture(target.device), ModelRunner()
        self.compiled, self.name = compiled, "graphs" if compiled is None else "compiled graphs"
        self._graphs: OrderedDict[tuple[object, ...], tuple[_Inputs, TargetOutput, Callable[[], None]] | None] = OrderedDict()
        self._alone = False  # a cycle is being recorded, so its pass is not

    @property
    def backend(self) -> Backend | None:
        return None if self.compiled is None else self.compiled.backend

    def wrap_cycle(self, cycle: CycleRunner) -> CycleRunner:
        return CycleReplay(cycle, CycleRecorder(self.capture, self._within))

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        layers = None if self.compiled is None else CompiledLayers(other.family.layers, self.compiled.backend)
        return other.run_with(GraphRunner(other, self.capture, layers))

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        return self.own.head(target, hidden)

    def __call__(self, work: ForwardInput) -> TargetOutput:
        (R, Q), T = work.tokens_RQ.shape, work.visible_RQT.shape[-1]
        if work.last_only or Q > LARGEST:
            return self.own(work)
        if self._alone:
            return self._run(replace(work, width=-(-work.width // ALIGNED) * ALIGNED))
        width = -(-work.width // BUCKET) * BUCKET
        work.cache.reserve(width)
        key = (R, Q, T, width, work.span.start, work.feature_layers, work.cache.addresses)
        if key not in self._graphs:
            self._graphs[key] = self._captured(replace(work, width=width))
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        if (found := self._graphs[key]) is None:
            return self._run(work)
        inputs, seen, again = found
        inputs.fill(work)
        again()
        return TargetOutput(seen.logits_BNV, seen.features_BNF.clone())  # features are kept for longer than until the next pass

    def _captured(self, work: ForwardInput) -> tuple[_Inputs, TargetOutput, Callable[[], None]] | None:
        inputs = _Inputs.like(work)
        mine = replace(work, **{name: getattr(inputs, name) for name in inputs.__dataclass_fields__})

        try:
            return inputs, *self.capture(lambda: self._run(mine), lambda: None)
        except RuntimeError as error:
            warnings.warn(f"a pass cannot be captured as a CUDA graph and runs as it is: {str(error).splitlines()[0]}", stacklevel=2)
            return None

    def _run(self, work: ForwardInput) -> TargetOutput:
        """The cache is told where the new nodes go, then the model runs."""
        T, Q = work.visible_RQT.shape[-1], work.tokens_RQ.shape[1]
        work.cache.at(work.span, lambda: work.length_R[:, None] + torch.arange(T - Q, T, device=work.length_R.device), work.width)
        with packed(self.target.family.layers):
            if self.compiled is None:
                return self.own(work)
            with self.compiled.storing_in(work.cache):
                return self.own(work)
