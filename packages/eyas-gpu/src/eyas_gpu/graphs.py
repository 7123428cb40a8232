"""CUDA graphs: a whole cycle, or one forward of a model, is replayed by one launch instead of
thousands of kernel launches.

A whole cycle is recorded (recording.py) if its draft reads no values on the host: all levels of the
draft, the target's forward, verification and both commits. Otherwise the cycle is recorded without
its draft. A forward alone is recorded where a cycle cannot be: with sampled children, a repetition
penalty or processors, and for models that draft. Prompts, trees of more than MAX_RECORDED_NODES nodes, and
work whose capture fails (with a warning) run without graphs.

A graph is valid for one number of rows and nodes and one width of the cache. Inputs are copied into
the graph's own tensors, masks and slots are computed inside it, and its results stay in its own
tensors. Keys and values are read in place (grouped_attention.py).

Tested on a CPU only: `capture` then runs the work again, and a test looks for operations that wait
for the device or read values on the host.
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

from eyas.core.cycle import CycleRunner
from eyas.core.ops import REFERENCE, Backend, Ops
from eyas.core.target import ForwardInput, ModelRunner, Target
from eyas.core.tree import Cycle, TargetOutput
from eyas.errors import first_line
from eyas.kernels import EXACT
from eyas_gpu.compiled import CompiledLayers
from eyas_gpu.grouped_attention import grouped_attention_enabled
from eyas_gpu.recording import BUCKET, CycleReplay, State

__all__ = [
    "BUCKET",
    "Capture",
    "CudaCapture",
    "CycleRecorder",
    "GraphRunner",
    "ModelLayers",
    "tensors_of",
]

MAX_RECORDED_NODES = 128  # new nodes of a forward that is recorded
MAX_GRAPHS = 48  # graphs that are kept; the least recently used one is dropped

T = TypeVar("T")


class Capture(Protocol):
    """Turns `work` into a recording: (work, undo) -> (result, replay).

    `undo` reverts a run of `work`, so that it can be run for warm-up. When the capture returns,
    `work` has had no effect; each call of `replay` runs it and leaves its result in the tensors of
    `result`.
    """

    def __call__(self, work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]: ...


class ModelLayers(Protocol):
    """A target's layers by kernels."""

    def __call__(self, inputs: ForwardInput) -> TargetOutput: ...


class CudaCapture:
    """Captures CUDA graphs on one device: three warm-up runs on a side stream, then the capture,
    which runs nothing.

    All graphs share one memory pool, because the result of a graph is read or copied before the
    next graph runs.
    """

    _of: ClassVar[dict[torch.device, tuple[Any, Any]]] = {}  # stream and memory pool of each device
    _failed: ClassVar[list[Any]] = []  # graphs whose capture failed: they are kept, as their memory must not be freed

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
                    result = work()
            except RuntimeError:
                self._failed.append(graph)
                del self._of[self.device]
                raise

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return result, replay


def tensors_of(record: object) -> Iterator[Tensor]:
    """Return all tensors in a dataclass and the dataclasses in it."""
    if isinstance(record, Tensor):
        yield record
    elif is_dataclass(record):
        for field in fields(record):
            yield from tensors_of(getattr(record, field.name))


