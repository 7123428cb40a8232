"""The state of a training run, and its folder `state-STEP-EVALUATED`, from which an interrupted run continues.

    values.json           counts, figures and settings; the SHA-256 of the other files, and of itself in the first line
    shard-*.safetensors   the tensors that a process holds: of the net, of the optimizers, of the best head

torch.distributed.checkpoint writes and reads the tensors, a part in each process, for any number of processes. The
folder is renamed when it is whole, and then the former one is removed. Nothing in it is a pickle. This module knows no
method and no network.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import parse_json, sha256_of_file, sync_folder, write_errors, write_text
from eyas_train.dist import SingleProcess
from eyas_train.setup import TrainSetup

STATE, STATE_NAME = "state-", re.compile(r"state-(\d+)-(\d+)")
VALUES_FILE = "values.json"


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

    def steps(self, setup: TrainSetup) -> int:
        """Return the steps of the whole run; with `minutes`, as many as the clock leaves at the pace so far."""
        if setup.config.minutes is None:
            return setup.total_steps
        share = self.seconds / (60 * setup.config.minutes)
        return max(1, self.step) if share >= 1 else max(self.step + 1, round(max(1, self.step) / max(share, 1e-6)))

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
        """Note an evaluation at the current step. `best`: the best head so far, this one included."""
        self.evaluated_step = self.step
        self.heldout = figures
        self.best = best
        self.evaluations_without_improvement = self.evaluations_without_improvement + 1 if is_worse else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the values that a state on disk has, but for tensors."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "seconds_before"}
        best = self.best and {"step": self.best.step, "figures": dict(self.best.figures)}
        return {**values, "seconds": self.seconds, "best": best}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], path: Path) -> TrainState:
        """Return the state that `to_dict` described. Raise InputError, which names the file, where values are missing."""
        try:
            values = {name: saved[name] for name in cls.__dataclass_fields__ if name != "seconds_before"}
            epoch, index = saved["position"]
            best = saved["best"] and BestHead(saved["best"]["step"], saved["best"]["figures"])
            return cls(
                **{**values, "position": (epoch, index), "best": best, "seconds_before": float(saved["seconds"])}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a whole state of a training; delete it to start again") from error


def _distributed_checkpoint() -> Any:
    """Import torch.distributed.checkpoint, which does not declare its exports."""
    return import_module("torch.distributed.checkpoint")


def save_state(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor], group: SingleProcess) -> None:
    """Save a state; each process writes its part. The former state is deleted only when this one is complete.

    Args:
        folder: the output folder of the run.
        values: values to save as JSON; the first process's count.
        tensors: DTensors, and tensors that are equal in all processes or that the first one has alone.

    Raises:
        InputError: it cannot be written.
    """
    dcp = _distributed_checkpoint()
    path, temporary = folder / f"{STATE}{values['step']}-{values['evaluated_step']}", folder / f".{STATE}tmp"
    if group.is_first:
        with write_errors(path):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
    group.gather(None)  # until the folder is there
    try:
        writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with _alone_is_fine():
            dcp.save(_apart(tensors), storage_writer=writer, no_dist=group.size == 1)
    except dcp.api.CheckpointException as error:  # no Exception
        cause, _ = next(iter(error.failures.values()))
        with write_errors(path):
            raise cause from error
    own = {file.name: sha256_of_file(file) for file in temporary.glob(f"shard-{group.rank + 1:05d}-*")}
    digests = {name: digest for part in group.gather(own) for name, digest in part.items()}
    if group.is_first:
        with write_errors(path):
            content = json.dumps({**values, "files": digests})
            digest = hashlib.sha256(content.encode()).hexdigest()
            write_text(temporary / VALUES_FILE, f"{digest}\n{content}\n")
            former = [one for one in saved_states(folder) if one != path]
            if path.exists():  # a second Ctrl-C came when it had been saved, and it is saved again
                shutil.rmtree(temporary)
            else:
                temporary.rename(path)
            sync_folder(folder)
            for one in former:
                shutil.rmtree(one)
    group.gather(None)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with copies in place of those that share the memory of others (tied weights), which the writer
    refuses."""
    found, places = dict[str, Tensor](), set[int]()
    for name, value in tensors.items():
        own: Any = value.to_local() if hasattr(value, "to_local") else value
        found[name] = value.clone() if own.data_ptr() in places else value
        places.add(own.data_ptr())
    return found


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Hide torch's warning that there is one process, which it gives also where it has been told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def saved_states(folder: Path) -> list[Path]:
    """Return the whole states in a folder of a run, the newest last. Other files in the folder, such as an
    archive of one, do not count."""
    found = [(match, path) for path in folder.glob(f"{STATE}*-*") if (match := STATE_NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2])))]


def step_of(path: Path) -> int:
    """Return the step of one of the `saved_states`."""
    return int(path.name.split("-")[1])


def load_values(path: Path, group: SingleProcess) -> dict[str, Any]:
    """Read the values of a state and compare its checksums, a part in each process. Raise InputError when the state is
    damaged, or is not a state of a training."""
    again = "delete it to start the training again"
    try:
        digest, content, _ = (path / VALUES_FILE).read_text(encoding="utf-8").split("\n")
        damaged = [VALUES_FILE] if hashlib.sha256(content.encode()).hexdigest() != digest else []
        saved = {} if damaged else parse_json(content)
        files = sorted(saved.get("files", {}).items())[group.rank :: group.size]
        damaged += [name for name, digest in files if sha256_of_file(path / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}); {again}") from error
    if all_damaged := sorted(name for part in group.gather(damaged) for name in part):
        raise InputError(f"{path} is damaged (checksum of {all_damaged[0]}); {again}")
    del saved["files"]
    return dict(saved)


def whole_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state, whole and not read yet."""
    found = _distributed_checkpoint().HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {key: torch.zeros(one.size, dtype=one.properties.dtype) for key, one in found.items()}


def load_tensors(path: Path, tensors: Mapping[str, Tensor], group: SingleProcess) -> None:
    """Load these tensors, or shards of them, from a state, in place. Raise InputError if it holds other tensors."""
    dcp = _distributed_checkpoint()
    try:
        with _alone_is_fine():
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=group.size == 1)
    except dcp.api.CheckpointException as error:
        raise InputError(f"{path} holds other tensors than this training has; delete it to start again") from error
