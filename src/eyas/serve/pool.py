"""The Decoders of the engine thread: one for each drafting method, and for each number of rows where empty rows cost
time.

Most runners leave empty rows out (`Runner.skips_rows`); then one Decoder of a method has all rows. A recorded cycle
computes every row, so Decoders are opened in several sizes, and a sequence enters the smallest one with room for all
that is to be decoded. All of them share the weights; their caches grow with their texts.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter

from eyas import checkpoints, drafters
from eyas.api import LLM, new_policy
from eyas.core.dormant import Policy, with_policy
from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder
from eyas.core.options import build_options
from eyas.core.prompts import Budget
from eyas.errors import OptionError
from eyas.threads import release_threads

PLAIN = "vanilla"  # the method that drafts nothing
MOST_OPEN = 3  # rows of all Decoders, busy and idle, in multiples of the rows that may be in flight
GROWTH = 4  # rows of each size of Decoder over those of the size before


class DecoderPool:
    """Opens Decoders when they are needed, and closes the least recently used idle ones."""

    def __init__(self, methods: Methods, rows: int, prefill_budget: Budget) -> None:
        self.methods = methods
        self.rows = rows
        self.sizes = [rows] if methods.llm.target.runner.skips_rows else sizes(rows)
        self.prefill_budget = prefill_budget
        # Decoders by (method, adapter) and rows, the least recently used first
        self._decoders: dict[tuple[tuple[str, str], int], Decoder] = {}
        self._taken = Counter[Decoder]()  # rows of each that are taken

    def busy(self) -> list[Decoder]:
        """Return the Decoders that have requests."""
        return [decoder for decoder in self._decoders.values() if not decoder.finished]

    def take(self, method: str, load: int, adapter: str = "") -> Decoder:
        """Return a Decoder with a row for a new sequence; `release` gives the row back. `load` counts sequences in
        flight and waiting, the new one included. Each adapter has Decoders, and so keys and values, of its own."""
        kind = method, adapter
        size = self._size(kind, load)
        decoder = self._decoders.pop((kind, size), None) or self._open(kind, size)
        self._decoders[kind, size] = decoder
        self._taken[decoder] += 1
        return decoder

    def release(self, decoder: Decoder) -> None:
        """Give back a row that `take` returned."""
        self._taken[decoder] -= 1

    def _size(self, kind: tuple[str, str], load: int) -> int:
        """Return the rows of the Decoder to enter: enough for the load, or a busy one that it fills well."""
        opened = {size: decoder for (other, size), decoder in self._decoders.items() if other == kind}
        taken = {size: self._taken[opened[size]] if size in opened else 0 for size in self.sizes}
        enough = [size for size in self.sizes if size >= min(load, self.rows) and taken[size] < size]
        busy = [size for size in enough if size < GROWTH * load and taken[size]]
        return min(busy or enough)

    def _open(self, kind: tuple[str, str], size: int) -> Decoder:
        """Return a new Decoder; close idle ones for it where too many rows are open."""
        idle = [key for key, decoder in self._decoders.items() if not self._taken[decoder]]
        while idle and sum(rows for _, rows in self._decoders) + size > MOST_OPEN * self.rows:
            del self._taken[self._decoders.pop(idle.pop(0))]
        drafter = self.methods.drafter(*kind)
        return Decoder(drafter.target, drafter, size, reuse=True, prefill_budget=self.prefill_budget)


def sizes(rows: int) -> list[int]:
    """Return 1, 4, 16, ... and the whole number of rows."""
    smaller = itertools.takewhile(lambda size: size < rows, (GROWTH**i for i in itertools.count()))
    return [*smaller, rows]


class Methods:
    """The drafting methods that a request may ask for: the server's own, and those that its head or the text alone can
    serve. Loads each when it is first asked for. May be used by several threads."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.names = [llm.method, *(name for name in drafters.names() if name != llm.method and self._is_served(name))]
        self._loaded: dict[tuple[str, str], tuple[Drafter, Policy | None]] = {}  # drafters by method and adapter
        self._loaded[llm.method, llm.target.adapter] = llm.drafter, llm.policy
        self._lock = threading.Lock()

    def drafter(self, method: str, adapter: str = "") -> Drafter:
        """Return the drafter of this method for an adapter of the target, adaptive where the server's own method is."""
        if method not in self.names:
            raise OptionError(f"drafting: this server drafts by {', '.join(self.names)}; there is no {method!r}")
        with self._lock:
            if (method, adapter) not in self._loaded:
                own = adapter == self.llm.target.adapter
                self._loaded[method, adapter] = self._load(method) if own else self._with_adapter(method, adapter)
                release_threads()
            return with_policy(*self._loaded[method, adapter])

    def _with_adapter(self, method: str, adapter: str) -> tuple[Drafter, Policy | None]:
        """Return the method with its weights for the server's own target, and a policy that learns by itself."""
        if method == self.llm.method:
            return self.llm.view(adapter)[1:]
        own = method, self.llm.target.adapter
        if own not in self._loaded:
            self._loaded[own] = self._load(method)
        drafter = self._loaded[own][0].for_target(self.llm.target.with_adapter(adapter))
        return drafter, None if self.llm.policy is None else new_policy(drafter)

    def _load(self, method: str) -> tuple[Drafter, Policy | None]:
        kind = drafters.find(method)
        drafter = kind.from_pretrained(self._head(method), self.llm.target, build_options(kind.Options, {}))
        return drafter, None if self.llm.policy is None else new_policy(drafter)

    def _is_served(self, method: str) -> bool:
        kind = drafters.find(method)
        return kind.model_free or method == PLAIN or self._head(method) is not None

    def _head(self, method: str) -> str | None:
        kind = drafters.find(method)
        if not kind.head_format:
            return None
        if own := self.llm.own_heads.get(kind.head_format):
            return own
        name = self.llm.draft_name
        return name if name is not None and checkpoints.load(name).method == kind.head_format else None
