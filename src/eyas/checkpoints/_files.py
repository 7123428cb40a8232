"""Files of a draft head: finding its folder (here or on the hub), reading config.json and tensors, writing both safely.

It knows file names and file formats, and no tensor name. Reading never runs code from a file: pickles only with weights_only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.errors import CheckpointError, InputError

__all__ = ["find", "read_config", "read_tensors", "write"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG = "config.json"
_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
_NAMED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")  # heads that may lie beside the model they belong to
_FETCHED_FIRST = [_CONFIG, "*.safetensors", "*.safetensors.index.json"]
_FETCHED_ELSE = ["*.bin", "*.bin.index.json", "*_lm_head.pt"]


# --- finding ---------------------------------------------------------------------------------------------------------------------------


def find(path_or_hub_id: str | os.PathLike[str], revision: str | None) -> tuple[Path, str]:
    """(folder on this machine, how to name it in messages). Fetches from the hub what is not here."""
    name = os.fspath(path_or_hub_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise InputError(f"revision {revision!r} is for a hub id, but {name} is a folder here: leave it out")
        return folder, name
    if folder.exists():
        raise CheckpointError(f"draft head {name}: this is a file; give the folder that holds it together with its {_CONFIG}")
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"draft head {name}: there is no such folder, and it is no hub id (owner/name)")
    folder = _fetch(name, revision)
    return folder, f"{name}@{folder.name}"


def _fetch(hub_id: str, revision: str | None) -> Path:
    """The folder of a hub snapshot: config and safetensors, or pickled files where there are no safetensors."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_FETCHED_FIRST))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_FETCHED_ELSE))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(f"draft head {hub_id}: there is no such folder here, and {_refusal(error, revision)}") from error
    return folder


def _refusal(error: Exception, revision: str | None) -> str:
    """Why the hub gave nothing, in words of ours where the reason is a common one."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to those who asked for access: ask there, then log in"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or keeps it private: check the name, or log in"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub cannot be reached, and no copy was fetched earlier: connect, or give a folder"
    return f"fetching it from the hub failed ({type(error).__name__}: {_first_line(error)})"


# --- reading ---------------------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict."""
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"the folder has no {_CONFIG}: is it the folder of a draft head?")
    return _read_json(folder / _CONFIG)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, on the CPU, from the first of: files named for a method, safetensors, sharded safetensors, .bin, sharded .bin."""
    for name in _NAMED:
        if (folder / name).is_file():
            return (_read_safetensors if name.endswith(".safetensors") else _read_bin)(folder / name)
    for single, read in ((_SAFETENSORS, _read_safetensors), (_BIN, _read_bin)):
        if (folder / single).is_file():
            return read(folder / single)
        if (folder / f"{single}.index.json").is_file():
            return _read_shards(folder / f"{single}.index.json", read)
    raise CheckpointError(f"the folder has no weights: neither {_SAFETENSORS} nor {_BIN}, nor the index.json of their shards")


def _read_shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f'{index.name} has no "weight_map" from tensor names to files')
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index.name} names {file!r}, which is outside the folder")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.name} names the shard {file}, which is missing: fetch it too")
        tensors |= read(index.parent / file)
    absent = sorted(places.keys() - tensors.keys())
    if absent:
        raise CheckpointError(f"{index.name} promises tensors that no shard holds: {', '.join(absent)}")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} is corrupt or truncated: {_first_line(error)}") from error


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise CheckpointError(f"{path.name} is corrupt, truncated or holds more than tensors: {_first_line(error)}") from error
    if not isinstance(held, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items()):
        raise CheckpointError(f"{path.name} holds no dict from names to tensors")
    return dict(held)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path.name} cannot be read: {_first_line(error)}") from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{path.name} holds no JSON object")
    return held


def _first_line(error: BaseException) -> str:
    """What an exception says, one line of at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# --- writing ---------------------------------------------------------------------------------------------------------------------------


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = _SAFETENSORS) -> None:
    """Write both files under temporary names in `folder`, then rename them: weights first, so that config.json completes a new head.

    file: the name of the safetensors file.
    """
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in (file, _CONFIG)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_unshared(tensors), temporary[file], metadata={"format": "pt"})
        temporary[_CONFIG].write_text(text, encoding="utf-8")
        temporary[file].chmod(temporary[_CONFIG].stat().st_mode)  # safetensors writes for the owner alone
        for path in temporary.values():
            _to_disk(path)
        for name, path in temporary.items():
            path.replace(folder / name)
    except (OSError, SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise InputError(f"cannot write the draft head to {folder} ({needed / 1e6:.1f} MB): {_why(error)}") from error
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):  # then the folder itself is what cannot be used, and that is being said already
                path.unlink(missing_ok=True)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, none of which shares its memory with another: what the file format can hold."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        out[name] = plain
    return out


def _to_disk(path: Path) -> None:
    """Make sure that a file is on the disk and not only promised: a full disk shows here at the latest."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _why(error: Exception) -> str:
    text = _first_line(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in text:
        return "no space left on the device: free some, or choose another folder"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}; choose another folder"
    return f"{text}; choose another folder"
