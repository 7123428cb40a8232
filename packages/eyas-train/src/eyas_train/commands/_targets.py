"""Targets whose features are read, and the target that a head's record names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli.tools import DraftOptions, ExactTarget, FeatureTarget, TargetOptions, load
from eyas.errors import OptionError

if TYPE_CHECKING:
    from eyas.api import LLM

__all__ = ["ExactTarget", "FeatureTarget", "check_exact", "load_target", "recorded_target", "training_record"]


def check_exact(model: TargetOptions) -> None:
    """Refuse a rounded target and kernels where features are read."""
    allowed = {"kernels": ("auto", "off"), "weights": ("exact",), "activations": ("exact",), "kv": ("exact",)}
    for name, fitting in allowed.items():
        if (given := getattr(model, name)) not in fitting:
            raise OptionError(f"--{name} {given}: features are read by the model's own forward, as it is: leave it out")


def load_target(model: TargetOptions, device: str | None = None) -> LLM:
    """Return the target by its own forward, with plain decoding: for reading its features."""
    check_exact(model)
    llm = load(replace(model, kernels="off", device=device or model.device), DraftOptions(method="vanilla"), {})
    if llm.adapters:
        raise OptionError(
            "features are read from one model: give one adapter without a name, --adapter FOLDER, which is merged"
        )
    return llm


def training_record(folder: Path) -> dict[str, Any]:
    """Return the training.json of a head's folder; empty when it is missing or broken."""
    try:
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def recorded_target(record: Mapping[str, Any]) -> str:
    """Return the folder or hub id of the target in a head's record; empty when it is unknown or
    embedded. A model with a name of its own goes by its hub id."""
    from eyas import named

    target = record.get("target")
    name = str(target.get("name") or "") if isinstance(target, dict) else ""
    model = named.of_target(name)
    return name if model is None else model.published
