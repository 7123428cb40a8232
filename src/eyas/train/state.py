"""The state of a training run, and its file `state.pt`, from which an interrupted run continues.

`torch.save` writes a ZIP archive with a CRC-32 of every record, and `torch.load` does not compare
them: `load_state` does. So a changed bit is either found, or is where no value depends on it.
This module knows no method and no network.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import write_atomically, write_errors

__all__ = ["STATE_FILE", "BestHead", "TrainState", "load_state", "save_state"]

STATE_FILE = "state.pt"
KEY_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "position": (list, tuple),
    "tokens": int,
    "seconds": (int, float),
    "evaluated_step": int,
    "evaluations_without_improvement": int,
    "heldout": dict,
    "log_sums": dict,
    "best": (dict, type(None)),
    "net": dict,
    "optimizers": list,
    "config": dict,
}


@dataclass(frozen=True)
class BestHead:
    """The head with the lowest held-out loss so far."""

    step: int
    figures: Mapping[str, float]  # figures of its evaluation
    net: Mapping[str, Tensor] = field(default_factory=dict)  # its weights; in the first process only


@dataclass
class TrainState:
    """All values that a run changes, apart from the weights and the optimizer's own state."""

    step: int = 0  # updates of the weights so far
    position: tuple[int, int] = (0, 0)  # epoch, and index of the next batch in it
    tokens: int = 0  # tokens read so far, without padding
    seconds_before: float = 0.0  # training time of earlier sessions
    evaluated_step: int = 0  # step of the last evaluation
    evaluations_without_improvement: int = 0  # since the best one
    heldout: dict[str, float] = field(default_factory=dict)  # figures of the last evaluation
    best: BestHead | None = None
    log_sums: dict[str, float] = field(default_factory=dict)  # sums over the steps since the last line of the log

    def __post_init__(self) -> None:
        self.session_start = time.perf_counter()
        self.session_tokens = self.tokens
        self.is_consistent = True  # False while the weights and the step number are being changed

    @property
    def seconds(self) -> float:
        """Training time of all sessions."""
        return self.seconds_before + time.perf_counter() - self.session_start

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in this session, evaluations included."""
        return (self.tokens - self.session_tokens) / (time.perf_counter() - self.session_start)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark the state as inconsistent until the block has ended well: such a state is never
        saved.
        """
        self.is_consistent = False
        yield
        self.is_consistent = True

    def add_evaluation(self, figures: dict[str, float], best: BestHead | None, is_worse: bool) -> None:
        """An evaluation at the current step. `best`: the best head so far, this one included."""
        self.evaluated_step = self.step
        self.heldout = figures
        self.best = best
        self.evaluations_without_improvement = self.evaluations_without_improvement + 1 if is_worse else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the values as `state.pt` holds them."""
        best = self.best and {"step": self.best.step, "figures": dict(self.best.figures), "net": dict(self.best.net)}
        return {
            "step": self.step,
            "position": list(self.position),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "evaluated_step": self.evaluated_step,
            "evaluations_without_improvement": self.evaluations_without_improvement,
            "heldout": self.heldout,
            "best": best,
            "log_sums": self.log_sums,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], path: Path) -> TrainState:
        """Return the state that `to_dict` described. InputError, which names the file, where values
        have other types.
        """
        best = saved["best"]
        try:
            epoch, index = saved["position"]
            state = cls(
                step=saved["step"],
                position=(int(epoch), int(index)),
                tokens=saved["tokens"],
                seconds_before=float(saved["seconds"]),
                evaluated_step=saved["evaluated_step"],
                evaluations_without_improvement=saved["evaluations_without_improvement"],
                heldout=_floats(saved["heldout"]),
                best=None if best is None else BestHead(int(best["step"]), _floats(best["figures"]), dict(best["net"])),
                log_sums=_floats(saved["log_sums"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} has values of the wrong types; delete it to start the training again") from error
        if min(state.step, state.tokens, *state.position) < 0:
            raise InputError(f"{path} has negative counts; delete it to start the training again")
        return state


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def save_state(path: Path, saved: Mapping[str, Any]) -> None:
    """Write a dict of tensors and plain values. InputError when it cannot be written; the earlier
    file then stays.
    """
    with write_errors(path), write_atomically(path) as stream:
        torch.save(dict(saved), stream)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, onto the CPU. InputError when the file is damaged, or is no
    state of a training.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged_record = archive.testzip() or _record_marked_as_folder(archive)
        saved = None if damaged_record else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive can fail in any part of the two libraries
        raise InputError(
            f"{path} is damaged ({type(error).__name__}); delete it to start the training again"
        ) from error
    if damaged_record:
        raise InputError(f"{path} is damaged (checksum of {damaged_record}); delete it to start the training again")
    if not isinstance(saved, dict) or "step" not in saved:
        raise InputError(f"{path} is no state of a training; delete it or choose another folder")
    for key, types in KEY_TYPES.items():
        if key not in saved:
            raise InputError(f"{path} has no {key!r}, so it is no whole state of a training; delete it to start again")
        if not isinstance(saved[key], types) or isinstance(saved[key], bool):
            raise InputError(
                f"{path} has {key!r} of the wrong type {type(saved[key]).__name__}; delete it to start again"
            )
    return saved


def _record_marked_as_folder(archive: zipfile.ZipFile) -> str | None:
    """Return the first record whose attributes say that it is a folder, which torch would read as nothing."""
    return next((record.filename for record in archive.infolist() if record.external_attr), None)
