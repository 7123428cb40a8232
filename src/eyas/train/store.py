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

import errno
import hashlib
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import InputError, OptionError
from eyas.train.data import Data, Example, Report
from eyas.train.state import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.target import Target

__all__ = ["DTYPES", "Manifest", "Settings", "Shard", "Store", "create", "identity"]

FORMAT, VERSION = "eyas-features", 1
MANIFEST, EXAMPLES = "manifest.json", "examples.safetensors"
LAYERS_MEAN = "Hugging Face's hidden_states[k], the input of layer k; the number of layers: after the final norm"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip
SHOWN_PROBLEMS = 1000  # bad lines that the manifest repeats
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Settings:
    """What two runs must agree on to write into one store."""

    target: dict[str, str]  # name, fingerprint, dtype
    tokenizer: dict[str, str]  # SHA-256 of its vocabulary and of its chat template
    layers: tuple[int, ...]
    hidden_size: int
    dtype: str  # of the features on disk
    data: dict[str, Any]  # files, each with its SHA-256; sha256 of all of them
    max_length: int
    heldout: float
    shard_bytes: int

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.hidden_size * DTYPES[self.dtype].itemsize

    def differences(self, now: Settings, same_target: Callable[[str], bool]) -> list[str]:
        """Where another run differs, for a message."""
        said = []
        if not same_target(self.target["fingerprint"]):
            said.append(f"the target was {self.target['name']!r}, it is {now.target['name']!r}")
        elif self.target["dtype"] != now.target["dtype"]:
            said.append(f"the target's dtype was {self.target['dtype']}, it is {now.target['dtype']}")
        said += [f"the tokenizer has another {part}" for part in self.tokenizer if self.tokenizer[part] != now.tokenizer.get(part)]
        if self.data["sha256"] != now.data["sha256"]:
            said.append(f"the data was {', '.join(file['name'] for file in self.data['files'])}, with other contents than now")
        for name in ("layers", "dtype", "max_length", "heldout", "shard_bytes"):
            then, value = getattr(self, name), getattr(now, name)
            said += [f"{name} {_shown(then)} there, {_shown(value)} now"] if then != value else []
        return said


@dataclass(frozen=True)
class Shard:
    """One file of features."""

    file: str
    first: int  # its first example's place in the shards' order
    examples: int
    tokens: int
    bytes: int  # without the file's header
    sha256: str | None = None  # of those bytes; the manifest has it when the store is complete, the shard's header always


