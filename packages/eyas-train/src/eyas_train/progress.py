"""The progress of a run, and a bar that shows it. The loop knows `Progress` only, and so does the
bar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


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


@contextmanager
def bar(console: Console | None = None) -> Iterator[OnProgress]:
    """Show a progress bar on stderr with steps, loss, held-out figures and speed; without a terminal, a line every
    half minute."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(console)
        return
    counts = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (*counts, TextColumn("{task.fields[text]}", markup=False))
    with RichProgress(*columns, console=console, redirect_stdout=False) as display:
        task = display.add_task("training", total=None, text="")

        def show(now: Progress) -> None:
            heldout = f"  | held-out {figures_text(now.heldout)}" if now.heldout else ""
            text = f"{figures_text(now.figures)}  {now.tokens_per_second:,.0f} tok/s{heldout}"
            display.update(task, completed=now.step, total=now.steps, text=text)
            if now.note:
                display.console.print(now.note, markup=False, highlight=False)

        yield show


def _line_printer(console: Console) -> OnProgress:
    last_time = 0.0

    def show(now: Progress) -> None:
        nonlocal last_time
        text = now.note
        if not text and (time.monotonic() - last_time > 30 or now.step == now.steps):
            last_time = time.monotonic()
            text = f"step {now.step}/{now.steps}  {figures_text(now.figures)}  lr {now.lr:.3g}  {now.tokens_per_second:,.0f} tok/s"
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    return show
