"""Medusa heads on disk: the names are written out here, so that a swapped pair in the code's own
table is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.checkpoints import Weights, load, save
from eyas.errors import CheckpointError

D, V = 6, 11


def tensors(heads: int = 3, blocks: int = 2, own: bool = True) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for j in range(blocks):
            sizes |= {f"{k}.{j}.linear.weight": (D, D), f"{k}.{j}.linear.bias": (D,)}
        if own:
            sizes[f"{k}.{blocks}.weight"] = (V, D)
    return {name: torch.randn(size, generator=made) for name, size in sizes.items()}


def config(heads: int = 3, blocks: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        **more,
    }


def lay(folder: Path, told: dict[str, Any], held: dict[str, Tensor], file: str = "medusa_lm_head.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    (torch.save if file.endswith(".pt") else save_file)(held, folder / file)
    return folder


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"])
def test_reading_the_published_names(tmp_path: Path, file: str) -> None:
    """Guards the map of names, one tensor after the other, and the names of the files."""
    held = tensors()
    weights = load(lay(tmp_path, config(), held, file))
    assert (weights.method, weights.config["heads"], weights.config["blocks"]) == ("medusa", 3, 2)
    assert (weights.config["hidden_size"], weights.config["vocab_size"], weights.config["output"]) == (D, V, "own")
    pairs = {
        "1.0.linear.weight": "blocks.1.0.weight",
        "2.1.linear.bias": "blocks.2.1.bias",
        "0.2.weight": "lm_head.0.weight",
    }
    assert all(torch.equal(held[theirs], weights.tensors[ours]) for theirs, ours in pairs.items())
    assert len(weights.tensors) == len(held)


def test_heads_are_counted_in_the_file(tmp_path: Path) -> None:
    """Guards the published Vicuna heads: five in the file, two in config.json."""
    assert load(lay(tmp_path, config(heads=2), tensors(heads=5))).config["heads"] == 5


@pytest.mark.parametrize("own", [True, False])
def test_there_and_back(tmp_path: Path, own: bool) -> None:
    """Guards the writer: what is read from what it wrote is the same, under the published names,
    and the record stays."""
    first = load(lay(tmp_path / "a", config(eyas={"target_fingerprint": "0a1:0.5"}), tensors(own=own)))
    save(first, tmp_path / "b")
    assert load_file(tmp_path / "b" / "medusa_lm_head.safetensors").keys() == tensors(own=own).keys()
    second = load(tmp_path / "b")
    assert second.config == first.config
    assert second.config["vocab_size"] == (V if own else None)
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()).get("version") == (None if own else "2")


def test_shared_blocks_of_the_authors_trainer(tmp_path: Path) -> None:
    """Guards heads whose blocks are one module in the authors' code: saved under two names, one memory."""
    held = tensors()
    held["0.1.linear.weight"] = held["0.0.linear.weight"]
    weights = load(lay(tmp_path, config(), held, "medusa_lm_head.pt"))
    save(weights, tmp_path / "b")
    assert torch.equal(load(tmp_path / "b").tensors["blocks.0.1.weight"], held["0.0.linear.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"medusa_num_heads": 4}}, "medusa_num_heads 4, the file holds 3"),
        ({"config": {"medusa_num_layers": 1}}, "unexpected 0.2.weight"),
        ({"config": {"medusa_num_layers": None}}, "no medusa_num_layers"),
        ({"drop": "1.0.linear.bias"}, "missing 1.0.linear.bias"),
        ({"drop": "0.0.linear.weight"}, "no matrix 0.0.linear.weight"),
        ({"drop": "2.2.weight"}, "missing 2.2.weight"),
        ({"add": "lm_head.weight"}, "whole model"),
        ({"add": "0.3.norm"}, "unexpected 0.3.norm"),
        ({"turn": "1.1.linear.weight"}, "1.1.linear.weight is"),
    ],
)
def test_what_is_not_as_the_format_says(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Guards strictness: what differs is named."""
    held = tensors()
    held.pop(change.get("drop", ""), None)
    if "add" in change:
        held[change["add"]] = torch.zeros(2)
    if "turn" in change:
        held[change["turn"]] = torch.zeros(D, D + 1)
    with pytest.raises(CheckpointError, match=said):
        load(lay(tmp_path, config() | change.get("config", {}), held))


def test_pickles_are_read_as_tensors_only(tmp_path: Path) -> None:
    """Guards against code in a .pt file."""
    lay(tmp_path, config(), tensors())
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load(tmp_path)


def test_integers_are_refused(tmp_path: Path) -> None:
    """Guards against quantised heads read as if they were plain."""
    held = tensors() | {"0.0.linear.weight": torch.zeros(D, D, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match="quantised"):
        load(lay(tmp_path, config(), held))


def test_a_head_of_ours_is_no_other(tmp_path: Path) -> None:
    """Guards the writer's own check."""
    with pytest.raises(AssertionError):
        save(
            Weights(
                "medusa", {"heads": 1, "blocks": 1, "hidden_size": D, "vocab_size": V, "output": "own"}, {}, "memory"
            ),
            tmp_path,
        )
