"""Reports of a training run in progress: lines of log.jsonl, trackers, and calls of the
progress callback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas_train.log import TrainLog
from eyas_train.progress import OnProgress, Progress, figures_text
from eyas_train.setup import TrainSetup
from eyas_train.state import TrainState
from eyas_train.trackers import Tracker, open_trackers

__all__ = ["Reporter"]


class Reporter:
    """The reports of a run. Only the first process of a group writes and calls; in the others the
    methods do nothing.
    """

    def __init__(self, setup: TrainSetup, state: TrainState, folder: Path, on_progress: OnProgress | None) -> None:
        """Open log and trackers; lines of the log that were written after the state are removed, as they will be
        written again."""
        self.setup = setup
        self.state = state
        self.on_progress: OnProgress | None = None
        self.log: TrainLog | None = None
        self.trackers: list[Tracker] = []
        if setup.group.is_first:
            self.on_progress = on_progress
            self.log = TrainLog(folder, state.step, state.evaluated_step)
            self.trackers = open_trackers(setup.config.trackers, folder, asdict(setup.config), state.step)

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
