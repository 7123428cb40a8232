"""Results of the reference implementations, where they lie beside this checkout, and checks of published heads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas import tiny
from eyas.checkpoints import Weights, load, save

GOLDEN = Path(__file__).parents[1].parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="needs ../shared/golden, the results of the reference implementations"
)
needs_weights = pytest.mark.skipif(
    not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not in this checkout"
)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, dtypes and values."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def golden_head(name: str, folder: Path) -> Weights:
    """The head of that name; asserts that .bin and .safetensors are read alike, and written as published."""
    safe = load(GOLDEN / name)
    for file in ("config.json", "pytorch_model.bin"):
        (folder / file).write_bytes((GOLDEN / name / file).read_bytes())
    binary = load(folder)
    assert same(safe.tensors, binary.tensors)
    assert safe.config == binary.config
    save(safe, folder / "again")
    assert same(load(folder / "again").tensors, safe.tensors)
    assert same(load_file(folder / "again" / "model.safetensors"), load_file(GOLDEN / name / "model.safetensors"))
    return safe
