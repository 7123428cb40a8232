"""A training with several processes that Ray starts, and starts again when one of them is lost, or with fewer.

The training is the one that torchrun runs: each process finds the variables that torchrun sets, and a group that is
connected. What it goes on from is its own state in its output folder, which all machines must see.

A process that is told to end (SIGTERM: `ray stop`, a pod that is taken away) says so to the others, all save the state
after the step that they are in, and Ray begins again from there.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from eyas.cluster.data import Workers, connected
from eyas.errors import EyasError
from eyas.files import write_errors
from eyas.locks import locked_output, prepare_folder

__all__ = ["train_with"]

RAY_FOLDER = ".ray"  # holds Ray's own files while it runs
RAY_PART = "training"  # of the output folder, which one command at a time has
FAILURES = 100  # lost processes, until the training is given up
FINAL = "final"  # beside the mistakes of processes: the run is over
PATIENCE_SECONDS, LOOK_SECONDS = 120.0, 0.5  # longer than Ray needs to notice a machine that is gone

Loop = Callable[[Callable[[], bool]], object]  # gets the function that says whether to save and stop


class Notice:
    """Whether this process has been told to end while it trains. Ray trains in a thread, and Python gives signals to
    the first one."""

    def __init__(self) -> None:
        self.is_training = self.is_given = False

    def take(self) -> None:
        """Take SIGTERM from now on; called in the first thread. A second one, or one without a training, does what the
        first one did before."""
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: Any) -> None:
            if callable(before) and (self.is_given or not self.is_training):
                before(number, frame)
            self.is_given = True

        signal.signal(signal.SIGTERM, note)


NOTICE = Notice()  # this process's own


class _SigtermAware(TorchConfig):  # type: ignore[misc]  # no types where Ray is not installed
    """torch's processes, which take SIGTERM as a request."""

    @property
    def backend_cls(self) -> type:
        base = super().backend_cls

        class Backend(base):  # type: ignore[misc, valid-type]
            def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
                super().on_training_start(worker_group, backend_config)
                worker_group.execute(_take_notice)

        return Backend


def _take_notice() -> None:
    NOTICE.take()


def train_with(
    loop: Loop,
    workers: Workers,
    folder: Path,
    fewest: int | None = None,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """Call `loop` in every process, again in all of them after one was lost.

    Args:
        folder: where the training's output goes, which all machines see.
        fewest: the number of processes to run with while the cluster has no room for all; None: all are required.
        patience: seconds that processes wait for one that has ended with a mistake of the user's, until they end too.

    Raises:
        EyasError: what `loop` has raised; an error of the user's that a retry cannot fix.
        InputError: another command trains in this folder by Ray.
    """
    own = folder / RAY_FOLDER
    prepare_folder(folder)
    with locked_output(folder, RAY_PART), connected(workers), _made(own), _made(own / "faults") as faults:
        trainer = TorchTrainer(
            _call,
            train_loop_config={"loop": loop, "faults": str(faults), "patience": patience},
            torch_config=_SigtermAware(),
            scaling_config=ScalingConfig(
                num_workers=workers.number if fewest is None else (fewest, workers.number),
                use_gpu=workers.gpus > 0,
                resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
            ),
            run_config=RunConfig(storage_path=str(own), failure_config=FailureConfig(max_failures=FAILURES)),
        )
        trainer.fit()
        # the first one: others may only say that a process has ended
        found = sorted(faults.glob("[0-9]*"), key=lambda file: file.stat().st_mtime_ns)
        if found:
            raise EyasError(found[0].read_text(encoding="utf-8"))


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Make an empty folder for the block; a command that was killed has left one."""
    shutil.rmtree(folder, ignore_errors=True)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call(config: Mapping[str, Any]) -> None:
    """Run the training in a process of Ray's. A mistake of the user's ends the run as if it were done: Ray would begin
    it again and again."""
    import torch.distributed as dist

    rank, faults = ray.train.get_context().get_world_rank(), Path(config["faults"])
    if (faults / FINAL).exists():
        return
    if rank == 0:
        for fault in faults.iterdir():  # of an earlier try, whose other processes were lost
            fault.unlink()
    dist.barrier()
    NOTICE.is_training = True
    try:
        with _not_left_waiting(faults, config["patience"]):
            config["loop"](lambda: NOTICE.is_given)
    except EyasError as error:
        (faults / str(rank)).write_text(str(error), encoding="utf-8")
    finally:
        NOTICE.is_training = False


@contextmanager
def _not_left_waiting(faults: Path, patience: float) -> Iterator[None]:
    """End this process if another one has ended with a mistake so many seconds ago, and this one waits for it. If the
    other one were lost, Ray would have ended this one by then. Ray begins again, and each process then ends at once."""
    ended = threading.Event()

    def watch() -> None:
        seconds = 0.0
        while seconds < patience:
            if ended.wait(LOOK_SECONDS):
                return
            seconds = seconds + LOOK_SECONDS if any(faults.iterdir()) else 0.0
        (faults / FINAL).touch()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