class CycleRecorder:
    """Records and replays the cycles of one decoder: the `Recorder` of `recording.CycleReplay`.

    Args:
        within_recording: makes a context in which the target's forwards are not recorded as graphs
            of their own.
    """

    def __init__(self, capture: Capture, within_recording: Callable[[], Any]) -> None:
        self.capture, self.within_recording = capture, within_recording
        self._recorded: OrderedDict[Hashable, tuple[dict[str, Tensor], Cycle, Callable[[], None]] | None] = (
            OrderedDict()
        )
        self._inputs: dict[Hashable, dict[str, Tensor]] = {}  # the inputs of the last replay of each recording
        self._state: dict[tuple[int, str], Tensor] = {}  # the recordings' tensors of sessions' attributes

    def __call__(
        self, key: Hashable, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> Cycle | None:  # fmt: skip
        for attribute in state:
            self._copy_into_recording(attribute, getattr(attribute.holder, attribute.name))
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs, state, inplace_state, work)
            if len(self._recorded) > MAX_GRAPHS:
                self._inputs.pop(self._recorded.popitem(last=False)[0], None)
        self._recorded.move_to_end(key)
        if (recording := self._recorded[key]) is None:
            return None
        recorded_inputs, cycle, replay = recording
        last = self._inputs.setdefault(key, {})
        for name, tensor in inputs.items():
            # tensors of RowSettings stay the same objects from cycle to cycle, so they need no copy
            if last.get(name) is not tensor:
                recorded_inputs[name].copy_(tensor)
        self._inputs[key] = dict(inputs)
        replay()
        return cycle

    def to_host(self, host_result_BX: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        """Return results in memory of the CPU, and a function that waits until they are there; None if they already
        are."""
        if host_result_BX.device.type != "cuda":
            return host_result_BX.clone(), None
        host_BX = torch.empty(host_result_BX.shape, dtype=host_result_BX.dtype, pin_memory=True)
        host_BX.copy_(host_result_BX, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(host_result_BX.device))
        return host_BX, copied.synchronize

    def _copy_into_recording(self, attribute: State, value: Tensor) -> None:
        """Set the attribute to the recordings' tensor for it, filled with `value`."""
        key = id(attribute.holder), attribute.name
        if key not in self._state:
            self._state[key] = value.new_zeros(attribute.shape)
        recorded = self._state[key]
        if value is not recorded:
            recorded[tuple(slice(size) for size in value.shape)].copy_(value)
        setattr(attribute.holder, attribute.name, recorded)

    def _record(
        self, inputs: Mapping[str, Tensor], state: Sequence[State], inplace_state: Sequence[Tensor],
        work: Callable[[Mapping[str, Tensor]], Cycle],
    ) -> tuple[dict[str, Tensor], Cycle, Callable[[], None]] | None:  # fmt: skip
        recorded_inputs = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in inputs.items()}
        state_before = [getattr(attribute.holder, attribute.name).clone() for attribute in state]
        inplace_before = [tensor.clone() for tensor in inplace_state]

        def run() -> Cycle:
            cycle = work(recorded_inputs)
            for attribute in state:
                self._copy_into_recording(attribute, getattr(attribute.holder, attribute.name))
            return cycle

        def undo() -> None:
            for attribute, value in zip(state, state_before, strict=True):
                self._copy_into_recording(attribute, value)
            for tensor, value in zip(inplace_state, inplace_before, strict=True):
                tensor.copy_(value)

        try:
            with self.within_recording():
                return recorded_inputs, *self.capture(run, undo)
        except RuntimeError as error:
            undo()
            warnings.warn(
                f"a cycle cannot be captured as a CUDA graph and runs as it is: {first_line(error)}",
                stacklevel=2,
            )
            return None


@dataclass(frozen=True)
class _Buffers:
    """The input tensors of one graph."""

    tokens_RQ: Tensor
    position_RQ: Tensor
    length_R: Tensor
    depth_RT: Tensor
    visible_RQT: Tensor

    @classmethod
    def like(cls, inputs: ForwardInput) -> _Buffers:
        tensors = (inputs.tokens_RQ, inputs.position_RQ, inputs.length_R, inputs.depth_RT, inputs.visible_RQT)
        return cls(*(x.clone(memory_format=torch.contiguous_format) for x in tensors))

    def fill(self, inputs: ForwardInput) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(inputs, name))


