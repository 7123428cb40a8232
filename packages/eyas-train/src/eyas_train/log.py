"""log.jsonl: the losses of a training run, one JSON object a line.

Every line has a "step". A line with "heldout" is an evaluation, the others are means over training
steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.files import parse_json, write_errors, write_text

__all__ = ["LOG_FILE", "TrainLog", "read_log"]

LOG_FILE = "log.jsonl"


class TrainLog:
    """The log of a run, to be appended to."""

    def __init__(self, folder: Path, step: int, evaluated_step: int) -> None:
        """Keep the lines of an earlier session up to `step`, and its evaluations up to
        `evaluated_step`: later ones are repeated.

        Raise InputError when the file cannot be written, or has lines that are not of a training log."""
        self.path = folder / LOG_FILE
        earlier = read_log(folder) if step else []
        valid = [line for line in earlier if line["step"] <= (min(step, evaluated_step) if "heldout" in line else step)]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in valid))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line. Raise InputError when it cannot be written."""
        with write_errors(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(line)) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log. A last line that is cut off is left out: a killed run may leave one.

    Raise InputError when the file cannot be read, or another line is not of a training log."""
    path = folder / LOG_FILE
    if not path.exists():
        return []
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return [_parsed(path, number, line) for number, line in enumerate(whole, start=1) if line.strip()]


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = parse_json(text)
    except InputError as error:
        raise InputError(f"{path}:{number}: {error}; delete the line") from error
    is_line = isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("heldout", {}), dict)
    if not is_line:
        raise InputError(f'{path}:{number}: no object with a "step", as a training log has; delete the line')
    return dict(line)
