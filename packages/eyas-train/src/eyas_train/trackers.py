"""Further places for the lines of log.jsonl: TensorBoard and Weights & Biases, if they are
installed. Knows no method and no loop.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError, one_line
from eyas.files import write_text

__all__ = ["Tracker", "check_trackers", "open_trackers"]

Tracker = Callable[[Mapping[str, Any] | None], None]  # called with every line of the log, and with None at the end
PROJECT = "eyas"


def check_trackers(names: Sequence[str]) -> None:
    """Raise OptionError if one of them is not installed. Cheap, so that it can be asked before a
    model is loaded.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the latter: a folder of that name that is not a package
            raise OptionError(f"log: {name} is not installed: pip install {name}, or leave it out")


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """Open trackers for a run at `step`: entries that an earlier session wrote beyond it are written again.

    Raises:
        OptionError: one of them is not installed.
        InputError: one cannot be started, for example W&B without a key.
    """
    check_trackers(names)
    return [_OPENERS[name](folder, dict(config), step) for name in names]


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
    """Open a tracker of W&B. A resumed run continues the W&B run whose id is in the folder. W&B itself reads
    WANDB_MODE and similar variables."""
    wandb = importlib.import_module("wandb")
    id_file = folder / "wandb.id"
    if not step or not id_file.exists():
        write_text(id_file, secrets.token_hex(6))
    try:
        run = wandb.init(
            project=PROJECT, name=folder.name, id=id_file.read_text(), resume="allow", dir=str(folder), config=config
        )
    except Exception as error:  # its own classes, some of them of other packages
        raise InputError(f"W&B does not begin: {one_line(error, 200)}; WANDB_MODE=offline needs no account") from error

    def write(line: Mapping[str, Any] | None) -> None:
        if line is None:
            run.finish()
        else:
            run.log(_flat(line), step=line["step"])

    return write


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names of charts, `train/loss` and `heldout/loss`."""
    if "heldout" in line:
        return {f"heldout/{name}": float(value) for name, value in line["heldout"].items()}
    return {f"train/{name}": float(value) for name, value in line.items() if name != "step"}


_OPENERS: dict[str, Callable[[Path, dict[str, Any], int], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
