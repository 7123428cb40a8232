"""A pool for each owner of requests, such as an API key: nobody is drafted from another's texts."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

from eyas.recall.feature import Recalled
from eyas.recall.pool import Pool

__all__ = ["Pools"]


class Pools:
    """The pools of all owners.

    Args:
        max_bytes: memory of one pool.
        max_age: see `Pool`.
        max_owners: how many pools there are; the least recently used one leaves for a new owner.
        shared: all owners have the same pool.
        folder: where pools are kept, one file each, when they leave and when `save` is called; None: nowhere.
    """

    def __init__(
        self,
        max_bytes: int = 64 * 2**20,
        max_age: float | None = None,
        max_owners: int = 16,
        shared: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.max_bytes, self.max_age, self.max_owners = max_bytes, max_age, max_owners
        self.shared, self.folder = shared, folder
        self._pools: OrderedDict[str, Recalled] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, owner: str) -> Recalled:
        """Return the request feature with the pool of an owner, which is made, or read, when it is first asked for."""
        owner = "" if self.shared else owner
        with self._lock:
            if owner not in self._pools:
                self._pools[owner] = Recalled(self._opened(owner))
                while len(self._pools) > self.max_owners:
                    self._save(*self._pools.popitem(last=False))
            self._pools.move_to_end(owner)
            return self._pools[owner]

    def _opened(self, owner: str) -> Pool:
        pool = Pool(self.max_bytes, self.max_age)
        if self.folder is not None and (file := self._file(owner)).exists():
            pool.load(file)
        return pool

    def _file(self, owner: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}.npz"  # names say nothing about keys

    def _save(self, owner: str, recalled: Recalled) -> None:
        if self.folder is not None:
            recalled.pool.save(self._file(owner))

    def save(self) -> None:
        """Write all pools to the folder, if there is one."""
        with self._lock:
            for owner, recalled in self._pools.items():
                self._save(owner, recalled)
