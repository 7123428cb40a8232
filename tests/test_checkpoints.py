"""eyas.checkpoints: heads survive writing and reading bit by bit; whatever is wrong with a file is said in one line."""

import contextlib
import dataclasses
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.checkpoints import Weights, expect, load, safeailab, save
from eyas.checkpoints._files import write
from eyas.errors import CheckpointError, InputError
from golden import golden_head, needs_golden, same

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 20,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def published(seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A small head as it would be published: its config.json, with some keys changed, and fitting random tensors."""
    config = CONFIG | changes
    sizes = safeailab.shapes(safeailab.read_config(config))
    random = torch.Generator().manual_seed(seed)
    return config, {
        name: torch.randn(sizes[ours], generator=random) for name, ours in safeailab.NAMES.items() if ours in sizes
    }


def put(folder: Path, config: Any = None, tensors: dict[str, Tensor] | None = None) -> Path:
    """A folder with config.json and model.safetensors."""
    usual = published()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(usual[0] if config is None else config))
    save_file(usual[1] if tensors is None else tensors, folder / "model.safetensors")
    return folder


def refused(folder: Any, says: str, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error, match=says) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- round trips -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [
    {},
    {"bias": False, "rope_theta": 500000.0},
    {"qkv_bias": True, "head_dim": 6},
    {"rope_scaling": {"type": "llama3", "factor": 8, **LLAMA3}},
    {"eyas": {"method": "eagle1", "version": "0.1", "training": {"steps": 3}}},
    {"eyas": {"inputs": "unshifted"}},
    {"eyas": {"inputs": "feature"}, "bias": False},
], ids=["plain", "llama3_style", "qkv_bias", "llama3_rope", "ours", "unshifted", "feature"])  # fmt: skip
def test_round_trip(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Bug: a tensor, a setting or a dtype is lost or swapped; the embedding may be left to the target."""
    config, tensors = published(**changes)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if dtype == torch.float16:
        del tensors["embed_tokens.weight"]
    first = load(put(tmp_path / "a", config, tensors))
    save(first, tmp_path / "b")
    again = load(tmp_path / "b")
    assert same(first.tensors, again.tensors)
    assert first.config == again.config
    assert first.method == again.method == "eagle1"
    assert same(load_file(tmp_path / "b" / "model.safetensors"), tensors)


def test_names_are_paired_right(tmp_path: Path) -> None:
    """Bug: two tensors of one shape are swapped in both directions, which a round trip cannot notice."""
    _, tensors = published(qkv_bias=True)
    ours = load(put(tmp_path, CONFIG | {"qkv_bias": True}, tensors)).tensors
    pairs = {
        "layer.attention.q.weight": "layers.0.self_attn.q_proj.weight",
        "layer.attention.k.weight": "layers.0.self_attn.k_proj.weight",
        "layer.attention.v.bias": "layers.0.self_attn.v_proj.bias",
        "layer.attention.o.weight": "layers.0.self_attn.o_proj.weight",
        "layer.mlp.gate.weight": "layers.0.mlp.gate_proj.weight",
        "layer.mlp.up.weight": "layers.0.mlp.up_proj.weight",
        "layer.mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
        "embed.weight": "embed_tokens.weight",
    }
    for mine, theirs in pairs.items():
        assert torch.equal(ours[mine], tensors[theirs]), mine


@needs_golden
@pytest.mark.parametrize("name", ["head_eagle1_a", "head_eagle1_b_nobias"])
def test_golden_heads(name: str, tmp_path: Path) -> None:
    """Bug: published files are read otherwise than their authors wrote them, .bin and .safetensors alike."""
    safe = golden_head(name, tmp_path)
    assert safe.config["fc_bias"] == ("fc.bias" in safe.tensors) == (name == "head_eagle1_a")
    assert safe.config["rope_theta"] == (10000.0 if name == "head_eagle1_a" else 500000.0)


# --- files -----------------------------------------------------------------------------------------------------------------------------


def shard(folder: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """Split tensors over two files with an index, as large heads are published."""
    stem, end, write = (
        ("model", "safetensors", save_file) if kind == "safetensors" else ("pytorch_model", "bin", torch.save)
    )
    names = sorted(tensors)
    places = {name: f"{stem}-0000{1 + i % 2}-of-00002.{end}" for i, name in enumerate(names)}
    for file in set(places.values()):
        write({name: tensors[name] for name in names if places[name] == file}, folder / file)
    index = folder / f"{stem}.{end}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin", "both", "sharded_safetensors", "sharded_bin"])
