"""The body of POST /infill, llama.cpp's route for editors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from eyas.serve.protocol.fields import WITHOUT_EFFECT, GenerationBody

__all__ = ["InfillBody"]


class File(BaseModel):
    """A further file."""

    text: str
    filename: str = "file"


class InfillBody(GenerationBody):
    """The texts before and after the middle. The response names fields of llama.cpp's server that have no
    effect here."""

    input_prefix: str
    input_suffix: str
    input_extra: list[File] | None = None
    prompt: str | None = None  # the beginning of the middle
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # -1: as many as fit

    def check(self) -> None:
        """See `Body.check`: nothing is refused."""

    @property
    def ignored(self) -> list[str]:
        """See `Body.ignored`."""
        given = {name: value for name, value in (self.model_extra or {}).items() if name not in WITHOUT_EFFECT}
        return sorted(name for name, value in given.items() if value not in (None, *(self.neutral(name) or ())))
