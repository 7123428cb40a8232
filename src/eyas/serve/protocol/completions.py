"""The bodies of POST /v1/completions, and of POST /infill, llama.cpp's route for editors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator

from eyas.serve.protocol.fields import MOST_LOGPROBS, WITHOUT_EFFECT, GenerationBody

__all__ = ["CompletionBody", "InfillBody"]


class CompletionBody(GenerationBody):
    """Prompts as text or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None  # what stands behind the text that is asked for
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None  # list the ids of the answer, as vLLM does

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if not isinstance(value, str) and not _is_ids(value):
            good = (
                isinstance(value, list)
                and value
                and (all(isinstance(v, str) for v in value) or all(map(_is_ids, value)))
            )
            if not good:
                raise ValueError(
                    "must be a string, a list of strings, a list of token ids or a list of those, and not empty"
                )
        return value

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or _is_ids(given) else list(given)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


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
