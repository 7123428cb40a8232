"""Turns the arguments of `eyas.load` and `LLM.generate` into plain values. Callers may write tensors, arrays
and tokenizer output as prompts, numpy numbers, one value where a list is expected, and names of transformers
and OpenAI. Everything else is an EyasError of one line that says what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from eyas.core.requests import RequestFeature
from eyas.core.sampling import Processor, Sampling
from eyas.errors import InputError, OptionError, near
from eyas.files import parse_json
from eyas.targets.pretrained import DeviceMap

__all__ = [
    "MEDIA_PARTS", "MODES", "STRUCTURE_KEYWORDS", "GenerateKeywords", "Keywords", "MediaIds", "Messages", "Prompt", "as_drafting",
    "as_logit_bias", "as_processors", "as_prompts", "as_stop_token_ids", "device_name", "dtype_name",
    "generate_keywords", "has_media", "load_keywords", "mode_of", "on_or_off", "placement_of", "plain_number",
    "request_features", "whole_number", "with_generate_keywords",
]  # fmt: skip

Keywords = Mapping[str, Any]
Messages = Sequence[Keywords]


@dataclass(frozen=True)
class MediaIds:
    """Token ids of one prompt with images or the like, as a processor of transformers makes them."""

    ids: tuple[int, ...]
    media: Mapping[str, Tensor]  # further inputs of the model's forward, such as pixel_values


Prompt = str | Messages | Sequence[int] | MediaIds
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
TEXT_ONLY = frozenset({"input_ids", "attention_mask", *TOKEN_TYPES, "special_tokens_mask", "offset_mapping", "length"})
"""Entries of a tokenizer's or processor's output that every text has. Others are inputs of a model
that reads more than text."""


class GenerateKeywords(TypedDict, total=False):
    """Keyword parameters that `generate`, `stream`, `chat` and `send` share. `LLM.generate` explains them."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | Iterable[tuple[int, float]] | None
    min_tokens: int | None
    stop_token_ids: Iterable[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    stop: str | Sequence[str] | None
    logits_processor: Processor | Iterable[Processor] | None
    drafting: str | int | bool
    adapter: str | None
    prediction: str | Sequence[int] | None
    features: Iterable[RequestFeature]
    ignore_eos: bool
    raw: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    response_format: Any  # OpenAI's mapping, or a model of pydantic
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(GenerateKeywords.__annotations__),
    **{field.name: field.default for field in fields(Sampling)},
    **{"min_tokens": 0, "stop_token_ids": (), "drafting": "auto", "features": (), "ignore_eos": False, "raw": False},
}

STRUCTURE_KEYWORDS = ("response_format", "regex", "grammar", "choice")  # they say which texts an answer may have
# Keywords of transformers' generate that change nothing here when they have one of these values.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_return_sequences", "n", "num_beams"), (None, 1)),
    **{"use_cache": (None, True), "return_dict_in_generate": (None, False)},
}
# Keywords of other libraries that mean the same as one of ours.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
INSTEAD = {
    "sampling_params": "give its fields as keywords (docs/guide/coming_from.md): llm.generate(prompt, temperature=...)",
    "generation_config": "give its fields as keywords (docs/guide/coming_from.md): llm.generate(prompt, temperature=...)",
    "num_return_sequences": "write llm.generate(prompt, n=...)",
    "n": "several answers to a prompt are what llm.generate(prompt, n=...) returns",
    "num_beams": "eyas decodes greedily or samples, without beams",
    "use_cache": "eyas always keeps keys and values",
    "return_dict_in_generate": "generate returns a Result with text, token_ids and stats",
    "streamer": "iterate over llm.stream(prompt)",
    "stopping_criteria": "write stop=[...] for strings, or break out of llm.stream",
    "eos_token_id": "the model's own ids end an answer; stop_token_ids adds others, and ignore_eos=True goes on past the model's own",
    "top_logprobs": "logprobs=5 lists the 5 most probable tokens for each one, logprobs=0 none",
    "input_ids": "give it as the prompt: generate(input_ids)",
    "attention_mask": "give the tokenizer's whole output as the prompt: generate(tokenizer(text))",
}
LOADED_ELSEWHERE = (
    "attn_implementation", "cache_dir", "load_in_4bit", "load_in_8bit", "local_files_only", "max_memory", "quantization_config",
    "revision", "subfolder", "token",
)  # fmt: skip

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")  # of device maps
MODES = ("auto", "fixed")
SHAPED = ("tree", "dynamic", "depth")  # groups of options that describe a tree
MEDIA_PARTS = ("image", "video", "audio")  # types of content parts, as the processors of transformers read them