@dataclass(frozen=True)
class Manifest:
    """manifest.json."""

    settings: Settings
    report: Report
    train: int  # examples
    heldout: int
    examples_sha256: str
    shards: tuple[Shard, ...]
    versions: dict[str, str]

    @property
    def id(self) -> str:
        """What every shard of this store carries."""
        settings = self.settings
        parts = [settings.target["fingerprint"], settings.target["dtype"], settings.layers, settings.dtype, self.examples_sha256]
        return hashlib.sha256(json.dumps([*parts, [[s.file, s.bytes] for s in self.shards]]).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        settings = {**asdict(self.settings), "layers_mean": LAYERS_MEAN}
        report = {**asdict(self.report), "problems": self.report.problems[:SHOWN_PROBLEMS]}
        examples = {"file": EXAMPLES, "sha256": self.examples_sha256, "train": self.train, "heldout": self.heldout}
        whole = {
            "format": FORMAT, "version": VERSION, "id": self.id, **settings, "report": report,
            "examples": {**examples, "order": f"the first {self.train} are for training, the last {self.heldout} are held out"},
            "shards": [asdict(shard) for shard in self.shards], "versions": self.versions,
        }  # fmt: skip
        write_text(folder / MANIFEST, json.dumps(whole, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """InputError when there is none, or it cannot be understood."""
        path = folder / MANIFEST
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["format"] != FORMAT or held["version"] > VERSION:
                raise InputError(f"{path} is of format {held['format']!r}, version {held['version']}: a newer eyas may read it")
            settings = Settings(**{f.name: held[f.name] for f in fields(Settings)})
            found = cls(
                replace(settings, layers=tuple(settings.layers)), Report(**held["report"]), held["examples"]["train"],
                held["examples"]["heldout"], held["examples"]["sha256"], tuple(Shard(**shard) for shard in held["shards"]), held["versions"],
            )  # fmt: skip
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"{str(folder)!r} holds no features (no {MANIFEST}): make them with `eyas features`") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is damaged ({type(error).__name__}): take it from where the features were made") from error
        if found.id != held["id"]:
            raise InputError(f"{path} was changed after it was written: take it from where the features were made")
        return found


def identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What tells tokenizers apart: SHA-256 of the vocabulary and of the chat template."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    return {
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
    }


# --- the plan ------------------------------------------------------------------------------------------------------------------------


def create(folder: Path, settings: Settings, data: Data, versions: dict[str, str], write: bool = True) -> Manifest:
    """Plan a store; with `write`, also write manifest and examples, from which shards can then be made anywhere."""
    every = [*data.train, *data.heldout]
    order = list(range(len(every)))
    random.Random(0).shuffle(order)
    tensors = {
        "lengths": torch.tensor([len(example.ids) for example in every], dtype=torch.int32),
        "order": torch.tensor(order, dtype=torch.int32),
        "tokens": torch.cat([torch.tensor(example.ids, dtype=torch.int32) for example in every]),
        "counted": torch.cat([torch.tensor(example.counted, dtype=torch.uint8) for example in every]),
    }
    shards = _cut([len(every[i].ids) for i in order], settings)
    manifest = Manifest(settings, data.report, len(data.train), len(data.heldout), _digest(tensors), shards, versions)
    if write:
        write_tensors(folder / EXAMPLES, tensors, {})
        manifest.write(folder)
    return manifest


def _cut(lengths: Sequence[int], settings: Settings) -> tuple[Shard, ...]:
    """Shards of at most `shard_bytes`, of whole examples."""
    shards, first, tokens = list[Shard](), 0, 0

    def close(end: int) -> None:
        size = tokens * settings.token_bytes + 8 * (end - first) * len(settings.layers)
        shards.append(Shard(f"shard-{len(shards):05d}.safetensors", first, end - first, tokens, size))

    for i, length in enumerate(lengths):
        if i > first and (tokens + length) * settings.token_bytes > settings.shard_bytes:
            close(i)
            first, tokens = i, 0
        tokens += length
    close(len(lengths))
    return tuple(shards)


# --- files ---------------------------------------------------------------------------------------------------------------------------


def _bytes(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().view(-1).view(torch.uint8).numpy()).cast("B")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for value in tensors.values():
        digest.update(_bytes(value))
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file that holds its own checksum, renamed into its place when it is whole and on the disk. Widest dtypes come first.

    (Written here because the library's writer copies everything and hides the system's errors.) OSError when it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, "sha256": _digest(tensors)}}
    begin = 0
    for name, value in tensors.items():
        end = begin + value.numel() * value.element_size()
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a killed run
        leftover.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as stream:
            stream.write(len(said).to_bytes(8, "little") + said)
            for value in tensors.values():
                stream.write(_bytes(value))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where the data begins, how many bytes the file should have); InputError when it is none."""
    try:
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size) if size < 1 << 27 else b"")
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: no header") from error
    return header, 8 + size, 8 + size + int(end)


def _file_digest(path: Path, begin: int) -> str:
    with open(path, "rb") as stream:
        stream.seek(begin)
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------------------------


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
            found = _digest({name: tensors[name] for name in ("lengths", "order", "tokens", "counted")})
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
            header, begin, end = _header(path)
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
        shard, row, length = self._shard_of[number], self._row_of[number], self.lengths[number]
        file = self._opened(shard)
        parts = []
        for k in layers:
            column = self.settings.layers.index(k)
            part = file.get_slice(f"layer.{k}")[row : row + length]
            at = number * len(self.settings.layers) + column
            if not self._checked[at]:
                if zlib.crc32(_bytes(part)) != int(self._checksums[shard][self._nth_of[number], column]):
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
                self._files[shard] = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
                self._checksums[shard] = self._files[shard].get_tensor("crc32")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:100]}); {self._cure}") from error
        return self._files[shard]

    # --- for a training

    def check(self, target: Target, tokenizer: PreTrainedTokenizerBase | None, layers: Sequence[int]) -> None:
        """InputError when these are features of another target or tokenizer, or lack layers that a method reads."""
        there, own = self.settings, self.folder
        if not target.is_named(there.target["fingerprint"]):
            raise InputError(f"{own} holds features of another target: {there.target['name']!r}, not {target.name!r}")
        mine = identity(tokenizer) if tokenizer is not None else there.tokenizer
        other = [part for part in mine if mine[part] != there.tokenizer.get(part)]
        if other:
            raise InputError(f"{own} was made with another tokenizer than {target.name!r} has now: its {other[0]} differs")
        absent = [k for k in layers if k not in there.layers]
        if absent:
            needed = ",".join(map(str, sorted({*there.layers, *layers})))
            raise InputError(
                f"{own} holds the layers {_shown(there.layers)}; this head also reads {_shown(absent)}: "
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
                header, begin, _ = _header(self.path(shard))
                if _file_digest(self.path(shard), begin) != header["__metadata__"]["sha256"]:
                    fault = f"{self.path(shard)} is damaged: its checksum is another"
            problems += [f"{fault}; {self._cure}"] if fault not in ("", "missing") else []
            if on_shard is not None:
                on_shard(planned.bytes)
        return problems

    def put(self, shard: int, features: Mapping[int, Tensor]) -> None:
        """Write a shard: layer -> [N, D]. OSError when it cannot be written; nothing is left of it then."""
        bounds = [0, *accumulate(self.lengths[i] for i in self.in_shard(shard))]
        spans = list(zip(bounds, bounds[1:], strict=False))
        sums = [[zlib.crc32(_bytes(features[k][a:b])) for k in self.settings.layers] for a, b in spans]
        tensors = {"crc32": torch.tensor(sums), **{f"layer.{k}": features[k] for k in self.settings.layers}}
        write_tensors(self.path(shard), tensors, {"store": self.id})

    def finish(self) -> bool:
        """When all shards are there: their checksums go into the manifest too. Whether they are."""
        if self.missing():
            return False
        if any(shard.sha256 is None for shard in self.manifest.shards):
            sums = [_header(self.path(i))[0]["__metadata__"]["sha256"] for i in range(len(self.manifest.shards))]
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


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
