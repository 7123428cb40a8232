"""The files of a draft head: finding its folder, locally or on the hub; reading and writing
config.json and tensors.

This module knows file names and file formats, and no tensor name. Reading never runs code from a
file: pickles are read with weights_only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.errors import CheckpointError, InputError, first_line
from eyas.files import CHECKSUMS, SCALE, from_int8, is_altered

__all__ = [
    "GGUF", "check_finite", "check_sum", "find", "hub_refusal", "mapping", "read_config", "read_pickle", "read_tensors", "short", "write",
]  # fmt: skip

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG = "config.json"
GGUF = ".gguf"
_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
# what is fetched from the hub: pickles only where there are no safetensors
# files that may be in one folder with the weights of a whole model
_NAMED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")


# --- finding ---------------------------------------------------------------------------------------


def find(path_or_hub_id: str | os.PathLike[str], revision: str | None) -> tuple[Path, str]:
    """Return the local folder, fetched from the hub if necessary, or a local file in GGUF format, and its name for
    messages."""
    name = os.fspath(path_or_hub_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise InputError(f"revision {revision!r} is for a hub id, but {name} is a folder here: leave it out")
        return folder, name
    if folder.is_file() and folder.suffix == GGUF:
        return folder, name
    if folder.exists():
        raise CheckpointError(
            f"draft head {name}: this is a file; give a folder with a {_CONFIG}, or a file in GGUF format ({GGUF})"
        )
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"draft head {name}: there is no such folder, and it is not a hub id (owner/name)")
    folder = _fetch(name, revision)
    return folder, f"{name}@{folder.name}"


def _fetch(hub_id: str, revision: str | None) -> Path:
    """Return the folder of a hub snapshot: config and safetensors, or pickled files where there are no safetensors."""
    import huggingface_hub

    safe = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    pickled = ["*.bin", "*.bin.index.json", "*_lm_head.pt"]
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=safe))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=pickled))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"draft head {hub_id}: this folder does not exist, and {hub_refusal(error, revision)}"
        ) from error
    return folder


def hub_refusal(error: Exception, revision: str | None) -> str:
    """Return the reason why the hub did not deliver; for common ones it says what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to those who asked for access: ask there, then log in"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or keeps it private: check the name, or log in"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub cannot be reached, and no copy was fetched earlier: connect, or give a folder"
    return f"fetching it from the hub failed ({type(error).__name__}: {first_line(error, 200)})"


# --- reading ---------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"the folder has no {_CONFIG}: is it the folder of a draft head?")
    return _read_json(folder / _CONFIG)


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under this key; an empty one when it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {key} {short(value)}; it must be an object or null")
    return value


def short(value: Any) -> str:
    """Return the value for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors, on the CPU, from the first of: files named for a method, safetensors, its shards, .bin, its
    shards."""
    for name in _NAMED:
        if (folder / name).is_file():
            return _read_file(folder / name)
    for single in (_SAFETENSORS, _BIN):
        if (folder / single).is_file():
            return _read_file(folder / single)
        if (folder / f"{single}.index.json").is_file():
            return _read_shards(folder / f"{single}.index.json")
    raise CheckpointError(
        f"the folder has no weights: neither {_SAFETENSORS} nor {_BIN}, nor the index.json of their shards"
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    shard_of = _read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
        raise CheckpointError(f'{index.name} has no "weight_map" from tensor names to files')
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(shard_of.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index.name} names {file!r}, which is outside the folder")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.name} names the shard {file}, which is missing: fetch it too")
        tensors |= _read_file(index.parent / file)
    absent = sorted(shard_of.keys() - tensors.keys())
    if absent:
        raise CheckpointError(f"{index.name} promises tensors that no shard holds: {', '.join(absent)}")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file, all of whose numbers are finite."""
    check_sum(path)
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    for name, tensor in tensors.items():
        check_finite(path.name, name, tensor)
        scale = tensors.get(name + SCALE)
        if scale is not None and tensor.dtype == torch.int8 and scale.shape != tensor.shape[:1]:
            raise CheckpointError(f"{path.name}: {name + SCALE} must hold one number for each row of {name}")
    return from_int8(tensors)


def check_finite(file: str, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a tensor of floats with NaN or infinite values."""
    checked = tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()
    if checked and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise CheckpointError(
            f"{file}: tensor {name} holds NaN or infinite values: the file is broken, or its training failed"
        )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} is corrupt or truncated: {first_line(error, 200)}") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, which is read with weights_only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise CheckpointError(
            f"{path.name} is corrupt, truncated or holds more than tensors: {first_line(error, 200)}"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise CheckpointError(f"{path.name} holds no dict from names to tensors")
    return dict(content)


def _read_json(path: Path) -> dict[str, Any]:
    check_sum(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path.name} cannot be read: {first_line(error, 200)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds no JSON object")
    return content


def check_sum(path: Path) -> None:
    """Raise CheckpointError for a file that does not match its checksum in the same folder."""
    if is_altered(path):
        raise CheckpointError(
            f"{path.name} is not the file whose SHA-256 is in {CHECKSUMS}: it is damaged; install or fetch it again"
        )


# --- writing ---------------------------------------------------------------------------------------


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = _SAFETENSORS) -> None:
    """Write both files under temporary names in `folder`, then rename them: weights first, so that
    config.json completes a new head.

    Args:
        file: the name of the file of tensors: safetensors, or a pickle where it ends in .pt.
    """
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in (file, _CONFIG)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.endswith(".pt"):
            torch.save(_unshare(tensors), temporary[file])
        else:
            save_file(_unshare(tensors), temporary[file], metadata={"format": "pt"})
        temporary[_CONFIG].write_text(text, encoding="utf-8")
        temporary[file].chmod(temporary[_CONFIG].stat().st_mode)  # safetensors writes for the owner alone
        for path in temporary.values():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())  # a full disk shows here at the latest
        for name, path in temporary.items():
            path.replace(folder / name)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises the second for the first
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise InputError(f"cannot write the draft head to {folder} ({needed / 1e6:.1f} MB): {_why(error)}") from error
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):  # the folder itself cannot be used, which is being reported
                path.unlink(missing_ok=True)


def _unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU that share no memory, as safetensors files need them."""
    storages: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().data_ptr() in storages:
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        out[name] = copy
    return out


def _why(error: Exception) -> str:
    text = first_line(error, 200)
    if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in text:
        return "no space left on the device: free some, or choose another folder"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}; choose another folder"
    return f"{text}; choose another folder"
