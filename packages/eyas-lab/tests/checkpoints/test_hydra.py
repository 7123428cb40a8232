"""Hydra heads on disk: the names are written out here, so that a swapped pair in the code's own
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
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
    **{f"self_attn.{x}_proj.weight": (D, D) for x in "qkvo"},
    "mlp.gate_proj.weight": (INNER, D),
    "mlp.up_proj.weight": (INNER, D),
    "mlp.down_proj.weight": (D, INNER),
}


def tensors(arch: str = "mlp", heads: int = 2, blocks: int = 2) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    places = [2 * j + 1 if arch == "prefix-mlp" else j for j in range(blocks)]
    sizes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for part in ("linear", "res_connection"):
            sizes |= {
                f"hydra_mlp.{k}.{places[0]}.{part}.weight": (D, (k + 2) * D),
                f"hydra_mlp.{k}.{places[0]}.{part}.bias": (D,),
            }
        for place in places[1:]:
            sizes |= {f"hydra_mlp.{k}.{place}.linear.weight": (D, D), f"hydra_mlp.{k}.{place}.linear.bias": (D,)}
        name = f"hydra_lm_head.{k}.1" if arch == "prefix-mlp" else f"hydra_lm_head.{k}"
        sizes |= {f"{name}.weight": (V, D), f"{name}.bias": (V,)}
    if arch == "prefix-mlp":
        sizes |= {f"prefix_embeding_layer.layers.0.{name}": size for name, size in LAYER.items()}
        sizes["prefix_embeding_layer.norm.weight"] = (D,)
    return {name: torch.randn(size, generator=made) for name, size in sizes.items()}


def config(arch: str = "mlp", heads: int = 2, blocks: int = 2, **more: Any) -> dict[str, Any]:
    told = {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    return {**told, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", **more}


def lay(folder: Path, told: dict[str, Any], held: dict[str, Tensor], file: str = "hydra_lm_head.pt") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    (torch.save if file.endswith(".pt") else save_file)(held, folder / file)
    return folder


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "model.safetensors"])
def test_reading_the_published_names(tmp_path: Path, file: str) -> None:
    """Guards the map of names of both architectures, dropout's places between the blocks included."""
    held = tensors()
    weights = load(lay(tmp_path / "a", config(), held, file))
    assert (weights.method, weights.config["layer"]) == ("hydra", None)
    assert (weights.config["hidden_size"], weights.config["vocab_size"], weights.config["arch"]) == (D, V, "mlp")
    pairs = {
        "hydra_mlp.1.0.linear.weight": "mlp.1.0.linear.weight",
        "hydra_mlp.1.0.res_connection.bias": "mlp.1.0.residual.bias",
        "hydra_mlp.0.1.linear.weight": "mlp.0.1.weight",
        "hydra_lm_head.1.bias": "lm_head.1.bias",
    }
    assert all(torch.equal(held[theirs], weights.tensors[ours]) for theirs, ours in pairs.items())
    held = tensors("prefix-mlp")
    weights = load(lay(tmp_path / "b", config("prefix-mlp"), held, file))
    pairs = {
        "hydra_mlp.1.1.linear.bias": "mlp.1.0.linear.bias",
        "hydra_mlp.0.1.res_connection.weight": "mlp.0.0.residual.weight",
        "hydra_mlp.0.3.linear.weight": "mlp.0.1.weight",
        "hydra_lm_head.0.1.weight": "lm_head.0.weight",
        "prefix_embeding_layer.norm.weight": "prefix.norm.weight",
        "prefix_embeding_layer.layers.0.input_layernorm.weight": "prefix.input_norm.weight",
        "prefix_embeding_layer.layers.0.post_attention_layernorm.weight": "prefix.mlp_norm.weight",
        **{f"prefix_embeding_layer.layers.0.self_attn.{x}_proj.weight": f"prefix.attention.{x}.weight" for x in "qkvo"},
        **{
            f"prefix_embeding_layer.layers.0.mlp.{x}_proj.weight": f"prefix.mlp.{x}.weight"
            for x in ("gate", "up", "down")
        },
    }
    assert all(torch.equal(held[theirs], weights.tensors[ours]) for theirs, ours in pairs.items())
    assert len(weights.tensors) == len(held)


@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_there_and_back(tmp_path: Path, arch: str) -> None:
    """Guards the writer: the same names and values come out that were read, and the record stays."""
    held = tensors(arch) | {"input_embed_fn.weight": torch.ones(V, D)}
    first = load(lay(tmp_path / "a", config(arch, eyas={"target_fingerprint": "0a1:0.5"}), held))
    save(first, tmp_path / "b")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == held.keys()
    second = load(tmp_path / "b")
    assert second.config == first.config
    assert all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items())


def test_the_table_that_nothing_reads(tmp_path: Path) -> None:
    """Guards Hydra++ heads as the authors' trainer saves them: the prefix layer's unused embeddings
    are left out, not refused."""
    held = tensors("prefix-mlp") | {"prefix_embeding_layer.embed_tokens.weight": torch.ones(V, D)}
    assert "embed.weight" not in load(lay(tmp_path, config("prefix-mlp"), held)).tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"hydra_head_arch": "eagle-attn"}}, "hydra_head_arch 'eagle-attn', which is not read"),
        ({"config": {"hydra_head_arch": None}}, "hydra_head_arch None"),
        ({"config": {"grounded_heads": False}}, "Medusa's"),
        ({"drop_config": "grounded_heads"}, "no grounded_heads"),
        ({"config": {"hidden_state_offset": 1}}, "hidden_state_offset 1"),
        ({"config": {"hydra_num_heads": 3}}, "missing hydra_mlp.2.0.linear.weight"),
        ({"config": {"hydra_num_heads": 1}}, "unexpected hydra_mlp.1.0.linear.weight"),
        ({"config": {"hydra_num_layers": 1}}, "unexpected hydra_mlp.0.1.linear.weight"),
        ({"config": {"hydra_head_arch": "prefix-mlp"}}, "no lm_head of the first head"),
        ({"config": {"eyas": {"layer": {"heads": 2}}}}, "not the shape of a layer"),
        ({"drop": "hydra_mlp.0.0.res_connection.bias"}, "missing hydra_mlp.0.0.res_connection.bias"),
        ({"drop": "hydra_lm_head.0.weight"}, "no lm_head of the first head"),
        ({"turn": "hydra_mlp.1.0.linear.weight"}, "mlp.1.0.linear.weight is"),
    ],
)
def test_what_is_not_as_the_format_says(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Guards strictness, and that nothing is guessed."""
    held, told = tensors(), config() | change.get("config", {})
    held.pop(change.get("drop", ""), None)
    told.pop(change.get("drop_config", ""), None)
    if "turn" in change:
        held[change["turn"]] = torch.zeros(D, D)
    with pytest.raises(CheckpointError, match=said):
        load(lay(tmp_path, told, held))
