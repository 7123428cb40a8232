"""Files of a run: its state, one file that is always whole, and its log, which resuming cuts back to the state.

Knows no method and no net: a state is a dict of tensors and plain values.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from eyas.errors import InputError
from eyas.files import replaced

__all__ = ["Log", "load_state", "prepare", "save_state", "write_text"]


def prepare(folder: Path) -> None:
    """Make the folder and see that it can be written, before any work is done; InputError when not.

    What a killed run left half written is removed.
    """
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system says when a file cannot be written, as one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save turns some of the former into the latter
        full = getattr(error, "errno", None) == errno.ENOSPC
        reason = "no space left; free some and resume" if full else getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"cannot write {path}: {reason}") from error


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """InputError when it cannot be written; what was there then stays."""
    with _told(path), replaced(path) as stream:
        torch.save(dict(state), stream)


def load_state(path: Path) -> dict[str, Any]:
    """A saved state, on the CPU; InputError when the file is damaged."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}); delete it to start the training anew") from error
    if not isinstance(state, dict) or "step" not in state:
        raise InputError(f"{path} is no state of a training; delete it or choose another folder")
    return state


def write_text(path: Path, text: str) -> None:
    """A small file, always whole."""
    with _told(path), replaced(path) as stream:
        stream.write(text.encode())


class Log:
    """One JSON object a line; every one has a "step"."""

    def __init__(self, path: Path, step: int, until: Mapping[str, int] | None = None) -> None:
        """Keep what an earlier run wrote up to this step: what comes after it will be done again. `until`: of lines with this key, up to
        another one.
        """
        self.path = path

        def last(line: Mapping[str, Any]) -> int:
            return min((at for key, at in (until or {}).items() if key in line), default=step)

        kept = [line for line in self._lines() if line.get("step", 0) <= last(line)] if step else []
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def _lines(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(json.JSONDecodeError):  # a killed run may leave half a line
                    yield json.loads(text)

    def add(self, entry: Mapping[str, Any]) -> None:
        with _told(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(entry)) + "\n")

    def read(self, key: str) -> list[dict[str, Any]]:
        """The entries that have this key."""
        return [line for line in self._lines() if key in line]
