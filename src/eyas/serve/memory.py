"""Keep the last conversations of /v1/responses, in memory only; a key finds only its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 2**20  # size of all conversations, as JSON
Item = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The items of a response and of its inputs, with their size in characters of JSON."""

    items: tuple[Item, ...]
    size: int


class Memory:
    """The conversations of the last responses, at most `max_bytes` of JSON. The oldest are forgotten."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Conversation] = OrderedDict()  # by (owner, response)
        self._bytes = 0

    def keep(self, owner: str, response: str, items: Sequence[Item]) -> None:
        """Keep the items of a response, and forget the longest unused ones beyond the limits."""
        size = len(json.dumps(items))
        if size > self.max_bytes or not self.max_responses:
            return
        self._kept[owner, response] = Conversation(tuple(items), size)
        self._bytes += size
        while len(self._kept) > self.max_responses or self._bytes > self.max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def conversation(self, owner: str, response: str) -> tuple[Item, ...] | None:
        """Return the items up to a response of this owner; None if they are not kept."""
        found = self._kept.get((owner, response))
        if found is None:
            return None
        self._kept.move_to_end((owner, response))
        return found.items

    def item(self, owner: str, name: str) -> Item | None:
        """Return an item of this owner by its id; None if it is not kept."""
        own = (kept.items for (who, _), kept in reversed(self._kept.items()) if who == owner)
        return next((item for items in own for item in reversed(items) if item.get("id") == name), None)