# --- prompts --------------------------------------------------------------------------------------


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Return (prompts, whether a single one was given). A string, a list of messages and a list of token ids are
    single prompts; a list of those, and a tensor [B, T], are several. Tensors, arrays and the output of a tokenizer
    become lists, without the tokens that its attention mask hides. The output of a processor for a prompt with
    images becomes `MediaIds`."""
    if isinstance(prompt, MediaIds) or (isinstance(prompt, Mapping) and _media_names(prompt)):
        return ([prompt], True) if isinstance(prompt, MediaIds) else _media_ids(prompt)
    prompt = _as_lists(prompt)
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, Mapping):
        raise InputError('messages come in a list: [{"role": "user", "content": ...}]')
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InputError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
        )
    if not prompt:
        return [], False
    if all(isinstance(x, Mapping) and "input_ids" not in x for x in prompt):
        return [list(prompt)], True
    if (ids := _token_ids(prompt)) is not None:
        return [ids], True
    if wrong := next((x for x in prompt if isinstance(x, float)), None):
        raise InputError(f"token ids are whole numbers, got {wrong}")
    prompts = list[Prompt]()
    for item in prompt:
        inner, single = as_prompts(item)
        if not single and len(inner) != 1:
            empty = "the prompt is empty: give at least one token"
            raise InputError("a list of prompts holds no further lists" if inner else empty)
        prompts += inner
    return prompts, False


def has_media(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages of which one holds an image or the like."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in MEDIA_PARTS for part in parts)


def _as_lists(prompt: Any) -> Any:
    """Return tensors, arrays and tokenizer output as (nested) lists of numbers; anything else as it is."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        for name in TOKEN_TYPES:
            if prompt.get(name) is not None and bool(torch.as_tensor(prompt[name]).any()):
                raise InputError(f"{name} is not read in a prompt without images: leave it out")
        ids, mask = _as_lists(prompt["input_ids"]), _as_lists(prompt.get("attention_mask"))
        if not mask or not isinstance(ids, Sequence):
            return ids
        if isinstance(mask[0], Sequence):
            return [_visible(row, row_mask) for row, row_mask in zip(ids, mask, strict=True)]
        return _visible(ids, mask)
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _media_names(prompt: Keywords) -> list[str]:
    """Return the names in a processor's output that are not text, such as pixel_values."""
    names = [name for name, value in prompt.items() if name not in TEXT_ONLY and value is not None]
    return names if "input_ids" in prompt else []


def _media_ids(prompt: Keywords) -> tuple[list[Prompt], bool]:
    """Return one prompt with images, of a processor's output, and whether its ids are a single list."""
    names = _media_names(prompt)
    if wrong := [name for name in names if not isinstance(prompt[name], Tensor)]:
        raise InputError(f"{wrong[0]} is not a tensor: call the processor with return_tensors='pt'")
    ids, mask = torch.as_tensor(prompt["input_ids"]), prompt.get("attention_mask")
    single, ids = ids.ndim == 1, ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1:
        raise InputError(
            f"a prompt with {names[0]} comes alone: call the processor for each prompt, and give a list of its outputs"
        )
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise InputError(f"the attention mask of a prompt with {names[0]} hides tokens: make it without padding")
    token_types = {name: prompt[name] for name in TOKEN_TYPES if prompt.get(name) is not None}
    return [MediaIds(tuple(ids[0].tolist()), token_types | {name: prompt[name] for name in names})], single


