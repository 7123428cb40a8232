"""Real methods on a tiny llama, for tests of the training: what child processes run must stand in a module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import zoo
from eyas import checkpoints, drafters
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch, Drafter
from eyas.errors import EyasError
from eyas_train import dist
from eyas_train.config import TrainConfig
from eyas_train.data import Batches
from eyas_train.features import batch_of
from eyas_train.loop import TrainResult, train
from eyas_train.new_heads import count_tokens
from eyas_train.state import saved_states
from heads import language
from train import toy

OPTIONS: dict[str, dict[str, Any]] = {"eagle3": {"head.layers": "0,2,3", "head.draft_vocab": 12, "ttt.steps": 3}}
CONFIG: dict[str, Any] = {
    "lr": 3e-3, "steps": 6, "batch_tokens": 128, "max_length": 32, "accumulation": 2, "eval_every": 3, "save_every": 1, "log_every": 1,
    "precision": "float32", "warmup_steps": 1,
}  # fmt: skip


def head(name: str, target: Target | None = None, **options: Any) -> Drafter:
    """A head whose training begins, for `language`."""
    kind, target = drafters.find(name), target or Target(zoo.tiny("llama"), "tiny-llama")
    chosen = build_options(kind.Options, {**OPTIONS.get(name, {}), **options})
    return kind.init_for_training(target, chosen, 1, count_tokens(language(30, 0), target.vocab_size))


def batch(drafter: Drafter) -> Batch:
    """Eight examples of `language`."""
    return batch_of(Batches(language(8, 0), 256), range(8), drafter)


def head_run(
    name: str, folder: str | Path, more: Any = None, drafter: Drafter | None = None, **options: Any
) -> TrainResult:
    torch.set_num_threads(1)
    config = TrainConfig(**{**CONFIG, **options})
    return train(drafter or head(name), language(30, 0), language(6, 1), config, folder, progress=more)


def stopped_run(name: str, folder: Path, stop: int = 0, **options: Any) -> dict[str, Any]:
    """A run of the toy or of a real method, interrupted by a signal once step `stop` is over; the
    outcome and the net."""

    def interrupt(now: Any) -> None:
        if now.step == stop and not now.note:
            os.kill(os.getpid(), signal.SIGINT)

    if name == "toy":
        checkpoints.save = toy.save_toy  # type: ignore[assignment]
        drafter: Drafter = toy.Toy()
        outcome = toy.run(folder, drafter, more=interrupt, **{"log_every": 1, **options})  # type: ignore[arg-type]
    else:
        drafter = head(name)
        outcome = head_run(name, folder, interrupt, drafter, **options)
    assert drafter.net is not None
    return {"outcome": outcome, "net": {key: value.detach().clone() for key, value in drafter.net.state_dict().items()}}


def broken_run(folder: Path) -> str:
    """A number of the second process is bad at step 4; what is said then."""
    checkpoints.save, drafter = toy.save_toy, toy.Toy()  # type: ignore[assignment]
    drafter.bad_from = 3 if os.environ["RANK"] == "1" else 10**9
    try:
        toy.run(folder, drafter)
    except EyasError as error:
        return str(error)
    raise AssertionError("it went on")


def dying_run_behind_state(folder: Path) -> None:
    """The second process is killed when the first state is complete, before it has told the first one so."""
    gather, former = dist.ProcessGroup.gather, []

    def dying(self: Any, value: Any) -> Any:
        if os.environ["RANK"] == "1" and former and any("shard-" in str(name) for name in former[-1] or ()):
            while not saved_states(folder):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        former.append(value if isinstance(value, dict) else None)  # digests of files before the state is complete
        return gather(self, value)

    dist.ProcessGroup.gather = dying  # type: ignore[method-assign]
    head_run("eagle1", folder)


def dying_run(folder: Path) -> None:
    """The second process is killed in the middle of its fourth step."""
    drafter, losses = head("eagle1"), []
    plain = drafter.loss

    def loss(batch: Any, generator: Any = None) -> Any:
        losses.append(1)
        if os.environ["RANK"] == "1" and len(losses) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(batch, generator)

    drafter.loss = loss  # type: ignore[method-assign]
    head_run("eagle1", folder, None, drafter)