def test_kinds_of_files(tmp_path: Path, kind: str) -> None:
    """Bug: one kind of file, or some of the shards, are read; a pickle is opened where there is no need to."""
    config, tensors = published()
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind in ("safetensors", "both"):
        save_file(tensors, tmp_path / "model.safetensors")
    if kind == "both":
        (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    elif kind == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    elif kind.startswith("sharded"):
        shard(tmp_path, kind.removeprefix("sharded_"), tensors)
    assert same(load(tmp_path).tensors, {safeailab.NAMES[name]: tensor for name, tensor in tensors.items()})


def test_bin_runs_no_code(tmp_path: Path) -> None:
    """Guards against a pickle that runs code when it is loaded."""

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (tmp_path / "was_run",))  # type: ignore[return-value]

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin is corrupt, truncated or holds more than tensors")
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("keep", [0, 5, 300, -1, None])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_weights(tmp_path: Path, name: str, keep: int | None) -> None:
    """Bug: a traceback, or short tensors, after a broken download, or for a web page saved under that name."""
    config, tensors = published()
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name.endswith("bin"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    page = b"<!DOCTYPE html><html>" + b"x" * 500
    (tmp_path / name).write_bytes(page if keep is None else (tmp_path / name).read_bytes()[:keep])
    refused(tmp_path, f"{name} is corrupt")


def test_bad_folders(tmp_path: Path) -> None:
    """Bug: a traceback for what people type, for a broken config.json, or a training checkpoint."""
    head = put(tmp_path / "head")
    refused(head / "model.safetensors", "this is a file; give a folder")
    refused(tmp_path / "nowhere", "there is no such folder")
    refused(str(tmp_path / "nowhere"), r"there is no such folder, and it is not a hub id \(owner/name\)")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "the folder has no config.json")
    (head / "model.safetensors").unlink()
    refused(head, "the folder has no weights")
    for held in ([torch.zeros(2)], {"state": {"fc.weight": torch.zeros(2)}}, {3: torch.zeros(2)}):
        torch.save(held, head / "pytorch_model.bin")
        refused(head, "pytorch_model.bin holds no dict from names to tensors")
    for text in (b"{", b"[1]", b"\xff", b""):
        (head / "config.json").write_bytes(text)
        refused(head, "config.json (cannot be read|holds no JSON object)")


# --- the hub ---------------------------------------------------------------------------------------------------------------------------


