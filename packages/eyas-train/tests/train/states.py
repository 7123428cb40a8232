"""The state of a run on disk, for tests that look into it or change it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from eyas.files import sha256_of_file
from eyas_train.dist import SingleProcess
from eyas_train.state import VALUES_FILE, load_tensors, load_values, saved_states, whole_tensors


def read_state(folder: Path) -> dict[str, Any]:
    """Everything in the newest state of a run: its values, "net", "best" with its net, and "optimizers"."""
    path = saved_states(folder)[-1]
    found, tensors = load_values(path, SingleProcess()), whole_tensors(path)
    load_tensors(path, tensors, SingleProcess())
    parts: dict[str, dict[str, Any]] = {"net": {}, "best": {}, "optimizer": {}}
    for key, value in tensors.items():
        part, name = key.split(".", 1)
        parts[part][name] = value
    if found["best"]:
        found["best"]["net"] = parts["best"]
    return {**found, "net": parts["net"], "optimizers": parts["optimizer"]}


def copy_state(source: Path, folder: Path) -> Path:
    """Copy the newest state of a run into another folder. Returns where it is."""
    path = saved_states(source)[-1]
    return Path(shutil.copytree(path, folder / path.name))


def change_values(state: Path, **changes: Any) -> None:
    """Give values of a state other ones, or none, and the checksums that belong to what is there now."""
    file = state / VALUES_FILE
    values = {**json.loads(file.read_text().splitlines()[1]), **changes}
    values["files"] = {path.name: sha256_of_file(path) for path in state.glob("shard-*")}
    content = json.dumps({key: value for key, value in values.items() if value is not REMOVED})
    file.write_text(f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}\n")


REMOVED = object()
