"""The record of a draft head, loading and saving it in any published format, and checks of its tensors.

This module knows neither how files are read (`_files`) nor any tensor name (one module per format).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from eyas.checkpoints._files import find, mapping, read_config, read_tensors, write
from eyas.errors import CheckpointError, near

__all__ = [
    "ExportTarget", "Format", "Published", "Shape", "Weights", "differences", "expect", "formats", "load",
    "published_at", "recognise", "refuse_dtypes", "save",
]  # fmt: skip

Shape = tuple[int, ...]
Published = tuple[dict[str, Any], dict[str, Tensor]]
"""A config.json and the tensors beside it."""

_WRAPPED = re.compile(r"((?:(?:model|module|_orig_mod|draft_model|eagle_module|dflash_module)\.)+)fc\.weight")
_FLOAT = r"-?(\d+\.\d+|nan|inf)"
_FINGERPRINT = re.compile(rf"([0-9a-z_-]+\+)*[0-9a-f]+:{_FLOAT}(,{_FLOAT})*")


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """A draft head in our names, from any published format. Filled by `load`, or by a trainer for `save`."""

    method: str
    """The method whose net these tensors are, a module of eyas.drafters: "eagle1", "eagle3"."""
    config: dict[str, Any]
    """Our keys, documented by the format that fills them; "eyas" holds the record in heads written
    by eyas."""
    tensors: dict[str, Tensor]
    """Our tensor names to tensors on the CPU, in the dtype of the file."""
    source: str
    """A folder, or a hub id with its commit; used in messages."""


@dataclass(frozen=True)
class ExportTarget:
    """Facts about the target model that a format may ask for when eyas-train exports a head. The
    command line fills them in."""

    name: str = ""
    """A folder or hub id by which other engines find the target; empty when nobody said."""
    architectures: tuple[str, ...] = ()
    """From the target's config.json."""
    embedding: Callable[[], Tensor] | None = None
    """Computes the target's table of token embeddings [V, D], in float32; None when the target was
    not named."""


