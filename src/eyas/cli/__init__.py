"""The command line. One file of this folder is one command.

    _app.py        finds the command, reads its options, runs it
    _options.py    options that several commands share, and the options of methods
    _errors.py     which exception becomes which line and which exit status
    _files.py      prompts in, results out, line by line
    _load.py       from options to an LLM, or to workers on Ray; a result as JSON
    _show.py       streamed answers, progress bars, tables
    _answers.py    prompts that a model answers
    tools.py       what authors of commands use of these

Other distributions bring commands by entry points.

Importing this module imports neither torch nor the library that reads options: Ctrl-C is answered
with one line from the first moment on.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from eyas.cli._errors import exit_status, open_closed_streams
from eyas.errors import EyasError

__all__ = ["main", "run"]


def run(arguments: Sequence[str]) -> int:
    """Run `eyas` with these arguments and return the exit status. A fault of ours escapes."""

    def dispatch() -> int:
        try:
            from eyas.cli._app import dispatch
        except ModuleNotFoundError as error:
            if error.name != "cyclopts":
                raise
            raise EyasError(
                "the command line needs the package cyclopts: pip install cyclopts (`import eyas` works without it)"
            ) from error
        return dispatch(arguments)

    return exit_status(dispatch)


def main() -> None:
    """Run the `eyas` command and exit."""
    open_closed_streams()
    try:
        status = run(sys.argv[1:])
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be interrupted
    raise SystemExit(status)
