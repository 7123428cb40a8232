"""Heads in files of GGUF format: they are what the folders hold from which they were made, they draft the same, and
what cannot be read says why."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eyas
import gguf_heads
from eyas import checkpoints
from eyas.checkpoints import ExportTarget
from eyas.checkpoints import mtp as mtp_form
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find, mtp
from eyas.drafters._nets import layer_shape
from eyas.errors import CheckpointError
from eyas.nn import rope_frequencies
from eyas_train.formats import vllm
from gguf_heads import BLOCKS, MODULES, Parts, assert_same, block_parts, eagle3_of, family_of, texts

LAYERS = [0, 1, 3]


def eagle3_parts(target: Target, **changes: Any) -> Parts:
    weights = eagle3_of(target, **changes)
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, ExportTarget())
    return gguf_heads.eagle3(config, tensors, LAYERS)


def refused(tmp_path: Path, parts: Parts, says: str, architecture: str = "eagle3") -> None:
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoints.load(gguf_heads.write(tmp_path / "head.gguf", architecture, *parts))
    assert "\n" not in str(error.value)


def test_eagle3(target: Target, tmp_path: Path) -> None:
    """Guards the rows of queries and keys, ids of the vocabulary, layer ids, names; the head drafts as its folder does."""
    made = eagle3_of(target)
    checkpoints.save(made, tmp_path / "head")
    path = gguf_heads.write(tmp_path / "head.gguf", "eagle3", *eagle3_parts(target))
    read, folder = checkpoints.load(path), checkpoints.load(tmp_path / "head")
    assert_same(read, folder)
    for key in set(folder.config) - {"eyas", "layer_ids_as_published"}:
        assert read.config[key] == folder.config[key], key
    assert texts(target, path, "eagle3") == texts(target, tmp_path / "head", "eagle3")
    assert eyas.load(target.model, path, tokenizer=None, kernels="off").method == "eagle3"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="corrupt or truncated"):
        checkpoints.load(path)


def test_flags_of_eagle3(target: Target, tmp_path: Path) -> None:
    """Guards a norm before fc, and the residual that starts from the normed hidden state."""
    weights = eagle3_of(target, norm_before_fc=True, norm_before_residual=True)
    weights.tensors["input_norm.weight"] = torch.rand(weights.tensors["fc.weight"].shape[1])
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, ExportTarget())
    path = gguf_heads.write(tmp_path / "head.gguf", "eagle3", *gguf_heads.eagle3(config, tensors, LAYERS))
    read = checkpoints.load(path)
    assert_same(read, weights)
    assert read.config["norm_before_fc"]
    assert read.config["norm_before_residual"]


def test_tables_of_the_target(target: Target, tmp_path: Path) -> None:
    """Guards a head without an lm_head, which uses the target's."""
    kind = find("eagle3")
    options = build_options(kind.Options, {"head.layers": "0,1,3", "head.draft_vocab": target.vocab_size})
    weights = kind.random(target, options, seed=1).weights()
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, ExportTarget())
    parts, settings = gguf_heads.eagle3(config, tensors, LAYERS)
    parts.pop("output.weight")
    read = checkpoints.load(gguf_heads.write(tmp_path / "head.gguf", "eagle3", parts, settings))
    assert read.config["head"] == "target"


def test_eight_bits(target: Target, tmp_path: Path) -> None:
    """Guards quantised weights: they are read as the gguf package dequantises them."""
    parts, settings = eagle3_parts(target)
    name = "blk.0.attn_output.weight"
    path = gguf_heads.write(tmp_path / "head.gguf", "eagle3", {**parts, name: torch.randn(48, 64)}, settings, (name,))
    with pytest.raises(CheckpointError, match="o_proj"):  # of another shape: blocks of eight bits hold 32 weights
        checkpoints.load(path)
    parts, settings = eagle3_parts(target)
    wide = {name for name, tensor in parts.items() if tensor.ndim == 2 and tensor.shape[1] % 32 == 0}
    assert wide, "no tensor can be quantised"
    read = checkpoints.load(gguf_heads.write(path, "eagle3", parts, settings, tuple(wide)))
    assert_same(read, checkpoints.load(gguf_heads.write(tmp_path / "exact.gguf", "eagle3", parts, settings)), atol=0.05)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 64.0, "original_max_position_embeddings": 1024}


def llama3_factors(target: Target) -> Tensor:
    """The converter's tensor for this scaling: by what the frequencies are divided."""
    heads = [eagle3_of(target, rope_scaling=scaling) for scaling in (None, {"rope_type": "llama3", **LLAMA3})]
    plain, scaled = (rope_frequencies(layer_shape(head.config)) for head in heads)
    return plain / scaled


