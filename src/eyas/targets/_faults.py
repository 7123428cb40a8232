"""Searches the files of models and tokenizers for the broken one: the libraries' own messages are often long, and name
no file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import InputError, one_line
from eyas.files import parse_json

__all__ = ["fault"]

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")  # the names that configurations use
MOST_LAYERS = 10_000
JSON_FILES = {
    "config": ("config.json",),
    "generation": ("generation_config.json",),
    "model": ("config.json", "generation_config.json", "*.index.json"),
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
}
REASON_LENGTH = 120  # characters of a library's message that are shown


def fault(folder: Path, files: str) -> str:
    """Return the first thing that is wrong with files of a folder, on one line; "" if nothing is found."""
    return next(_faults(folder, files), "")


def _faults(folder: Path, files: str) -> Iterator[str]:
    if files == "layers":
        yield from _layer_faults(folder)
        return
    yield from _json_faults(folder, JSON_FILES[files])
    if files == "model":
        yield from _weight_faults(folder)
    if files == "tokenizer":
        yield from _template_faults(folder)


def _layer_faults(folder: Path) -> Iterator[str]:
    """Yield the fault if config.json has a number of layers that no model has."""
    try:
        content = parse_json((folder / "config.json").read_bytes())
    except (OSError, InputError):  # reported as a fault of "config"
        return
    for part in (content, content.get("text_config")) if isinstance(content, dict) else ():
        for name in LAYER_COUNTS:
            count = part.get(name) if isinstance(part, dict) else None
            if isinstance(count, int) and count > MOST_LAYERS:
                yield f"config.json: {name} is {count:,}, and no model has more than {MOST_LAYERS:,}: correct it"


def _weight_faults(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.index.json")):
        if not isinstance(json.loads(path.read_text("utf-8")).get("weight_map"), dict):
            yield f'{path.name} has no "weight_map" from tensor names to files'
    tensors = sorted(folder.glob("*.safetensors"))
    yield from _tensor_faults(tensors)
    if not tensors:
        yield from _pickle_faults(sorted(folder.glob("*.bin")))


def _template_faults(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jinja")):
        try:
            path.read_text("utf-8")
        except (OSError, ValueError) as error:
            yield f"{path.name} is not text in UTF-8 ({error})"


def _json_faults(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield the faults of files that do not hold one JSON object."""
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        try:
            content = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = "its brackets are nested too deeply" if isinstance(error, RecursionError) else error
            yield f"{path.name} is not valid JSON ({reason}): fetch or write it again"
            continue
        if not isinstance(content, dict):
            yield f"{path.name} holds {type(content).__name__} {str(content)[:20]!r} where a JSON object is expected"


def _tensor_faults(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            with safe_open(path, framework="pt") as tensors:
                tensors.keys()
        except (OSError, SafetensorError) as error:
            yield f"{path.name} is broken or cut off ({error}): fetch or write it again"


def _pickle_faults(paths: list[Path]) -> Iterator[str]:
    """Yield the faults of pickled weights that hold anything but tensors by name; nothing in them is run."""
    for path in paths:
        try:
            content = torch.load(path, map_location="meta", weights_only=True)
        except pickle.UnpicklingError:
            yield (
                f"{path.name} is a pickle that holds more than tensors and could run code, so it is not read (weights_only); "
                "convert it to safetensors where you trust it"
            )
        except Exception as error:
            yield f"{path.name} is broken or cut off ({one_line(error, REASON_LENGTH)}): fetch or write it again"
        else:
            if not isinstance(content, dict):
                yield f"{path.name} holds a {type(content).__name__} where tensors by name are expected"
