"""An LLM whose head learns while it answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.api import LLM
from eyas.core.engine import Decoder
from eyas_train.adapt.learner import Learner, Settings

__all__ = ["LearningLLM", "adapting"]


class LearningLLM(LLM):
    """An LLM with a learner, which makes its steps when a call of `generate` or a stream has ended."""

    def __init__(self, llm: LLM, settings: Settings | None = None) -> None:
        self.learner = Learner(llm.drafter, settings)
        super().__init__(llm.target, self.learner.drafter, llm.tokenizer, llm.draft_name, llm.policy)

    def take_decoder(
        self, rows: int = 1, reuse: bool = False, adapter: str | None = None
    ) -> tuple[Decoder, Callable[[], None]]:
        decoder, give_back = super().take_decoder(rows, reuse, adapter)

        def rest() -> None:
            give_back()
            while self.learner.rest():
                pass

        return decoder, rest

    def save_draft(self, folder: str | Path) -> None:
        """Write the head as it is now into a folder of its own; `eyas.load(draft=folder)` reads it."""
        self.learner.save(folder, self.draft_name)


def adapting(llm: LLM, **settings: Any) -> LearningLLM:
    """Return the LLM with a head that learns from its answers. `Settings` explains the settings.

    Raises:
        OptionError: the head cannot learn.
    """
    return LearningLLM(llm, Settings(**settings))
