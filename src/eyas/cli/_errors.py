"""How a command ends: which exceptions become one line, and with which exit status.

    0     done
    2     a mistake of the user's, or the machine's limits (disk, memory): one line on stderr
    130   interrupted: one line that says what was kept
    1     a fault of ours: everything else escapes, with its traceback

This module knows no command.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from eyas.errors import EyasError, one_line

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
UNUSABLE = frozenset({errno.EACCES, errno.ENAMETOOLONG})  # whatever names a file, where the file is looked for
NO_HOME = "Could not determine home directory"
GREEN, RED = "32", "31"


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user stopped a command; the message names the kept results and the way to go on."""


class UsageError(EyasError):
    """Options that exclude or need each other. The line on stderr ends with where to find help."""


@contextmanager
def interruptible(message: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into an Interrupted, whose message names the kept results."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message()) from None


def color_text(text: str, color: str, stream: TextIO | None = None) -> str:
    """Return the text in a color, where the stream shows colors and the user wants them (NO_COLOR)."""
    stream = stream or sys.stdout
    wanted = os.environ.get("FORCE_COLOR") or (stream.isatty() and os.environ.get("TERM") != "dumb")
    return f"\x1b[{color}m{text}\x1b[0m" if wanted and not os.environ.get("NO_COLOR") else text


def note(line: str) -> None:
    print(f"eyas: {one_line(line)}", file=sys.stderr, flush=True)


def problem(line: str) -> None:
    """Print a line about a mistake on stderr."""
    print(color_text("eyas: error:", RED, sys.stderr), one_line(line), file=sys.stderr, flush=True)


def exit_status(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit status. Mistakes of the user's and limits become one line on stderr."""
    with _interrupts() as interrupted:
        try:
            with _log_to_stderr():
                status = run()
                sys.stdout.flush()
            return status or 0
        except Interrupted as stop:
            note(f"interrupted{': ' * bool(str(stop))}{stop}")
        except KeyboardInterrupt:
            note("interrupted")
        except Exception as error:
            cut_off = interrupted and isinstance(error.__cause__, ImportError)  # a module was being imported
            line = None if cut_off else _mistake(error)
            if line is not None:
                if line:
                    problem(line)
                return 2 if line else 1
            if not interrupted:
                raise
            note("interrupted")  # a library turned the KeyboardInterrupt into an error of its own
        return 130


def _mistake(error: Exception) -> str | None:
    """Return the line for an exception that is not our fault, "" to say nothing, or None if it is our fault."""
    if isinstance(error, EyasError):
        return str(error)
    if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough
        _discard_output()
        return ""
    if isinstance(error, OSError) and error.errno in FULL:
        _discard_output()
        place = f" for {error.filename}" if error.filename else ""
        return f"no space left on the device{place}: free some and try again"
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename:
        return f"{str(error.filename)[:200]} cannot be used: {(error.strerror or '').lower()}"
    if isinstance(error, RuntimeError) and str(error).startswith(NO_HOME):  # Path.expanduser
        return "a path begins with ~ and a user whom this machine does not know: write the path in full"
    # torch's error for accelerators is a RuntimeError of that name
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        reason = str(error).partition(". ")[0][:200] or "allocation failed"
        return f"out of memory ({reason}): a smaller batch, tree or model needs less"
    return None


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C before it becomes a KeyboardInterrupt; the list is empty until then."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield received
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    logger = logging.getLogger("eyas")
    handler = _Notes(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _discard_output() -> None:
    """Keep the interpreter from writing at its end the output that could not be written now."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream, whose place the next file would take. Output never fails on a
    character."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process runs
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")
