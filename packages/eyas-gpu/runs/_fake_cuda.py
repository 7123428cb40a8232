"""A GPU that is not there: tensors of device cuda without memory, and a log of what a recorded cycle launches on it.

A cycle runs on FakeTensors through all of eyas and of the model's own code. A value that the host reads is an
exception; the log has the rest:

    launches     operations that are no views, by stage of the cycle, with the bytes that they read and write
    faults       tensors of the host inside the recorded region, two devices in one operation, attention masks of odd widths

An operation counts as one launch, operators of ours (torch.library) as `eyas_gpu.operators.KERNELS` says. A build of
torch without CUDA lacks the guard of the device that indexing asks for: `Unguarded` does that in its place.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.timing import StageTimer
from eyas_gpu.operators import KERNELS

__all__ = ["CUDA", "Launch", "LaunchLog", "fake_cuda", "logged_by_stage"]

CUDA = torch.device("cuda", 0)
HOPPER = (9, 0)  # compute capability of an H100 or H200
T = TypeVar("T")

NOTHING = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "expand_as", "view_as", "transpose", "permute", "t", "movedim",
    "unsqueeze", "squeeze",
    "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "unfold", "unflatten", "flatten", "diagonal",
    "as_strided", "detach", "alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "is_same_size",
    "sym_size", "sym_stride", "sym_numel", "_assert_async", "_assert_tensor_metadata", "resolve_conj", "resolve_neg", "T", "mT",
})  # fmt: skip
READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")  # the host waits for a value
GATHERS = frozenset({"index", "gather", "embedding", "index_select"})  # read as much as they write


@dataclass(frozen=True)
class Launch:
    """An operation on the device."""

    stage: str  # of the cycle: draft, target, verify, commit; rest: around them
    name: str
    bytes: int  # read and written
    kernels: int = 1


class LaunchLog(TorchDispatchMode):
    """Logs the operations within its context.

    Attributes:
        faults: what a recording cannot hold, or what makes it slow, with how often it was met.
    """

    def __init__(self, stage: Callable[[], str]) -> None:
        super().__init__()
        self.stage, self.launches, self.faults = stage, list[Launch](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket._qualified_op_name.split("::")[-1]
        if any(word in name for word in READS):
            self.faults[f"{self.stage()}: the host reads {name}"] += 1
        outputs = func(*args, **(kwargs or {}))
        read, made = (_tensors(part) for part in ((args, kwargs), outputs))
        # a number of the host may take part in an operation, but not be copied
        moves = name in ("_to_copy", "copy_")
        devices = {t.device for t in (*read, *made) if t.ndim or moves}
        if len(devices) > 1 or any(device.type != "cuda" for device in devices):
            shapes = [f"{t.device.type}{list(t.shape)}" for t in (*read, *made)]
            self.faults[f"{self.stage()}: {name} of {', '.join(shapes)}"] += 1
        if "attention" in name:
            for mask in read[3:]:
                if mask.ndim == 4 and mask.shape[-1] % 8:
                    self.faults[f"{self.stage()}: a mask of width {mask.shape[-1]}, which is padded"] += 1
        writes = func._schema.is_mutable
        if (made or writes) and name not in NOTHING and (writes or not _is_view(name, read, made)):
            size = _bytes_of(name, args, read, made)
            self.launches.append(Launch(self.stage(), name, size, KERNELS.get(name, 1)))
        return outputs


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_view(name: str, read: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether the results lie in the memory of the inputs, and the operation does not write there."""
    if name.endswith("_"):
        return False
    stores = {t.untyped_storage()._cdata for t in read}
    return all(t.untyped_storage()._cdata in stores for t in made)


