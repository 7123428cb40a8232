"""Heads of Medusa and Hydra on disk: the names are written out here, so that a swapped pair in the code's own
table is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.checkpoints import load, save
from eyas.errors import CheckpointError

D, V, INNER = 6, 11, 10
LAYER = {
    "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
    **{f"self_attn.{x}_proj.weight": (D, D) for x in "qkvo"},
    "mlp.gate_proj.weight": (INNER, D), "mlp.up_proj.weight": (INNER, D), "mlp.down_proj.weight": (D, INNER),
}  # fmt: skip
FILES = {"medusa": "medusa_lm_head.safetensors", "hydra": "hydra_lm_head.pt", "hydra++": "hydra_lm_head.pt"}


def linear(name: str, out: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}


def tensors(kind: str, heads: int = 3, own: bool = True) -> dict[str, Tensor]:
    """Weights of so many heads with two blocks each, under the published names."""
    sizes: dict[str, tuple[int, ...]] = {}
    plus = kind == "hydra++"  # dropout stands between its blocks
    for k in range(heads):
        if kind == "medusa":
            sizes |= {**linear(f"{k}.0.linear", D, D), **linear(f"{k}.1.linear", D, D)}
            sizes |= {f"{k}.2.weight": (V, D)} if own else {}
            continue
        for part in ("linear", "res_connection"):
            sizes |= linear(f"hydra_mlp.{k}.{1 if plus else 0}.{part}", D, (k + 2) * D)
        sizes |= linear(f"hydra_mlp.{k}.{3 if plus else 1}.linear", D, D)
        sizes |= linear(f"hydra_lm_head.{k}.1" if plus else f"hydra_lm_head.{k}", V, D)
    if plus:
        sizes |= {f"prefix_embeding_layer.layers.0.{name}": size for name, size in LAYER.items()}
        sizes["prefix_embeding_layer.norm.weight"] = (D,)
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=made) for name, size in sizes.items()}


def config(kind: str, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    if kind != "medusa":
        arch = "prefix-mlp" if kind == "hydra++" else "mlp"
        told = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": arch, "grounded_heads": True}
        told["hidden_state_offset"] = 0
    return {**told, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", **more}


def lay(folder: Path, told: dict[str, Any], held: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    (torch.save if file.endswith(".pt") else save_file)(held, folder / file)
    return folder


PREFIX = "prefix_embeding_layer"
NAMES = {
    "medusa": {
        "1.0.linear.weight": "blocks.1.0.weight", "2.1.linear.bias": "blocks.2.1.bias", "0.2.weight": "lm_head.0.weight",
    },
    "hydra": {
        "hydra_mlp.1.0.linear.weight": "mlp.1.0.linear.weight",
        "hydra_mlp.1.0.res_connection.bias": "mlp.1.0.residual.bias",
        "hydra_mlp.0.1.linear.weight": "mlp.0.1.weight",
        "hydra_lm_head.1.bias": "lm_head.1.bias",
    },
    "hydra++": {
        "hydra_mlp.1.1.linear.bias": "mlp.1.0.linear.bias",
        "hydra_mlp.0.1.res_connection.weight": "mlp.0.0.residual.weight",
        "hydra_mlp.0.3.linear.weight": "mlp.0.1.weight",
        "hydra_lm_head.0.1.weight": "lm_head.0.weight",
        f"{PREFIX}.norm.weight": "prefix.norm.weight",
        f"{PREFIX}.layers.0.input_layernorm.weight": "prefix.input_norm.weight",
        f"{PREFIX}.layers.0.post_attention_layernorm.weight": "prefix.mlp_norm.weight",
        **{f"{PREFIX}.layers.0.self_attn.{x}_proj.weight": f"prefix.attention.{x}.weight" for x in "qkvo"},
        **{f"{PREFIX}.layers.0.mlp.{x}_proj.weight": f"prefix.mlp.{x}.weight" for x in ("gate", "up", "down")},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("medusa", "medusa_lm_head.safetensors"), ("medusa", "medusa_lm_head.pt"), ("medusa", "model.safetensors"),
        ("hydra", "hydra_lm_head.pt"), ("hydra", "model.safetensors"), ("hydra++", "hydra_lm_head.pt"), ("hydra++", "model.safetensors"),
    ],
)  # fmt: skip
def test_reading_the_published_names(tmp_path: Path, kind: str, file: str) -> None:
    """Guards the map of names, one tensor after the other, and the names of the files."""
    held = tensors(kind)
    weights = load(lay(tmp_path, config(kind), held, file))
    read = weights.config
    assert (weights.method, read["hidden_size"], read["vocab_size"]) == (kind.removesuffix("++"), D, V)
    if kind == "medusa":
        assert (read["heads"], read["blocks"], read["output"]) == (3, 2, "own")
    else:
        assert (read["layer"], read["arch"]) == (None, "prefix-mlp" if kind == "hydra++" else "mlp")
    assert all(torch.equal(held[theirs], weights.tensors[ours]) for theirs, ours in NAMES[kind].items())
    assert len(weights.tensors) == len(held)


def test_what_the_authors_files_have(tmp_path: Path) -> None:
    """Guards the published Vicuna heads (five in the file, two in config.json), blocks that are one module in the authors'
    code (saved under two names, one memory), and the prefix layer's unused embeddings of Hydra++, which are left out."""
    told = config("medusa", medusa_num_heads=2)
    assert load(lay(tmp_path / "a", told, tensors("medusa", heads=5), FILES["medusa"])).config["heads"] == 5
    held = tensors("medusa")
    held["0.1.linear.weight"] = held["0.0.linear.weight"]
    save(load(lay(tmp_path / "b", config("medusa"), held, "medusa_lm_head.pt")), tmp_path / "c")
    assert torch.equal(load(tmp_path / "c").tensors["blocks.0.1.weight"], held["0.0.linear.weight"])
    held = tensors("hydra++") | {"prefix_embeding_layer.embed_tokens.weight": torch.ones(V, D)}
    assert "embed.weight" not in load(lay(tmp_path / "d", config("hydra++"), held, FILES["hydra"])).tensors


