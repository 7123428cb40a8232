"""The output folder of a training run: the state, the best head in its published format,
training.json and README.md.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.options import option_values
from eyas.errors import InputError
from eyas.files import write_text
from eyas.hardware import versions
from eyas_train import state as states
from eyas_train.card import model_card
from eyas_train.optim import HeadOptimizer
from eyas_train.reporter import read_log
from eyas_train.setup import TrainSetup
from eyas_train.state import BestHead, TrainState, saved_states, step_of
from eyas_train.step import check_finite


def kept_state(folder: Path) -> str:
    """Return which state is on disk, for messages. The folder is read, as a process may have ended after the state was
    complete and before the others knew."""
    found = saved_states(folder)
    return f"the state of step {step_of(found[-1])} stays in {folder}" if found else "no state had been saved yet"


class TrainOutput:
    """Reads and writes the folder. Every process of a group calls the same methods; the first one
    writes.
    """

    def __init__(self, setup: TrainSetup, folder: Path, about: Mapping[str, Any]) -> None:
        """`about`: further entries of training.json, for example the hash of the data files."""
        self.setup, self.folder, self.about = setup, folder, dict(about)
        self.saved_step = -1  # step and last evaluation of the state on disk
        self.saved_evaluation = 0
        self.state_file = folder

    def load(self, resume: bool) -> dict[str, Any] | None:
        """Return the saved state, checked against this run's settings; None when there is none.
        Without `resume` it is deleted.

        Raises:
            InputError: the file is damaged.
            OptionError: it is of a run with other settings.
        """
        found = self.setup.group.broadcast(saved_states(self.folder))
        if not (resume and found):
            if self.setup.group.is_first:
                for path in found:
                    shutil.rmtree(path)
            return None
        self.state_file = found[-1]
        saved = states.load_values(self.state_file, self.setup.group)
        self.setup.check_same_run(saved, self.state_file)
        self.saved_step, self.saved_evaluation = saved["step"], saved["evaluated_step"]
        return saved

    def save(self, state: TrainState, optimizer: HeadOptimizer) -> None:
        """Write the state; and the head as it is, when no evaluation has chosen a best one.

        Raises:
            EyasError: weights are NaN or infinite; the earlier state stays.
            InputError: the file cannot be written; the earlier state stays.
        """
        if (state.step, state.evaluated_step) == (self.saved_step, self.saved_evaluation):
            return
        setup = self.setup
        for value in setup.net.state_dict().values():
            total = value.detach().sum()
            check_finite(total.full_tensor() if hasattr(total, "full_tensor") else total, state.step)
        values = {**state.to_dict(), "config": asdict(setup.config), **setup.identity}
        states.save_state(self.folder, values, self._tensors(optimizer.tensors(), state.best), setup.group)
        self.saved_step, self.saved_evaluation = state.step, state.evaluated_step
        if state.best is None:
            self.publish(state, state.step)

    def _tensors(self, optimizer: Mapping[str, Tensor], best: BestHead | None) -> dict[str, Tensor]:
        parts = {"net": self.setup.net.state_dict(), "optimizer": optimizer, "best": best.net if best else {}}
        return {f"{part}.{name}": value for part, tensors in parts.items() for name, value in tensors.items()}

    def restore(self, state: TrainState, optimizer: HeadOptimizer) -> None:
        """Read the weights of a saved state, its best ones and the optimizer's state."""
        whole = {tuple(key.split(".", 1)): value for key, value in states.whole_tensors(self.state_file).items()}
        try:
            tensors = optimizer.like({name: value for (part, name), value in whole.items() if part == "optimizer"})
        except (LookupError, ValueError) as error:
            raise InputError(
                f"{self.state_file} holds no state of this optimizer; delete it to start the training again"
            ) from error
        if state.best and self.setup.group.is_first:
            net = {name: value for (part, name), value in whole.items() if part == "best"}
            state.best = replace(state.best, net=net)
        states.load_tensors(self.state_file, self._tensors(tensors, state.best), self.setup.group)
        optimizer.load(tensors)

    def publish(self, state: TrainState, head_step: int) -> None:
        """Write the net as the head of `head_step`, in its published format and dtype, and the
        record of how it was made.
        """
        setup = self.setup
        with setup.group.full_weights(setup.net):
            weights = setup.drafter.weights() if setup.group.is_first else None
        if weights is None:
            return
        checkpoints.save(replace(weights, tensors=_in_dtype(weights.tensors, setup.head_dtype)), self.folder)
        record = self._record(state, weights, head_step)
        write_text(self.folder / "training.json", json.dumps(record, indent=2) + "\n")
        write_text(self.folder / "README.md", model_card(weights, record, "THIS_FOLDER", record["target"]["name"]))

    def _record(self, state: TrainState, weights: Weights, head_step: int) -> dict[str, Any]:
        setup, drafter, target = self.setup, self.setup.drafter, self.setup.drafter.target
        lines = read_log(self.folder)
        training_losses = [line["loss"] for line in lines if "loss" in line]
        return {
            "method": weights.method,
            "target": {"name": getattr(target, "name", ""), "fingerprint": setup.identity["target"]},
            **self.about,
            "head": {key: weights.config[key] for key in ("vocab_size", "draft_vocab_size") if key in weights.config},
            "trained_length": drafter.trained_length,
            "options": option_values(drafter.options),
            "examples": {
                "train": len(setup.batches.lengths),
                "heldout": len(setup.heldout_batches.lengths),
                "sha256": setup.identity["examples"],
            },
            "config": asdict(setup.config),
            "seed": setup.config.seed,
            "device": target.device.type,
            "processes": setup.group.size,
            "precision": "bf16" if setup.use_bf16 else "float32",
            "steps": state.steps(setup),
            "step": state.step,
            "best_step": head_step,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            "heldout": dict(state.best.figures) if state.best else None,
            "losses": [{"step": line["step"], **line["heldout"]} for line in lines if "heldout" in line],
            "last_training_loss": training_losses[-1] if training_losses else None,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "versions": versions(),
        }


def _in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return floating-point tensors in this dtype; maps of a vocabulary stay whole numbers."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
