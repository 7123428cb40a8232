"""manifest.json of a folder of features: its target, tokenizer, data and layers, and the plan of
its shards.

This module knows no features: it plans, and writes the parts that do not need the target.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import write_text
from eyas.text.sources import File
from eyas_lab.folders import read_versioned
from eyas_train._tensors import DTYPES, tensors_digest, write_tensors
from eyas_train.data import Data, Report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, VERSION = "eyas-features", 1
MANIFEST_FILE, EXAMPLES_FILE = "manifest.json", "examples.safetensors"
LAYERS_MEAN = "Hugging Face's hidden_states[k], the input of layer k; the number of layers: after the final norm"


class StoredTensor(NamedTuple):
    """A tensor of a shard, [tokens, width]."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class FeatureSettings:
    """Settings that two runs must share to write into one store."""

    target: dict[str, str]  # name, fingerprint, dtype
    tokenizer: dict[str, str]  # SHA-256 of its vocabulary and of its chat template
    layers: tuple[int, ...]
    hidden_size: int
    dtype: str  # dtype of the features on disk
    data: dict[str, Any]  # files, each with its SHA-256; sha256 of all of them
    max_length: int
    heldout: float
    shard_bytes: int

    @property
    def token_bytes(self) -> int:
        """Return bytes of one token's features."""
        return sum(tensor.token_bytes for layer in self.layers for tensor in self.tensors(layer))

    def tensors(self, layer: int) -> tuple[StoredTensor, ...]:
        """Return the tensors in which a layer is stored: for eight bits, first the scales of the tokens."""
        features = StoredTensor(f"layer.{layer}", DTYPES[self.dtype], self.hidden_size)
        if features.dtype.itemsize > 1:
            return (features,)
        return StoredTensor(f"scale.{layer}", torch.bfloat16, 1), features

    def differences(self, now: FeatureSettings, is_same_target: Callable[[str], bool]) -> list[str]:
        """Return the differences to another run's settings, for a message.

        Args:
            is_same_target: whether a fingerprint belongs to the other run's target.
        """
        messages = []
        if not is_same_target(self.target["fingerprint"]):
            messages.append(f"the target was {self.target['name']!r}, it is {now.target['name']!r}")
        elif self.target["dtype"] != now.target["dtype"]:
            messages.append(f"the target's dtype was {self.target['dtype']}, it is {now.target['dtype']}")
        parts = [part for part, digest in self.tokenizer.items() if digest != now.tokenizer.get(part)]
        messages += [f"the tokenizer has another {part}" for part in parts]
        if self.data["sha256"] != now.data["sha256"]:
            names = ", ".join(file["name"] for file in self.data["files"])
            messages.append(f"the data was {names}, with other contents than now")
        for name in ("layers", "dtype", "max_length", "heldout", "shard_bytes"):
            before, value = format_value(getattr(self, name)), format_value(getattr(now, name))
            if before != value:
                messages.append(f"{name} {before} there, {value} now")
        return messages


