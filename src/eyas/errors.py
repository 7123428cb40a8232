"""The exceptions of eyas.

    EyasError (ValueError)     a user's mistake: one clear line that says what is wrong and what to do; exit status 2
    |-- OptionError            an option that does not exist or has an impossible value
    |   `-- UnknownOptionError   an option that does not exist, by its name
    |-- InputError             a prompt, message, data line or file that cannot be used
    |-- FitError               a request that does not fit the context or the memory
    |-- ModelError             a target model that cannot be served, with the reason
    |-- CheckpointError        a draft head that cannot be loaded, with the names and shapes that differ

A bug in eyas raises an AssertionError or any other exception: exit status 1, with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "CheckpointError", "EyasError", "FitError", "InputError", "ModelError", "OptionError", "UnknownOptionError",
    "code_of_request", "first_line", "near", "one_line",
]  # fmt: skip


class EyasError(ValueError):
    """A user's mistake. The message is one line and needs no context."""


class OptionError(EyasError):
    """An option that does not exist or has an impossible value."""


class UnknownOptionError(OptionError):
    """An option that a method or a training does not have; `option` is its dotted name."""

    def __init__(self, option: str, hint: str) -> None:
        super().__init__(option, hint)  # what pickle calls the class with again
        self.option = option

    def __str__(self) -> str:
        return f"unknown option {self.args[0]!r}; {self.args[1]}"


class InputError(EyasError):
    """A prompt, message, data line or file that cannot be used."""


class FitError(EyasError):
    """A request that does not fit the context or the memory."""


class ModelError(EyasError):
    """A target model that cannot be served, with the reason."""


class CheckpointError(EyasError):
    """A draft head that cannot be loaded, with the names and shapes that differ."""


@contextmanager
def code_of_request(name: str) -> Iterator[None]:
    """Turn an exception of code that came with a request (a processor, a constraint) into an InputError, which fails
    that request only."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {one_line(error, 200)}") from error


def one_line(error: object, limit: int | None = None) -> str:
    """Return an exception's message on one line, cut after `limit` characters."""
    return " ".join(str(error).split())[:limit]


def first_line(error: BaseException, limit: int | None = None) -> str:
    """Return the first line of an exception's message, cut after `limit` characters; its type where the
    message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__


def near(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known names, or all of them."""
    names = sorted(known)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
