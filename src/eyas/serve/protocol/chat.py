"""The body of POST /v1/chat/completions; and those of /tokenize and /detokenize, as in vLLM, /v1/corpora and /v1/draft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from eyas.errors import InputError
from eyas.serve.protocol.fields import MOST_LOGPROBS, Body, GenerationBody

__all__ = ["ChatBody", "CorpusBody", "DetokenizeBody", "DraftBody", "Prediction", "TemplateFields", "TokenizeBody"]


class Part(BaseModel):
    """A part of a text."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the answer probably contains."""

    model_config = ConfigDict(strict=True)

    type: Literal["content"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """The text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TemplateFields(Body):
    """Return the keywords for the chat template, besides the messages."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    _places: tuple[str, ...] = PrivateAttr(())

    def placed(self, places: Sequence[str], body: Body) -> Self:
        """Keep what a client of another dialect calls each message, for errors, and whose body it is; returns the chat
        itself."""
        self._places, self._without_place = tuple(places), body._without_place
        return self

    def check_effort(self, template: str) -> None:
        """Note a reasoning effort that the chat template does not read."""
        variable = "enable_thinking" if self.reasoning_effort == "none" else "reasoning_effort"
        if self.reasoning_effort is not None and variable not in template:
            self._without_place.append("reasoning_effort")

    def in_its_places(self, error: InputError) -> InputError:
        """Return an error about the messages in the words of the client's dialect."""

        def name(found: re.Match[str]) -> str:
            number = int(found[1])
            return self._places[number - 1] if 1 <= number <= len(self._places) else found[0]

        return InputError(re.sub(r"\bmessage (\d+)", name, str(error)))

    def template(self) -> dict[str, Any]:
        """Return the keywords of `text.render` that these fields mean."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort = {"enable_thinking": False}
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": {**effort, **(self.chat_template_kwargs or {})},
        }


class ChatBody(TemplateFields, GenerationBody):
    """A conversation."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    return_token_ids: bool | None = None  # list the ids of the answer, as vLLM does


class TokenizeBody(TemplateFields):
    """A text, or a conversation with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class CorpusBody(Body):
    """One text or several, as strings or as token ids."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]]


class DraftBody(Body):
    """A head: a folder of the server's machine, or a name."""

    path: str | None = None
    name: str | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
