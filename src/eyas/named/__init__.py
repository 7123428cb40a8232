"""Models that have a name of their own, for `eyas.load("smollm2")` and `--target smollm2`.

    embedded   the small model of the package eyas-tiny (tiny.py); also what no name stands for
    smollm2    SmolLM2-135M-Instruct, fetched when it is first asked for (_smollm2.py)

A local folder of the same name is taken instead of the model. `listed_heads` knows heads that others have
published for other models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import tiny
from eyas.named import _smollm2
from eyas.named._listed import FittingHead, ListedHead, fitting_heads, left_out, listed_heads

__all__ = [
    "EMBEDDED", "FittingHead", "ListedHead", "NamedModel", "find", "fitting_heads", "left_out", "listed_heads",
    "models", "of_target", "place_of", "shown_head",
]  # fmt: skip

EMBEDDED = "embedded"


@dataclass(frozen=True)
class NamedModel:
    """A model with a name."""

    names: tuple[str, ...]  # what it is called by, the plain name first
    best: str  # the method that is fastest on it, and the default
    published: str = ""  # its hub id; "": it has none
    # its own heads, by the kind of head that a method reads
    heads: Mapping[str, Path] = field(default_factory=dict)
    # from one of `names` to the folder with its files, fetched if necessary, and the target's name
    place: Callable[[str], tuple[Path, str]] | None = None


def models() -> tuple[NamedModel, ...]:
    """Return all of them. Here stands which method is the default for each, and which heads it has."""
    # in eyas-tiny, which may not be installed
    smollm2_heads = {kind: tiny.FOLDER / f"smollm2_{kind}" for kind in ("eagle3", "mtp")}
    has_heads = all(folder.is_dir() for folder in smollm2_heads.values())
    return (
        NamedModel((EMBEDDED,), tiny.BEST, heads=tiny.HEADS),
        NamedModel(
            ("smollm2", _smollm2.QUANTISED),
            "eagle3" if has_heads else "suffix",
            heads=smollm2_heads if has_heads else {},
            published=_smollm2.HUB,
            place=_smollm2.place,
        ),
    )


def find(target: Any) -> NamedModel | None:
    """Return the model that the argument `target` of `eyas.load` names; None for folders, hub ids
    and loaded models."""
    if target is None:
        target = EMBEDDED
    if not isinstance(target, str) or Path(target).is_dir():
        return None
    return next((model for model in models() if target in model.names), None)


def of_target(name: str) -> NamedModel | None:
    """Return the model that a loaded target of this name is."""
    return next((model for model in models() if name and name in (*model.names, model.published)), None)


def shown_head(head: str | None) -> str | None:
    """Return what a head is called: one of a named model's by that model's name, without its path here."""
    owner = next((model for model in models() if head in [str(path) for path in model.heads.values()]), None)
    return head if owner is None else owner.names[0]


def place_of(target: str) -> str:
    """Return a folder or hub id for what `target` names; "" for the embedded model, which has none.

    Raises: see `NamedModel.place`.
    """
    model = find(target)
    if model is None:
        return target
    return "" if model.place is None else str(model.place(target)[0])
