"""The device of the target, or of its parts, as callers write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError
from eyas.files import parse_json
from eyas.targets.pretrained import DeviceMap

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def placement_of(target: Any, device: Any, device_map: Any, folder: Any) -> tuple[Any, DeviceMap | None]:
    """Return the device of the whole model, or where a device map puts its parts: one of STRATEGIES, a mapping from
    parts to devices, or the path of a JSON file that holds one. `folder`: for weights on disk."""
    if isinstance(device_map, str) and device_map.endswith(".json"):
        device_map = _read(Path(device_map))
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


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"the device map {path} cannot be read: {error}") from error
