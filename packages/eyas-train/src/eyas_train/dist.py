"""Training with several processes: the work of each, and their agreement.

    torchrun --nproc-per-node 8 -m eyas train ...        WORLD_SIZE says how many processes there are

Of the batches of a step, process r of n takes numbers r, r + n, ... Gradients are sums over tokens and are
summed over processes. So a step is the same for any number of processes, up to rounding. All processes make the
same decisions from the same numbers; the first one writes. Without WORLD_SIZE, torch.distributed is not needed.

    fsdp   each process holds a shard of every weight, of its gradient and of its optimizer state (FSDP2)
    ddp    each process holds all of them

FSDP2 shards one module, whose forward is the method's loss: so a method always sees whole weights,
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

from eyas.drafters import Batch, DraftMethod, Loss
from eyas.errors import OptionError, one_line

T = TypeVar("T")
LossFunction = Callable[[Batch, torch.Generator], Loss]
TIMEOUT = timedelta(hours=1)  # the other processes wait while the first one decodes held-out prompts
FSDP_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # attributes to which fully_shard adds its hooks
CONNECTION_ERRORS = (
    "connection closed", "connection reset", "broken pipe", "timed out", "connection refused", "socket closed", "remote process",
)  # fmt: skip


def world_size() -> int:
    """Return the number of processes that the launcher has started."""
    return launched_as("WORLD_SIZE", 1)


def launched_as(name: str, default: int) -> int:
    """Return a number that the launcher has put into the environment. Raise OptionError if it is not a whole number."""
    given = os.environ.get(name) or str(default)
    if not given.isdecimal():
        raise OptionError(f"{name} must be a whole number, as torchrun sets it; it is {given!r}")
    return int(given)


def join(device: torch.device, parallel: str) -> SingleProcess:
    """Connect to the other processes of the run, if there are any. Raise OptionError when they cannot be reached.

    Args:
        parallel: "fsdp" or "ddp".
    """
    return ProcessGroup(device, parallel) if world_size() > 1 else SingleProcess()


class SingleProcess:
    """A run of one process; the base class of `ProcessGroup`. All processes of a group call the
    same methods in the same order.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def split(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Return this process's share of the items, each with its number among all of them."""
        return list(enumerate(items))[self.rank :: self.size]

    def shard(self, drafter: DraftMethod) -> LossFunction:
        """Distribute the drafter's net; returns the loss to train it with. Its parameters may be
        other objects afterwards.
        """
        return drafter.loss

    def unshard(self, net: nn.Module) -> None:
        """Make the net an ordinary one again."""

    @contextmanager
    def full_weights(self, net: nn.Module) -> Iterator[None]:
        """Make the net an ordinary one with whole weights within this context, in every process. May be nested."""
        yield

    def broadcast_weights(self, net: nn.Module) -> None:
        """Give the net of every process the weights of the first one."""

    def backward(self, total: Tensor, is_last: bool) -> None:
        """Compute gradients. `is_last`: of the losses of this process in this step."""
        torch.autograd.backward(total)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum gradients over the processes, after the last backward of a step."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        return [value]

    def sum_values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return sums over the processes, the same bits in all of them."""
        total = dict[str, float]()
        for part in self.gather(dict(values)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return any(self.gather(flag))

    def broadcast(self, value: T) -> T:
        """Return the first process's value."""
        return self.gather(value)[0]

    def close(self) -> None:
        """Leave the group, after a run that ended well."""

    def is_connection_error(self, error: RuntimeError) -> bool:
        """Return whether the error says that another process has ended."""
        return False


class ProcessGroup(SingleProcess):
    """One of several processes, connected by torch.distributed."""

    def __init__(self, device: torch.device, parallel: str) -> None:
        """Raise OptionError if the other processes cannot be reached."""
        import torch.distributed as dist

        self.dist, self.device = dist, device
        self.use_fsdp = parallel == "fsdp"
        self.owns_group = not dist.is_initialized()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.owns_group:
            try:
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
            except (ValueError, RuntimeError) as error:
                raise OptionError(
                    f"WORLD_SIZE is {world_size()}, but the processes cannot meet ({one_line(error, 200)}); start them with torchrun"
                ) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sharded: Any = None  # FSDP2's module
        self.original_hooks: list[tuple[nn.Module, dict[str, Any]]] = []  # as they were before the net was sharded

    def shard(self, drafter: DraftMethod) -> LossFunction:
        assert drafter.net is not None
        self.broadcast_weights(drafter.net)
        if not self.use_fsdp:
            return drafter.loss
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.original_hooks = [
            (module, {name: vars(module)[name].copy() for name in FSDP_HOOKS}) for module in drafter.net.modules()
        ]
        self.sharded = fully_shard(_LossModule(drafter), mesh=init_device_mesh(self.device.type, (self.size,)))
        self.sharded.set_force_sum_reduction_for_comms(True)  # sums, not means; gloo knows no other
        self.sharded.set_gradient_divide_factor(1.0)
        return lambda batch, generator: Loss(*self.sharded(batch, generator))

    def unshard(self, net: nn.Module) -> None:
        self._replace_shards(net)
        for module, hooks in self.original_hooks:
            vars(module).update({name: before.copy() for name, before in hooks.items()})
        self.sharded, self.original_hooks = None, []

    @contextmanager
    def full_weights(self, net: nn.Module) -> Iterator[None]:
        shards = self._replace_shards(net)
        try:
            yield
        finally:
            for module, name, value in shards:
                setattr(module, name, value)

    def _replace_shards(self, net: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        """Put whole parameters in the place of shards; returns the shards and where they were."""
        parameters: list[tuple[nn.Module, str, Any]] = [
            (module, *item) for module in net.modules() for item in module._parameters.items()
        ]
        shards = [(module, name, value) for module, name, value in parameters if hasattr(value, "full_tensor")]
        for module, name, value in shards:
            setattr(module, name, nn.Parameter(value.detach().full_tensor(), requires_grad=value.requires_grad))
        return shards

    def broadcast_weights(self, net: nn.Module) -> None:
        for value in net.state_dict().values():
            self.dist.broadcast(value, src=0)

    def backward(self, total: Tensor, is_last: bool) -> None:
        if self.sharded is not None:
            self.sharded.set_requires_gradient_sync(is_last)
        super().backward(total, is_last)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.sharded is not None:
            return
        for value in parameters:
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        for work in [self.dist.all_reduce(value.grad, async_op=True) for value in parameters]:
            work.wait()

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        self.dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        self.dist.barrier()
        if self.owns_group:
            self.dist.destroy_process_group()

    def is_connection_error(self, error: RuntimeError) -> bool:
        kinds = (self.dist.DistNetworkError, self.dist.DistBackendError, self.dist.DistStoreError)
        return isinstance(error, kinds) or any(text in str(error).lower() for text in CONNECTION_ERRORS)


class _LossModule(nn.Module):
    """The module that FSDP2 shards: the net, whose weights the loss alone uses."""

    def __init__(self, drafter: DraftMethod) -> None:
        super().__init__()
        self.net = drafter.net
        self.loss = drafter.loss

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = self.loss(batch, generator)
        return loss.total, loss.count, loss.sums
