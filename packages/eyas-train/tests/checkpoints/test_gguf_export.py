"""Heads that eyas writes into files of GGUF format come back, and what llama.cpp does not compute is refused.
tests/interop compares them with what llama.cpp's converter writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gguf_heads
import zoo
from eyas import checkpoints
from eyas.checkpoints import ExportTarget, Weights
from eyas.checkpoints.tools import File
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find, mtp
from eyas.drafters._nets import layer_shape
from eyas.errors import CheckpointError, InputError
from eyas.nn import rope_frequencies
from eyas_train import exports
from eyas_train.formats.gguf import fields
from gguf_heads import BLOCKS, MODULES, assert_same, block_parts, eagle3_of, family_of, texts

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def target_file(
    target: Target, path: Path, architecture: str = "llama", parts: dict[str, Tensor] | None = None, **settings: Any
) -> ExportTarget:
    """The target's own file: its sizes and its vocabulary."""
    tokens = [f"t{i}" for i in range(target.vocab_size)]
    words = {"model": "gpt2", "tokens": tokens, "token_type": [1] * len(tokens), "scores": [0.5] * len(tokens)}
    whole = {f"tokenizer.ggml.{name}": value for name, value in {**words, "eos_token_id": 2}.items()}
    whole |= {"block_count": target.num_layers, "embedding_length": target.hidden_size, **settings}
    gguf_heads.write(path, architecture, parts or {"output_norm.weight": torch.ones(48)}, whole)
    return ExportTarget(str(path))


def assert_comes_back(
    made: Weights, tmp_path: Path, known: ExportTarget, dtype: str = "", but: tuple[str, ...] = ()
) -> Path:
    path = tmp_path / "out.gguf"
    exports.export(made, "gguf", path, known, dtype)
    read = checkpoints.load(path)
    assert_same(read, made)
    left = {"eyas", "layer_ids_as_published", "target_layers", *but}
    for key in set(made.config) - left:
        assert read.config[key] == made.config[key], key
    assert not list(tmp_path.glob(".out*")), "a temporary file stays"
    return path


def read_back(made: Weights, folder: Path) -> Weights:
    checkpoints.save(made, folder)
    return checkpoints.load(folder)


@pytest.mark.parametrize("dtype", ["", *DTYPES])
def test_an_eagle3_head_is_written(dtype: str, target: Target, tmp_path: Path) -> None:
    """Guards rows of queries and keys, ids of the vocabulary, the target's tokens; every type."""
    made = eagle3_of(target, norm_before_fc=True, norm_before_residual=True)
    made.tensors["input_norm.weight"] = torch.rand(made.tensors["fc.weight"].shape[1])
    if dtype:  # matrices that this type holds
        for name, tensor in made.tensors.items():
            if tensor.ndim > 1:
                made.tensors[name] = tensor.to(DTYPES[dtype]).float()
    known = target_file(target, tmp_path / "target.gguf")
    path = assert_comes_back(read_back(made, tmp_path / "head"), tmp_path, known, dtype)
    ours, theirs = (fields(File(tmp_path / name), "tokenizer.") for name in ("out.gguf", "target.gguf"))
    assert ours == theirs
    stored = {tensor.name: tensor.tensor_type.name for tensor in File(path).reader.tensors}
    assert (stored["d2t"], stored["output_norm.weight"]) == ("I64", "F32")
    assert stored["fc.weight"] == (dtype or "f32").upper()
    if not dtype:
        assert texts(target, path, "eagle3") == texts(target, tmp_path / "head", "eagle3")


def test_the_default_layers_are_written(tmp_path: Path) -> None:
    """Guards 2, L//2, L-3, which the file must name, and a head that uses the target's lm_head."""
    deep = Target(zoo.tiny("llama", num_hidden_layers=8))
    kind = find("eagle3")
    made = kind.random(deep, build_options(kind.Options, {"head.draft_vocab": deep.vocab_size}), seed=1).weights()
    del made.tensors["head.weight"]
    made.config["head"] = "target"
    path = assert_comes_back(made, tmp_path, target_file(deep, tmp_path / "target.gguf"), but=("feature_layers",))
    assert checkpoints.load(path).config["feature_layers"] == (2, 4, 5)
    assert "d2t" not in File(path)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "windows"])
