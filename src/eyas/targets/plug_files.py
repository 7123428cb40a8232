"""Plugs a search for broken files of models and tokenizers into the socket "files" (core/sockets.py). The
libraries' own messages are often long, and name no file.
"""

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
MODEL_JSON = ("config.json", "generation_config.json", "*.index.json")
TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
REASON_LENGTH = 120  # characters of a library's message that are shown


def fault(folder: Path, files: str) -> str:
    """Return the first thing that is wrong with files of a folder; "" if nothing is found. See `FilesPlug`."""
    return next(_SEARCHES[files](folder), "")


def _config_faults(folder: Path) -> Iterator[str]:
    yield from _json_faults(folder, ("config.json",))


def _generation_faults(folder: Path) -> Iterator[str]:
    yield from _json_faults(folder, ("generation_config.json",))


def _layer_faults(folder: Path) -> Iterator[str]:
    """Yield the fault if config.json has a number of layers that no model has."""
    try:
        content = parse_json((folder / "config.json").read_bytes())
    except (OSError, InputError):  # reported by `_config_faults`
        return
    for part in (content, content.get("text_config")) if isinstance(content, dict) else ():
        for name in LAYER_COUNTS:
            count = part.get(name) if isinstance(part, dict) else None
            if isinstance(count, int) and count > MOST_LAYERS:
                yield f"config.json: {name} is {count:,}, and no model has more than {MOST_LAYERS:,}: correct it"


def _model_faults(folder: Path) -> Iterator[str]:
    yield from _json_faults(folder, MODEL_JSON)
    for path in sorted(folder.glob("*.index.json")):
        if not isinstance(json.loads(path.read_text("utf-8")).get("weight_map"), dict):
            yield f'{path.name} has no "weight_map" from tensor names to files'
    tensors = sorted(folder.glob("*.safetensors"))
    yield from _tensor_faults(tensors)
    if not tensors:
        yield from _pickle_faults(sorted(folder.glob("*.bin")))


def _tokenizer_faults(folder: Path) -> Iterator[str]:
    yield from _json_faults(folder, TOKENIZER_JSON)
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


_SEARCHES = {
    "config": _config_faults,
    "generation": _generation_faults,
    "layers": _layer_faults,
    "model": _model_faults,
    "tokenizer": _tokenizer_faults,
}