def test_llama3_is_found_in_its_factors(target: Target, tmp_path: Path) -> None:
    """Guards the scaling of which a file holds the factors only. Heads of 12 channels have six of them."""
    made = eagle3_of(target, rope_scaling={"rope_type": "llama3", **LLAMA3})
    parts, settings = eagle3_parts(target)
    scaled = {**parts, "rope_freqs.weight": llama3_factors(target)}
    path = gguf_heads.write(tmp_path / "h.gguf", "eagle3", scaled, settings)
    found, expected = (rope_frequencies(layer_shape(head.config)) for head in (checkpoints.load(path), made))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    other = torch.tensor([1.0, 1.1, 3.0, 2.0, 7.0, 8.0])
    refused(tmp_path, ({**parts, "rope_freqs.weight": other}, settings), "of another scaling than llama3")


def test_yarn(target: Target, tmp_path: Path) -> None:
    """Guards YaRN's settings, each under its own name."""
    parts, settings = eagle3_parts(target)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    keys |= {"yarn_attn_factor": 1.25, "yarn_beta_fast": 16.0}
    settings |= {f"rope.scaling.{key}": value for key, value in keys.items()}
    read = checkpoints.load(gguf_heads.write(tmp_path / "h.gguf", "eagle3", parts, settings))
    assert read.config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128.0, "attention_factor": 1.25, "beta_fast": 16.0
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.quick("dspark")
@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads(name: str, target: Target, tmp_path: Path) -> None:
    """Guards names, windows, their order, and which token a slot predicts; the head drafts as its folder does."""
    folder, parts = block_parts(target, tmp_path / "head", name)
    path = gguf_heads.write(tmp_path / "head.gguf", "dflash", *parts)
    read = checkpoints.load(path)
    assert_same(read, folder)
    for key in set(folder.config) - {"eyas", "target_layers"}:
        assert read.config[key] == folder.config[key], key
    assert texts(target, path, read.method) == texts(target, tmp_path / "head", read.method)


@pytest.mark.parametrize(
    ("name", "architecture"), [("dflash", "dflash-draft"), ("dflash", "qwen35-dflash-draft"), ("dspark", "dspark")]
)
def test_files_of_forks(name: str, architecture: str, target: Target, tmp_path: Path) -> None:
    """Guards the files that llama.cpp refuses: no vocabulary, layers one lower, other names. They draft as the folder does."""
    folder, parts = block_parts(target, tmp_path / "head", name)
    path = gguf_heads.write(tmp_path / "head.gguf", architecture, *gguf_heads.in_a_fork(parts, architecture))
    read = checkpoints.load(path)
    assert_same(read, folder)
    for key in set(folder.config) - {"eyas", "target_layers", "vocab_size", "max_positions"}:
        assert read.config[key] == folder.config[key], key
    assert read.config["vocab_size"] in (None, target.vocab_size)
    assert texts(target, path, read.method) == texts(target, tmp_path / "head", read.method)


def test_refused_files_of_forks(target: Target, tmp_path: Path) -> None:
    """Guards against settings that are read wrongly in silence: a net that reads noise, a scaling without its kind."""
    parts = gguf_heads.in_a_fork(block_parts(target, tmp_path / "head", "dspark")[1], "dspark")
    for key, value, why in (
        ("dspark.log_snr_conditioning", True, "the level of noise"),
        ("rope.scaling.factor", 64.0, "does not say which scaling"),
    ):
        refused(tmp_path, (parts[0], parts[1] | {key: value}), why, "dspark")
    refused(tmp_path, (parts[0] | {"more.weight": torch.zeros(2)}, parts[1]), "more.weight", "dspark")


def test_a_file_without_a_vocabulary(target: Target, tmp_path: Path) -> None:
    """Guards llama.cpp's own architecture without tokens, whose tokens are the target's."""
    folder, (tensors, settings) = block_parts(target, tmp_path / "head", "dflash")
    settings = {**settings, "tokenizer.ggml.model": "none"}
    del settings["vocab_size"]
    read = checkpoints.load(gguf_heads.write(tmp_path / "head.gguf", "dflash", tensors, settings))
    assert_same(read, folder)
    assert read.config["vocab_size"] is None
    assert find("dflash").load(read, target).weights().config["vocab_size"] == target.vocab_size


def test_a_draft_vocabulary(target: Target, tmp_path: Path) -> None:
    """Guards DSpark over 40 tokens: the file holds the target's ids, the form of the speculators library offsets."""
    _, (tensors, settings) = block_parts(target, tmp_path / "head", "dspark")
    ids = torch.arange(40) * 3 + 1
    tensors |= {"output.weight": torch.randn(40, 48), "d2t": ids, "markov_w2.weight": tensors["markov_w2.weight"][:40]}
    read = checkpoints.load(gguf_heads.write(tmp_path / "head.gguf", "dflash", tensors, settings))
    assert read.method == "dspark"
    assert read.config["draft_vocab"] == 40
    assert read.config["from_anchor"]
    assert torch.equal(read.tensors["draft_ids"], ids)
    windows = {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, True]}
    refused(tmp_path, (tensors, settings | windows), "draft vocabulary and layer_types", "dflash")


