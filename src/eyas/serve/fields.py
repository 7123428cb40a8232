"""Fields that all bodies that generate text have in common.

A field is known and served, known and refused by name, or unknown. Unknown fields change nothing:
the response lists them in a header (`x-eyas-ignored-fields`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model, field_validator

from eyas.core.params import Sampling, is_whole
from eyas.errors import OptionError
from eyas.serve.errors import JsonObject, bad_request
from eyas.serve.settings import UNLIMITED

MOST_LOGPROBS = 20  # per token
MOST_DRAFTED = 1024  # draft tokens in a cycle
Texts = list[Annotated[str, Field(min_length=1)]]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=UNLIMITED)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]

# Fields that change an answer and are not served, each with the values that change nothing here, besides those that are
# empty; any other value is refused. So are the fields of `foreign_fields.json`, which this table completes and corrects:
# what OpenAI, Ollama and earlier versions have, and values that mean something else here.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "audio", "documents", "extra_args", "functions", "generation_config", "guided_whitespace_pattern",
            "logits_processors", "n_predict", "options", "structural_tag", "think", "truncate_prompt_tokens",
            "web_search_options",
        ),
        (),
    ),
    **dict.fromkeys(("beam_search", "return_prompt_text", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size"), (0,)),
    "add_special_tokens": (False,),  # of a chat: the template writes them
    "function_call": ("none",),
    "modalities": (["text"],),
    "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_last_n": (-1, 64),  # all tokens; llama.cpp's default
    "suffix": ("",),  # of a chat
    "tfs_z": (1.0,),
}  # fmt: skip
# Fields that name or sort requests, say how caches are kept or what a response tells, or that only tune a field
# which is refused itself; they change no answer.
WITHOUT_EFFECT = frozenset(
    {
        "adaptive_decay", "backend_sampling", "betas", "cache_prompt", "cache_salt", "client_metadata",
        "custom_labels", "data_parallel_rank", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "extra_key", "guided_decoding_backend", "id_slot",
        "keep_alive", "metadata", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard", "n_keep",
        "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id",
        "response_fields", "return_progress", "rid", "routed_dp_rank", "safety_identifier", "service_tier",
        "session_id", "sse_ping_interval", "stream_interval", "user", "verbose", "xtc_threshold",
    }
)  # fmt: skip


@cache
def foreign_fields(*paths: str) -> dict[str, list[Any]]:
    """Return fields of vLLM, SGLang and llama.cpp on these paths, or on any, with the defaults that change nothing."""
    listed = json.loads(Path(__file__).with_name("foreign_fields.json").read_text(encoding="utf-8"))["fields"]
    found: dict[str, list[Any]] = {}
    for path in paths or listed:
        for name, defaults in listed[path].items():
            found[name] = [*found.get(name, ()), *defaults]
    return found


class Strict(BaseModel):
    """An object of a body. Values are not converted from other types."""

    model_config = ConfigDict(strict=True)


class Body(BaseModel):
    """A body whose unknown fields are kept apart; values are not converted from other types."""

    model_config = ConfigDict(extra="allow", strict=True)

    _without_place: list[str] = PrivateAttr(default_factory=list)  # fields that the model's chat template does not read

    def check(self) -> None:
        """Raise the ApiError for a field that is known and not served."""
        for name, value in (self.model_extra or {}).items():
            neutral = None if name in WITHOUT_EFFECT else self.neutral(name)
            if neutral is not None and value not in (None, [], {}, *neutral):
                raise bad_request(f"this server does not support {name}: leave it out", name)

    def neutral(self, name: str) -> Sequence[Any] | None:
        """Return the values with which a field that is not served changes nothing; None for a field that nobody has."""
        return REFUSED.get(name, foreign_fields("/tokenize").get(name))

    @property
    def ignored(self) -> list[str]:
        """The names of fields that change nothing because the server, or the model, does not know them."""
        unknown = {name for name in self.model_extra or {} if name not in WITHOUT_EFFECT and self.neutral(name) is None}
        return sorted(unknown.union(self._without_place))

    @property
    def response_headers(self) -> dict[str, str]:
        """The headers that name ignored fields."""
        return {"x-eyas-ignored-fields": ",".join(self.ignored)} if self.ignored else {}


class StreamOptions(Strict):
    """The report of usage in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against readers of encrypted traffic: none is sent


SAMPLING = {field.name: (get_type_hints(Sampling)[field.name] | None, None) for field in fields(Sampling)}