class Hub:
    """Stands in for the hub: gives the files of a folder that match, and remembers what it was asked."""

    def __init__(self, holds: Path, cache: Path) -> None:
        self.holds, self.cache, self.asked = holds, cache / "0123abc", []

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((repo_id, revision))
        self.cache.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            for file in self.holds.glob(pattern):
                (self.cache / file.name).write_bytes(file.read_bytes())
        return str(self.cache)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Guards against fetching the weights twice (both kinds), or fetching everything else that lies in a repository."""
    head = put(tmp_path / "head")
    torch.save(published()[1], head / "pytorch_model.bin")
    (head / "huge.onnx").write_bytes(b"0")
    if kind == "bin":
        (head / "model.safetensors").unlink()
    hub = Hub(head, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    weights = load("someone/some-head", revision="v2")
    assert set(hub.asked) == {("someone/some-head", "v2")}
    assert weights.source == "someone/some-head@0123abc"
    expected = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    assert {file.name for file in hub.cache.iterdir()} == {"config.json", expected}


# --- what is in a head -----------------------------------------------------------------------------------------------------------------


def test_every_difference_is_named(tmp_path: Path) -> None:
    """Guards against a head that loads in part, and against errors that come one at a time."""
    config, tensors = published()
    del tensors["fc.bias"]
    tensors |= {"layers.0.mlp.up_proj.weight": torch.zeros(3, 8), "norm.weight": torch.zeros(8)}
    said = refused(put(tmp_path, config, tensors), "the tensors differ from config.json")
    wide = "layers.0.mlp.up_proj.weight is [3, 8] and should be [12, 8]"
    for part in ("missing fc.bias [8]", "unexpected norm.weight [8]", wide):
        assert part in said


@pytest.mark.parametrize(("changes", "held", "says"), [
    ({"bias": False}, {}, r"unexpected fc\.bias"),
    ({"attention_bias": True}, {}, r"self_attn\.q_proj\.bias"),
    ({}, {"layers.1.mlp.up_proj.weight": torch.zeros(8)}, "has one layer, layers.0; this file has layers 0, 1"),
    ({}, {"layers.0.input_layernorm.weight": torch.zeros(8)}, "has no layers.0.input_layernorm.weight"),
    ({}, {"midlayer.hidden_norm.weight": torch.zeros(8)}, "EAGLE-3"),
    ({}, {"d2t": torch.zeros(8)}, "EAGLE-3"),
    ({}, {"fc.weight": torch.zeros(8, 16, dtype=torch.int8)}, r"of 16 bits or more: fc\.weight \(torch\.int8\)"),
])  # fmt: skip
def test_other_nets(tmp_path: Path, changes: dict[str, Any], held: dict[str, Tensor], says: str) -> None:
    """Bug: a deeper, differently normed or quantised head is run as EAGLE-1, or the bias guessed from the file."""
    refused(put(tmp_path, CONFIG | changes, published()[1] | held), says)


SCALED = {"rope_type": "llama3", "factor": 8.0, **LLAMA3}


@pytest.mark.parametrize(("changes", "ours"), [
    ({}, {"rope_theta": 10000.0, "rope_scaling": None, "fc_bias": True, "num_kv_heads": 2, "head_dim": 2}),
    ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
    ({"hidden_size": 208, "num_attention_heads": 52, "num_key_value_heads": 13}, {"num_kv_heads": 13, "head_dim": 4}),
    ({"max_position_embeddings": None, "max_sequence_length": 1024}, {"max_positions": 1024}),
    ({"max_position_embeddings": None}, {"max_positions": 2048}),
    ({"rope_theta": 500000}, {"rope_theta": 500000.0}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6, "rope_scaling": None}),
    ({"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
    ({"rope_theta": 5e5, "rope_scaling": SCALED}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
    ({"rope_theta": 5e5, "rope_parameters": SCALED}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
    ({"head_dim": 16}, {"head_dim": 16}),
    ({"rms_norm_eps": None}, {"rms_eps": 1e-6}),
    ({"num_hidden_layers": 40}, {"qkv_bias": False}),  # which published configs leave at the target's
    # what is the target's and says nothing: a window that is off or wider than the trained length, two equal names
    ({"use_sliding_window": False, "sliding_window": 64, "layer_norm_eps": 1e-5}, {"rms_eps": 1e-5}),
    ({"use_sliding_window": True, "sliding_window": 512, "attention_bias": False}, {"qkv_bias": False}),
])  # fmt: skip
def test_config_as_published(changes: dict[str, Any], ours: dict[str, Any], tmp_path: Path) -> None:
    """Bug: wrong defaults: what a config leaves out has its authors' meaning. Scaled RoPE run as plain accepts less."""
    config = load(put(tmp_path, *published(**changes))).config
    assert {key: config[key] for key in ours} == ours


