"""Plugs the models that have names into the socket "target" (core/sockets.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from eyas import named, tiny
from eyas.core.sockets import KnownHead, KnownTarget, Source
from eyas.core.target import Target

__all__ = ["find_target", "heads_for"]


def find_target(target: Any, gguf_file: str | None, cache: bool, stored: bool = False) -> KnownTarget | None:
    """Return the model of that name; None if there is none, or if a folder has the name."""
    model = named.find(target)
    if model is not None:
        return KnownTarget(partial(_open, model, target), best=model.best, heads=model.heads)
    if any(target in model.names for model in named.models()):
        warnings.warn(
            f"took the folder {target} that is here; the model {target} is loaded where there is none", stacklevel=4
        )
    return None


def heads_for(target: Target) -> list[KnownHead]:
    """Return the heads of the model that a loaded target is, then those that others have published."""
    model, config = named.of_target(target.name), target.model.config.get_text_config(decoder=True)
    own = [] if model is None else [KnownHead(str(path), kind) for kind, path in model.heads.items()]
    settings = {**config.to_dict(), "_name_or_path": getattr(target.model, "name_or_path", "")}
    fitting = named.fitting_heads(target.name, settings)
    return own + [KnownHead(fit.head.head, fit.head.method, fit.why, fit.of_family) for fit in fitting]


@contextmanager
def _open(model: named.NamedModel, target: Any, tokenizer: Any) -> Iterator[Source]:
    if model.place is not None:
        yield Source(*model.place(target), tokenizer)
    else:
        yield Source(tiny.model(), named.EMBEDDED, tiny.tokenizer() if tokenizer is None else tokenizer)