@pytest.mark.parametrize(("kind", "own"), [("medusa", True), ("medusa", False), ("hydra", True), ("hydra++", True)])
def test_there_and_back(tmp_path: Path, kind: str, own: bool) -> None:
    """Guards the writer: what is read from what it wrote is the same, under the published names,
    and the record stays."""
    held = tensors(kind, own=own) | ({} if kind == "medusa" else {"input_embed_fn.weight": torch.ones(V, D)})
    first = load(lay(tmp_path / "a", config(kind, eyas={"target_fingerprint": "0a1:0.5"}), held, FILES[kind]))
    save(first, tmp_path / "b")
    written = FILES["medusa"] if kind == "medusa" else "model.safetensors"
    assert load_file(tmp_path / "b" / written).keys() == held.keys()
    second = load(tmp_path / "b")
    assert second.config == first.config
    assert second.config["vocab_size"] == (V if own else None)
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())
    if kind == "medusa":
        assert json.loads((tmp_path / "b" / "config.json").read_text()).get("version") == (None if own else "2")


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("medusa", {"config": {"medusa_num_heads": 4}}, "medusa_num_heads 4, the file holds 3"),
        ("medusa", {"config": {"medusa_num_layers": 1}}, "unexpected 0.2.weight"),
        ("medusa", {"config": {"medusa_num_layers": None}}, "no medusa_num_layers"),
        ("medusa", {"drop": "1.0.linear.bias"}, "missing 1.0.linear.bias"),
        ("medusa", {"drop": "0.0.linear.weight"}, "no matrix 0.0.linear.weight"),
        ("medusa", {"drop": "2.2.weight"}, "missing 2.2.weight"),
        ("medusa", {"add": {"lm_head.weight": torch.zeros(2)}}, "whole model"),
        ("medusa", {"add": {"0.3.norm": torch.zeros(2)}}, "unexpected 0.3.norm"),
        ("medusa", {"add": {"1.1.linear.weight": torch.zeros(D, D + 1)}}, "1.1.linear.weight is"),
        ("medusa", {"add": {"0.0.linear.weight": torch.zeros(D, D, dtype=torch.int8)}}, "quantised"),
        ("hydra", {"config": {"hydra_head_arch": "eagle-attn"}}, "hydra_head_arch 'eagle-attn', which is not read"),
        ("hydra", {"config": {"hydra_head_arch": None}}, "hydra_head_arch None"),
        ("hydra", {"config": {"grounded_heads": False}}, "Medusa's"),
        ("hydra", {"drop": "grounded_heads"}, "no grounded_heads"),
        ("hydra", {"config": {"hidden_state_offset": 1}}, "hidden_state_offset 1"),
        ("hydra", {"config": {"hydra_num_heads": 4}}, "missing hydra_mlp.3.0.linear.weight"),
        ("hydra", {"config": {"hydra_num_heads": 2}}, "unexpected hydra_mlp.2.0.linear.weight"),
        ("hydra", {"config": {"hydra_num_layers": 1}}, "unexpected hydra_mlp.0.1.linear.weight"),
        ("hydra", {"config": {"hydra_head_arch": "prefix-mlp"}}, "no lm_head of the first head"),
        ("hydra", {"config": {"eyas": {"layer": {"heads": 2}}}}, "not the shape of a layer"),
        ("hydra", {"drop": "hydra_mlp.0.0.res_connection.bias"}, "missing hydra_mlp.0.0.res_connection.bias"),
        ("hydra", {"drop": "hydra_lm_head.0.weight"}, "no lm_head of the first head"),
        ("hydra", {"add": {"hydra_mlp.1.0.linear.weight": torch.zeros(D, D)}}, "mlp.1.0.linear.weight is"),
    ],
)
def test_what_is_not_as_the_format_says(tmp_path: Path, kind: str, change: dict[str, Any], said: str) -> None:
    """Guards strictness: what differs is named, and nothing is guessed; quantised heads are not read as plain ones."""
    held, told = tensors(kind) | change.get("add", {}), config(kind) | change.get("config", {})
    held.pop(change.get("drop", ""), None)
    told.pop(change.get("drop", ""), None)
    with pytest.raises(CheckpointError, match=said):
        load(lay(tmp_path, told, held, FILES[kind]))


def test_pickles_are_read_as_tensors_only(tmp_path: Path) -> None:
    """Guards against code in a .pt file."""
    lay(tmp_path, config("medusa"), {"0.0.linear.weight": Path("x")}, "medusa_lm_head.pt")  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load(tmp_path)