def _bytes_of(name: str, args: Any, read: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    if name in GATHERS:
        return 2 * sum(map(_size, made))
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        return 2 * _size(args[2])
    if name in ("copy_", "fill_", "zero_"):
        return sum(map(_size, made)) + sum(map(_size, read[1:]))
    if name == "rotate_and_store":  # writes the new tokens' slots of the cache alone
        return 2 * sum(map(_size, read[:3]))
    if name == "commit":
        store, _, path = read
        return 2 * path.numel() * (store.numel() // (store.shape[1] * store.shape[3])) * store.element_size()
    return sum(map(_size, read)) + sum(map(_size, made))


def _size(tensor: Tensor) -> int:
    """Bytes of the numbers that a tensor reaches: repeated ones count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


class Unguarded(TorchFunctionMode):
    """Does x[...] and x[...] = y by operators that ask for no guard of the device. Random numbers are not drawn.

    Attributes:
        from_host: tensors that were made on the device from numbers of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.from_host = list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            like = torch.tensor(*args, **{**kwargs, "device": "cpu"})
            self.from_host.append(f"torch.tensor of {list(like.shape)}")
            return torch.empty(like.shape, dtype=like.dtype, device=kwargs["device"])
        if func in (Tensor.uniform_, Tensor.normal_) or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func in SAME and args[0].device.type == "cuda":
            return SAME[func](*args, **kwargs)
        if func is Tensor.__getitem__ and args[0].device.type == "cuda":
            x, indices = _indexed(*args)
            return x if indices is None else torch.ops.aten.index(x, indices)
        if func is Tensor.__setitem__ and args[0].device.type == "cuda":
            x, indices = _indexed(*args[:2])
            value = args[2] if isinstance(args[2], Tensor) else torch.full((), args[2], dtype=x.dtype, device=x.device)
            return torch.ops.aten.copy_(x, value) if indices is None else torch.ops.aten.index_put_(x, indices, value)
        return func(*args, **kwargs)

    def _moved(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x.to(...)."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or x.device, dtype or x.dtype
        if device.type == x.device.type:
            return x if dtype == x.dtype else torch.ops.aten._to_copy(x, dtype=dtype)
        self.from_host.append(f"a tensor {list(x.shape)} moved from {x.device.type} to {device.type}")
        return torch.empty_like(x, dtype=dtype, device=device)


SAME = {
    Tensor.copy_: torch.ops.aten.copy_,
    Tensor.contiguous: torch.ops.aten.contiguous,
    Tensor.__invert__: torch.ops.aten.bitwise_not,
}  # operators that ask for no guard


def _indexed(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """The view that slices, numbers and None make of x, and the tensors that index it; None without any."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    place = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[place : place + 1] = [slice(None)] * (x.ndim - used)
    indices = list[Tensor | None]()
    for item in items:
        dim = len(indices)
        if isinstance(item, Tensor):
            indices.append(item)
        elif item is None:
            x = x.unsqueeze(dim)
            indices.append(None)
        elif isinstance(item, slice):
            x = x if item == slice(None) else torch.ops.aten.slice(x, dim, item.start, item.stop, item.step or 1)
            indices.append(None)
        else:
            x = x.select(dim, int(item))
    return x, indices if any(i is not None for i in indices) else None


def _cast(net: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The net with its weights in this dtype: `nn.Module.to` cannot exchange FakeTensors."""
    for module in net.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            assert weight.device.type == device.type, f"{type(module).__name__}.{name} was made on {weight.device}"
            setattr(module, name, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
    return net


@contextmanager
def fake_cuda() -> Iterator[Unguarded]:
    """Within this context new tensors are FakeTensors, those of device cuda too."""
    with (
        warnings.catch_warnings(),
        mock.patch("torch.random.fork_rng", return_value=nullcontext()),
        mock.patch("torch.nn.Module.to", _cast),
        mock.patch("torch.cuda.get_device_capability", return_value=HOPPER),
        mock.patch("torch.cuda.Event"),
        mock.patch("torch.cuda.current_stream"),
        FakeTensorMode(allow_non_fake_inputs=True),
        Unguarded() as mode,
        torch.inference_mode(),
    ):
        # keys of recordings hold addresses
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield mode


@contextmanager
def logged_by_stage(
    mode: Unguarded,
) -> Iterator[Callable[[Callable[[], T], Callable[[], None]], tuple[T, Callable[[], None]]]]:
    """A capture for `eyas_gpu.graphs.GraphRunner` that runs the work twice, the first time to warm up, and logs the
    second run by the stages of the cycle, in its list `logs`."""
    stages = ["rest"]

    class Stages(StageTimer):
        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            stages.append(name)
            try:
                yield
            finally:
                stages.pop()

    def capture(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
        work()
        undo()
        before = len(mode.from_host)
        with LaunchLog(lambda: stages[-1]) as log:
            result = work()
        log.faults.update(f"numbers of the host: {made}" for made in mode.from_host[before:])
        capture.logs.append(log)  # type: ignore[attr-defined]
        return result, lambda: None

    capture.logs = list[LaunchLog]()  # type: ignore[attr-defined]
    with mock.patch("eyas_gpu.recording.StageTimer", Stages):
        yield capture
