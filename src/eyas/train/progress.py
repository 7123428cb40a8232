"""What a run says while it goes on, and a bar that shows it. The loop knows `Progress` only; the bar knows only it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

__all__ = ["OnProgress", "Progress", "bar", "figures_text"]

QUIET_SECONDS = 30.0  # between lines where there is no terminal


@dataclass(frozen=True)
class Progress:
    """Where a run stands: after every step, every evaluation, and when there is something to say."""

    step: int
    steps: int
    lr: float
    tokens_per_second: float  # of this process, evaluations included; 0 before the first step
    figures: Mapping[str, float] = field(default_factory=dict)  # the training loss and its parts, smoothed
    heldout: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    note: str = ""  # one line for the user; mostly empty


OnProgress = Callable[[Progress], None]


def figures_text(figures: Mapping[str, float]) -> str:
    """`loss 0.512  0-alpha 0.71`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


@contextmanager
def bar(console: Console | None = None) -> Iterator[OnProgress]:
    """A progress bar on stderr: steps, loss, held-out figures, speed. Where there is no terminal: a line now and then."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )  # fmt: skip
    with RichProgress(*columns, console=console, redirect_stdout=False) as shown:
        task = shown.add_task("training", total=None, said="")

        def show(now: Progress) -> None:
            heldout = f"  | held-out {figures_text(now.heldout)}" if now.heldout else ""
            said = f"{figures_text(now.figures)}  {now.tokens_per_second:,.0f} tok/s{heldout}"
            shown.update(task, completed=now.step, total=now.steps, said=said)
            if now.note:
                shown.console.print(now.note, markup=False, highlight=False)

        yield show


def _lines(console: Console) -> OnProgress:
    last = 0.0

    def show(now: Progress) -> None:
        nonlocal last
        if now.note:
            console.print(now.note, markup=False, highlight=False, soft_wrap=True)
        elif time.monotonic() - last > QUIET_SECONDS or now.step == now.steps:
            last = time.monotonic()
            said = f"step {now.step}/{now.steps}  {figures_text(now.figures)}  lr {now.lr:.3g}  {now.tokens_per_second:,.0f} tok/s"
            console.print(said, markup=False, highlight=False, soft_wrap=True)

    return show
