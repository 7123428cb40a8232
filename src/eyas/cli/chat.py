"""`eyas chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

from eyas.cli._errors import GREEN, color_text, note, problem
from eyas.cli._load import load, note_no_head, sampling_of
from eyas.cli._options import AnswerOptions, DraftOptions, Fields, MethodOptions, TargetOptions, option_group
from eyas.cli._show import Painter, TimedStream, summary
from eyas.errors import EyasError, InputError, near

if TYPE_CHECKING:
    from types import FrameType

    from eyas.api import LLM

GROUP = "Answers"
EXAMPLES = """
eyas chat  # with the embedded model
eyas chat --color-accepted  # drafted text is green
eyas chat --target MODEL --draft HEAD --system 'Be brief.'  # with your own model
"""
NOTES = ("In the conversation: /help, /reset, /exit. Ctrl-C stops an answer, Ctrl-D ends the conversation.",)
CHAT_COMMANDS = {"/help": "list these commands", "/reset": "forget the conversation", "/exit": "end it, like Ctrl-D"}


@option_group
class ChatOptions:
    """How the conversation begins and looks."""

    system: Annotated[str | None, "Prompt", "TEXT"] = None
    """System message."""
    color_accepted: Annotated[bool, "Output"] = False
    """Show drafted text in green."""


def command(
    *, chat: ChatOptions, sampling: AnswerOptions, model: TargetOptions, draft: DraftOptions, options: MethodOptions
) -> int:
    """Talk with a model."""
    keywords = sampling_of(sampling)
    llm = load(model, draft, options)
    if llm.tokenizer is None or not getattr(llm.tokenizer, "chat_template", None):
        raise InputError("this target has no chat template: use eyas generate")
    note_no_head(llm, model, draft)
    return _Conversation(llm, chat, keywords).run()


class _Conversation:
    def __init__(self, llm: LLM, options: ChatOptions, keywords: Fields) -> None:
        self.llm = llm
        self.options = options
        self.keywords = keywords
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.reset()

    def reset(self) -> None:
        self.chat = self.llm.chat(self.options.system, **self.keywords)

    def run(self) -> int:
        """Answer until the user leaves; returns the exit status: 2 when a turn of a piped conversation failed."""
        if self.interactive:
            note(f"{self.llm.target.name} with {self.llm.method}; /help lists commands, Ctrl-D ends")
            with suppress(ImportError):
                import readline  # noqa: F401 - input() then has a history
        for line in self._lines():
            if line == "/exit":
                break
            self._turn(line)
        return 2 if self.failed and not self.interactive else 0

    def _lines(self) -> Iterator[str]:
        """Yield the user's lines. Ctrl-C at the prompt begins the line again."""
        while True:
            try:
                line = input("you> ") if self.interactive else sys.stdin.readline()
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print(file=sys.stderr)
                continue
            if not line and not self.interactive:
                return
            if line.strip():
                yield line.strip()

    def _turn(self, line: str) -> None:
        if line == "/reset":
            self.reset()
            note("the conversation is forgotten")
        elif line == "/help":
            commands = [f"{name}: {purpose}" for name, purpose in CHAT_COMMANDS.items()]
            note(";  ".join([*commands, "Ctrl-C stops an answer"]))
        elif line.startswith("/") and " " not in line:
            problem(f"unknown command {line!r}; {near(line, CHAT_COMMANDS)}")
            self.failed = True
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        before = len(self.chat.messages)
        try:
            with _stop_flag() as stopped, closing(self.chat.stream(line)) as pieces:
                stream = TimedStream(pieces)
                painter = Painter(self.llm)
                for piece in stream:
                    for text, drafted in painter.split(piece):
                        green = drafted and self.options.color_accepted
                        print(color_text(text, GREEN) if green else text, end="")
                    sys.stdout.flush()
                    if stopped():
                        break
            print(flush=True)
            note(summary(self.llm, stream.result()))
        except EyasError as error:
            del self.chat.messages[before:]
            problem(f"{error}{'; /reset begins again' if before else ''}")
            self.failed = True


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Remember the first Ctrl-C, so that a cycle is never cut in two; the second one interrupts."""
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
