"""Plugs adapters of PEFT into the socket "adapter" (core/sockets.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.core.target import Target
from eyas.targets.adapters import AdapterSet, AdapterView, add_adapter_layers, digest, merge
from eyas.targets.fingerprints import Origin, fingerprint_of
from eyas.targets.loading import is_peft_model
from eyas.targets.quantised import library_of

__all__ = ["target_with_adapters"]


def target_with_adapters(model: Any, name: str, adapters: str | Path | Mapping[str, str | Path] | None) -> Target:
    """Return the target of a PeftModel, or of a model to which adapters are added from their folders."""
    if is_peft_model(model):
        found = AdapterSet(model)
        target = Target(model.get_base_model(), name)
        target.adapters = AdapterView(found, found.active)
        return target
    assert adapters, "a PeftModel, or folders"
    target = Target(model, name)
    base = fingerprint_of(model)
    if isinstance(adapters, Mapping):
        found = AdapterSet.load(model, adapters)
        found.use("")
        target = Target(model, name)
        target.adapters = AdapterView(found, "")
        origin = Origin(base)
    else:
        target = Target((add_adapter_layers if library_of(model) else merge)(model, adapters), name)
        origin = Origin(base, digest(adapters))
    target.extensions += (origin,)
    return target
