"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from eyas.serve.protocol.fields import MOST_LOGPROBS, GenerationBody

__all__ = ["CompletionBody"]


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
        """Return the prompts one by one."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or _is_ids(given) else list(given)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
