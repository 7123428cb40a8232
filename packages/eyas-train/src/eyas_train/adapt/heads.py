"""The requests of a server to its head."""

from __future__ import annotations

import logging
from typing import Any

from eyas.api import LLM
from eyas.core.features import RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.drafters.tools import EagleMethod
from eyas.errors import EyasError, one_line
from eyas_train.adapt.swap import head_of, load_like, put

log = logging.getLogger("eyas.serve.adapt")  # the server shows what is logged below eyas.serve

__all__ = ["Heads", "Private", "PrivateRow"]


class Private(RequestFeature):
    """Feature that keeps a request private: the learner gets nothing of its text."""

    def open(self, request: Request, target: Target) -> RowFeature:
        return PrivateRow()


class PrivateRow(RowFeature):
    """Marks a row whose text is not kept."""


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
        self.learner: Any = getattr(llm, "learner", None)  # eyas_train.adapt.Learner

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
            return bool(self.learner.rest(idle))
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
