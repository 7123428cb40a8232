"""Formats for features on disk: our safetensors shards, Arrow by `datasets`, and MDS by `mosaicml-streaming`.

    python packages/eyas-train/runs/feature_formats.py --output docs/results/feature_formats.json

Each writes the same random features in bfloat16 and reads them again: all examples in the order of the file, then in a
random order, all layers and then one layer of them. What is read is a tensor of bfloat16, and is compared with what was
written. Rates are tokens a second, from the system's cache. Then one bit of a file is changed, and a file is cut in
two: is that noticed? A format whose package is missing is left out.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import parser, run, write
from torch import Tensor

from eyas_train.data import Data, Example, Examples, Report
from eyas_train.store import FeatureSettings, FeatureStore, plan_store

SHARD_BYTES = 64 << 20
HIDDEN = 576


class Shape:
    """The features: `count` examples with a number of tokens each, and the same numbers at every call."""

    def __init__(self, count: int, tokens: int, layers: int) -> None:
        choices = random.Random(0)
        self.lengths = [choices.randint(tokens // 2, tokens * 3 // 2) for _ in range(count)]
        self.layers = tuple(range(layers))
        self.noise = torch.randn(max(self.lengths) + 997, HIDDEN).to(torch.bfloat16)

    def features(self, example: int, layer: int) -> Tensor:
        """[T, D]"""
        begin = (example * 7 + layer) % 997
        return self.noise[begin : begin + self.lengths[example]]

    def bytes_of(self, example: int, layer: int) -> bytes:
        return self.features(example, layer).contiguous().view(torch.uint8).numpy().tobytes()


Reader = Callable[[int, Sequence[int]], list[Tensor]]  # (example, layers) -> [T, D] of each


def tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(-1, HIDDEN)


class Safetensors:
    """The store of `eyas features`."""

    def write(self, folder: Path, shape: Shape) -> None:
        examples = Examples()
        for length in shape.lengths:
            examples.append(Example([1] * length, [True] * length))
        settings = FeatureSettings(
            {"name": "noise", "fingerprint": "", "dtype": "float32"}, {}, shape.layers, HIDDEN, "bfloat16",
            {"files": [], "sha256": hashlib.sha256().hexdigest()}, max(shape.lengths), 0.0, SHARD_BYTES,
        )  # fmt: skip
        folder.mkdir()
        plan_store(settings, Data(examples, [], Report(), ""), {}).write(folder)
        store = FeatureStore(folder)
        for shard in range(len(store.manifest.shards)):
            numbers = store.in_shard(shard)
            parts = {k: [torch.cat([shape.features(i, k) for i in numbers])] for k in shape.layers}
            store.write_shard(shard, parts)
        assert store.finish()

    def order(self, folder: Path, shape: Shape) -> Sequence[int]:
        return FeatureStore(folder).order

    def open(self, folder: Path, shape: Shape) -> Reader:
        store = FeatureStore(folder)
        if faults := [store.fault(shard) for shard in range(len(store.manifest.shards)) if store.fault(shard)]:
            raise OSError(faults[0])
        return lambda example, layers: [
            part.view(-1, len(layers), HIDDEN)[:, k]
            for part in [store.features(example, layers)]
            for k in range(len(layers))
        ]


class Arrow:
    """A column of bytes for each layer: Arrow has no bfloat16."""

    def write(self, folder: Path, shape: Shape) -> None:
        import datasets

        datasets.disable_progress_bars()
        columns = {f"layer.{k}": datasets.Value("binary") for k in shape.layers}

        def rows() -> Iterator[dict[str, bytes]]:
            for i in range(len(shape.lengths)):
                yield {f"layer.{k}": shape.bytes_of(i, k) for k in shape.layers}

        made = datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(columns),
            cache_dir=str(folder / "cache"),
            writer_batch_size=16,
            keep_in_memory=False,
        )
        made.cleanup_cache_files()

    def order(self, folder: Path, shape: Shape) -> Sequence[int]:
        return range(len(shape.lengths))

    def open(self, folder: Path, shape: Shape) -> Reader:
        import datasets

        files = sorted((folder / "cache").rglob("*.arrow"))
        whole = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
        views = {
            n: whole.select_columns([f"layer.{k}" for k in shape.layers[:n]]) for n in range(1, len(shape.layers) + 1)
        }

        def read(example: int, layers: Sequence[int]) -> list[Tensor]:
            row = views[len(layers)][example]
            return [tensor_of(row[f"layer.{k}"]) for k in layers]

        return read


class Mosaic:
    """MDS shards with a column of bytes for each layer."""

    def write(self, folder: Path, shape: Shape) -> None:
        from streaming import MDSWriter

        columns = {f"layer.{k}": "bytes" for k in shape.layers}
        with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES, hashes=["xxh3_64"]) as writer:
            for i in range(len(shape.lengths)):
                writer.write({f"layer.{k}": shape.bytes_of(i, k) for k in shape.layers})

    def order(self, folder: Path, shape: Shape) -> Sequence[int]:
        return range(len(shape.lengths))

    def open(self, folder: Path, shape: Shape) -> Reader:
        from streaming import LocalDataset

        dataset = LocalDataset(local=str(folder))
        return lambda example, layers: [tensor_of(row[f"layer.{k}"]) for row in [dataset[example]] for k in layers]


FORMATS: dict[str, Any] = {"safetensors": Safetensors(), "arrow": Arrow(), "mosaic": Mosaic()}


def rate(read: Reader, shape: Shape, order: Sequence[int], layers: Sequence[int]) -> int:
    """Return the tokens a second of one pass."""
    began, checked = time.perf_counter(), 0.0
    for example in order:
        checked += sum(float(part[0, 0]) for part in read(example, layers))
    return round(sum(shape.lengths[i] for i in order) / (time.perf_counter() - began))


def is_noticed(form: Any, folder: Path, shape: Shape, harm: Callable[[Path], None]) -> bool:
    """Return whether reading everything fails after the largest file was harmed. The file is mended."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    before = file.read_bytes()
    harm(file)
    try:
        read = form.open(folder, shape)
        for example in range(len(shape.lengths)):
            read(example, shape.layers)
    except Exception:
        return True
    finally:
        file.write_bytes(before)
    return False


