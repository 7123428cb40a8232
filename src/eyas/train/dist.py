"""One run on several processes: what each of them does, and how they agree. A process alone is a `SingleProcess` too, with nothing to do in it.

    torchrun --nproc-per-node 8 -m eyas train ...        WORLD_SIZE says how many there are; torch.distributed is not needed without it

Of the batches of a step, process r of n takes those numbered r, r + n, ...; gradients are sums over tokens, and are summed over processes,
so a step is the same step in any world, up to rounding. All make the same decisions from the same numbers; the first one writes.

    fsdp   each process holds a part of every weight, of its gradient and of its optimiser's state
    ddp    each process holds all of it

What is sharded is one unit: a module whose forward is the method's loss. So whatever a method does with its weights, it finds them whole,
and this module knows no method.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eyas.core.drafter import Batch, Drafter, Loss
from eyas.errors import OptionError

__all__ = ["ProcessGroup", "SingleProcess", "join", "processes"]

T = TypeVar("T")
LossOf = Callable[[Batch, torch.Generator], Loss]
PATIENCE = timedelta(hours=1)  # the others wait while the first process decodes held-out prompts
HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # of a module, to which fully_shard adds its own
LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "connection refused", "socket closed", "remote process")


def processes() -> int:
    """How many the launcher has started."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def join(device: torch.device, parallel: str) -> SingleProcess:
    """Meet the other processes of the run, if there are any."""
    return ProcessGroup(device, parallel) if processes() > 1 else SingleProcess()


class SingleProcess:
    """One process."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """This process's part, with its numbers."""
        return list(enumerate(items))[self.rank :: self.size]

    def spread(self, drafter: Drafter) -> LossOf:
        """Make the net ready for training; the loss to train it with. Its parameters may be others afterwards."""
        return drafter.loss

    def backward(self, total: Tensor, last: bool) -> None:
        """`last`: of this process in this step."""
        torch.autograd.backward(total)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """After the last backward of a step."""

    @contextmanager
    def gathered(self, net: nn.Module) -> Iterator[None]:
        """The net is an ordinary one, whole on every process. All of them come here together; what they do inside is their own."""
        yield

    def unspread(self, net: nn.Module) -> None:
        """The net is an ordinary one again."""

    def whole(self, value: Tensor) -> Tensor:
        """A tensor of the optimiser, whole; all processes together."""
        return value

    def part(self, value: Tensor, parameter: Tensor) -> Tensor:
        """This process's part of it."""
        return value

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    def any(self, flag: bool) -> bool:
        return flag

    def told(self, value: T) -> T:
        """What the first process says."""
        return value

    def same_weights(self, net: nn.Module) -> None:
        """Those of the first process, for all."""

    def leave(self) -> None:
        """After the last step of a run that ended well."""

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether this means that another process has gone."""
        return False


class ProcessGroup(SingleProcess):
    """One of several processes."""

    def __init__(self, device: torch.device, parallel: str) -> None:
        import torch.distributed as dist

        self.dist, self.device, self.sharded = dist, device, parallel == "fsdp"
        self.began = not dist.is_initialized()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.began:
            try:
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
            except (ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise OptionError(
                    f"WORLD_SIZE is {processes()}, but the processes cannot meet ({reason}); start them with torchrun"
                ) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.unit: Any = None
        self.hooks: list[tuple[nn.Module, dict[str, Any]]] = []  # as they were before the net was sharded

    def spread(self, drafter: Drafter) -> LossOf:
        assert drafter.net is not None
        self.same_weights(drafter.net)
        if not self.sharded:
            return drafter.loss
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.hooks = [(module, {name: vars(module)[name].copy() for name in HOOKS}) for module in drafter.net.modules()]
        self.unit = fully_shard(_Unit(drafter), mesh=init_device_mesh(self.device.type, (self.size,)))
        self.unit.set_force_sum_reduction_for_comms(True)  # sums, not means; gloo knows no other
        self.unit.set_gradient_divide_factor(1.0)
        return lambda batch, generator: Loss(*self.unit(batch, generator))

    def backward(self, total: Tensor, last: bool) -> None:
        if self.unit is not None:
            self.unit.set_requires_gradient_sync(last)
        super().backward(total, last)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.unit is not None:
            return
        for value in parameters:
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        for work in [self.dist.all_reduce(value.grad, async_op=True) for value in parameters]:
            work.wait()

    @contextmanager
    def gathered(self, net: nn.Module) -> Iterator[None]:
        before = self._exchange(net)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    def unspread(self, net: nn.Module) -> None:
        self._exchange(net)
        for module, hooks in self.hooks:
            vars(module).update({name: before.copy() for name, before in hooks.items()})
        self.unit, self.hooks = None, []

    def _exchange(self, net: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Put whole parameters in the place of shards; what stood there."""
        found = [(module, name, value) for module in net.modules() for name, value in module._parameters.items() if value is not None]
        shards = [(module, name, value) for module, name, value in found if hasattr(value, "full_tensor")]
        for module, name, value in shards:
            setattr(module, name, nn.Parameter(value.detach().full_tensor(), requires_grad=value.requires_grad))  # type: ignore[attr-defined]
        return shards

    def whole(self, value: Tensor) -> Tensor:
        if not hasattr(value, "full_tensor"):
            return value
        full: Tensor = value.full_tensor()
        return full.cpu() if self.first else full.new_empty(0)

    def part(self, value: Tensor, parameter: Tensor) -> Tensor:
        if not hasattr(parameter, "full_tensor"):
            return value
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        return distribute_tensor(value.to(self.device), mesh, placements, src_data_rank=None)

    def _all(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, value)
        return found

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """In the order of the processes, so that all of them find the same bits."""
        total = dict[str, float]()
        for part in self._all(dict(values)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def any(self, flag: bool) -> bool:
        return any(self._all(flag))

    def told(self, value: T) -> T:
        box: list[Any] = [value]
        self.dist.broadcast_object_list(box, src=0)
        said: T = box[0]
        return said

    def same_weights(self, net: nn.Module) -> None:
        for value in net.state_dict().values():
            self.dist.broadcast(value, src=0)

    def leave(self) -> None:
        self.dist.barrier()
        if self.began:
            self.dist.destroy_process_group()

    def is_lost(self, error: RuntimeError) -> bool:
        kinds = (self.dist.DistNetworkError, self.dist.DistBackendError, self.dist.DistStoreError)
        return isinstance(error, kinds) or any(sign in str(error).lower() for sign in LOST)


class _Unit(nn.Module):
    """What is sharded: the net, used by the loss and by nothing else."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.net, self.loss = drafter.net, drafter.loss

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = self.loss(batch, generator)
        return loss.total, loss.count, loss.sums
