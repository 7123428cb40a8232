"""Plugs files in GGUF format into the socket "target" (core/sockets.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from eyas.core.sockets import KnownHead, KnownTarget, Source
from eyas.core.target import Target
from eyas.targets.gguf_files import as_folder, split_gguf
from eyas.targets.pretrained import has_tokenizer

__all__ = ["find_target", "heads_for"]


def find_target(target: Any, gguf_file: str | None, cache: bool, stored: bool = False) -> KnownTarget | None:
    """Return the model in a file in GGUF format: a path to one, or `gguf_file` of a folder or hub id."""
    if not isinstance(target, str | Path):
        return None
    source, file = split_gguf(target, gguf_file)
    return None if file is None else KnownTarget(partial(_open, source, file, cache), takes_file=True)


def heads_for(target: Target) -> list[KnownHead]:
    """Return none: a file comes without heads."""
    return []


@contextmanager
def _open(source: str | Path, file: str, cache: bool, tokenizer: Any) -> Iterator[Source]:
    with as_folder(source, file, cache) as folder:
        if tokenizer is None and has_tokenizer(source):
            tokenizer = source
        elif tokenizer is None and not has_tokenizer(folder):
            warnings.warn(f"no tokenizer in {file}: name one (tokenizer=..., --tokenizer)", stacklevel=5)
        yield Source(folder, f"{source}/{file}", tokenizer)
