"""Plugs the models that have names into the socket "target" (core/sockets.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from eyas import named, tiny
from eyas.core.sockets import KnownTarget, Source

__all__ = ["find_target", "own_heads"]


def find_target(target: Any, gguf_file: str | None, cache: bool) -> KnownTarget | None:
    """Return the model of that name; None if there is none, or if a folder has the name."""
    model = named.find(target)
    if model is not None:
        return KnownTarget(partial(_opened, model, target), best=model.best, heads=model.heads)
    if named.is_name(target):
        warnings.warn(
            f"took the folder {target} that is here; the model {target} is loaded where there is none", stacklevel=4
        )
    return None


def own_heads(name: str) -> Mapping[str, Path]:
    """Return the heads of the model that a loaded target of this name is."""
    model = named.of_target(name)
    return {} if model is None else model.heads


@contextmanager
def _opened(model: named.NamedModel, target: Any, tokenizer: Any) -> Iterator[Source]:
    if model.place is not None:
        yield Source(*model.place(target), tokenizer)
    else:
        yield Source(tiny.model(), named.EMBEDDED, tiny.tokenizer() if tokenizer is None else tokenizer)