class Format(Protocol):
    """The interface of a format's module. All functions are pure; their CheckpointErrors need not name the source.

    The purpose of the format decides which of these a module has:

        read       `recognises` and `read`. At most one format recognises a folder, so their order does not matter
        saved      METHODS and `write`; FILE where the weights are not published as model.safetensors
        one file   SUFFIX and `unpack`, which converts a file to what other formats read
    """

    METHODS: tuple[str, ...]
    """The methods whose heads eyas saves in this format."""
    SUFFIX: str
    """The ending of the files that `unpack` reads."""

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return whether config.json and the tensor names belong to this format, even if `read`
        then refuses them."""

    def read(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Convert a published head to (method, our config, our tensors). Unknown names or settings are errors."""

    def unpack(self, path: Path) -> Published:
        """Convert a file to the config.json and tensors of another format."""

    def write(self, method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
        """Convert our config and tensors to config.json and the tensors to publish."""


def load(path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None) -> Weights:
    """Load a draft head from a folder, from a file in GGUF format, or from the hub as "owner/name"; a local
    file or folder takes precedence.

    The format is recognised from config.json and the tensor names. From the hub only the config and
    weight files are fetched (safetensors, or .bin where there are none).

    Args:
        revision: a branch, tag or commit on the hub.

    Raises:
        CheckpointError: no head is there. A file is missing, corrupt, truncated or altered. A tensor has values that
            are not finite. Names, shapes or settings do not fit the format.
        InputError: a revision is given for a folder.
    """
    folder, source = find(path_or_hub_id, revision)
    try:
        config, tensors = published_at(folder)
        _check_fingerprint(mapping(config, "eyas").get("target_fingerprint"))
        method, our_config, our_tensors = recognise(config, tensors).read(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"draft head {source}: {error}") from error
    return Weights(method, our_config, our_tensors, source)


def published_at(place: Path) -> Published:
    if not place.is_file():
        return read_config(place), _without_buffers(read_tensors(place))
    return next(form.unpack(place) for form in formats() if getattr(form, "SUFFIX", None) == place.suffix)


def _without_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the frequencies of RoPE, which config.json gives. They also lose the prefix of a head
    that was saved from within a model or a trainer, such as "model." (a whole model has no fc)."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    prefix = next((found[1] for name in kept if (found := _WRAPPED.fullmatch(name))), "")
    bare = {name.removeprefix(prefix): tensor for name, tensor in kept.items()}
    return bare if len(bare) == len(kept) else kept  # a name with and without the prefix: neither is meant


def save(weights: Weights, folder: str | os.PathLike[str]) -> None:
    """Write a draft head in its published format: config.json and its safetensors, into a folder that is made if absent.

    An interrupt leaves an older head whole. Raises InputError when the folder cannot be written or the disk is full.
    """
    writers = {method: form for form in formats() for method in getattr(form, "METHODS", ())}
    if weights.method not in writers:
        from eyas import elsewhere

        elsewhere.check("saves", weights.method, f"saving a head of {weights.method}")
        raise CheckpointError(
            f"no format here can hold a head of method {weights.method!r}; {near(weights.method, writers)}"
        )
    form = writers[weights.method]
    config, tensors = form.write(weights.method, weights.config, weights.tensors)
    write(Path(folder).expanduser(), config, tensors, *([form.FILE] if hasattr(form, "FILE") else []))


def expect(weights: Weights, shapes: Mapping[str, Shape], optional: Collection[str] = frozenset()) -> None:
    """Raise one CheckpointError that names every missing, unexpected and mis-shaped tensor.

    Args:
        shapes: our names and the shapes that a net has.
        optional: names in `shapes` that may be absent.
    """
    faults = differences(weights.tensors, shapes, optional)
    if faults:
        raise CheckpointError(f"draft head {weights.source} does not fit {weights.method}: {faults}")


def differences(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], optional: Collection[str] = frozenset()
) -> str:
    """Return the missing, unexpected and mis-shaped tensors on one line; empty if there are none."""
    missing = [
        f"missing {name} {list(shape)}"
        for name, shape in shapes.items()
        if name not in tensors and name not in optional
    ]
    extra = [f"unexpected {name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in shapes]
    other = [
        f"{name} is {list(tensors[name].shape)} and should be {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    return "; ".join(missing + extra + other)


def refuse_dtypes(tensors: Mapping[str, Tensor], but: Collection[str] = ()) -> None:
    """Refuse quantised weights: all tensors, except those named in `but`, are floats of 16 bits or more."""
    wrong = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if name not in but and not (tensor.is_floating_point() and tensor.element_size() > 1)
    ]
    if wrong:
        raise CheckpointError(
            f"tensors that are not floating point of 16 bits or more: {', '.join(wrong)}; quantised heads are not read"
        )


def _check_fingerprint(fingerprint: Any) -> None:
    if fingerprint is not None and not (isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint)):
        raise CheckpointError(
            'config.json has an eyas.target_fingerprint that eyas did not write (it is text like "dadd22ddee45:-0.003,-0.044,0.018"): '
            "remove it"
        )


def formats() -> Iterator[Format]:
    """Yield the formats: first the modules of this package, then the entry points of other distributions in the
    group "eyas.formats". Modules whose names begin with an underscore are tools."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_") and module.name != "tools":
            yield cast(Format, importlib.import_module(f"eyas.checkpoints.{module.name}"))
    for point in entry_points(group="eyas.formats"):
        yield cast(Format, point.load())


def recognise(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Format:
    for form in formats():
        if hasattr(form, "recognises") and form.recognises(config, tensors.keys()):
            return form
    from eyas import elsewhere

    for key in config:
        elsewhere.check("heads", key, f"a draft head with {key} in its config.json")
    some = ", ".join(sorted(tensors)[:4]) + ", ..." * (len(tensors) > 4)
    raise CheckpointError(f"not a draft head of a format known here; it holds {len(tensors)} tensors: {some}")
