"""manifest.json of a folder of features: which target, tokenizer, data and layers, and which shards there will be.

This module knows no features: it plans, and writes what does not need the target.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.train._tensors import digest_of, write_tensors
from eyas.train.data import Data, Report
from eyas.train.state import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DTYPES", "EXAMPLES", "MANIFEST", "Manifest", "Plan", "Settings", "Shard", "identity", "plan", "shown"]

FORMAT, VERSION = "eyas-features", 1
MANIFEST, EXAMPLES = "manifest.json", "examples.safetensors"
LAYERS_MEAN = "Hugging Face's hidden_states[k], the input of layer k; the number of layers: after the final norm"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHOWN_PROBLEMS = 1000  # bad lines that the manifest repeats


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
            said += [f"{name} {shown(then)} there, {shown(value)} now"] if then != value else []
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
            shards, examples = tuple(Shard(**shard) for shard in held["shards"]), held["examples"]
            if outside := [shard.file for shard in shards if Path(shard.file).name != shard.file]:
                raise InputError(f"{path} names a shard outside of its folder ({outside[0]}): do not use these features")
            found = cls(
                replace(settings, layers=tuple(settings.layers)), Report(**held["report"]), examples["train"], examples["heldout"],
                examples["sha256"], shards, held["versions"],
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


@dataclass(frozen=True)
class Plan:
    """A store before anything is written."""

    manifest: Manifest
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Manifest and examples: from them the shards can be made anywhere. OSError when they cannot be written."""
        write_tensors(folder / EXAMPLES, self.tensors, {})
        self.manifest.write(folder)


def plan(settings: Settings, data: Data, versions: dict[str, str]) -> Plan:
    """How these examples will lie in shards."""
    tokens, counted, lengths = array("i"), bytearray(), array("i")
    for side in (data.train, data.heldout):
        for example in side:
            tokens.extend(example.ids)
            counted.extend(example.counted)
            lengths.append(len(example.ids))
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    tensors = {
        "lengths": torch.tensor(lengths, dtype=torch.int32), "order": torch.tensor(order, dtype=torch.int32),
        "tokens": torch.frombuffer(tokens, dtype=torch.int32), "counted": torch.frombuffer(counted, dtype=torch.uint8),
    }  # fmt: skip
    shards = _cut([lengths[i] for i in order], settings)
    return Plan(Manifest(settings, data.report, len(data.train), len(data.heldout), digest_of(tensors), shards, versions), tensors)


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


def shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
