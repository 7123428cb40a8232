"""Work on many items with several processes, on Ray Data.

Each worker builds its function once, and then receives a few items at a time. Ray gives the items of a worker
that died to another worker. The caller gets every outcome once, in the order of the items, and as fast as it
takes them. Items and outcomes go between these processes as pickles, as all of Ray's own messages do; none is
read from a file.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.data

from eyas.errors import EyasError, OptionError, one_line

__all__ = ["Workers", "connected", "fault", "on_shared_cluster", "piece_size", "worked"]

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Make = Callable[[], Callable[[Sequence[Any]], Iterable[Any]]]

ADDRESS = "RAY_ADDRESS"  # Ray's own variable: a cluster that runs already
LOCAL = "local"  # Ray's own word: on this machine
PIECES = 8  # the items are divided into at least so many pieces a worker
MAX_ITEMS = 64  # most items of a piece
LOSSES = 10  # workers that are lost one after the other before one is ready, until Ray gives up


@dataclass(frozen=True)
class Workers:
    """Describe the worker processes.

    Attributes:
        number: how many there are.
        cpus, gpus: numbers that each uses.
    """

    number: int
    cpus: float = 1
    gpus: float = 0


def worked(
    items: Sequence[Item], make: Callable[[], Callable[[Sequence[Item]], Iterable[Outcome]]], workers: Workers
) -> Iterator[Outcome]:
    """Yield the outcomes of items, in the order of the items.

    Args:
        make: builds the function that works on items; it is called once in each worker.

    Raises:
        EyasError: `make` or its result has raised it. Ray does not try again after an exception, but it does
            where a process is lost.
    """
    if not items:
        return
    with connected(workers):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        context.max_consecutive_actor_init_deaths = LOSSES
        size = piece_size(len(items), workers.number)
        pieces = [{"items": pickle.dumps(items[i : i + size])} for i in range(0, len(items), size)]
        done = ray.data.from_items(pieces, override_num_blocks=len(pieces)).map_batches(
            _Worker,
            fn_constructor_args=(make,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers.number),
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
        )
        for row in done.iter_rows():
            outcomes = pickle.loads(row["outcomes"])
            if isinstance(outcomes, EyasError):
                raise outcomes
            yield from outcomes


def piece_size(items: int, workers: int) -> int:
    """Return the number of items that a worker takes at a time. They are enough to keep its rows full, and few
    enough that all workers end together and a dying one has done little in vain."""
    return max(1, min(MAX_ITEMS, items // (PIECES * workers)))


class _Worker:
    """The class of Ray's actors."""

    def __init__(self, make: Make) -> None:
        self.failed: EyasError | None = None
        try:
            self.work = make()
        except Exception as error:
            self.failed = fault(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"outcomes": [pickle.dumps(self._outcomes(piece)) for piece in batch["items"]]}

    def _outcomes(self, piece: bytes) -> list[Any] | EyasError:
        if self.failed is not None:
            return self.failed
        try:
            return list(self.work(pickle.loads(piece)))
        except Exception as error:
            return fault(error)


def fault(error: Exception) -> EyasError:
    """Return the error to report for a worker's exception, on one line. The traceback of a fault of ours goes to Ray's
    log of the worker."""
    if isinstance(error, EyasError):
        return OptionError(str(error))
    traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(place.filename)}:{place.lineno}, the traceback is in the worker's log of Ray's"
    return EyasError(f"a worker has failed with {type(error).__name__}: {one_line(error, 300)} ({where})")


def on_shared_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster that runs already, perhaps for others too."""
    return os.environ.get(ADDRESS, LOCAL) not in ("", LOCAL)


@contextmanager
def connected(workers: Workers) -> Iterator[None]:
    """Use the cluster that RAY_ADDRESS names, or start Ray on this machine while the block runs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {} if on_shared_cluster() else {"num_cpus": workers.number * workers.cpus + 1, "include_dashboard": False}
    ray.init(log_to_driver=False, **own)
    try:
        yield
    finally:
        ray.shutdown()
