"""Read a Hugging Face model and its tokenizer, from a folder or from the hub.

A broken file makes the libraries raise exceptions of many kinds, often of many lines. Here each of
them becomes a ModelError of one line, which names the broken file if `_faults` finds it. This module
knows files and transformers' Auto classes; it knows no tree, no cache and no method.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from eyas.errors import ModelError, OptionError, one_line

__all__ = [
    "BASE", "REASON_LENGTH", "DeviceMap", "check_config", "check_path", "has_tokenizer", "is_missing_path",
    "is_peft_model", "one_line_errors", "read_model", "read_tokenizer",
]  # fmt: skip

log = logging.getLogger(__name__)  # the command line shows its messages

CPU = torch.device("cpu")

BASE = "base"  # in requests: the model without an adapter
REASON_LENGTH = 240  # characters of a library's message that are shown
TOKENIZER_FILES = (
    "tokenizer.*", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip


class DeviceMap(NamedTuple):
    """The devices on which accelerate puts a model's weights."""

    # "auto" and the like, or a device ("cpu", "disk", 0 ...) for each part of the model
    device_map: str | Mapping[str, str | int]
    # the folder of weights that the map puts on "disk", if the checkpoint is not safetensors
    folder: str | Path | None = None


def is_peft_model(model: object) -> bool:
    """Return whether the object is a PeftModel, which holds a model."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def read_model(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    role: str = "target",
    device_map: DeviceMap | None = None,
    keywords: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
    own_dtype: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in eval mode.

    Args:
        source: local folder or hub id.
        dtype: a torch dtype, or "auto" for the checkpoint's own.
        role: how messages call the model: "target", "draft model".
        device_map: where its weights go, instead of the CPU.
        keywords: further keywords of `from_pretrained`. With "config" no config.json is read.
        device: the device of the model. A quantised model is loaded there, as its library may not
            be able to move it.
        own_dtype: a quantised checkpoint keeps its own dtype, in which its scales are stored.

    Raises:
        ModelError: the model cannot be loaded or tensors are missing; the message names the file
            if one is broken.
    """
    options = dict(keywords or {})
    config = options.get("config") or check_config(source, trust_remote_code, role)
    quantised = "config" not in options and getattr(config, "quantization_config", None) is not None
    if quantised and device != CPU and device_map is None:
        options["device_map"] = {"": device}
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
    with one_line_errors(f"{role} {str(source)!r} cannot be loaded", source, "model"):
        loaded: Any = kind.from_pretrained(
            str(source),
            dtype="auto" if quantised and own_dtype else dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
            **_device_map_keywords(device_map),
        )
    model, info = loaded
    if absent := sorted(info["missing_keys"]):
        raise ModelError(f"{role} {str(source)!r} lacks tensors: {_first_of(absent)}")
    shapes = info["mismatched_keys"]
    if mismatched := sorted(f"{name} {list(there)} instead of {list(here)}" for name, there, here in shapes):
        raise ModelError(f"{role} {str(source)!r} has tensors of another shape: {_first_of(mismatched)}")
    return model if quantised or device_map is not None else model.to(device)  # type: ignore[no-any-return]


def _device_map_keywords(device_map: DeviceMap | None) -> dict[str, Any]:
    """Return keywords of `from_pretrained`. Raise OptionError without accelerate."""
    if device_map is None:
        return {}
    if find_spec("accelerate") is None:
        raise OptionError("a device_map needs accelerate: pip install '.[offload]' in a clone of eyas")
    return {"device_map": device_map.device_map, "offload_folder": device_map.folder}


def check_config(source: str | Path, trust_remote_code: bool = False, role: str = "target") -> PreTrainedConfig:
    """Read a model's configuration before anything large is read.

    Raises:
        ModelError: the name is neither a folder of a model nor a hub id, or transformers refuses
            the configuration.
    """
    check_path(source, role)
    folder = _folder(source)
    # transformers would list every layer in its error
    if folder is not None and (fault := _fault(folder, "layers")):
        raise ModelError(f"{role} {str(source)!r} cannot be loaded: {fault}")
    with one_line_errors(f"{role} {str(source)!r} cannot be loaded", source, "config", "config.json: "):
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    folder = _folder(source)  # a hub id is in the cache by now
    # transformers ignores a broken generation_config.json
    if folder is not None and (fault := _fault(folder, "generation")):
        raise ModelError(f"{role} {str(source)!r} cannot be loaded: {fault}")
    return config


