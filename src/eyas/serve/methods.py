"""The drafting methods that a request may ask for: the server's own, and those that its head or the
text alone can serve."""

from __future__ import annotations

import threading

from eyas import checkpoints, drafters
from eyas.api import LLM, new_policy
from eyas.core.dormant import Policy, with_policy
from eyas.core.drafter import Drafter
from eyas.core.options import build_options
from eyas.errors import OptionError
from eyas.threads import release_threads

PLAIN = "vanilla"  # the method that drafts nothing


class Methods:
    """Loads each method when it is first asked for. May be used by several threads."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.names = [llm.method, *(name for name in drafters.names() if name != llm.method and self._is_served(name))]
        self._loaded: dict[tuple[str, str], tuple[Drafter, Policy | None]] = {}  # drafters by method and adapter
        self._loaded[llm.method, llm.target.adapter] = llm.drafter, llm.policy
        self._lock = threading.Lock()

    def drafter(self, method: str, adapter: str = "") -> Drafter:
        """Return the drafter of this method for an adapter of the target, adaptive where the server's own method is."""
        if method not in self.names:
            raise OptionError(f"speculation: this server drafts by {', '.join(self.names)}; there is no {method!r}")
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
