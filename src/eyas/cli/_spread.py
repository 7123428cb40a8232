"""Work of a command on several processes, on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from eyas import elsewhere
from eyas.cli._load import need_packages

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Given = TypeVar("Given")


@dataclass(frozen=True)
class Here(Generic[Given]):
    """A function to call in another process, but in the folder of this one, from which relative paths are meant."""

    function: Callable[..., Given]
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, *arguments: object) -> Given:
        with suppress(OSError):  # another machine need not have it
            os.chdir(self.folder)
        return self.function(*arguments)


def wants_gpu(device: str) -> bool:
    """Return whether a process whose --device this is takes a GPU."""
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available()


def on_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster, or asks with "local" for Ray on this machine."""
    return bool(os.environ.get("RAY_ADDRESS"))


def cores_for(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def spread(
    items: Sequence[Item],
    make: Callable[[], Callable[[Sequence[Item]], Iterable[Outcome]]],
    workers: int,
    device: str,
) -> Iterator[Outcome]:
    """Yield the outcomes of items, by workers of Ray's that `make` makes, in the order of the items."""
    need_packages("--workers", "ray", "ray")
    ray = elsewhere.part("workers", "--workers")
    share = ray.Workers(workers, cpus=cores_for(workers), gpus=float(wants_gpu(device)))
    outcomes: Iterator[Outcome] = ray.worked(items, Here(make), share)
    return outcomes