def _visible(ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    return [token for token, shown in zip(ids, mask, strict=True) if shown]


def _token_ids(items: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the items as ints, where all of them are whole numbers (of numpy and torch, too)."""
    if all(type(item) is int for item in items):
        return tuple(items)
    ids = [plain_number(item) for item in items]
    return tuple(map(int, ids)) if all(_is_whole(token) for token in ids) else None


def plain_number(value: Any) -> Any:
    """Return a number of numpy or torch as Python's own; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# --- generate -------------------------------------------------------------------------------------


def generate_keywords(given: Keywords, defaults: Keywords | None = None) -> dict[str, Any]:
    """Return all keywords of `LLM.generate`, with the defaults where nothing else is given. `max_length`, which
    counts the prompt too, stays among them."""
    keywords = {name: value for name, value in given.items() if value is not None or name not in DEFAULTS}
    for name, ours in SYNONYMS.items():
        if name in keywords:
            value = keywords.pop(name)
            if ours in keywords:
                raise OptionError(f"{name} is called {ours} here: write only one of them")
            keywords[ours] = value
    for name in [name for name in keywords if name in INSTEAD]:
        value = keywords.pop(name)
        if value not in WITHOUT_EFFECT.get(name, (None,)):
            raise OptionError(f"{name} is not a keyword of eyas: {INSTEAD[name]}")
    keywords.pop("pad_token_id", None)  # nothing is padded
    sample = keywords.pop("do_sample", None)
    unknown = keywords.keys() - DEFAULTS.keys() - {"max_length"}
    if unknown:
        name = min(unknown)
        raise InputError(f"unknown sampling parameter {name!r}; {near(name, DEFAULTS)}")
    merged = DEFAULTS | dict(defaults or {}) | keywords
    if merged["max_new_tokens"] is not None:
        merged["max_new_tokens"] = whole_number("max_new_tokens", merged["max_new_tokens"])
    merged["drafting"] = as_drafting(merged["drafting"])
    merged["logit_bias"] = as_logit_bias(merged["logit_bias"])
    merged["min_tokens"] = whole_number("min_tokens", merged["min_tokens"], 0)
    merged["stop_token_ids"] = as_stop_token_ids(merged["stop_token_ids"])
    for name in ("logprobs", "prompt_logprobs"):
        if merged[name] is not None:
            merged[name] = whole_number(name, merged[name], 0)
    for name in ("ignore_eos", "raw"):
        if not isinstance(merged[name], bool):
            raise OptionError(f"{name} must be True or False, got {merged[name]!r}")
    return merged | _temperature(sample, keywords.get("temperature"), merged["temperature"])


def _temperature(sample: Any, given: Any, temperature: Any) -> dict[str, Any]:
    if sample is None:
        return {}
    if not isinstance(sample, bool):
        raise OptionError(f"do_sample must be True or False, got {sample!r}; a temperature above 0 samples")
    if sample and not temperature:
        raise OptionError("do_sample=True needs a temperature above 0: write temperature=1.0")
    if not sample and given:
        raise OptionError(f"do_sample=False contradicts temperature={given!r}: leave one of them out")
    return {} if sample else {"temperature": 0.0}


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return a value as an int. Raise OptionError unless it is a whole number, `least` or more."""
    number = plain_number(value)
    if not _is_whole(number) or number < least:
        raise OptionError(f"{name} must be a whole number, {least} or more, got {value!r}")
    return int(number)


def as_processors(given: Any) -> list[Any]:
    """Return one processor, several or None as a list."""
    if given is None:
        return []
    if isinstance(given, Iterable) and not isinstance(given, str | type):
        return list(given)
    return [given]


def request_features(given: Any) -> tuple[RequestFeature, ...]:
    """Return one feature or several as a tuple. Raise OptionError for other objects."""
    listed = tuple(given) if isinstance(given, Iterable) else (given,)
    if wrong := [each for each in listed if not isinstance(each, RequestFeature)]:
        raise OptionError(f"features are objects of subclasses of eyas.core.requests.RequestFeature, got {wrong[0]!r}")
    return listed


def as_stop_token_ids(given: Any) -> tuple[int, ...]:
    """Return token ids of a list, tensor or array as ints. Raise OptionError for other values."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    listed = _token_ids(list(_as_lists(given))) if is_list else None
    if listed is None:
        raise OptionError(f"stop_token_ids is a list of token ids, got {given!r}")
    return listed


def as_drafting(given: Any) -> str | int:
    """Return the setting of a request for its drafts: "auto", "off" or a number of draft tokens."""
    value = plain_number(given)
    if isinstance(value, bool) or value in ("auto", "off", 0):
        return "auto" if value in (True, "auto") else "off"
    if not _is_whole(value) or value < 1:
        raise OptionError(f"drafting must be auto, off or a number of draft tokens, 1 or more; got {given!r}")
    return int(value)


def as_logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Return a logit bias as sorted pairs; its keys may be strings of digits, as in JSON."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple(sorted((_token_id(token), float(plain_number(bias))) for token, bias in pairs))
    except (TypeError, ValueError):
        raise OptionError(f"logit_bias maps token ids to numbers, for example {{50256: -100}}, got {given!r}") from None


def _token_id(given: Any) -> int:
    """Return a token id that is a whole number or a string of digits. `int` would read "5_0" as 50, and 5.7 as 5."""
    number = plain_number(given)
    if _is_whole(number) or (isinstance(number, str) and number.isascii() and number.isdigit()):
        return int(number)
    raise ValueError(given)


F = TypeVar("F", bound=Callable[..., Any])


def with_generate_keywords(function: F) -> F:
    """Let `help` and `inspect.signature` show the keywords of GenerateKeywords instead of `**keywords`."""
    signature, types = inspect.signature(function), GenerateKeywords.__annotations__
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = [name for name in DEFAULTS if name not in signature.parameters]
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=types[name].__forward_arg__
        )
        for name in names
    ]
    function.__signature__ = signature.replace(parameters=[*kept, *shared])  # type: ignore[attr-defined]
    return function


