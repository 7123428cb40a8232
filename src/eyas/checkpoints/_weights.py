"""The record of a draft head, how it is loaded and saved in whichever published format, and the strict check of its tensors.

It does not know how files are read (`_files`), nor any tensor name (one file for each format beside this one).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from eyas.checkpoints._files import find, read_config, read_tensors, write
from eyas.errors import CheckpointError, near

__all__ = ["Format", "Weights", "differences", "expect", "load", "save"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """A draft head as the drafters want it, whatever format it was published in. Filled by `load`, or by a trainer for `save`."""

    method: str
    """The method whose net these tensors are, a name of the drafters folder: "eagle1", "eagle3"."""
    config: dict[str, Any]
    """Our keys, described by the format that filled them; "eyas" holds the record of a head that we wrote, if we wrote it."""
    tensors: dict[str, Tensor]
    """Our tensor names to tensors on the CPU, in the dtype of the file."""
    source: str
    """Where it came from, for messages: a folder, or a hub id with its commit."""


class Format(Protocol):
    """What a file of this folder offers. All of it is pure; errors are CheckpointErrors that need not name the source.

    Whatever a folder holds, one format at most recognises it: the order of the files is no rule. A format whose weights are published
    under another name than model.safetensors says so in a `FILE`.
    """

    METHODS: tuple[str, ...]
    """The methods whose heads are saved in this format; none for a format that is only read, which has no `write`."""

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a config.json and tensor names are of this format, also if it then refuses them."""

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Published config and tensors -> method, our config, our tensors. Strict: what it does not know is an error."""

    def write(self, method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The way back: a config.json and the tensors to publish."""


def load(path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None) -> Weights:
    """A draft head from a folder, or from the hub as "owner/name"; a folder goes before a hub id of the same name.

    The format is told from config.json and the tensor names. Of the hub only config and weight files are fetched (safetensors, or .bin
    where there are none). revision: a branch, tag or commit of the hub.
    Raises CheckpointError when there is no such head, when a file is missing, corrupt or truncated, or when names, shapes or settings
    are not what the format says; InputError when revision is given for a folder.
    """
    folder, source = find(path_or_hub_id, revision)
    try:
        config = read_config(folder)
        tensors = read_tensors(folder)
        method, ours, renamed = _recognise(config, tensors).read(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"draft head {source}: {error}") from error
    return Weights(method, ours, renamed, source)


def save(weights: Weights, folder: str | os.PathLike[str]) -> None:
    """Write a draft head in its published format: `config.json` and its safetensors in `folder`, which is made if absent.

    Both files are written beside their places and then renamed into them, so that an interrupt leaves an older head whole; nothing
    else in the folder is touched. Raises InputError when the folder cannot be written or the disk is full.
    """
    formats = {method: form for form in _formats() for method in form.METHODS}
    if weights.method not in formats:
        raise CheckpointError(f"no format here can hold a head of method {weights.method!r}; {near(weights.method, formats)}")
    form = formats[weights.method]
    config, tensors = form.write(weights.method, weights.config, weights.tensors)
    write(Path(folder).expanduser(), config, tensors, *([form.FILE] if hasattr(form, "FILE") else []))


def expect(weights: Weights, shapes: Mapping[str, Shape], optional: Collection[str] = frozenset()) -> None:
    """Check that the tensors are exactly these: every missing, unexpected and mis-shaped one is named, in one CheckpointError.

    shapes: our names and the shapes that a net wants; optional: names of `shapes` that may be absent.
    """
    found = differences(weights.tensors, shapes, optional)
    if found:
        raise CheckpointError(f"draft head {weights.source} does not fit {weights.method}: {found}")


def differences(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], optional: Collection[str] = frozenset()) -> str:
    """What is missing, unexpected or of another shape, by name, on one line; empty if nothing."""
    missing = [f"missing {name} {list(shape)}" for name, shape in shapes.items() if name not in tensors and name not in optional]
    extra = [f"unexpected {name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in shapes]
    other = [
        f"{name} is {list(tensors[name].shape)} and should be {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    return "; ".join(missing + extra + other)


def _formats() -> Iterator[Format]:
    """The formats: every module of this folder whose name has no underscore in front."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            yield cast(Format, importlib.import_module(f"eyas.checkpoints.{module.name}"))


def _recognise(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Format:
    for form in _formats():
        if form.recognises(config, tensors.keys()):
            return form
    some = ", ".join(sorted(tensors)[:4]) + ", ..." * (len(tensors) > 4)
    raise CheckpointError(f"not a draft head of a format known here; it holds {len(tensors)} tensors: {some}")
