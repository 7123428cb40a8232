"""A training with several processes that Ray starts, and starts again when one of them is lost, or with fewer.

The training is the one that torchrun runs: each process finds the variables that torchrun sets, and a group that is
connected. What it goes on from is its own state in its output folder, which all machines must see.

A process that is told to end (SIGTERM: `ray stop`, a pod that is taken away) says so to the others, all save the state
after the step that they are in, and Ray begins again from there.
"""

from __future__ import annotations

import shutil
import signal
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

__all__ = ["train_with"]

RAY_FOLDER = ".ray"  # holds Ray's own files while it runs
FAILURES = 100  # lost processes, until the training is given up


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


def train_with(loop: Loop, workers: Workers, folder: Path, fewest: int | None = None) -> None:
    """Call `loop` in every process, again in all of them after one was lost.

    Args:
        folder: where the training's output goes, which all machines see.
        fewest: the number of processes to run with while the cluster has no room for all; None: all are required.

    Raises:
        EyasError: what `loop` has raised; an error of the user's that a retry cannot fix.
    """
    own = folder / RAY_FOLDER
    with connected(workers), _made(own):
        fault = own / "fault"
        trainer = TorchTrainer(
            _call,
            train_loop_config={"loop": loop, "fault": str(fault)},
            torch_config=_SigtermAware(),
            scaling_config=ScalingConfig(
                num_workers=workers.number if fewest is None else (fewest, workers.number),
                use_gpu=workers.gpus > 0,
                resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
            ),
            run_config=RunConfig(storage_path=str(own), failure_config=FailureConfig(max_failures=FAILURES)),
        )
        trainer.fit()
        if fault.exists():
            raise EyasError(fault.read_text(encoding="utf-8"))


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder for the block."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call(config: Mapping[str, Any]) -> None:
    """Run the training in a process of Ray's. A mistake of the user's ends the run as if it were done: Ray would begin
    it again and again."""
    is_first, fault = ray.train.get_context().get_world_rank() == 0, Path(config["fault"])
    if is_first:
        fault.unlink(missing_ok=True)  # of an earlier try, whose other processes were lost
    NOTICE.is_training = True
    try:
        config["loop"](lambda: NOTICE.is_given)
    except EyasError as error:
        if is_first:
            fault.write_text(str(error), encoding="utf-8")
    finally:
        NOTICE.is_training = False