def test_block_heads_are_written(name: str, target: Target, tmp_path: Path) -> None:
    """Guards names, windows, which token a slot predicts, sizes of the further parts."""
    made, _ = block_parts(target, tmp_path / "head", name)
    known = target_file(target, tmp_path / "target.gguf")
    path = assert_comes_back(made, tmp_path, known, but=("embed_scale", "logit_scale"))
    method = BLOCKS[name][0]
    assert texts(target, path, method) == texts(target, tmp_path / "head", method)


def test_settings_of_block_heads(target: Target, tmp_path: Path) -> None:
    """Guards factors, a RoPE of each kind, slots that all see earlier ones only, a draft vocabulary."""
    known = target_file(target, tmp_path / "target.gguf")
    made, _ = block_parts(target, tmp_path / "head", "dflash")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0, "beta_fast": 16.0}
    changes: list[dict[str, Any]] = [
        {"embed_scale": 3.0, "logit_scale": 0.5, "logit_cap": 2.0, "rope_scaling": yarn},
        {"windows": (7, 7), "causal": (True, True), "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ]
    for i, changed in enumerate(changes):
        head = dataclasses.replace(made, config={**made.config, **changed})
        (tmp_path / str(i)).mkdir()
        assert_comes_back(head, tmp_path / str(i), known)
    dspark, _ = block_parts(target, tmp_path / "dspark", "dspark")
    ids = torch.arange(3, 3 + 2 * 40, 2)
    dspark.config.update(draft_vocab=40, anchored=True)
    dspark.tensors.update({
        "draft_ids": ids,
        "markov.after.weight": dspark.tensors["markov.after.weight"][ids],
        "head.weight": torch.randn(40, 48),
    })  # fmt: skip
    (tmp_path / "drafted").mkdir()
    assert_comes_back(dspark, tmp_path / "drafted", known)


def test_llama3s_rope_is_written(target: Target, tmp_path: Path) -> None:
    """Guards the factors of frequencies, which are all that the file has of the scaling."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
        "original_max_position_embeddings": 256.0,
    }  # fmt: skip
    made = eagle3_of(target, rope_scaling=scaling)
    exports.export(made, "gguf", tmp_path / "out.gguf", target_file(target, tmp_path / "target.gguf"))
    configs = (checkpoints.load(tmp_path / "out.gguf").config, made.config)
    read, expected = (rope_frequencies(layer_shape(config)) for config in configs)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=0)


def test_eight_bits_are_written(target: Target, tmp_path: Path) -> None:
    """Guards that q8_0 stores rows of other lengths than a multiple of 32 in float16, and rounds all others."""
    made, path = eagle3_of(target), tmp_path / "out.gguf"
    exports.export(made, "gguf", path, target_file(target, tmp_path / "target.gguf"), "q8_0")
    stored = {tensor.name: tensor.tensor_type.name for tensor in File(path).reader.tensors}
    assert stored["blk.0.attn_q.weight"] == "Q8_0"  # rows of 96
    assert stored["output.weight"] == "F16"  # of 48
    read = checkpoints.load(path)
    for name, tensor in made.tensors.items():
        error = (read.tensors[name] - tensor).abs().max()
        assert error <= tensor.abs().max() / 127, name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODULES)
def test_modules_are_written_into_their_target(architecture: str, tmp_path: Path) -> None:
    """Guards the layer behind the target's, norms with 1 added, experts, the target's own tensors and settings."""
    target = Target(family_of(MODULES[architecture]))
    made, L = mtp.Method.random(target, seed=5).weights(), target.num_layers
    layer = {"blk.0.attn_q.weight": torch.randn(32, 64), f"blk.{L}.nextn.enorm.weight": torch.ones(48)}
    gguf_heads.write(
        tmp_path / "target.gguf", architecture, layer,
        {"block_count": L + 1, "nextn_predict_layers": 1, "embedding_length": 48, "context_length": 512, "vocab_size": target.vocab_size,
         "attention.recurrent_layers": [True] * L + [False]}, ("blk.0.attn_q.weight",),
    )  # fmt: skip
    known = ExportTarget(str(tmp_path / "target.gguf"))
    exports.export(made, "gguf", tmp_path / "out.gguf", known)
    assert_same(checkpoints.load(tmp_path / "out.gguf"), made, atol=1e-6)
    before, after = File(tmp_path / "target.gguf"), File(tmp_path / "out.gguf")
    assert fields(before) == fields(after)
    assert torch.equal(before.tensor("blk.0.attn_q.weight"), after.tensor("blk.0.attn_q.weight"))
    assert after.reader.tensors[0].tensor_type.name == "Q8_0"


def test_what_llama_cpp_does_not_compute(target: Target, tmp_path: Path) -> None:
    """Guards heads that would load there and draft something else, and a target that is another one."""
    known, made = target_file(target, tmp_path / "target.gguf"), eagle3_of(target)
    other = target_file(target, tmp_path / "other.gguf", embedding_length=96)
    more = {"block_count": target.num_layers + 1, "nextn_predict_layers": 1}  # the last one is a module, not a layer
    with_module = target_file(target, tmp_path / "module.gguf", **more)
    windows, _ = block_parts(target, tmp_path / "windows", "windows")
    block, _ = block_parts(target, tmp_path / "dflash", "dflash")

    def changed(**config: Any) -> Weights:
        return dataclasses.replace(block, config={**block.config, **config})

    for head, target_of_it, says, name, dtype in (
        (made, known, r"give it the ending \.gguf", "folder", ""),
        (made, known, "no dtype 'q4_0': f32, f16, bf16, q8_0", "out.gguf", "q4_0"),
        (made, ExportTarget("someone/target"), "pass the target's file in GGUF format", "out.gguf", ""),
        (made, other, "has the hidden size 96 and 160 tokens, the head's target 48 and 160", "out.gguf", ""),
        (eagle3_of(target, carries="normed"), known, "a normed state that is carried, which llama.cpp", "out.gguf", ""),
        (eagle3_of(target, window=9), known, "a window, which", "out.gguf", ""),
        (eagle3_of(target, feature_layers=(0, 1, 4)), known, r"reads hidden_states\[4\], but", "out.gguf", ""),
        (windows, known, "layers that see earlier slots only beside others", "out.gguf", ""),
        (changed(windows=(7, 7), anchored=True), known, "windows that are counted from the root", "out.gguf", ""),
        (changed(feature_layers=(1, target.num_layers)), with_module, r"reads hidden_states\[\d\], but", "out.gguf", ""),
        (changed(from_anchor=True), known, "slots that predict the next token, and no Markov head", "out.gguf", ""),
        (mtp.Method.random(target, seed=5).weights(), known, "a llama, for which eyas knows no multi-token prediction", "out.gguf", ""),
    ):  # fmt: skip
        with pytest.raises((CheckpointError, InputError), match=says) as error:
            exports.export(head, "gguf", tmp_path / name, target_of_it, dtype)
        assert "\n" not in str(error.value)
        assert not (tmp_path / name).exists()
    with pytest.raises(InputError, match="vllm has no dtype 'f16': it keeps the type of the head"):
        exports.export(made, "vllm", tmp_path / "folder", known, "f16")


def test_factors_of_the_target(target: Target, tmp_path: Path) -> None:
    """Guards Gemma's embeddings: a head that uses the target's factor gets it, as llama.cpp takes it from the head alone."""
    made, _ = block_parts(target, tmp_path / "head", "dflash")
    own = dataclasses.replace(made, config={**made.config, "embed_scale": None, "eyas": {}})
    for architecture, factor in (("gemma3", pytest.approx(48**0.5)), ("llama", None)):
        known = target_file(target, tmp_path / f"{architecture}.gguf", architecture)
        exports.export(own, "gguf", tmp_path / f"{architecture}-head.gguf", known)
        assert File(tmp_path / f"{architecture}-head.gguf").get("dflash.embedding_scale") == factor
