"""A training with several processes that Ray starts, and starts again when one of them is lost, or with fewer.

The training is the one that torchrun runs: each process finds the variables that torchrun sets, and a group that is
connected. It goes on from its own state in its output folder, which all machines must see.

A process that is told to end (SIGTERM: `ray stop`, a pod that is taken away) says so to the others. All save
the state after their present step, and Ray begins again from there. If the command itself is told to end (also
by Ctrl-C), a file in the output folder tells the processes. They save in the same way, and the run is over.
"""

from __future__ import annotations

import logging
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

from eyas.errors import EyasError
from eyas.files import write_errors
from eyas.locks import locked_output, prepare_folder
from eyas_ray.data import Workers, connected, fault

__all__ = ["train_with"]

RAY_FOLDER = ".ray"  # holds Ray's own files while it runs
RAY_PART = "training"  # of the output folder, which one command at a time has
FAULTY = "faults"  # a folder in it, with the mistakes of processes
FAILURES = 100  # lost processes, until the training is given up
FINAL = "final"  # beside the mistakes of processes: the run is over
STOP = "stop"  # in Ray's folder: the command is to end
# Errors that the same call would raise again. Where one process is lost, the others raise a RuntimeError or an OSError.
FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError,
          NotImplementedError, RecursionError, TypeError, ValueError)  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS, LOOK_SECONDS = 120.0, 0.5  # longer than Ray needs to notice a machine that is gone

# Gets the function that says whether to save and stop. Returns None at the end; where it has stopped, the text about it.
Loop = Callable[[Callable[[], bool]], str | None]
log = logging.getLogger("eyas.ray")


class Notice:
    """Whether this process has been told to end while it trains. Ray trains in a thread, and Python gives signals to
    the first one."""

    def __init__(self) -> None:
        self.is_training = self.is_given = False

    def take(self) -> None:
        """Take SIGTERM from now on; call this in the first thread. A second SIGTERM, or one outside of a
        training, does the default action of SIGTERM."""
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


class _Trainer(TorchTrainer):  # type: ignore[misc]  # no types where Ray is not installed
    """torch's trainer, which leaves Ctrl-C to the command: Ray's own handler saves nothing and tells nothing."""

    def _register_sigint_handler(self, controller: Any) -> None:
        """Do nothing."""


def train_with(
    loop: Loop,
    workers: Workers,
    folder: Path,
    fewest: int | None = None,
    patience: float = PATIENCE_SECONDS,
) -> str | None:
    """Call `loop` in every process, again in all of them after one was lost. Return None at its end. If the
    command was told to end, return the loop's message.

    Args:
        folder: where the training's output goes, which all machines see.
        fewest: the number of processes to run with while the cluster has no room for all; None: all are required.
        patience: seconds that processes wait for one that has ended with a mistake of the user's, until they end too.

    Raises:
        EyasError: `loop` has raised it; a retry cannot fix such an error.
        InputError: another command trains in this folder by Ray.
    """
    own = folder / RAY_FOLDER
    prepare_folder(folder)
    with locked_output(folder, RAY_PART), connected(workers), _made(own), _made(own / FAULTY) as faults:
        trainer = _Trainer(
            _call,
            train_loop_config={"loop": loop, "folder": str(own), "patience": patience},
            torch_config=_SigtermAware(),
            scaling_config=ScalingConfig(
                num_workers=workers.number if fewest is None else (fewest, workers.number),
                use_gpu=workers.gpus > 0,
                resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
            ),
            run_config=RunConfig(storage_path=str(own), failure_config=FailureConfig(max_failures=FAILURES)),
        )
        with _first_signal((own / STOP).touch):
            stopped: str | None = trainer.fit().return_value
        # the first one: others may only say that a process has ended
        found = sorted(faults.glob("[0-9]*"), key=lambda file: file.stat().st_mtime_ns)
        if found:
            raise EyasError(found[0].read_text(encoding="utf-8"))
        return stopped


@contextmanager
def _first_signal(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` at the first Ctrl-C or SIGTERM. A second one has its former effect."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and callable(handler := before[signal.Signals(number)]):
            handler(number, frame)
        asked = True
        ask()
        log.info("stopping after this step; Ctrl-C again stops at once")

    if threading.current_thread() is threading.main_thread():  # Python allows no handler in other threads
        for number in SIGNALS:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)


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


def _call(config: Mapping[str, Any]) -> str | None:
    """Run the training in a process of Ray's. A mistake of the user's, or a fault of ours, ends the run as if it were
    done: Ray would begin it again and again."""
    import torch
    import torch.distributed as dist

    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    faults, stop = folder / FAULTY, folder / STOP
    if (faults / FINAL).exists():
        return None
    if rank == 0:
        for file in faults.iterdir():  # of an earlier try, whose other processes were lost
            file.unlink()
    dist.barrier()
    NOTICE.is_training = True
    try:
        with _not_left_waiting(faults, config["patience"]):
            stopped: str | None = config["loop"](lambda: NOTICE.is_given or (rank == 0 and stop.exists()))
        if stopped is not None and not stop.exists():
            raise RuntimeError(stopped)  # Ray begins again
        return stopped
    except (*FAULTS, torch.OutOfMemoryError) as error:
        (faults / str(rank)).write_text(str(fault(error)), encoding="utf-8")
        return None
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
