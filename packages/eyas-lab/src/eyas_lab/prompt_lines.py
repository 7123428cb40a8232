"""Files of prompts, one a line, as the demo and `eyas examine` read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.cli.tools import file_errors
from eyas.errors import InputError

__all__ = ["prompt_lines"]


def prompt_lines(path: str | None, least: int = 1) -> Sequence[str]:
    """Return the lines of a file that are not blank; none without a path. Raise InputError if they are too few."""
    if path is None:
        return ()
    with file_errors(path, "prompts file"):
        prompts = [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if len(prompts) < least:
        raise InputError(f"prompts file {path!r} has {len(prompts)} of the {least} prompts needed: write one a line")
    return prompts
