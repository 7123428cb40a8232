"""Heads whose matrices are stored in int8 with a scale for each row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import checkpoints, tiny
from eyas.errors import CheckpointError
from eyas.files import from_int8, to_int8
from golden import needs_weights


def test_the_largest_value_of_each_row_is_exact_and_others_are_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(7, 33, generator=generator, dtype=torch.float32) * torch.logspace(-4, 3, 7)[:, None]
    once = to_int8({"x": x_ND})
    read = from_int8(once)["x"]
    assert torch.equal(to_int8({"x": read})["x"], once["x"]), "what was rounded once is rounded to itself"
    assert torch.equal(from_int8(to_int8({"x": torch.zeros(2, 3)}))["x"], torch.zeros(2, 3))
    largest_N1 = x_ND.abs().amax(1, keepdim=True)
    assert ((read - x_ND).abs() <= largest_N1 / 127 / 2 * 1.001).all()
    place_N1 = x_ND.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(read.gather(1, place_N1), x_ND.gather(1, place_N1))


@needs_weights
def test_a_head_in_int8_is_read_as_its_float32_copy_is(tmp_path: Path) -> None:
    source = tiny.HEADS["eagle1"]
    packed = load_file(source / "model.safetensors")
    assert any(value.dtype == torch.int8 for value in packed.values())
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(from_int8(packed), tmp_path / "model.safetensors")
    ours, theirs = checkpoints.load(source), checkpoints.load(tmp_path)
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(value, theirs.tensors[name]) for name, value in ours.tensors.items())


@needs_weights
def test_scales_that_do_not_fit_their_matrix_are_refused(tmp_path: Path) -> None:
    source = tiny.HEADS["eagle1"]
    packed = load_file(source / "model.safetensors")
    name = next(key for key in packed if key.endswith(".scale"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(packed | {name: packed[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="one number for each row"):
        checkpoints.load(tmp_path)
