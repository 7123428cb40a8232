"""Streamed answers, added up and colored; progress bars and tables on the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from eyas.api import LLM, Piece, Result, Stream


class TimedStream:
    """Passes the pieces of a streamed answer on. Its clock is stopped while the text is shown."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.seconds = 0.0
        self.finish_reason = "interrupted"

    def __iter__(self) -> TimedStream:
        return self

    def __next__(self) -> Piece:
        began = time.perf_counter()
        try:
            piece = next(self.stream)
        finally:
            self.seconds += time.perf_counter() - began
        self.finish_reason = piece.finish_reason or "interrupted"
        return piece

    def result(self) -> Result:
        """Return the answer so far; one that was not read to its end has the finish reason "interrupted"."""
        result = self.stream.result()
        return replace(result, finish_reason=self.finish_reason, stats=replace(result.stats, seconds=self.seconds))


class Painter:
    """Splits the text of pieces into drafted and other text. Texts of tokens wait for the text of pieces, which may
    come later."""

    def __init__(self, llm: LLM) -> None:
        from eyas.text import Detokeniser

        self._detokeniser = Detokeniser(llm.tokenizer) if llm.tokenizer is not None else None
        self._waiting: deque[tuple[str, bool]] = deque()

    def split(self, piece: Piece) -> list[tuple[str, bool]]:
        """Return (text, drafted) in order; the texts together are the piece's text."""
        if self._detokeniser is None:
            return []
        for i, token in enumerate(piece.token_ids):
            self._waiting.append((self._detokeniser.feed(token), i < piece.accepted))
        spans = list[tuple[str, bool]]()
        rest = piece.text
        while rest and self._waiting:
            text, drafted = self._waiting.popleft()
            if len(text) > len(rest):
                self._waiting.appendleft((text[len(rest) :], drafted))
                text = text[: len(rest)]
            if text:
                spans.append((rest[: len(text)], drafted))
            rest = rest[len(text) :]
        return [*spans, (rest, False)] if rest else spans  # text that was held back to the very end


def summary(llm: LLM, result: Result) -> str:
    """Return one line about an answer; its speed counts the whole answer, the prompt's pass included."""
    stats, tokens = result.stats, len(result.token_ids)
    speed = f" in {stats.seconds:.2f} s ({tokens / stats.seconds:.1f} tokens/s)" if stats.seconds else ""
    end = {"length": ", cut at the length asked for", "interrupted": ", interrupted"}.get(result.finish_reason, "")
    drafted = stats.decisions.keys() - {"plain"} or not stats.cycles
    method = llm.method if drafted else "no drafts"
    return f"{tokens} token{'s' * (tokens != 1)}{speed}, tau {stats.tau:.2f}, {method}{end}"


class ProgressBar:
    def __init__(self, display: Progress, total: int | None, unit: str) -> None:
        self.display = display
        self.task = display.add_task("", total=total, text="")
        self.unit = unit
        self.done = 0

    def advance(self, amount: int) -> None:
        self.show(self.done + amount)

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Show the state: `done` is the amount done in all; `text` is shown next to the bar, by default the speed."""
        self.done = done
        speed = self.display.tasks[0].speed
        text = text or (f"{speed:,.0f} {self.unit}/s" if speed and self.unit else "")
        self.display.update(self.task, completed=done, total=total, text=text)


@contextmanager
def progress_bar(title: str, total: int | None = None, unit: str = "", hidden: bool = False) -> Iterator[ProgressBar]:
    """Show a progress bar on stderr, where that is a terminal. `unit`: things that are counted, whose speed is
    shown."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn(title),
        progress.BarColumn(24),
        progress.TaskProgressColumn() if unit else progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[text]}", markup=False),
    )
    disable = hidden or not console.is_terminal
    with progress.Progress(*columns, console=console, disable=disable, redirect_stdout=False) as display:
        yield ProgressBar(display, total, unit)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, bold: int | None = None
) -> None:
    """Print a table on stdout; `bold` is the number of a row to stress. Narrow terminals fold the cells."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold green" if number == bold else "")
    Console(highlight=False).print(table)
