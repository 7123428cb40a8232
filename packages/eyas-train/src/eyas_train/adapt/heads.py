"""An LLM whose head learns while it answers, and the requests of a server to its head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.api import LLM
from eyas.core.engine import Decoder
from eyas.drafters.tools import EagleMethod
from eyas.errors import EyasError, one_line
from eyas_train.adapt.learner import Learner, Settings
from eyas_train.adapt.recording import Private
from eyas_train.adapt.swap import head_of, load_like, put

log = logging.getLogger("eyas.serve.adapt")  # the server shows what is logged below eyas.serve


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
        """Write the head's present weights into a new folder; `eyas.load(draft=folder)` reads it."""
        self.learner.save(folder, self.draft_name)


def adapting(llm: LLM, **settings: Any) -> LearningLLM:
    """Return the LLM with a head that learns from its answers. `Settings` explains the settings.

    Raises:
        OptionError: the head cannot learn.
    """
    return LearningLLM(llm, Settings(**settings))


def swap_draft(llm: LLM, head: str | Path) -> None:
    """Let another head draft for an LLM, from the next cycle on. Its requests in flight go on.

    Args:
        head: a folder or a hub id, of a head of the same method and sizes.

    Raises:
        OptionError: this LLM's drafts come from no head that can be replaced.
        CheckpointError: the head cannot be read, or does not have the method and the sizes of the one in use.
    """
    heads = Heads(llm)
    heads.put(heads.load(str(head)), str(head))


class Heads:
    """The head of a server: others take its place, and it learns, if its LLM does.

    Args:
        folder: where the head is written when the server ends; None: nowhere.
    """

    private = Private()  # the feature of requests that nothing is learnt from

    def __init__(self, llm: LLM, folder: str | None = None) -> None:
        self.llm, self.folder = llm, folder
        self.given = llm.draft_name
        self.failed = False  # whether a step has failed
        self.learner: Learner | None = getattr(llm, "learner", None)

    def load(self, source: str) -> EagleMethod:
        """Return a head that may take the place of the one in use. Takes a while, and changes nothing.

        Raises:
            OptionError: there is no head that could be replaced.
            CheckpointError: this one cannot take its place.
        """
        return load_like(head_of(self.llm.drafter), source)

    def put(self, head: EagleMethod, source: str) -> None:
        """Let this head draft from now on. Called between cycles."""
        if self.learner is None:
            put(head_of(self.llm.drafter), head)
        else:
            self.learner.replace(head)
        self.llm.draft_name = source

    def rest(self, idle: bool) -> bool:
        """See `Learner.rest`. An error there ends the learning, but no request."""
        if self.learner is None or self.failed:
            return False
        try:
            return self.learner.rest(idle)
        except (EyasError, RuntimeError, MemoryError) as error:
            self.failed = True
            log.warning("the head learns no more: %s", one_line(error, 200))
            return False

    def figures(self) -> dict[str, Any] | None:
        """Return the learned head. Return None if the head does not learn."""
        return None if self.learner is None else self.learner.figures()

    def save(self) -> None:
        """Write the head into the folder, if there is one and something was learnt."""
        if self.learner is not None and self.folder is not None and self.learner.kept:
            self.learner.save(self.folder, self.given)