@pytest.mark.parametrize(("changes", "says"), [
    ({"hidden_size": None}, "has no hidden_size"),
    ({"hidden_size": "8"}, "hidden_size '8'; it must be a whole number"),
    ({"vocab_size": 0}, "vocab_size 0"),
    ({"num_attention_heads": True}, "num_attention_heads True"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "not a multiple of its 3 attention heads"),
    ({"num_key_value_heads": 3}, "not a multiple of its 3 key-value heads"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
    ({"bias": 1}, "bias 1; it must be true or false"),
    ({"rms_norm_eps": -1}, "rms_norm_eps -1"),
    ({"layer_norm_eps": 1e-6}, "layer_norm_eps 1e-06, but the norms' epsilon is rms_norm_eps, which is 1e-05"),
    ({"mlp_bias": True}, "mlp_bias true"),
    ({"use_sliding_window": True, "sliding_window": 64}, "a sliding window of 64 tokens, which the layer of EAGLE-1"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "a sliding window of 64 tokens"),
    ({"rope_theta": "big"}, "rope_theta 'big'"),
    ({"rope_scaling": {"type": "linear"}}, "has no factor"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "has no factor"),
    ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, "has no factor"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope'"),
    ({"rope_scaling": 2.0}, "rope_scaling 2.0; it must be an object"),
    ({"eyas": {"inputs": "shiftd"}}, "\"inputs\" 'shiftd'; did you mean shifted"),
])  # fmt: skip
def test_impossible_configs(changes: dict[str, Any], says: str) -> None:
    """Guards against a wrong setting that shows only as bad acceptance, or as a shape error deep in a net."""
    with pytest.raises(CheckpointError, match=says):
        safeailab.read_config(CONFIG | changes)


def test_expect(tmp_path: Path) -> None:
    """Bug: a drafter loads what it has no place for, or the optional embedding is demanded or unchecked."""
    weights = load(put(tmp_path))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    expect(weights, shapes, set())
    without = dataclasses.replace(weights, tensors={k: v for k, v in weights.tensors.items() if k != "embed.weight"})
    expect(without, shapes, {"embed.weight"})
    with pytest.raises(CheckpointError, match=r"embed\.weight is \[20, 8\] and should be \[21, 8\]"):
        expect(weights, shapes | {"embed.weight": (21, 8)}, {"embed.weight"})
    wanted = {k: v for k, v in shapes.items() if k != "fc.bias"} | {"norm.weight": (8,), "fc.weight": (8, 24)}
    with pytest.raises(CheckpointError) as caught:
        expect(weights, wanted, set())
    faults = "missing norm.weight [8]; unexpected fc.bias [8]; fc.weight is [8, 16] and should be [8, 24]"
    assert str(caught.value) == f"draft head {tmp_path} does not fit eagle1: {faults}"


# --- saving ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def head(tmp_path: Path) -> Weights:
    return load(put(tmp_path / "source"))


def test_save_leaves_other_files_alone(tmp_path: Path, head: Weights) -> None:
    """Bug: a folder is replaced as a whole, rubbish stays, or tied or transposed parameters cannot be saved."""
    folder = tmp_path / "new" / "head"
    folder.mkdir(parents=True)
    (folder / "train.log").write_text("kept")
    (folder / "config.json").write_text("old")
    tied, strided = torch.nn.Parameter(torch.randn(8)), torch.randn(8, 4).T
    tensors = head.tensors | {"fc.bias": tied, "layer.mlp_norm.weight": tied, "layer.attention.k.weight": strided}
    save(dataclasses.replace(head, tensors=tensors), folder)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "train.log"]
    assert same(load(folder).tensors, {name: tensor.detach() for name, tensor in tensors.items()})


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """For a while no file of this process may grow over 1,000 bytes: a full disk, as far as a writer can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interrupted(_: int) -> None:
    raise KeyboardInterrupt


def test_failed_save_leaves_the_older_head(tmp_path: Path, head: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a save that fails half-way, by a full disk or Ctrl-C, destroys a good head; torch.save's own error."""
    save(head, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    other = dataclasses.replace(head, tensors={k: v + 1 for k, v in head.tensors.items()})
    says = r"cannot write the draft head to .*; choose another folder"
    with small_files():
        with pytest.raises(InputError, match=says.replace(".*", r".* MB\): .*")):
            save(other, tmp_path / "out")
        with pytest.raises(InputError, match=says):
            write(tmp_path / "hydra", {}, {"weight": torch.zeros(1000)}, "hydra_lm_head.pt")
    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(other, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert list((tmp_path / "hydra").iterdir()) == []
