"""`eyas chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import rich_click as click

from eyas.cli._errors import note, problem
from eyas.cli._load import check_sampling, load, note_no_head, sampling_of
from eyas.cli._options import MODEL, SAMPLING, MethodCommand, examples, method_options, option, stack
from eyas.cli._show import Painter, Tally, summary
from eyas.errors import EyasError, InputError, near

if TYPE_CHECKING:
    from types import FrameType

    from eyas.api import LLM, Piece

__all__ = ["command"]

EXAMPLES = examples(
    ("eyas chat", "with the embedded model"),
    ("eyas chat --color-accepted", "what was drafted is green"),
    ("eyas chat --target MODEL --draft HEAD --system 'Be brief.'", "with a model of yours"),
    more=("In the conversation: /help, /reset, /exit. Ctrl-C stops an answer, Ctrl-D ends the conversation.",),
)
COMMANDS = {"/help": "what can be said here", "/reset": "forget the conversation", "/exit": "end it (so does Ctrl-D)"}


@click.command("chat", cls=MethodCommand, epilog=EXAMPLES, panel="Answers")
@stack(
    option("Prompt", "--system", metavar="TEXT", help="A system message."),
    option("Output", "--color-accepted", is_flag=True, help="Show what was drafted in green."),
    SAMPLING,
    MODEL,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> int:
    """Talk with a model."""
    check_sampling(given)
    llm = load(given, method_options(ctx))
    if llm.tokenizer is None or not getattr(llm.tokenizer, "chat_template", None):
        raise InputError("this target has no chat template: use eyas generate")
    note_no_head(llm, given)
    return _Talk(llm, given).run()


class _Talk:
    """One conversation."""

    def __init__(self, llm: LLM, given: dict[str, Any]) -> None:
        self.llm, self.given = llm, given
        self.live = sys.stdin.isatty()
        self.failed = False
        self._new()

    def _new(self) -> None:
        self.chat = self.llm.chat(self.given["system"], **sampling_of(self.given))

    def run(self) -> int:
        """Until the user leaves; the exit status: 2 when a turn of a piped conversation failed."""
        if self.live:
            note(f"{self.llm.target.name} with {self.llm.method}; /help says what can be done, Ctrl-D ends")
            with suppress(ImportError):
                import readline  # noqa: F401 - input() then has a history
        for line in self._lines():
            if line == "/exit":
                break
            self._turn(line)
        return 2 if self.failed and not self.live else 0

    def _lines(self) -> Iterator[str]:
        """What the user says. Ctrl-C at the prompt begins the line again."""
        while True:
            try:
                line = input("you> ") if self.live else sys.stdin.readline()
            except EOFError:
                click.echo(err=True)
                return
            except KeyboardInterrupt:
                if not self.live:
                    raise
                click.echo(err=True)
                continue
            if not line and not self.live:
                return
            if line.strip():
                yield line.strip()

    def _turn(self, line: str) -> None:
        if line == "/reset":
            self._new()
            note("the conversation is forgotten")
        elif line == "/help":
            note(";  ".join(f"{name}: {what}" for name, what in COMMANDS.items()) + ";  Ctrl-C stops an answer")
        elif line.startswith("/") and " " not in line:
            problem(f"unknown command {line!r}; {near(line, COMMANDS)}")
            self.failed = True
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        before = len(self.chat.messages)
        try:
            stream = cast("Generator[Piece, None, None]", self.chat.stream(line))
            with _stop_flag() as stopped, closing(stream) as pieces:
                tally, painter = Tally(pieces), Painter(self.llm)
                for piece in tally:
                    self._show(painter.split(piece))
                    if stopped():
                        break
            click.echo()
            note(summary(self.llm, tally.result()))
        except EyasError as error:
            del self.chat.messages[before:]
            problem(f"{error}{'; /reset begins anew' if before else ''}")
            self.failed = True

    def _show(self, spans: list[tuple[str, bool]]) -> None:
        for text, drafted in spans:
            click.echo(click.style(text, fg="green") if drafted and self.given["color_accepted"] else text, nl=False)
        sys.stdout.flush()


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is only remembered, so that a cycle is never cut in two; the second one interrupts."""
    pressed = list[bool]()

    def remember(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