# --- load -----------------------------------------------------------------------------------------


def load_keywords(options: Keywords, dtype: Any, device: Any) -> tuple[dict[str, Any], str, str]:
    """Return (options of the method, dtype, device), with the names that transformers uses understood."""
    options = dict(options)
    if "torch_dtype" in options:
        if dtype not in ("auto", None):
            raise OptionError("torch_dtype is called dtype here: write only one of them")
        dtype = options.pop("torch_dtype")
    for name in LOADED_ELSEWHERE:
        if name in options:
            raise OptionError(f"{name} belongs to transformers: load the model with it and give eyas.load the model")
    return options, dtype_name(dtype), device_name(device)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype: "auto" for None, "float32" for torch.float32. Raise OptionError for other values."""
    if dtype is None:
        return "auto"
    if not isinstance(dtype, str | torch.dtype):
        raise OptionError(f"dtype must be a name such as 'float32' or a torch dtype, got {dtype!r}")
    return str(dtype).removeprefix("torch.")


def device_name(device: Any) -> str:
    """Return the name of a device: "auto" for None, "cuda:1" for the number 1."""
    if device is None:
        return "auto"
    if not isinstance(device, str | torch.device) and not _is_whole(device):
        raise OptionError(f"device must be a name such as 'cpu' or 'cuda:0', got {device!r}")
    return f"cuda:{device}" if _is_whole(device) else str(device)


def on_or_off(value: Any) -> Any:
    """Return "on", "off" or "auto" for True, False or None; other values as they are."""
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "auto"}[value]
    return value


def mode_of(options: Keywords) -> tuple[str, dict[str, Any]]:
    """Return the mode of trees, auto or fixed, and the options of the method alone. `tree` with the name of a mode
    decides; without it, trees are fixed where an option describes them. With tree=auto they grow no larger than the
    options allow."""
    mode = options.get("tree")
    if not isinstance(mode, str):
        shaped = any(name.partition(".")[0] in SHAPED for name in options)
        return "fixed" if shaped else "auto", dict(options)
    if mode not in MODES:
        raise OptionError(
            f"unknown tree {mode!r}; {near(mode, MODES)}. A tree's own options are --tree.nodes and others"
        )
    return mode, {name: value for name, value in options.items() if name != "tree"}


def placement_of(target: Any, device: Any, device_map: Any, folder: Any) -> tuple[Any, DeviceMap | None]:
    """Return the device of the whole model, or where a device map puts its parts. A device map is one of
    STRATEGIES, a mapping from parts to devices, or the path of a JSON file with such a mapping. `folder`: for
    weights on disk."""
    if isinstance(device_map, str) and device_map.endswith(".json"):
        try:
            device_map = parse_json(Path(device_map).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"the device map {Path(device_map)} cannot be read: {error}") from error
    if isinstance(device_map, Mapping) and list(device_map) == [""]:
        device_map = device_map[""]
    spreads = isinstance(device_map, Mapping) or device_map in STRATEGIES
    if folder is not None and not spreads:
        raise OptionError("offload_folder is for a device_map that puts weights on disk: give both")
    if device_map is None:
        return device, None
    if device not in ("auto", None):
        raise OptionError("device_map and device say the same: write one of them")
    if not spreads:
        return device_map, None
    if not isinstance(target, str | Path):
        own = "the embedded model needs no device_map" if target is None else "a model that you loaded is used as it is"
        raise OptionError(f"{own}: give a device_map together with the folder or hub id of a target")
    if isinstance(device_map, Mapping):
        if not device_map or not all(isinstance(k, str) and isinstance(v, str | int) for k, v in device_map.items()):
            raise OptionError(f"a device_map gives a device to each part of the model, by name: got {device_map!r}")
        device_map = dict(device_map)
    return "auto", DeviceMap(device_map, folder)