class GenerationBody(create_model("SamplingBody", __base__=Body, **SAMPLING)):  # type: ignore[misc]
    """The fields of `Sampling`, length and stream of a request."""

    model: str | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # -1: a new seed for each request
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    best_of: int | None = None
    max_tokens: Limit | None = None
    min_tokens: Count | None = None
    stop: str | Texts | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Logprobs | None = None
    response_format: JsonObject | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structured_outputs: JsonObject | None = None  # vLLM's names for these
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    timings_per_token: bool | None = None  # llama.cpp's: `timings` in the response and in every chunk
    store: bool | None = (
        None  # OpenAI's: keep the answer, which the server does for responses alone; false: do not learn
    )
    # eyas' own
    drafting: bool | int | str | None = None  # "auto" | "off" | draft tokens at most | a method
    cycles: bool | None = None  # with stream: describe every cycle, for the page
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds

    def neutral(self, name: str) -> Sequence[Any] | None:
        """Return the values of a foreign field that change nothing; None for a field that is not known."""
        return REFUSED.get(name, foreign_fields().get(name))

    @property
    def ignored(self) -> list[str]:
        """The fields that were given and have no effect."""
        return sorted([*super().ignored, *(["store"] if self.store else [])])

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of chooses among more texts than n, which is not served", "best_of")

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stops(cls, value: Any) -> Any:
        listed = [value] if isinstance(value, str) else value
        if listed is not None and not (
            isinstance(listed, list) and all(isinstance(text, str) and text for text in listed)
        ):
            raise ValueError("must be a string or a list of strings, none of them empty")
        return listed or None

    @field_validator("drafting", mode="before")
    @classmethod
    def _check_drafting(cls, value: Any) -> Any:
        is_count = is_whole(value) and 1 <= value <= MOST_DRAFTED
        if value is not None and not isinstance(value, bool | str) and not is_count:
            raise ValueError(
                f'must be "auto", "off", a number of draft tokens from 1 to {MOST_DRAFTED}, or the name of a method'
            )
        return value

    @property
    def wants_cycles(self) -> bool:
        """Whether every cycle is to be described; only a stream can."""
        if self.cycles and not self.stream:
            raise OptionError("cycles are described in a stream only: add stream=true")
        return bool(self.cycles)

    def job_fields(self) -> JsonObject:
        """Return the fields of a Job that do not concern the text."""
        names_method = isinstance(self.drafting, str) and self.drafting not in ("auto", "off")
        return {
            "method": self.drafting if names_method else None,
            "timeout": self.timeout,
            "cycles": self.wants_cycles,
            "private": self.store is False,
        }

    def keywords(self, **more: Any) -> JsonObject:
        """Return the keywords of `LLM.generate` that are given, and the entries of `more` that are not None."""
        fields = {name: getattr(self, name) for name in KEYWORDS} | more
        given: JsonObject = {name: value for name, value in fields.items() if value is not None}
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
        if isinstance(self.drafting, int) or self.drafting in ("auto", "off"):
            given["drafting"] = self.drafting
        return {"temperature": 1.0, **given}


KEYWORDS = (
    *SAMPLING, "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "response_format", "regex", "grammar", "choice",
)  # fmt: skip


# vLLM's names for structured output: the older ones, and those within `structured_outputs`
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURE_FIELDS = ("structured_outputs", *GUIDED)
NAMES = ("json", "regex", "choice", "grammar", "json_object")
CHANGE_NOTHING = (None, False)  # values with which further names are left out


def structure_keywords(fields: Mapping[str, Any]) -> JsonObject:
    """Return the keywords that `structured_outputs` and the older guided names of a body mean."""
    given = {ours: fields[name] for name, ours in GUIDED.items() if fields.get(name) is not None}
    outputs = fields.get("structured_outputs")
    if outputs is not None and not isinstance(outputs, Mapping):
        raise OptionError(f"structured_outputs must be an object with one of {', '.join(NAMES)}")
    for name, value in (outputs or {}).items():
        if name in NAMES and value not in CHANGE_NOTHING:
            given[name] = value
        elif value not in CHANGE_NOTHING:
            raise OptionError(f"structured_outputs: this server does not support {name}: leave it out")
    keywords = {name: value for name, value in given.items() if name not in ("json", "json_object")}
    if "json" in given:
        keywords["response_format"] = {"type": "json_schema", "json_schema": {"schema": given["json"]}}
    elif given.get("json_object"):
        keywords["response_format"] = {"type": "json_object"}
    return keywords
