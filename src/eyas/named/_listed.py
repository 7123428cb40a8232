"""The list of published heads, `heads.json`: for a target, hub ids of heads that others have
published, with the source of each entry.

It was collected on the day that it names; nothing is fetched here. `fitting_heads` also finds those of
the model that a fine-tune was made from, and models that draft for a whole family. Heads of one target
are in the order in which `draft="auto"` tries them: those of a method's authors, then those whose
format leaves nothing open, then others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FittingHead", "ListedHead", "fitting_heads", "left_out", "listed_heads"]

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
    """Return the names of a target, in lower case: its id; for a folder the id that it has in the hub's cache, and all
    listed ids that end with the folder's name."""
    folder, known = Path(target), {head.target.lower() for head in _read()}
    cached = [part.removeprefix(IN_CACHE).replace("--", "/") for part in folder.parts if part.startswith(IN_CACHE)]
    alike = [name for name in known if folder.is_dir() and name.split("/")[1] == folder.name.lower()]
    return {name.lower() for name in (target, *cached)} | set(alike)


def left_out() -> list[tuple[str, str]]:
    """Return heads that others have published and that are not listed: their ids or publisher, and the reason."""
    return [(", ".join(entry["heads"]), entry["reason"]) for entry in _content()["left_out"]]


def fitting_heads(target: str, config: Mapping[str, Any]) -> list[FittingHead]:
    """Return the listed heads that fit a target, in the order in which they are tried: those for this very model, those for
    the model that it was made from, those for its family.

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
    """Return the models that a target was made from, as far as its own files say: `base_model` of the model card in
    its folder, and the name that its config was saved with."""
    names = [str(config.get("_name_or_path") or "")]
    card = Path(target) / "README.md"
    if card.is_file():
        head = card.read_text("utf-8", errors="replace").split("\n---", 1)[0]
        listed = re.search(r"^base_model:[ \t]*(.*(?:\n[ \t]*- .*)*)", head, re.MULTILINE)
        names += re.findall(r"[\w.-]+/[\w.-]+", listed[1]) if listed else []
    return list(dict.fromkeys(name for name in names if "/" in name and name.lower() not in _names(target)))