@pytest.mark.slow
@pytest.mark.quick("qwen35")
@pytest.mark.parametrize("architecture", MODULES)
def test_modules_of_targets(architecture: str, tmp_path: Path) -> None:
    """Guards norms with 1 added, experts in one tensor, the place behind the target's layers; the module drafts."""
    target = Target(family_of(MODULES[architecture]))
    made = mtp.Method.random(target, seed=5).weights()
    _, tensors = mtp_form.write("mtp", made.config, made.tensors)
    L, shared = target.num_layers, {"block_count": target.num_layers + 1, "nextn_predict_layers": 1}
    settings = {**shared, "embedding_length": 48, "context_length": 512, "vocab_size": target.vocab_size}
    parts = gguf_heads.module(architecture, tensors, L) | {
        "blk.0.attn_norm.weight": torch.ones(48),
        f"blk.{L}.nextn.embed_tokens.weight": torch.ones(4, 48),
    }
    path = gguf_heads.write(tmp_path / "whole.gguf", architecture, parts, settings)
    assert_same(checkpoints.load(path), made, atol=1e-6)
    checkpoints.save(made, tmp_path / "head")
    assert texts(target, path, "mtp") == texts(target, tmp_path / "head", "mtp")
    parts.pop(f"blk.{L}.nextn.shared_head_norm.weight")
    last = made.tensors["module.post_norm.weight"] + (0 if architecture == "glm4moe" else 1)
    parts["output_norm.weight"] = last
    assert_same(checkpoints.load(gguf_heads.write(path, architecture, parts, settings)), made, atol=1e-6)
    refused(tmp_path, ({**parts, f"blk.{L}.other.weight": last}, settings), "not known here: blk.4.other", architecture)


def test_files_without_a_head(target: Target, tmp_path: Path) -> None:
    """Guards one clear line of error for a whole model, for a module in another form, and for a file that is not GGUF."""
    parts = {"token_embd.weight": torch.ones(4, 4)}
    module = {"block_count": 3, "nextn_predict_layers": 1}
    refused(tmp_path, (parts, {"block_count": 2}), "'llama' and no module of multi-token prediction", "llama")
    refused(tmp_path, (parts, module), "the MTP module of a deepseek2", "deepseek2")
    refused(tmp_path, (parts, {"split.count": 2}), "one of 2 parts: join them", "eagle3")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(CheckpointError, match=r"text\.gguf is corrupt or truncated"):
        checkpoints.load(tmp_path / "text.gguf")
    (tmp_path / "head.bin").write_text("something else")
    said = r"this is a file; give a folder with a config\.json, or a file in GGUF format"
    with pytest.raises(CheckpointError, match=said):
        checkpoints.load(tmp_path / "head.bin")


def test_refusals_of_eagle3(target: Target, tmp_path: Path) -> None:
    """Guards settings that a reader must not guess."""
    parts, settings = eagle3_parts(target)
    more = {**parts, "blk.0.attn_qkv.weight": torch.ones(4, 4)}
    refused(tmp_path, (more, settings), "does not have: blk.0.attn_qkv.weight")
    refused(tmp_path, (parts, settings | {"block_count": 2}), "has 2 layers; EAGLE-3 heads of llama.cpp have one")
    refused(tmp_path, (parts, settings | {"rope.dimension_count": 6}), "RoPE turns 6 of the 12 channels")
    refused(tmp_path, (parts, settings | {"rope.scaling.type": "yarn"}), "has no eagle3.rope.scaling.factor")
    without = {key: value for key, value in settings.items() if key != "target_layers"}
    refused(tmp_path, (parts, without), "has no eagle3.target_layers")
    broken = {**parts, "fc.weight": torch.full_like(parts["fc.weight"], float("nan"))}
    refused(tmp_path, (broken, settings), "tensor fc.weight holds NaN")
    del broken["fc.weight"]
    refused(tmp_path, (broken, settings), "missing fc.weight")


@pytest.mark.parametrize(("tensor", "setting", "says"), [
    ("blk.0.post_attention_norm.weight", {}, "the layers are Gemma 4's"),
    ("blk.0.attn_sinks.weight", {}, "the attention has sinks"),
    ("", {"hyper_connection.count": 4}, "DeepSeek-V4's"),
    ("", {"attention.value_scale": 0.5}, "values of the attention have a factor"),
])  # fmt: skip
def test_refusals_of_block_heads(tensor: str, setting: Any, says: str, target: Target, tmp_path: Path) -> None:
    """Guards layers that are computed in another way."""
    _, (tensors, settings) = block_parts(target, tmp_path / "head", "dflash")
    more = {tensor: torch.ones(48)} if tensor else {}
    refused(tmp_path, ({**tensors, **more}, settings | setting), says, "dflash")