def flip(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def measure(name: str, folder: Path, shape: Shape) -> dict[str, Any]:
    """Return the figures of a format."""
    form, total = FORMATS[name], sum(shape.lengths)
    began = time.perf_counter()
    form.write(folder, shape)
    seconds = time.perf_counter() - began
    read, order = form.open(folder, shape), form.order(folder, shape)
    for i in random.Random(1).sample(range(len(order)), 20):
        assert all(
            torch.equal(part, shape.features(i, k)) for part, k in zip(read(i, shape.layers), shape.layers, strict=True)
        )
    shuffled = random.Random(2).sample(range(len(order)), len(order))
    first = rate(read, shape, order, shape.layers)
    return {
        "bytes_per_token": round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / total, 1),
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "write": round(total / seconds),
        "first_read": first,
        "in_order": rate(read, shape, order, shape.layers),
        "random": rate(read, shape, shuffled, shape.layers),
        "random_one_layer": rate(read, shape, shuffled, shape.layers[:1]),
        "notices_a_changed_bit": is_noticed(form, folder, shape, flip),
        "notices_a_cut_file": is_noticed(form, folder, shape, cut),
    }


def main() -> None:
    options = parser(__doc__, examples=2000, tokens=64, layers=4, formats=list(FORMATS)).parse_args()
    torch.manual_seed(0)
    shape = Shape(options.examples, options.tokens, options.layers)
    found = {}
    for name in options.formats:
        with tempfile.TemporaryDirectory() as place:
            try:
                found[name] = measure(name, Path(place) / name, shape)
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
        print(name, found[name], file=sys.stderr)
    write(
        options.output,
        {
            "examples": len(shape.lengths),
            "tokens": sum(shape.lengths),
            "layers": len(shape.layers),
            "hidden": HIDDEN,
            "formats": found,
        },
    )


if __name__ == "__main__":
    run(main)
