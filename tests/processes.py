"""Child processes of tests."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """For `preexec_fn`: a test run in the background of a shell ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
