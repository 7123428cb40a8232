"""Reports of a training run in progress: log.jsonl, TensorBoard and Weights & Biases, and calls of the progress callback.

Every line of log.jsonl is a JSON object with a "step". A line with "heldout" is an evaluation, the others are means over
training steps. The trackers, if they are installed, get the same lines.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError, one_line
from eyas.files import parse_json, write_errors, write_text
from eyas_train.setup import TrainSetup
from eyas_train.state import TrainState

LOG_FILE = "log.jsonl"
Tracker = Callable[[Mapping[str, Any] | None], None]  # called with every line of the log, and with None at the end


@dataclass(frozen=True)
class Progress:
    """A report of the training loop: after every step, after every evaluation, and with a note for
    the user.
    """

    step: int
    steps: int
    lr: float
    tokens_per_second: float  # tokens per second of this process, evaluations included; 0 before the first step
    figures: Mapping[str, float] = field(default_factory=dict)  # the training loss and its parts, smoothed
    heldout: Mapping[str, float] = field(default_factory=dict)  # figures of the last evaluation
    note: str = ""  # one line for the user; mostly empty


OnProgress = Callable[[Progress], None]


def figures_text(figures: Mapping[str, float]) -> str:
    """Return figures as text, such as `loss 0.512 0-alpha 0.71`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


class Reporter:
    """The reports of a run. Only the first process of a group writes and calls; in the others the
    methods do nothing.
    """

    def __init__(self, setup: TrainSetup, state: TrainState, folder: Path, on_progress: OnProgress | None) -> None:
        """Open log and trackers; lines of the log that were written after the state are removed, as they will be
        written again."""
        self.setup, self.state = setup, state
        self.on_progress: OnProgress | None = None
        self.log: TrainLog | None = None
        self.trackers: list[Tracker] = []
        if setup.group.is_first:
            self.on_progress = on_progress
            self.log = TrainLog(folder, state.step, state.evaluated_step)
            check_trackers(setup.config.trackers)
            openers = {"tensorboard": _tensorboard, "wandb": _wandb}
            self.trackers = [openers[name](folder, asdict(setup.config), state.step) for name in setup.config.trackers]

    def note(self, text: str) -> None:
        """Write a line for the user."""
        self._report_progress(text, {})

    def report_step(self, figures: Mapping[str, float]) -> None:
        """Take the figures of the step that has just ended; every `log_every` steps their means go into the
        log.
        """
        state, config = self.state, self.setup.config
        for name, value in {**figures, "count": 1.0}.items():
            state.log_sums[name] = state.log_sums.get(name, 0.0) + value
        means = {name: total / state.log_sums["count"] for name, total in state.log_sums.items() if name != "count"}
        if state.step % config.log_every == 0 or state.step == state.steps(self.setup):
            lr = config.lr_at(state.step - 1, state.steps(self.setup))
            self.write(
                {"step": state.step, **means, "lr": lr, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
            )
            state.log_sums = {}
        self._report_progress("", {name: value for name, value in means.items() if name != "grad_norm"})

    def report_evaluation(self, figures: Mapping[str, float], is_worse: bool) -> None:
        """Report held-out figures to the user."""
        self.note(f"step {self.state.step}: held-out {figures_text(figures)}{' (not better)' if is_worse else ''}")

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log and to the trackers."""
        if self.log is not None:
            self.log.add(line)
        for tracker in self.trackers:
            tracker(line)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker(None)

    def _report_progress(self, note: str, figures: Mapping[str, float]) -> None:
        if self.on_progress is not None:
            state, steps = self.state, self.state.steps(self.setup)
            lr = self.setup.config.lr_at(max(0, state.step - 1), steps)
            self.on_progress(Progress(state.step, steps, lr, state.tokens_per_second, figures, state.heldout, note))


class TrainLog:
    """The log of a run, to be appended to."""

    def __init__(self, folder: Path, step: int, evaluated_step: int) -> None:
        """Keep the lines of an earlier session up to `step`, and its evaluations up to
        `evaluated_step`: later ones are repeated.

        Raise InputError when the file cannot be written, or has lines that are not of a training log."""
        self.path = folder / LOG_FILE
        earlier = read_log(folder) if step else []
        valid = [line for line in earlier if line["step"] <= (min(step, evaluated_step) if "heldout" in line else step)]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in valid))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line. Raise InputError when it cannot be written."""
        with write_errors(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(line)) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log. A last line that is cut off is left out: a killed run may leave one.

    Raise InputError when the file cannot be read, or another line is not of a training log."""
    path, lines = folder / LOG_FILE, list[dict[str, Any]]()
    if not path.exists():
        return lines
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    for number, text in enumerate(whole, start=1):
        try:
            line = parse_json(text)
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}; delete the line") from error
        if not (
            isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("heldout", {}), dict)
        ):
            raise InputError(f'{path}:{number}: no object with a "step", as a training log has; delete the line')
        lines.append(line)
    return lines


# --- trackers


def check_trackers(names: Sequence[str]) -> None:
    """Raise OptionError if one of them is not installed. Cheap, so that it can be asked before a
    model is loaded.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the latter: a folder of that name that is not a package
            raise OptionError(f"log: {name} is not installed: pip install {name}, or leave it out")


def _tensorboard(folder: Path, config: dict[str, Any], step: int) -> Tracker:
    """Open TensorBoard, which writes entries again that an earlier session wrote beyond the step."""
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
    """Open W&B; a resumed run continues the W&B run whose id is in the folder. W&B itself reads WANDB_MODE and similar
    variables. Raise InputError if it does not begin, for example without a key."""
    wandb, id_file = importlib.import_module("wandb"), folder / "wandb.id"
    if not step or not id_file.exists():
        write_text(id_file, secrets.token_hex(6))
    try:
        run = wandb.init(
            project="eyas", name=folder.name, id=id_file.read_text(), resume="allow", dir=str(folder), config=config
        )
    except Exception as error:  # its own classes, some of them of other packages
        raise InputError(f"W&B does not begin: {one_line(error, 200)}; WANDB_MODE=offline needs no account") from error
    return lambda line: run.finish() if line is None else run.log(_flat(line), step=line["step"])


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names of charts, `train/loss` and `heldout/loss`."""
    if "heldout" in line:
        return {f"heldout/{name}": float(value) for name, value in line["heldout"].items()}
    return {f"train/{name}": float(value) for name, value in line.items() if name != "step"}
