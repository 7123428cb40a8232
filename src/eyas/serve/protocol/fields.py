"""Fields that all bodies that generate text have in common.

A field is known and served, known and refused by name, or unknown. Unknown fields change nothing:
the response lists them in a header (`x-eyas-ignored-fields`).
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from eyas.errors import OptionError
from eyas.serve.protocol.structure import STRUCTURE_FIELDS, structure_keywords

__all__ = ["MOST_LOGPROBS", "Body", "GenerationBody", "StreamOptions"]

MOST_LOGPROBS = 20  # per token
MOST_DRAFTED = 1024  # draft tokens in a cycle
Texts = list[Annotated[str, Field(min_length=1)]]

# Fields of other servers, each with the values that change nothing here; any other value is
# refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "background": (None, False),
    "bad_words": (None, []),
    "beam_search": (None, False),
    "best_of": (None, 1),
    "documents": (None, []),
    "extra_args": (None, {}),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "no_repeat_ngram_size": (None, 0),
    "reasoning_effort": (None,),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1.0),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# Fields that name or sort requests and change no answer.
WITHOUT_EFFECT = frozenset(
    {"metadata", "priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "user"}
)


class Body(BaseModel):
    """A body whose unknown fields are kept apart; values are not converted from other types."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise ValueError(f"this server does not support {name}: leave it out")
        return self

    @property
    def ignored(self) -> list[str]:
        """The names of fields that change nothing because the server does not know them."""
        return sorted(name for name in self.model_extra or {} if name not in REFUSED and name not in WITHOUT_EFFECT)

    @property
    def response_headers(self) -> dict[str, str]:
        """The header that tells the client which fields were ignored, if there are any."""
        return {"x-eyas-ignored-fields": ",".join(self.ignored)} if self.ignored else {}


class StreamOptions(BaseModel):
    """The report of usage in a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against readers of encrypted traffic: none is sent


class GenerationBody(Body):
    """Sampling, length and stream of a request."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: str | Texts | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's names for these
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # eyas' own
    speculation: bool | int | str | None = None  # False | "auto" | draft tokens at most | a method
    cycles: bool | None = None  # with stream: every cycle, for the page
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stops(cls, value: Any) -> Any:
        listed = [value] if isinstance(value, str) else value
        if listed is not None and not (
            isinstance(listed, list) and all(isinstance(text, str) and text for text in listed)
        ):
            raise ValueError("stop must be a string or a list of strings, none of them empty")
        return listed or None

    @field_validator("speculation", mode="before")
    @classmethod
    def _check_speculation(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not isinstance(value, bool | str) and not (number and 1 <= value <= MOST_DRAFTED):
            raise ValueError(
                f'must be false, "auto", a number of draft tokens from 1 to {MOST_DRAFTED}, or the name of a method'
            )
        return value

    @property
    def wants_cycles(self) -> bool:
        """Whether every cycle is to be described; only a stream can."""
        if self.cycles and not self.stream:
            raise OptionError("cycles are described in a stream only: add stream=true")
        return bool(self.cycles)

    def job_fields(self) -> dict[str, Any]:
        """The fields of a Job that every dialect sets from these names."""
        return {
            "min_tokens": self.min_tokens or 0,
            "stop_token_ids": frozenset(self.stop_token_ids or ()),
            "prompt_logprobs": self.prompt_logprobs,
            "timeout": self.timeout,
            "cycles": self.wants_cycles,
            **self._speculation(),
        }

    def _speculation(self) -> dict[str, Any]:
        """Keywords that the field `speculation` asks for: a method, or whether and how much to draft."""
        asked = self.speculation
        if asked is None or asked is True or asked == "auto":
            return {}
        if asked is False or asked == "off":
            return {"draft": "off"}
        return {"method": asked} if isinstance(asked, str) else {"draft": asked}

    def keywords(self, **more: Any) -> dict[str, Any]:
        """The keywords of `LLM.generate` among the fields that are given, and those of `more` that
        are not None.

        Raises:
            OptionError: structured output that is asked for under two names.
        """
        fields = {name: getattr(self, name) for name in KEYWORDS} | more
        given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        for name, value in structure_keywords({field: getattr(self, field) for field in STRUCTURE_FIELDS}).items():
            if name in given:
                raise OptionError(f"{name} is there twice: once under a name of vLLM")
            given[name] = value
        if given.get("top_k") == -1:  # vLLM's word for all tokens
            given["top_k"] = 0
        return {"temperature": 1.0, **given}


KEYWORDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
    "stop", "ignore_eos", "response_format", "regex", "grammar", "choice",
)  # fmt: skip
