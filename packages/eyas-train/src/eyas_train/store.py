"""Features on disk: the target's hidden states for the training data, written once, trained from as
often as wanted.

    FOLDER/manifest.json             target, tokenizer, data, layers, and the plan of the shards; written first
           examples.safetensors      tokens, marks and lengths of all examples, the held-out ones last
           shard-00000.safetensors   "layer.K" [tokens, hidden] for each layer K, and "crc32" [examples, layers];
                                     of eight bits also "scale.K" [tokens, 1]

Layer K is Hugging Face's hidden_states[K], the input of layer K; the number of layers means
the output of the final norm. Each layer is a tensor of its own, so a method that reads one of four
reads a quarter of the bytes.

Examples are in the shards in a shuffled order: any part of the shards is a fair sample of the data,
held-out examples included, and can be trained from. A shard is renamed into its place when it is
whole, and carries the id of its store. Its header has the SHA-256 of all bytes after it, which
`verify` compares; `features` compares the CRC-32 of an example when it is first read.

Files are memory-mapped. This module knows no model and no method.

Shapes: N tokens of a shard, R examples, T tokens of an example, D hidden size, F = layers x D.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import InputError, one_line
from eyas.targets.fingerprints import has_fingerprint
from eyas_train._manifest import EXAMPLES_FILE, MANIFEST_FILE, Manifest, format_value, tokenizer_identity
from eyas_train._tensors import Header, byte_view, read_header, restored, tensors_digest, write_tensors
from eyas_train.data import Data, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.core.target import Target

MISSING = "missing"
REPAIR = "delete it and run `eyas features` as before: that shard alone is made again"


class FeatureStore:
    """A folder of features: its examples, and the features of any of them."""

    repair = REPAIR  # what to do about a damaged shard

    def __init__(self, folder: Path) -> None:
        """Raise InputError if the manifest or the examples are missing or damaged."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.settings = self.manifest.settings
        self.id = self.manifest.id
        tensors = self._read_examples()
        self.tokens, self.counted = tensors["tokens"], tensors["counted"]
        self.lengths: list[int] = tensors["lengths"].tolist()
        self.order: list[int] = tensors["order"].tolist()  # examples in the order of the shards
        self.begins = [0, *accumulate(self.lengths)]
        self._place_of = dict[int, tuple[int, int, int]]()  # of each example: its shard, first row and number there
        for shard in range(len(self.manifest.shards)):
            row = 0
            for number, i in enumerate(self.in_shard(shard)):
                self._place_of[i] = shard, row, number
                row += self.lengths[i]
        self._files: dict[int, Any] = {}
        self._checksums: dict[int, Tensor] = {}
        self._checked = set[tuple[int, int]]()  # examples and layers that have been compared

    def _read_examples(self) -> dict[str, Tensor]:
        path, remedy = self.folder / EXAMPLES_FILE, "take it from where the features were made"
        try:
            tensors = self._load(path)
            digest = tensors_digest({name: tensors[name] for name in ("lengths", "order", "tokens", "counted")})
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path} is missing or damaged ({type(error).__name__}): {remedy}") from error
        if digest != self.manifest.examples_sha256:
            raise InputError(f"{path} has another checksum than the manifest says: {remedy}")
        return tensors

    def _load(self, path: Path) -> dict[str, Tensor]:
        """Return all tensors of a file."""
        return load_file(path)

    def path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.folder / self.manifest.shards[shard].file

    def fault(self, shard: int) -> str:
        """Return the fault of a shard, as far as its header and size tell: MISSING, a sentence, or
        an empty string.
        """
        path = self.path(shard)
        if not path.exists():
            return MISSING
        try:
            return self._header_fault(shard, read_header(path), path.stat().st_size)
        except InputError as error:
            return str(error)

    def _header_fault(self, shard: int, header: Header, size: int) -> str:
        """Return the fault of a shard that has this header and size; empty when there is none."""
        path, planned, metadata = self.path(shard), self.manifest.shards[shard], header.metadata
        if size != header.end or header.end - header.begin != planned.bytes:
            return f"{path} has {size:,} bytes instead of {header.begin + planned.bytes:,}"
        if metadata.get("store") != self.id or planned.sha256 not in (None, metadata.get("sha256")):
            return f"{path} belongs to other features than the {MANIFEST_FILE} in its folder"
        return ""

    def progress(self) -> str:
        """Return how many shards are whole, for people."""
        total = len(self.manifest.shards)
        return f"{total - len(self.missing())} of {total} shards"

    def missing(self) -> list[int]:
        """Return the shards that are missing or not whole."""
        return [shard for shard in range(len(self.manifest.shards)) if self.fault(shard)]

    def in_shard(self, shard: int) -> list[int]:
        """Return the examples of a shard, in the order of its rows."""
        planned = self.manifest.shards[shard]
        return self.order[planned.first : planned.first + planned.examples]

    def example(self, number: int) -> Example:
        """Return an example by its number."""
        span = slice(self.begins[number], self.begins[number + 1])
        return Example(self.tokens[span].tolist(), self.counted[span].bool().tolist())

    def features(self, number: int, layers: Sequence[int]) -> Tensor:
        """Return [T, F]: these layers of an example, side by side. Raise InputError when layers are missing or bytes
        were changed."""
        self.check_layers(layers)
        return torch.cat([self._layer(number, k) for k in layers], -1)

    def _layer(self, number: int, layer: int) -> Tensor:
        """Return [T, D]: one layer of an example, whose bytes are compared with their checksum at the first time."""
        tensors = self._rows(number, layer)
        if (number, layer) not in self._checked:
            shard, _, row = self._place_of[number]
            if _checksum(tensors) != int(self._checksums[shard][row, self.settings.layers.index(layer)]):
                raise InputError(f"{self.path(shard)} is damaged (layer {layer} of an example); {self.repair}")
            self._checked.add((number, layer))
        return restored(tensors)

    def _rows(self, number: int, layer: int) -> list[Tensor]:
        """Return an example's rows of the tensors of a layer, from the shard's file, of which nothing else is read."""
        shard, begin, _ = self._place_of[number]
        end, path = begin + self.lengths[number], self.path(shard)
        try:
            if shard not in self._files:
                file = safe_open(path, framework="pt")
                self._checksums[shard] = file.get_tensor("crc32")  # type: ignore[no-untyped-call]
                self._files[shard] = file
            file = self._files[shard]
            return [file.get_slice(tensor.name)[begin:end] for tensor in self.settings.tensors(layer)]
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read ({one_line(error, 100)}); {self.repair}") from error

    def expect(self, numbers: Sequence[int], layers: Sequence[int]) -> None:
        """Learn which examples are read next; files on this machine need no preparation."""

    # --- for a training

    def check(self, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raise InputError if these are features of another target or tokenizer."""
        settings = self.settings
        if not has_fingerprint(target, settings.target["fingerprint"]):
            raise InputError(
                f"{self.folder} holds features of another target: {settings.target['name']!r}, not {target.name!r}"
            )
        identity = tokenizer_identity(tokenizer) if tokenizer is not None else settings.tokenizer
        for part, digest in identity.items():
            if digest != settings.tokenizer.get(part):
                raise InputError(
                    f"{self.folder} was made with another tokenizer than {target.name!r} has now: its {part} differs"
                )

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raise InputError if some of these layers are not in the store."""
        present = self.settings.layers
        absent = [k for k in layers if k not in present]
        if absent:
            needed = format_value(sorted({*present, *layers}))
            raise InputError(
                f"{self.folder} holds layers {format_value(present)}, but this head also reads {format_value(absent)}: "
                f"make features with `eyas features --layers {needed}`"
            )

    def data(self) -> Data:
        """Return the examples whose shards are there, in the order of `data.read`.

        Raise InputError when a shard is there but not whole, or when there is none."""
        faults = {shard: fault for shard in range(len(self.manifest.shards)) if (fault := self.fault(shard))}
        if broken := next((fault for fault in faults.values() if fault != MISSING), ""):
            raise InputError(f"{broken}; {REPAIR}")
        available = [i for i in range(len(self.lengths)) if self._place_of[i][0] not in faults]
        train = [i for i in available if i < self.manifest.train]
        if not train:
            raise InputError(f"{self.folder} holds no shard to train from yet: run `eyas features` again, it goes on")
        parts = StoredExamples(self, train), StoredExamples(self, available[len(train) :])
        return Data(*parts, self.manifest.report, self.settings.data["sha256"])

    # --- checking and writing

    def verify(self, on_shard: Callable[[int], None] = lambda size: None) -> list[str]:
        """Compare every checksum; returns one line for each shard that is there and damaged.

        Args:
            on_shard: called with the bytes of each shard that was checked.
        """
        problems = []
        for shard, planned in enumerate(self.manifest.shards):
            path, fault = self.path(shard), self.fault(shard)
            if not fault:
                header = read_header(path)
                with open(path, "rb") as stream:
                    stream.seek(header.begin)
                    is_same = hashlib.file_digest(stream, "sha256").hexdigest() == header.metadata["sha256"]
                fault = "" if is_same else f"{path} is damaged: its checksum is another"
            if fault not in ("", MISSING):
                problems.append(f"{fault}; {REPAIR}")
            on_shard(planned.bytes)
        return problems

    def write_shard(self, shard: int, features: Mapping[int, Sequence[Tensor]]) -> None:
        """Write a shard. Raise OSError when it cannot be written; nothing is left of it then.

        Args:
            features: layer -> its tensors, [N, width].
        """
        layers, bounds = self.settings.layers, [0, *accumulate(self.lengths[i] for i in self.in_shard(shard))]
        checksums = [
            [_checksum([value[begin:end] for value in features[k]]) for k in layers] for begin, end in pairwise(bounds)
        ]
        names = [tensor.name for k in layers for tensor in self.settings.tensors(k)]
        written = zip(names, (value for k in layers for value in features[k]), strict=True)
        aligned = dict(sorted(written, key=lambda pair: -pair[1].itemsize))  # the widest first
        write_tensors(self.path(shard), {"crc32": torch.tensor(checksums), **aligned}, {"store": self.id})

    def finish(self) -> bool:
        """Copy the shards' checksums into the manifest and return True, if all shards are there."""
        if self.missing():
            return False
        shards = self.manifest.shards
        if any(shard.sha256 is None for shard in shards):
            digests = [read_header(self.path(i)).metadata["sha256"] for i in range(len(shards))]
            whole = tuple(replace(shard, sha256=digest) for shard, digest in zip(shards, digests, strict=True))
            self.manifest = replace(self.manifest, shards=whole)
            self.manifest.write(self.folder)
        return True


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Return the CRC-32 of these tensors' bytes, one after the other."""
    checksum = 0
    for value in tensors:
        checksum = zlib.crc32(byte_view(value), checksum)
    return checksum


class StoredExamples(Sequence[Example]):
    """Some examples of a store; unlike examples in memory they have `features`."""

    def __init__(self, store: FeatureStore, numbers: Sequence[int]) -> None:
        self.store, self.numbers = store, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.store.example(number) for number in self.numbers[index]]
        return self.store.example(self.numbers[index])

    def features(self, index: int, layers: Sequence[int]) -> Tensor:
        """Return the target's hidden states of an example, [T, F], these layers side by side."""
        return self.store.features(self.numbers[index], layers)

    def expect(self, indices: Iterable[int], layers: Sequence[int]) -> None:
        """Learn which examples are read next, so that remote ones can be fetched ahead."""
        self.store.expect([self.numbers[index] for index in indices], layers)
