"""Models that have a name of their own, for `eyas.load("smollm2")` and `--target smollm2`, and published heads.

    embedded   the small model of the package eyas-tiny (tiny.py); also what no name stands for
    smollm2    SmolLM2-135M-Instruct, fetched when it is first asked for (_smollm2.py)

A local folder of the same name is taken instead of the model.

heads.json lists hub ids of heads that others have published, by their targets, with the source of each entry. It was
collected on the day that it names; nothing is fetched here. `fitting_heads` also finds heads for the model that
a fine-tune was made from, and models that draft for a whole family. Heads of one target are in the order in
which `draft="auto"` tries them: first heads by a method's authors, then heads whose format leaves nothing open,
then others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eyas import tiny
from eyas.named import _smollm2

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
    """Return the shown name of a head. The head of a named model has that model's name, without its path here."""
    owner = next((model for model in models() if head in [str(path) for path in model.heads.values()]), None)
    return head if owner is None else owner.names[0]


def place_of(target: str) -> str:
    """Return a folder or hub id for the name that `target` names; "" for the embedded model, which has none.

    Raises: see `NamedModel.place`.
    """
    model = find(target)
    if model is None:
        return target
    return "" if model.place is None else str(model.place(target)[0])


FILE = Path(__file__).with_name("heads.json")
IN_CACHE = "models--"  # the hub's client keeps owner/name in a folder models--owner--name


@dataclass(frozen=True)
class ListedHead:
    """A published head."""

    target: str  # hub id of the model that it was made for
    head: str  # hub id
    method: str  # by which it drafts, a module of eyas.drafters
    source: str  # who lists it


class FittingHead(NamedTuple):
    """A head that fits a target, and why."""

    head: ListedHead
    why: str  # a sentence that goes on after the head's id
    of_family: bool = False  # made for a whole family of models, not for this one


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return content


@cache
def _read() -> tuple[ListedHead, ...]:
    content = _content()
    return tuple(ListedHead(**{**entry, "source": content["sources"][entry["source"]]}) for entry in content["heads"])


def listed_heads(target: str | None = None) -> list[ListedHead]:
    """Return the heads for a target, in the order in which they are tried; without a target, all.

    Args:
        target: a hub id, or a folder: one of the hub's cache, or one with the model's name.
    """
    if target is None:
        return list(_read())
    names = _names(target)
    return [head for head in _read() if head.target.lower() in names]


def _names(target: str) -> set[str]:
    """Return the names of a target, in lower case: its id. For a folder they are its id in the hub's cache, and
    all listed ids that end with the folder's name."""
    folder, known = Path(target), {head.target.lower() for head in _read()}
    cached = [part.removeprefix(IN_CACHE).replace("--", "/") for part in folder.parts if part.startswith(IN_CACHE)]
    alike = [name for name in known if folder.is_dir() and name.split("/")[1] == folder.name.lower()]
    return {name.lower() for name in (target, *cached)} | set(alike)


def left_out() -> list[tuple[str, str]]:
    """Return heads that others have published and that are not listed: their ids or publisher, and the reason."""
    return [(", ".join(entry["heads"]), entry["reason"]) for entry in _content()["left_out"]]


def fitting_heads(target: str, config: Mapping[str, Any]) -> list[FittingHead]:
    """Return the listed heads that fit a target, in the order in which they are tried. First come heads for
    this very model, then heads for the model that it was made from, then heads for its family.

    Args:
        target: as for `listed_heads`.
        config: the target's text config: its model_type and vocab_size are read, and the name that it was saved with.
    """
    exact = [FittingHead(head, f"{head.source} lists for {head.target}") for head in listed_heads(target)]
    known = {fit.head.head for fit in exact}
    inherited = [
        FittingHead(head, f"{head.source} lists for {head.target}, from which {target} was made")
        for base in _bases(target, config)
        for head in listed_heads(base)
        if head.head not in known
    ]
    kind, size = config.get("model_type"), config.get("vocab_size")
    sources = _content()["sources"]
    families = [
        FittingHead(
            ListedHead(target, entry["head"], entry["method"], sources[entry["source"]]),
            f"{sources[entry['source']]} lists for models of type {kind} with this vocabulary",
            True,
        )
        for entry in _content()["families"]
        if kind in entry["model_types"] and size in entry["vocab_sizes"]
    ]
    return [*exact, *inherited, *families]


def _bases(target: str, config: Mapping[str, Any]) -> list[str]:
    """Return the models that a target was made from, as far as its own files say. These are `base_model` of the
    model card in its folder, and the name that its config was saved with."""
    names = [str(config.get("_name_or_path") or "")]
    card = Path(target) / "README.md"
    if card.is_file():
        head = card.read_text("utf-8", errors="replace").split("\n---", 1)[0]
        listed = re.search(r"^base_model:[ \t]*(.*(?:\n[ \t]*- .*)*)", head, re.MULTILINE)
        names += re.findall(r"[\w.-]+/[\w.-]+", listed[1]) if listed else []
    return list(dict.fromkeys(name for name in names if "/" in name and name.lower() not in _names(target)))
