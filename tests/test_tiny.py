"""The embedded model's files: a flipped bit is one line, before anything is computed with it."""

import shutil
from pathlib import Path

import pytest

from eyas import checkpoints, tiny
from eyas.errors import CheckpointError, ModelError
from golden import needs_weights


def flip(path: Path) -> None:
    """The lowest bit of the last byte."""
    with path.open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)[0]
        stream.seek(-1, 2)
        stream.write(bytes([last ^ 1]))


@needs_weights
def test_flipped_bits(tmp_path: Path) -> None:
    """Bug: a bit that flipped on the disk, in the weights or in a head, was noticed by `eyas doctor` alone."""
    folder = tmp_path / "weights"
    shutil.copytree(tiny.FOLDER, folder)
    for name in ("eagle1/model.safetensors", "eagle3/model.safetensors", "eagle3/config.json", "mtp/model.safetensors"):
        head, _, file = name.partition("/")
        checkpoints.load(folder / head)
        flip(folder / name)
        with pytest.raises(CheckpointError, match=f"{file} is not the file whose SHA-256 is in checksums.json"):
            checkpoints.load(folder / head)
        shutil.copy(tiny.FOLDER / name, folder / name)
    tiny.tokenizer(folder)
    flip(folder / tiny.PACKED)
    flip(folder / "tokenizer.json")
    with pytest.raises(ModelError, match=r"model\.int8\.safetensors changed on the disk"):
        tiny.model(folder)
    with pytest.raises(ModelError, match=r"tokenizer\.json changed on the disk"):
        tiny.tokenizer(folder)
