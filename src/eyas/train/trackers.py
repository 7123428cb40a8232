"""Where the lines of log.jsonl go besides: TensorBoard and Weights & Biases, when they are installed. Knows no method and no loop."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError
from eyas.train.state import write_text

__all__ = ["Tracker", "check_trackers", "open_trackers"]

Tracker = Callable[[Mapping[str, Any] | None], None]  # a line of the log; None: that was all
PROJECT = "eyas"


def check_trackers(names: Sequence[str]) -> None:
    """OptionError when one of them is not installed: cheap, before anything is loaded."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the latter: a folder of that name that is no package
            raise OptionError(f"log: {name} is not installed: pip install {name}, or leave it out")


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """For a run that stands at `step`: what an earlier run wrote beyond it will be written again.

    Raises:
        OptionError: one of them is not installed.
        InputError: it does not begin: W&B without a key, say.
    """
    check_trackers(names)
    return [_OPEN[name](folder, dict(config), step) for name in names]


def _tensorboard(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(folder / "tensorboard"), purge_step=step + 1 if step else None
    )

    def write(line: Mapping[str, Any] | None) -> None:
        if line is None:
            writer.close()
            return
        for name, value in _flat(line).items():
            writer.add_scalar(name, value, line["step"])
        writer.flush()

    return write


def _wandb(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    """A resumed run goes on in the run that the folder names. WANDB_MODE=offline and its like are W&B's own."""
    wandb, kept = importlib.import_module("wandb"), folder / "wandb.id"
    if not step or not kept.exists():
        write_text(kept, secrets.token_hex(6))
    try:
        run = wandb.init(project=PROJECT, name=folder.name, id=kept.read_text(), resume="allow", dir=str(folder), config=config)
    except Exception as error:  # its own classes, some of them of other packages
        raise InputError(f"W&B does not begin: {' '.join(str(error).split())[:200]}; WANDB_MODE=offline needs no account") from error

    def write(line: Mapping[str, Any] | None) -> None:
        if line is None:
            run.finish()
        else:
            run.log(_flat(line), step=line["step"])

    return write


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """`train/loss`, `heldout/loss`: what a chart can show."""
    if "heldout" in line:
        return {f"heldout/{name}": float(value) for name, value in line["heldout"].items()}
    return {f"train/{name}": float(value) for name, value in line.items() if name != "step"}


_OPEN: dict[str, Callable[[Path, dict[str, Any], int], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
