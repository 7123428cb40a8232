"""Fields that all bodies that generate text have in common.

A field is known and served, known and refused by name, or unknown. Unknown fields change nothing:
the response lists them in a header (`x-eyas-ignored-fields`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from eyas.core.params import Sampling, is_whole
from eyas.errors import OptionError
from eyas.serve.errors import ApiError
from eyas.serve.protocol.structure import STRUCTURE_FIELDS, structure_keywords

__all__ = ["MOST_LOGPROBS", "Body", "GenerationBody", "StreamOptions"]

MOST_LOGPROBS = 20  # per token
MOST_DRAFTED = 1024  # draft tokens in a cycle
Texts = list[Annotated[str, Field(min_length=1)]]

# Fields of OpenAI, vLLM, SGLang, llama.cpp and Ollama that change an answer, each with the values
# that change nothing here; any other value is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),  # of a chat: the template writes them
    "allowed_token_ids": (None,),
    "audio": (None,),
    "background": (None, False),
    "bad_words": (None, []),
    "beam_search": (None, False),
    "chat_template": (None,),
    "custom_logit_processor": (None,),
    "documents": (None, []),
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "ebnf": (None,),
    "echo": (None, False),
    "extra_args": (None, {}),
    "function_call": (None, "none"),
    "functions": (None, []),
    "generation_config": (None,),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "json_schema": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "lora_path": (None,),
    "media_io_kwargs": (None, {}),
    "min_new_tokens": (None, 0),
    "mirostat": (None, 0),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "n_predict": (None,),
    "n_probs": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "no_stop_trim": (None, False),
    "options": (None, {}),
    "prompt_embeds": (None,),
    "repeat_penalty": (None, 1.0),
    "repetition_detection": (None,),
    "return_hidden_states": (None, False),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "samplers": (None,),
    "separate_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, []),
    "store": (None, False),
    "structural_tag": (None,),
    "suffix": (None, ""),  # of a chat
    "tfs_z": (None, 1.0),
    "think": (None,),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "typical_p": (None, 1.0),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
    "xtc_probability": (None, 0),
}
# Fields that name or sort requests, or say how caches are kept, and change no answer.
WITHOUT_EFFECT = frozenset(
    {
        "cache_prompt", "cache_salt", "client_metadata", "keep_alive", "metadata", "priority", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "stream_interval", "user",
    }
)  # fmt: skip


class Body(BaseModel):
    """A body whose unknown fields are kept apart; values are not converted from other types."""

    model_config = ConfigDict(extra="allow", strict=True)

    def check(self) -> None:
        """Raise the ApiError for a field that is known and not served."""
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise ApiError(400, f"this server does not support {name}: leave it out", param=name)

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


SAMPLING = {field.name: (get_type_hints(Sampling)[field.name] | None, None) for field in fields(Sampling)}


class GenerationBody(create_model("SamplingBody", __base__=Body, **SAMPLING)):  # type: ignore[misc]
    """The fields of `Sampling`, length and stream of a request."""

    model: str | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # -1: another one for each request
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    best_of: int | None = None
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
    timings_per_token: bool | None = None  # llama.cpp's: `timings` in the response and in every chunk
    # eyas' own
    speculation: bool | int | str | None = None  # False | "auto" | draft tokens at most | a method
    cycles: bool | None = None  # with stream: describe every cycle, for the page
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "best_of chooses among more texts than n, which is not served", param="best_of")

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stops(cls, value: Any) -> Any:
        listed = [value] if isinstance(value, str) else value
        if listed is not None and not (
            isinstance(listed, list) and all(isinstance(text, str) and text for text in listed)
        ):
            raise ValueError("must be a string or a list of strings, none of them empty")
        return listed or None

    @field_validator("speculation", mode="before")
    @classmethod
    def _check_speculation(cls, value: Any) -> Any:
        is_count = is_whole(value) and 1 <= value <= MOST_DRAFTED
        if value is not None and not isinstance(value, bool | str) and not is_count:
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

    @property
    def wants_privacy(self) -> bool:
        """Whether nothing is to be kept of the request: OpenAI's `store`, set to false."""
        return getattr(self, "store", (self.model_extra or {}).get("store")) is False

    def job_fields(self) -> dict[str, Any]:
        """Return the fields of a Job that are not keywords of `LLM.request`."""
        names_method = isinstance(self.speculation, str) and self.speculation not in ("auto", "off")
        return {
            "method": self.speculation if names_method else None,
            "timeout": self.timeout,
            "cycles": self.wants_cycles,
            "private": self.wants_privacy,
        }

    def keywords(self, **more: Any) -> dict[str, Any]:
        """Return the keywords of `LLM.generate` among the fields that are given, and the entries of
        `more` that are not None.

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
        if given.get("top_p") == 0:  # no mass: the most probable token alone
            given |= {"top_p": 1.0, "top_k": 1}
        if given.get("seed") == -1:  # as in vLLM and llama.cpp
            del given["seed"]
        if isinstance(self.speculation, int) or self.speculation in ("auto", "off"):
            given["draft"] = self.speculation
        return {"temperature": 1.0, **given}


KEYWORDS = (
    *SAMPLING, "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "response_format", "regex", "grammar", "choice",
)  # fmt: skip
