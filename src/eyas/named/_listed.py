"""The list of published heads, `heads.json`: for a target, hub ids of heads that others have
published, with the source of each entry.

It was collected on the day that it names; nothing is fetched here. Heads of one target
are in the order in which `draft="auto"` tries them: those of a method's authors, then those whose
format leaves nothing open, then others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ListedHead", "listed_heads"]

FILE = Path(__file__).with_name("heads.json")
IN_CACHE = "models--"  # the hub's client keeps owner/name in a folder models--owner--name


@dataclass(frozen=True)
class ListedHead:
    """A published head."""

    target: str  # hub id of the model that it was made for
    head: str  # hub id
    method: str  # by which it drafts, a module of eyas.drafters
    source: str  # who lists it


@cache
def _read() -> tuple[ListedHead, ...]:
    content = json.loads(FILE.read_text("utf-8"))
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
    """Names of a target, in lower case: its id; for a folder the id that it has in the hub's cache,
    and all listed ids that end with the folder's name."""
    folder, known = Path(target), {head.target.lower() for head in _read()}
    cached = [part.removeprefix(IN_CACHE).replace("--", "/") for part in folder.parts if part.startswith(IN_CACHE)]
    alike = [name for name in known if folder.is_dir() and name.split("/")[1] == folder.name.lower()]
    return {name.lower() for name in (target, *cached)} | set(alike)
