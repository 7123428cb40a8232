"""Loads the target that `load` asks for, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas.core.sockets import TARGET, KnownTarget, Source
from eyas.core.target import Target
from eyas.errors import ModelError, OptionError
from eyas.targets.loading import load_target, pick_device, pick_dtype, target_of
from eyas.targets.pretrained import DeviceMap, check_config, is_peft_model, read_tokenizer

__all__ = ["TargetSettings", "known_target", "read_target"]

Loaded = tuple[Target, PreTrainedTokenizerBase | None]


class TargetSettings(NamedTuple):
    """How `load` is to load a target: its own arguments, checked."""

    tokenizer: Any
    dtype: str
    device: str
    trust_remote_code: bool
    adapters: dict[str, str] | str | None
    device_map: DeviceMap | None
    gguf_file: str | None


def known_target(target: Any, gguf_file: str | None, cache: bool) -> KnownTarget | None:
    """Return what a plug knows about a target; None for a folder, a hub id or a loaded model."""
    for plug in TARGET.plugs:
        if (known := plug.find_target(target, gguf_file, cache)) is not None:
            return known
    return None


def read_target(target: Any, known: KnownTarget | None, settings: TargetSettings) -> Loaded:
    """Return the target and its tokenizer.

    Raises:
        ModelError: one line that says what is wrong with the target or the tokenizer.
        OptionError: settings that do not go with such a target.
    """
    if settings.gguf_file is not None and (known is None or not known.takes_file):
        raise OptionError(
            "gguf_file names a file of a target that eyas loads: give the target's folder or hub id with it"
        )
    if known is not None:
        with known.open(settings.tokenizer) as source:
            return _read(source, settings)
    if isinstance(target, PreTrainedModel) or is_peft_model(target):
        return _take(target, settings)
    if target is None:
        raise ModelError("there is no embedded model in this installation of eyas: name a target")
    if not isinstance(target, str | Path):
        raise ModelError(
            f"a target is a folder, a hub id or a causal language model of transformers, not {type(target).__name__}"
        )
    return _read(Source(target, "", settings.tokenizer), settings)


def _read(source: Source, settings: TargetSettings) -> Loaded:
    """Read a folder, or what is at a hub id; or finish a model that a plug has made."""
    place, trust = source.place, settings.trust_remote_code
    if isinstance(place, PreTrainedModel):
        device = torch.device(pick_device(settings.device))
        dtype = pick_dtype(settings.dtype, device)
        model: torch.nn.Module = place
        model.to(device=device, dtype=torch.float32 if isinstance(dtype, str) else dtype)
        return target_of(model, source.name, settings.adapters), _tokenizer(source.tokenizer, "")
    check_config(place, trust)
    tokenizer = _tokenizer(source.tokenizer, place, trust)
    target = load_target(
        place,
        settings.dtype,
        settings.device,
        trust,
        adapters=settings.adapters,
        device_map=settings.device_map,
        name=source.name,
    )
    return target, tokenizer


def _take(model: Any, settings: TargetSettings) -> Loaded:
    """Take a model that the caller has loaded."""
    if settings.adapters:
        raise OptionError(
            "put the adapter into a model that you loaded by PeftModel.from_pretrained, and give eyas.load the result"
        )
    name = (model.get_base_model() if is_peft_model(model) else model).name_or_path
    tokenizer = _tokenizer(settings.tokenizer, name)
    return target_of(model, name or type(model).__name__), tokenizer


def _tokenizer(given: Any, place: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that the caller names, else the one at `place`, which may be ""; None for False.

    Raises:
        ModelError: there is no tokenizer where the caller says.
    """
    if given is None:
        return read_tokenizer(place, trust_remote_code) if place else None
    if given is False:
        return None
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if not isinstance(given, str | Path):
        raise ModelError(
            f"a tokenizer is a folder, a hub id or a tokenizer of transformers, not {type(given).__name__}"
        )
    return read_tokenizer(given, trust_remote_code, required=True)