@dataclass(frozen=True)
class Shard:
    """One file of features."""

    file: str
    first: int  # number of its first example in the order of the shards
    examples: int
    tokens: int
    bytes: int  # without the file's header
    # hash of those bytes: always in the shard's header, in the manifest once the store is complete
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    settings: FeatureSettings
    report: Report
    train: int  # examples
    heldout: int  # examples
    examples_sha256: str
    shards: tuple[Shard, ...]
    versions: dict[str, str]

    @property
    def id(self) -> str:
        """Identifies the store; every shard carries it."""
        target, shards = self.settings.target, [[shard.file, shard.bytes] for shard in self.shards]
        parts = [target["fingerprint"], target["dtype"], self.settings.layers, self.settings.dtype]
        return hashlib.sha256(json.dumps([*parts, self.examples_sha256, shards]).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write manifest.json. Raise InputError if it cannot be written."""
        has_scales = DTYPES[self.settings.dtype].itemsize == 1
        content = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            **asdict(self.settings),
            "layers_mean": LAYERS_MEAN + "; times scale.k, a power of two for each token" * has_scales,
            "report": {**asdict(self.report), "problems": self.report.problems[:1000]},
            "examples": {
                "file": EXAMPLES_FILE,
                "sha256": self.examples_sha256,
                "train": self.train,
                "heldout": self.heldout,
                "order": f"the first {self.train} are for training, the last {self.heldout} are held out",
            },
            "shards": [asdict(shard) for shard in self.shards],
            "versions": self.versions,
        }
        write_text(folder / MANIFEST_FILE, json.dumps({**content, "sha256": _content_hash(content)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: File) -> Manifest:
        """Read manifest.json, here or at a URL. Raise InputError if it is missing, damaged or of a newer version."""
        path = folder / MANIFEST_FILE
        missing = f"{str(folder)!r} holds no features (no {MANIFEST_FILE}): make them with `eyas features`"

        def damaged(reason: str) -> InputError:
            return InputError(f"{path} is damaged ({reason}): take it from where the features were made")

        manifest, is_unchanged = read_versioned(path, FORMAT, VERSION, cls._from_content, missing, damaged)
        if outside := [shard.file for shard in manifest.shards if Path(shard.file).name != shard.file]:
            raise InputError(f"{path} names a shard outside of its folder ({outside[0]}): do not use these features")
        if not is_unchanged:
            raise InputError(f"{path} was changed after it was written: take it from where the features were made")
        return manifest

    @classmethod
    def _from_content(cls, content: Mapping[str, Any]) -> tuple[Manifest, bool]:
        """Return the manifest, and whether it is as it was written."""
        settings = FeatureSettings(**{f.name: content[f.name] for f in fields(FeatureSettings)})
        examples = content["examples"]
        manifest = cls(
            replace(settings, layers=tuple(settings.layers)),
            Report(**content["report"]),
            examples["train"],
            examples["heldout"],
            examples["sha256"],
            tuple(Shard(**shard) for shard in content["shards"]),
            content["versions"],
        )
        return manifest, content["sha256"] == _content_hash(content) and manifest.id == content["id"]


def _content_hash(content: Mapping[str, Any]) -> str:
    """Return SHA-256 of a manifest's content, without the entry for this hash itself."""
    hashed = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return SHA-256 of a tokenizer's vocabulary and of its chat template."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    parts = {"vocabulary": vocabulary, "chat template": template}
    return {part: hashlib.sha256(text.encode()).hexdigest() for part, text in parts.items()}


@dataclass(frozen=True)
class StorePlan:
    """A store before anything is written."""

    manifest: Manifest
    tensors: dict[str, Tensor]  # tensors of all examples

    def write(self, folder: Path) -> None:
        """Write manifest and examples; from them the shards can be made anywhere. Raise OSError when the examples
        cannot be written, InputError when the manifest cannot."""
        write_tensors(folder / EXAMPLES_FILE, self.tensors, {})
        self.manifest.write(folder)


def plan_store(settings: FeatureSettings, data: Data, versions: dict[str, str]) -> StorePlan:
    """Assign the examples to shards of at most `shard_bytes`, in a shuffled order."""
    tokens, counted, lengths = array("i"), bytearray(), array("i")
    for examples in (data.train, data.heldout):
        for example in examples:
            tokens.extend(example.ids)
            counted.extend(example.counted)
            lengths.append(len(example.ids))
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    tensors = {
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "order": torch.tensor(order, dtype=torch.int32),
        "tokens": torch.frombuffer(tokens, dtype=torch.int32),
        "counted": torch.frombuffer(counted, dtype=torch.uint8),
    }
    shards = _cut_into_shards([lengths[i] for i in order], settings)
    sizes = len(data.train), len(data.heldout)
    return StorePlan(Manifest(settings, data.report, *sizes, tensors_digest(tensors), shards, versions), tensors)


def _cut_into_shards(lengths: Sequence[int], settings: FeatureSettings) -> tuple[Shard, ...]:
    """Return shards of whole examples. `lengths`: tokens of each example, in the order of the shards."""
    shards: list[Shard] = []
    first, tokens = 0, 0
    for end in range(1, len(lengths) + 1):
        tokens += lengths[end - 1]
        if end == len(lengths) or (tokens + lengths[end]) * settings.token_bytes > settings.shard_bytes:
            size = tokens * settings.token_bytes + 8 * (end - first) * len(settings.layers)
            shards.append(Shard(f"shard-{len(shards):05d}.safetensors", first, end - first, tokens, size))
            first, tokens = end, 0
    return tuple(shards)


def format_value(value: object) -> str:
    """Return a setting's value, for a message."""
    return ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
