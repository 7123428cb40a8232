"""Features on disk: what the frozen target saw of the training data, written once, trained from as often as one likes.

    FOLDER/manifest.json             which target, tokenizer, data and layers, and the plan of the shards; written first
           examples.safetensors      tokens, marks and lengths of all examples, the held-out ones last: the data files are done with
           shard-00000.safetensors   "layer.K" [tokens, hidden] for each layer K, and "crc32" [examples, layers]

A layer K is Hugging Face's hidden_states[K], the input of layer K; the number of layers is what comes after the final norm. Each is a
tensor of its own, so a method that reads one of them touches a quarter of the bytes of four.

Examples lie in the shards in a shuffled order: any part of the shards is a fair sample of the data, held-out examples included, and can be
trained from. A shard is renamed into its place when it is whole, and it names the store that it belongs to. Its header holds the SHA-256 of
all bytes behind it, which `verify` compares; reading compares a CRC-32 of each example the first time that it is read.

Reading is memory-mapped. This module knows no model and no method.

Letters: N tokens of a shard, R examples, T tokens of an example, D hidden, F = layers x D.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import InputError
from eyas.train._manifest import DTYPES, EXAMPLES, MANIFEST, Manifest, Plan, Settings, Shard, identity, plan, shown
from eyas.train._tensors import digest_of, digest_of_file, read_header, view_of, write_tensors
from eyas.train.data import Data, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.core.target import Target

__all__ = ["DTYPES", "MANIFEST", "Manifest", "Plan", "Settings", "Shard", "Store", "Stored", "identity", "plan"]


class Store:
    """A folder of features: what is in it, and the features of any example."""

    def __init__(self, folder: Path) -> None:
        """InputError when the manifest or the examples are missing or damaged."""
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.settings = self.manifest.settings
        self.id = self.manifest.id
        tensors = self._read_examples()
        self.tokens, self.counted = tensors["tokens"], tensors["counted"]
        self.lengths, self.order = tensors["lengths"].tolist(), tensors["order"].tolist()
        self.begins = [0, *accumulate(self.lengths)]
        self._shard_of, self._row_of, self._nth_of = self._places()
        self._files: dict[int, Any] = {}
        self._checksums: dict[int, Tensor] = {}
        self._checked = bytearray(len(self.lengths) * len(self.settings.layers))

    def _read_examples(self) -> dict[str, Tensor]:
        path = self.folder / EXAMPLES
        try:
            tensors = load_file(path)
            found = digest_of({name: tensors[name] for name in ("lengths", "order", "tokens", "counted")})
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path} is missing or damaged ({type(error).__name__}): take it from where the features were made") from error
        if found != self.manifest.examples_sha256:
            raise InputError(f"{path} has another checksum than the manifest says: take it from where the features were made")
        return tensors

    def _places(self) -> tuple[list[int], list[int], list[int]]:
        """For each example: its shard, its first row there, its number there."""
        shard_of, row_of, nth_of = ([0] * len(self.order) for _ in range(3))
        for number, shard in enumerate(self.manifest.shards):
            row = 0
            for nth, i in enumerate(self.order[shard.first : shard.first + shard.examples]):
                shard_of[i], row_of[i], nth_of[i] = number, row, nth
                row += self.lengths[i]
        return shard_of, row_of, nth_of

    def path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].file

    def fault(self, shard: int) -> str:
        """What is wrong with a shard as far as its header and size tell: "missing", a sentence, or nothing."""
        path, planned = self.path(shard), self.manifest.shards[shard]
        if not path.exists():
            return "missing"
        try:
            header, begin, end = read_header(path)
        except InputError as error:
            return str(error)
        size, said = path.stat().st_size, header.get("__metadata__", {})
        if size != end or end - begin != planned.bytes:
            return f"{path} has {size:,} bytes instead of {begin + planned.bytes:,}"
        if said.get("store") != self.id or planned.sha256 not in (None, said.get("sha256")):
            return f"{path} belongs to other features than {MANIFEST} beside it"
        return ""

    def missing(self) -> list[int]:
        """Shards that are not there, or not whole."""
        return [shard for shard in range(len(self.manifest.shards)) if self.fault(shard)]

    def in_shard(self, shard: int) -> list[int]:
        """Its examples, in the order of its rows."""
        planned = self.manifest.shards[shard]
        return self.order[planned.first : planned.first + planned.examples]

    def example(self, number: int) -> Example:
        span = slice(self.begins[number], self.begins[number + 1])
        return Example(self.tokens[span].tolist(), self.counted[span].bool().tolist())

    def features(self, number: int, layers: Sequence[int]) -> Tensor:
        """[T, F]: these layers of an example, side by side. InputError when the bytes are not those that were written."""
        self.need(layers)
        shard, row, length = self._shard_of[number], self._row_of[number], self.lengths[number]
        file = self._opened(shard)
        parts = []
        for k in layers:
            column = self.settings.layers.index(k)
            part = file.get_slice(f"layer.{k}")[row : row + length]
            at = number * len(self.settings.layers) + column
            if not self._checked[at]:
                if zlib.crc32(view_of(part)) != int(self._checksums[shard][self._nth_of[number], column]):
                    raise InputError(f"{self.path(shard)} is damaged (layer {k} of an example); {self._cure}")
                self._checked[at] = 1
            parts.append(part)
        return torch.cat(parts, -1)

    @property
    def _cure(self) -> str:
        return "delete it and run `eyas features` as before: that shard alone is made again"

    def _opened(self, shard: int) -> Any:
        if shard not in self._files:
            path = self.path(shard)
            try:
                self._files[shard] = safe_open(path, framework="pt")
                self._checksums[shard] = self._files[shard].get_tensor("crc32")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:100]}); {self._cure}") from error
        return self._files[shard]

    # --- for a training

    def check(self, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """InputError when these are features of another target or tokenizer."""
        there, own = self.settings, self.folder
        if not target.is_named(there.target["fingerprint"]):
            raise InputError(f"{own} holds features of another target: {there.target['name']!r}, not {target.name!r}")
        mine = identity(tokenizer) if tokenizer is not None else there.tokenizer
        other = [part for part in mine if mine[part] != there.tokenizer.get(part)]
        if other:
            raise InputError(f"{own} was made with another tokenizer than {target.name!r} has now: its {other[0]} differs")

    def need(self, layers: Sequence[int]) -> None:
        """InputError when layers are asked for that are not there."""
        there = self.settings.layers
        absent = [k for k in layers if k not in there]
        if absent:
            needed = shown(sorted({*there, *layers}))
            raise InputError(
                f"{self.folder} holds layers {shown(there)}, and this head also reads {shown(absent)}: "
                f"make features with `eyas features --layers {needed}`"
            )

    def data(self) -> Data:
        """What can be trained from: the examples whose shards are there, in the order in which `data.read` gives them.

        InputError when a shard is there but not whole, or when there is none.
        """
        faults = {shard: fault for shard in range(len(self.manifest.shards)) if (fault := self.fault(shard))}
        broken = [fault for fault in faults.values() if fault != "missing"]
        if broken:
            raise InputError(f"{broken[0]}; {self._cure}")
        there = [i for i in range(len(self.lengths)) if self._shard_of[i] not in faults]
        train = self.manifest.train
        if not any(i < train for i in there):
            raise InputError(f"{self.folder} holds no shard to train from yet: run `eyas features` as before, it goes on")
        sides = (Stored(self, [i for i in there if i < train]), Stored(self, [i for i in there if i >= train]))
        return Data(*sides, self.manifest.report, self.settings.data["sha256"])

    # --- checking and finishing

    def verify(self, on_shard: Callable[[int], None] | None = None) -> list[str]:
        """Compare every checksum; what is wrong, one line for each shard that is there and not what was written."""
        problems = []
        for shard, planned in enumerate(self.manifest.shards):
            fault = self.fault(shard)
            if not fault:
                header, begin, _ = read_header(self.path(shard))
                if digest_of_file(self.path(shard), begin) != header["__metadata__"]["sha256"]:
                    fault = f"{self.path(shard)} is damaged: its checksum is another"
            problems += [f"{fault}; {self._cure}"] if fault not in ("", "missing") else []
            if on_shard is not None:
                on_shard(planned.bytes)
        return problems

    def put(self, shard: int, features: Mapping[int, Tensor]) -> None:
        """Write a shard: layer -> [N, D]. OSError when it cannot be written; nothing is left of it then."""
        bounds = [0, *accumulate(self.lengths[i] for i in self.in_shard(shard))]
        spans = list(pairwise(bounds))
        sums = [[zlib.crc32(view_of(features[k][a:b])) for k in self.settings.layers] for a, b in spans]
        tensors = {"crc32": torch.tensor(sums), **{f"layer.{k}": features[k] for k in self.settings.layers}}
        write_tensors(self.path(shard), tensors, {"store": self.id})

    def finish(self) -> bool:
        """When all shards are there: their checksums go into the manifest too. Whether they are."""
        if self.missing():
            return False
        if any(shard.sha256 is None for shard in self.manifest.shards):
            sums = [read_header(self.path(i))[0]["__metadata__"]["sha256"] for i in range(len(self.manifest.shards))]
            shards = tuple(replace(shard, sha256=said) for shard, said in zip(self.manifest.shards, sums, strict=True))
            self.manifest = replace(self.manifest, shards=shards)
            self.manifest.write(self.folder)
        return True


class Stored(Sequence[Example]):
    """Some examples of a store. `features` is what tells them from examples in memory."""

    def __init__(self, store: Store, numbers: Sequence[int]) -> None:
        self.store, self.numbers = store, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.store.example(number) for number in self.numbers[index]]
        return self.store.example(self.numbers[index])

    def features(self, index: int, layers: Sequence[int]) -> Tensor:
        """[T, F]: what the target saw of an example."""
        return self.store.features(self.numbers[index], layers)
