"""Seconds by stage of one cycle or of one prompt, on the host's clock. The engine names the stages
and knows no clock itself."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

__all__ = ["StageTimer"]


class StageTimer:
    """Times the stages of one cycle: "draft", "target", "verify", "commit"; or the reading of a
    prompt: "prompt".

    Attributes:
        began: when the cycle began, `time.perf_counter` seconds.
        stage_seconds: seconds of each stage so far, added up if a stage comes again. On a GPU a stage ends
            when its work was handed over, not when it is done.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.stage_seconds: dict[str, float] = {}
        self._stage, self._since = "", 0.0

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Everything inside the `with` belongs to this stage. Stages follow each other, they do not nest."""
        self._stage = name
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.stage_seconds[self._stage] = self.stage_seconds.get(self._stage, 0.0) + time.perf_counter() - self._since

    def now(self) -> float:
        """Return the time in seconds, of a clock that only runs forward."""
        return time.perf_counter()