def read_tokenizer(
    source: str | Path, trust_remote_code: bool = False, required: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer; None if there are no files of one, or it knows no token.

    Args:
        source: local folder or hub id.
        required: raise instead of returning None.

    Raises:
        ModelError: the files of a tokenizer are there, but it cannot be loaded.
    """
    folder = _folder(source)
    if folder is not None and not _has_files_of_tokenizer(folder):
        if required:
            raise _no_tokenizer(source)
        return None
    try:
        with one_line_errors(f"the tokenizer in {str(source)!r} cannot be loaded", source, "tokenizer"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(source), trust_remote_code=trust_remote_code
            )
            empty = len(tokenizer) == 0
            if not getattr(tokenizer, "chat_template", None):
                tokenizer.chat_template = _template_of_processor(str(source))
    except ModelError:
        folder = _folder(source)
        if required or (folder is not None and _has_files_of_tokenizer(folder)):
            raise
        return None
    wrong = ""
    if not isinstance(getattr(tokenizer, "chat_template", None), str | dict | None):
        wrong = "a chat template that is not text"
    elif not isinstance(tokenizer.model_max_length, int | float):
        wrong = "a model_max_length that is not a number"
    if wrong:
        raise ModelError(f"the tokenizer in {str(source)!r} has {wrong}: repair tokenizer_config.json")
    if empty and required:
        raise _no_tokenizer(source)
    return None if empty else tokenizer


def _template_of_processor(source: str) -> Any:
    """Return the chat template in the files of a processor, which a tokenizer does not read; None where there is none."""
    for name in ("chat_template.json", "processor_config.json"):
        path = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if path is not None and (template := json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")):
            return template
    return None


def has_tokenizer(source: str | Path) -> bool:
    """Return whether a local folder, or the cached part of a hub repository, holds files of a tokenizer."""
    folder = _folder(source)
    return folder is not None and _has_files_of_tokenizer(folder)


def _no_tokenizer(source: str | Path) -> ModelError:
    return ModelError(f"there is no tokenizer in {str(source)!r}: name the folder or hub id of one")


def check_path(source: str | Path, role: str) -> None:
    """Raise ModelError for a name that can be neither a model's folder nor a hub id."""
    path, name = Path(source), str(source)
    if path.is_file():
        raise ModelError(f"{role} {name!r} is a file: pass the folder that holds it and its config.json")
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        hint = f", or a file in GGUF format, such as {str(found[0])!r}" if found else ""
        raise ModelError(f"{role} folder {name!r} has no config.json: pass a folder in Hugging Face layout{hint}")
    if is_missing_path(source):
        raise ModelError(f"{role} {name!r} does not exist")


def is_missing_path(source: str | Path) -> bool:
    """Return whether nothing is at a path that cannot be a hub id."""
    path, name = Path(source), str(source)
    return not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name)


def _folder(source: str | Path) -> Path | None:
    """Return the folder with the files of a local path, or of a hub id that is in the cache; None if there is none."""
    if Path(source).is_dir():
        return Path(source)
    try:
        cached = try_to_load_from_cache(str(source), "config.json")
    except ValueError:  # not a hub id
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _has_files_of_tokenizer(folder: Path) -> bool:
    return any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern))


@contextmanager
def one_line_errors(beginning: str, source: str | Path, files: str = "", place: str = "") -> Iterator[None]:
    """Turn exceptions of a library into a ModelError of one line.

    The line names the first broken file, or else holds the library's message.

    Args:
        beginning: the first words of the message.
        files: the files of the folder that may be broken, a word of `_faults.fault`; "": none.
        place: the file that is named before the library's message if no file is found broken.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a broken file makes the libraries raise exceptions of many kinds
        folder = _folder(source)
        fault = None if folder is None or not files else _fault(folder, files)
        raise ModelError(f"{beginning}: {fault or place + _message(error)}") from error


def _fault(folder: Path, files: str) -> str:
    from eyas.targets._faults import fault

    return fault(folder, files)


def _message(error: Exception) -> str:
    """Return an exception's message on one line; with its type if the message alone says little."""
    message = one_line(error)
    if "couldn't connect to" in message:
        return "no such folder, and the hub cannot be reached" + " (HF_HUB_OFFLINE is set)" * constants.HF_HUB_OFFLINE
    # "Validation error for field 'x': TypeError: Field 'x' ... Errors: ..."
    if type(error).__name__.startswith("StrictDataclass"):
        return message[max(0, message.find("Field ")) :].partition(". Errors:")[0][:REASON_LENGTH]
    if len(message) > REASON_LENGTH:
        message = f"{message[:REASON_LENGTH].rstrip()} ..."
    return message if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {message}"


def _first_of(names: list[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
