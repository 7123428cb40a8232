"""Sampling parameters that come in one object, as keywords of `LLM.generate`: `SamplingParams` of
vLLM, the dict of SGLang, `GenerationConfig` of transformers.

An object is read by its fields' names; none of these libraries is imported. A field that means the
same here becomes a keyword, whatever it is called there. One that means something else, or nothing
here, is refused by name unless it has its neutral value. docs/names.md is the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from eyas.errors import InputError, OptionError, near

__all__ = ["SYNONYMS", "with_objects"]

# Keywords of other libraries that mean the same as one of ours.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
OBJECTS = ("sampling_params", "generation_config")
TOP_K_OF_GENERATE = 50  # the default top_k of transformers' generate

# Names that are the same here, or that `generate_keywords` knows as another name of a keyword.
SAME = frozenset(
    [
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "max_new_tokens",
        "max_tokens",
        "min_new_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "regex",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    ]
)
RENAMED = {**SYNONYMS, "ebnf": "grammar", "sampling_seed": "seed"}
# Fields of vLLM and SGLang that change nothing here with these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stream_interval": (1,),
}
# how vLLM itself delivers what it has decoded
INTERNAL = frozenset(["output_kind", "skip_clone", "skip_reading_prefix_cache"])

# Fields of a GenerationConfig, by the same rules. Those of sampling count only with do_sample.
CONFIG_SAME = {
    "max_length": "max_length",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}
CONFIG_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
CONFIG_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["diversity_penalty", "epsilon_cutoff", "eta_cutoff"], (0.0,)),
    **dict.fromkeys(["encoder_no_repeat_ngram_size", "min_length", "no_repeat_ngram_size"], (0,)),
    **dict.fromkeys(["encoder_repetition_penalty", "length_penalty", "typical_p"], (1.0,)),
    **dict.fromkeys(["num_beam_groups", "num_beams"], (1,)),
    **dict.fromkeys(["output_attentions", "output_hidden_states", "output_logits", "output_scores"], (False,)),
    **dict.fromkeys(["remove_invalid_values", "token_healing"], (False,)),
    **dict.fromkeys(["early_stopping", "renormalize_logits", "return_dict_in_generate", "use_cache"], (True, False)),
}
# Read elsewhere, known to the tokenizer or the model, drafts of transformers' own, and how it
# computes: no part of a text's distribution.
CONFIG_IGNORED = frozenset(
    [
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "decoder_start_token_id",
        "disable_compile",
        "do_sample",
        "eos_token_id",
        "is_assistant",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "pad_token_id",
        "prefill_chunk_size",
        "target_lookbehind",
        "transformers_version",
    ]
)


def with_objects(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with the fields of `sampling_params` and `generation_config` among them. A
    keyword overrides the same field.

    Raises:
        OptionError: a field that has no equivalent here.
        InputError: no such object.
    """
    plain = {name: value for name, value in keywords.items() if name not in OBJECTS}
    given = [name for name in OBJECTS if keywords.get(name) is not None]
    if len(given) > 1:
        raise OptionError("sampling_params and generation_config say the same: write only one of them")
    if not given:
        return plain
    read = _of_params if given == ["sampling_params"] else _of_config
    written = {SYNONYMS.get(name, name) for name, value in plain.items() if value is not None}
    fields_read = {name: value for name, value in read(keywords[given[0]]).items() if name not in written}
    return {**plain, **fields_read}


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The public fields of an object, or the items of a dict, that are not None."""
    if isinstance(value, Mapping):
        found = dict(value)
    elif isinstance(value, type):
        raise InputError(f"{name} must be an object with fields such as temperature, not the class {value.__name__}")
    elif (names := getattr(value, "__struct_fields__", None)) is not None:  # msgspec, which vLLM uses
        found = {field: getattr(value, field) for field in names}
    elif is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "__dict__"):
        found = dict(vars(value))
    else:
        raise InputError(
            f"{name} must be an object with fields such as temperature, or a dict of them, not {type(value).__name__}"
        )
    return {field: one for field, one in found.items() if one is not None and not field.startswith("_")}


def _of_params(value: Any) -> dict[str, Any]:
    """Keywords of the sampling parameters of vLLM or SGLang."""
    found, keywords = _fields(value, "sampling_params"), dict[str, Any]()
    for field, one in found.items():
        if field in SAME or field in RENAMED:
            keywords[RENAMED.get(field, field)] = one
        elif field == "json_schema":
            keywords["response_format"] = _schema(one)
        elif field == "structured_outputs":
            keywords |= _structured(one)
        elif field not in INTERNAL and not _is_neutral(one, NEUTRAL.get(field, ())):
            raise _no_equivalent("sampling_params", field, [*SAME, *RENAMED, "json_schema", "structured_outputs"])
    if keywords.get("top_k") in (-1, 1 << 30):  # "all tokens" in vLLM and SGLang
        keywords["top_k"] = 0
    return {name: one for name, one in keywords.items() if not _is_neutral(one, ())}


def _structured(value: Any) -> dict[str, Any]:
    """vLLM's `StructuredOutputsParams`."""
    keywords = dict[str, Any]()
    for field, one in _fields(value, "structured_outputs").items():
        if field in ("regex", "choice", "grammar"):
            keywords[field] = one
        elif field == "json":
            keywords["response_format"] = _schema(one)
        elif field == "json_object" and one:
            keywords["response_format"] = {"type": "json_object"}
        elif one is not False:
            raise _no_equivalent("structured_outputs", field, ["regex", "choice", "grammar", "json", "json_object"])
    return keywords


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _of_config(config: Any) -> dict[str, Any]:
    """Keywords of a GenerationConfig, which means what it means to `generate` of transformers."""
    found = _fields(config, "generation_config")
    keywords: dict[str, Any] = {CONFIG_SAME[field]: one for field, one in found.items() if field in CONFIG_SAME}
    for field, one in found.items():
        known = field in CONFIG_SAME or field in CONFIG_SAMPLING or field in CONFIG_IGNORED
        if not known and not _is_neutral(one, CONFIG_NEUTRAL.get(field, ())):
            raise _no_equivalent(
                "generation_config", field, [*CONFIG_SAME, *CONFIG_SAMPLING, "do_sample", "eos_token_id"]
            )
    if "max_new_tokens" in keywords:
        keywords.pop("max_length", None)  # generate lets the former decide
    if found.get("do_sample"):
        keywords |= {
            "temperature": 1.0,
            "top_k": TOP_K_OF_GENERATE,
            **{field: found[field] for field in CONFIG_SAMPLING if field in found},
        }
    if (eos := found.get("eos_token_id")) is not None:
        # these end the text, and no others
        keywords |= {"ignore_eos": True, "stop_token_ids": eos if isinstance(eos, Iterable) else [eos]}
    return keywords


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field with this value says nothing."""
    return any(value is one or (type(value) is type(one) and value == one) for one in neutral) or value in ([], (), {})


def _no_equivalent(where: str, field: str, known: Iterable[str]) -> OptionError:
    return OptionError(f"{where}.{field} has no equivalent in eyas: leave it at its default; {near(field, known)}")
