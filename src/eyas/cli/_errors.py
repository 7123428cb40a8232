"""How a command ends when it does not end well: which exceptions become one line, and with which exit status.

    0     done
    2     a mistake of the user's, or the machine's limits (disk, memory): one line `eyas: error: ...` on stderr
    130   interrupted: one line that says what was kept
    1     a fault of ours: everything else escapes, with its traceback

This module knows no command.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import rich_click as click

from eyas.errors import EyasError

__all__ = ["FULL", "Interrupted", "note", "problem", "status_of"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The user stopped a command; the message says what was kept and how to go on."""


def note(line: str) -> None:
    """Something worth knowing, on stderr."""
    click.echo(f"eyas: {one_line(line)}", err=True)


def problem(line: str) -> None:
    """Something that went wrong, on stderr."""
    click.echo(f"{click.style('eyas: error:', fg='red')} {one_line(line)}", err=True)


def one_line(text: str) -> str:
    return " ".join(text.split())


class _Notes(logging.Handler):
    """What eyas logs while a command runs are notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def _noted() -> Iterator[None]:
    logger, handler = logging.getLogger("eyas"), _Notes(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def status_of(run: Callable[[], object]) -> int:
    """Run it; the exit status. What is not the user's or the machine's doing escapes."""
    try:
        with _noted():
            status = run()
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except Interrupted as stop:
        note(f"interrupted{': ' * bool(str(stop))}{stop}")
        return 130
    except click.Abort:
        note("interrupted")
        return 130
    except click.UsageError as error:
        problem(error.format_message() + (f" (see {error.ctx.command_path} --help)" if error.ctx else ""))
    except click.ClickException as error:
        problem(error.format_message())
    except EyasError as error:
        problem(str(error))
    except BrokenPipeError:  # who read our output has seen enough
        _forget_output()
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        _forget_output()
        problem(f"no space left on the device{f' for {error.filename}' if error.filename else ''}: free some and try again")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":  # torch's, for accelerators
            raise
        reason = str(error).partition(". ")[0][:200] or "allocation failed"
        problem(f"out of memory ({reason}): a smaller batch, tree or model needs less")
    return 2


def _forget_output() -> None:
    """Output that cannot be written must not be tried again when the interpreter ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