class GraphRunner:
    """Runs the forwards of a target as CUDA graphs.

    Args:
        capture: makes the recordings; None: `CudaCapture`.
        compiled: the model's layers by torch.compile; None: they are not compiled.
        fused: the model's layers by few kernels; None: they run by the model's own code.
        ops: the operations around the forward.
        draft_layers: returns the layers by few kernels of a model that drafts; None: no model has them.
    """

    weight_format = EXACT
    threads: int | None = None
    records_cycles = True
    skips_rows = False
    skips_padding = False

    def __init__(
        self, target: Target, capture: Capture | None = None, compiled: CompiledLayers | None = None, fused: ModelLayers | None = None,
        ops: Ops = REFERENCE, draft_layers: Callable[[Target], ModelLayers | None] | None = None,
    ) -> None:  # fmt: skip
        self.target, self.capture, self.model_runner = target, capture or CudaCapture(target.device), ModelRunner()
        self.compiled, self.name = compiled, "graphs" if compiled is None else "compiled graphs"
        self.fused, self.ops, self.draft_layers = fused, ops, draft_layers
        self._graphs: OrderedDict[tuple[object, ...], tuple[_Buffers, TargetOutput, Callable[[], None]] | None] = (
            OrderedDict()
        )
        self._within_cycle = False  # a cycle is being recorded: the forward in it is not a graph of its own

    @property
    def backend(self) -> Backend | None:
        """The backend of torch.compile; None without it."""
        return None if self.compiled is None else self.compiled.backend

    def wrap_cycle(self, cycle: CycleRunner) -> CycleRunner:
        """Return a cycle that is recorded, and replayed as CUDA graphs."""
        return CycleReplay(cycle, CycleRecorder(self.capture, self._recording_cycle))

    @contextmanager
    def _recording_cycle(self) -> Iterator[None]:
        self._within_cycle = True
        try:
            yield
        finally:
            self._within_cycle = False

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        """Return a small model that runs by recorded graphs, too."""
        layers = None if self.compiled is None else CompiledLayers(other.family.layers, self.compiled.backend)
        fused = None if self.draft_layers is None else self.draft_layers(other)
        return other.run_with(GraphRunner(other, self.capture, layers, fused, self.ops, self.draft_layers))

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, by the model's own output matrix."""
        return self.model_runner.head(target, hidden)

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        (R, Q), T = inputs.tokens_RQ.shape, inputs.visible_RQT.shape[-1]
        if inputs.prompt or Q > MAX_RECORDED_NODES:
            return self.model_runner(inputs) if self.fused is None else self.fused(inputs)
        if self._within_cycle:
            return self._run(inputs)
        width = -(-inputs.width // BUCKET) * BUCKET
        inputs.cache.reserve(width)
        key = (R, Q, T, width, inputs.rows, inputs.feature_layers, inputs.cache.addresses)
        if key not in self._graphs:
            self._graphs[key] = self._capture(replace(inputs, width=width))
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        if (graph := self._graphs[key]) is None:
            return self._run(inputs)
        buffers, output, replay = graph
        buffers.fill(inputs)
        replay()
        # drafters keep features beyond the next replay
        return TargetOutput(output.logits_BNV, output.features_BNF.clone())

    def _capture(self, inputs: ForwardInput) -> tuple[_Buffers, TargetOutput, Callable[[], None]] | None:
        buffers = _Buffers.like(inputs)
        recorded_work = replace(inputs, **{name: getattr(buffers, name) for name in buffers.__dataclass_fields__})

        try:
            return buffers, *self.capture(lambda: self._run(recorded_work), lambda: None)
        except RuntimeError as error:
            warnings.warn(
                f"a pass cannot be captured as a CUDA graph and runs as it is: {first_line(error)}",
                stacklevel=2,
            )
            return None

    def _run(self, inputs: ForwardInput) -> TargetOutput:
        """Run the model. The slots of the new nodes are computed here again, as part of the graph."""
        T, Q = inputs.visible_RQT.shape[-1], inputs.tokens_RQ.shape[1]
        if self.fused is not None:
            inputs.cache.reserve(inputs.width)
            return self.fused(inputs)
        inputs.cache.prepare(
            inputs.rows,
            lambda: inputs.length_R[:, None] + torch.arange(T - Q, T, device=inputs.length_R.device),
            inputs.width,
        )
        with grouped_attention_enabled(self.target.family.layers):
            if self.compiled is None:
                return self.model_runner(inputs)
            with self.compiled.storing_in(inputs.cache):
                return self.model_runner(inputs)
