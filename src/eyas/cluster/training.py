"""A training with several processes that Ray starts, and starts again when one of them is lost.

The training is the one that torchrun runs: each process finds the variables that torchrun sets, and a group that is
connected. What it goes on from is its own state in its output folder, which all machines must see.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from eyas.cluster.data import Workers, connected
from eyas.errors import EyasError

__all__ = ["train_with"]

FAILURES = 100  # lost processes, until the training is given up


def train_with(loop: Callable[[], object], workers: Workers, failures: int = FAILURES) -> None:
    """Call `loop` in every process, again in all of them after one was lost.

    Raises:
        EyasError: what `loop` has raised; it is a mistake of the user's, which another try does not mend.
    """
    with connected(workers), tempfile.TemporaryDirectory() as folder:
        fault = Path(folder) / "fault"  # of processes on this machine; on others Ray's own message has it
        trainer = TorchTrainer(
            _call,
            train_loop_config={"loop": loop, "fault": str(fault)},
            scaling_config=ScalingConfig(
                num_workers=workers.number,
                use_gpu=workers.gpus > 0,
                resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
            ),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=failures)),
        )
        trainer.fit()
        if fault.exists():
            raise EyasError(fault.read_text(encoding="utf-8"))


def _call(config: Mapping[str, Any]) -> None:
    """Run the training in a process of Ray's. A mistake of the user's ends the run as if it were done: Ray would begin
    it again and again."""
    try:
        config["loop"]()
    except EyasError as error:
        if ray.train.get_context().get_world_rank() == 0:
            Path(config["fault"]).write_text(str(error), encoding="utf-8")
