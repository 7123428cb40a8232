"""Options of heads that learn while they serve (`eyas_train.adapt`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts.types import PositiveFloat

from eyas import elsewhere
from eyas.cli._errors import UsageError
from eyas.cli._load import load
from eyas.cli._options import DraftOptions, TargetOptions, option_group

if TYPE_CHECKING:
    from eyas.api import LLM

__all__ = ["AdaptOptions", "load_adapted", "save_adapted"]


@option_group
class AdaptOptions:
    """Whether the head learns from what it answers."""

    adapt: Annotated[bool, "Method"] = False
    """Let the head learn from the answers (EAGLE-3, MTP)."""
    adapt_percent: Annotated[PositiveFloat, "Method", "N"] = 3.0
    """Share of drafting time to spend on learning, in percent."""
    adapt_save: Annotated[str | None, "Method", "FOLDER"] = None
    """Write the head to this folder at the end."""


def load_adapted(adapt: AdaptOptions, model: TargetOptions, draft: DraftOptions, options: Mapping[str, Any]) -> LLM:
    """Return the LLM that the options describe, with a head that learns if they say so."""
    if not adapt.adapt:
        if adapt.adapt_save is not None:
            raise UsageError("--adapt-save needs --adapt")
        return load(model, draft, options)
    learning = elsewhere.part("adapt", "--adapt")
    llm: LLM = learning.LearningLLM(load(model, draft, options), learning.Settings(share=adapt.adapt_percent / 100))
    return llm


def save_adapted(llm: LLM, options: AdaptOptions) -> None:
    """Write the head, if the options say where."""
    if options.adapt and options.adapt_save is not None:
        llm.save_draft(options.adapt_save)  # type: ignore[attr-defined]  # of a LearningLLM
