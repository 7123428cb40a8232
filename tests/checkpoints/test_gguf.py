"""Heads in files of GGUF format: they are what the folders hold from which they were made, they draft the same, and
what cannot be read says why. Heads that eyas writes into such files come back; tests/interop compares them with what
llama.cpp's converter writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eyas
import gguf_heads
import zoo
from eyas import checkpoints
from eyas.checkpoints import Weights, vllm
from eyas.checkpoints import mtp as mtp_form
from eyas.checkpoints._files import read_config, read_tensors
from eyas.checkpoints._gguf import File
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import find, mtp
from eyas.drafters._nets import layer_shape
from eyas.errors import CheckpointError, InputError
from eyas.nn import rope_frequencies
from eyas_train import exports
from reference import plain_decode, run

LAYERS = [0, 1, 3]
SMALL = {"head.layers": "1,2", "head.depth": 2, "head.block": 5}
SECOND = {"head.taps": 3, "head.channels": 8, "head.selector_rank": 6, "head.candidates": 5}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", SMALL, {}),
    "windows": ("dflash", SMALL, {"windows": (None, 7), "causal": (False, True)}),
    "windows both ways": ("dflash", SMALL, {"windows": (None, 7), "causal": ()}),
    "dflash2": ("dflash2", {**SMALL, **SECOND}, {}),
    "dspark": ("dspark", {**SMALL, "head.markov_rank": 8}, {}),
}
Parts = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.FAMILIES["llama"]())


def eagle3_of(target: Target, **changes: Any) -> Weights:
    kind = find("eagle3")
    options = build_options(kind.Options, {"head.layers": "0,1,3", "head.draft_vocab": 40})
    made = kind.random(target, options, seed=1).weights()
    return dataclasses.replace(made, config={**made.config, **changes})


def eagle3_parts(target: Target, **changes: Any) -> Parts:
    weights = eagle3_of(target, **changes)
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, checkpoints.ExportTarget())
    return gguf_heads.eagle3(config, tensors, LAYERS)


def block_parts(target: Target, folder: Path, name: str) -> tuple[Weights, Parts]:
    """A head in a folder, and its parts for a file."""
    method, options, changes = BLOCKS[name]
    kind = find(method)
    made = kind.random(target, build_options(kind.Options, options), seed=1).weights()
    made.config.update({"embed_scale": 1.0, "logit_scale": 1.0, **changes})
    checkpoints.save(made, folder)
    return checkpoints.load(folder), gguf_heads.block(read_config(folder), read_tensors(folder))


def assert_same(read: Weights, made: Weights, atol: float = 0.0) -> None:
    assert read.method == made.method
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        torch.testing.assert_close(read.tensors[name], tensor, rtol=0, atol=atol, msg=name)


def texts(target: Target, draft: Path, method: str) -> tuple[Any, Any]:
    """Return the texts and what each step accepted, after comparing the texts with plain decoding."""
    laws = (Sampling(), Sampling(1.0, seed=3))
    requests = [Request(tuple(range(5, 5 + n)), 14, law) for n, law in zip((4, 21), laws, strict=True)]
    drafter = find(method).from_pretrained(draft, target)
    tokens, steps = run(Decoder(target, drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]
    return tokens, [(step.request_id, step.tokens, step.path) for step in steps]


def refused(tmp_path: Path, parts: Parts, says: str, architecture: str = "eagle3") -> None:
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoints.load(gguf_heads.write(tmp_path / "head.gguf", architecture, *parts))
    assert "\n" not in str(error.value)


# --- what is read ------------------------------------------------------------------------------------


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


def test_a_file_is_a_draft(target: Target, tmp_path: Path) -> None:
    """Guards `draft=FILE` without a method: the file says it."""
    path = gguf_heads.write(tmp_path / "head.gguf", "eagle3", *eagle3_parts(target))
    llm = eyas.load(target.model, path, tokenizer=None, kernels="off")
    assert llm.method == "eagle3"


def test_flags_of_eagle3(target: Target, tmp_path: Path) -> None:
    """Guards a norm before fc, and the residual that starts from the normed hidden state."""
    weights = eagle3_of(target, norm_before_fc=True, norm_before_residual=True)
    weights.tensors["input_norm.weight"] = torch.rand(weights.tensors["fc.weight"].shape[1])
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, checkpoints.ExportTarget())
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
    config, tensors = vllm.export("eagle3", weights.config, weights.tensors, checkpoints.ExportTarget())
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
    plain, scaled = (
        rope_frequencies(layer_shape(eagle3_of(target, rope_scaling=scaling).config))
        for scaling in (None, {"rope_type": "llama3", **LLAMA3})
    )
    return plain / scaled


def test_llama3_is_found_in_its_factors(target: Target, tmp_path: Path) -> None:
    """Guards the scaling of which a file holds the factors only. Heads of 12 channels have six of them."""
    made = eagle3_of(target, rope_scaling={"rope_type": "llama3", **LLAMA3})
    parts, settings = eagle3_parts(target)
    path = gguf_heads.write(
        tmp_path / "h.gguf", "eagle3", {**parts, "rope_freqs.weight": llama3_factors(target)}, settings
    )
    found, expected = (rope_frequencies(layer_shape(head.config)) for head in (checkpoints.load(path), made))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    other = torch.tensor([1.0, 1.1, 3.0, 2.0, 7.0, 8.0])
    refused(tmp_path, ({**parts, "rope_freqs.weight": other}, settings), "of another scaling than llama3")


def test_yarn(target: Target, tmp_path: Path) -> None:
    """Guards YaRN's settings, each under its own name."""
    parts, settings = eagle3_parts(target)
    keys = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 128,
        "yarn_attn_factor": 1.25,
        "yarn_beta_fast": 16.0,
    }
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


MODULES = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next", "glm4moe": "glm4_moe"}


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


def family_of(name: str) -> Any:
    if name == "glm4_moe":
        return zoo.tiny(
            name, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1
        )
    return zoo.HYBRIDS[name]()


# --- what is written ---------------------------------------------------------------------------------

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def target_file(
    target: Target, path: Path, architecture: str = "llama", parts: dict[str, Tensor] | None = None, **settings: Any
) -> checkpoints.ExportTarget:
    """The target's own file: its sizes and its vocabulary."""
    tokens = [f"t{i}" for i in range(target.vocab_size)]
    whole = {
        "block_count": target.num_layers,
        "embedding_length": target.hidden_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.scores": [0.5] * len(tokens),
        "tokenizer.ggml.eos_token_id": 2,
        **settings,
    }
    gguf_heads.write(path, architecture, parts or {"output_norm.weight": torch.ones(48)}, whole)
    return checkpoints.ExportTarget(str(path))


def assert_comes_back(
    made: Weights, tmp_path: Path, known: checkpoints.ExportTarget, dtype: str = "", but: tuple[str, ...] = ()
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
    path = assert_comes_back(
        read_back(made, tmp_path / "head"), tmp_path, target_file(target, tmp_path / "target.gguf"), dtype
    )
    ours, theirs = (File(tmp_path / name).fields("tokenizer.") for name in ("out.gguf", "target.gguf"))
    assert ours == theirs
    stored = {tensor.name: tensor.tensor_type.name for tensor in File(path).stored()}
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
    path = assert_comes_back(
        made, tmp_path, target_file(target, tmp_path / "target.gguf"), but=("embed_scale", "logit_scale")
    )
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
    read, expected = (
        rope_frequencies(layer_shape(c)) for c in (checkpoints.load(tmp_path / "out.gguf").config, made.config)
    )
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=0)


def test_eight_bits_are_written(target: Target, tmp_path: Path) -> None:
    """Guards that q8_0 stores rows of other lengths than a multiple of 32 in float16, and rounds all others."""
    made, path = eagle3_of(target), tmp_path / "out.gguf"
    exports.export(made, "gguf", path, target_file(target, tmp_path / "target.gguf"), "q8_0")
    stored = {tensor.name: tensor.tensor_type.name for tensor in File(path).stored()}
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
    known = checkpoints.ExportTarget(str(tmp_path / "target.gguf"))
    exports.export(made, "gguf", tmp_path / "out.gguf", known)
    assert_same(checkpoints.load(tmp_path / "out.gguf"), made, atol=1e-6)
    before, after = File(tmp_path / "target.gguf"), File(tmp_path / "out.gguf")
    assert before.fields() == after.fields()
    assert torch.equal(before.tensor("blk.0.attn_q.weight"), after.tensor("blk.0.attn_q.weight"))
    assert after.stored()[0].tensor_type.name == "Q8_0"


def not_written(made: Weights, known: checkpoints.ExportTarget, says: str, path: Path, dtype: str = "") -> None:
    with pytest.raises((CheckpointError, InputError), match=says) as error:
        exports.export(made, "gguf", path, known, dtype)
    assert "\n" not in str(error.value)
    assert not path.exists()


def test_what_llama_cpp_does_not_compute(target: Target, tmp_path: Path) -> None:
    """Guards heads that would load there and draft something else, and a target that is another one."""
    known, out = target_file(target, tmp_path / "target.gguf"), tmp_path / "out.gguf"
    made = eagle3_of(target)
    not_written(made, known, r"give it the ending \.gguf", tmp_path / "folder")
    not_written(made, known, "no dtype 'q4_0': f32, f16, bf16, q8_0", out, "q4_0")
    not_written(made, checkpoints.ExportTarget("someone/target"), "name the target's file in GGUF format", out)
    other = target_file(target, tmp_path / "other.gguf", embedding_length=96)
    not_written(made, other, "has the hidden size 96 and 160 tokens, the head's target 48 and 160", out)
    not_written(eagle3_of(target, carries="normed"), known, "a normed state that is carried, which llama.cpp", out)
    not_written(eagle3_of(target, window=9), known, "a window, which", out)
    not_written(eagle3_of(target, feature_layers=(0, 1, 4)), known, r"reads hidden_states\[4\], and", out)
    block, _ = block_parts(target, tmp_path / "windows", "windows")
    not_written(block, known, "layers that see earlier slots only beside others", out)
    block, _ = block_parts(target, tmp_path / "dflash", "dflash")
    anchored = dataclasses.replace(block, config={**block.config, "windows": (7, 7), "anchored": True})
    not_written(anchored, known, "windows that are counted from the root", out)
    last = dataclasses.replace(block, config={**block.config, "feature_layers": (1, target.num_layers)})
    more = {"block_count": target.num_layers + 1, "nextn_predict_layers": 1}  # the last one is a module, not a layer
    not_written(last, target_file(target, tmp_path / "module.gguf", **more), r"reads hidden_states\[\d\], and", out)
    early = dataclasses.replace(block, config={**block.config, "from_anchor": True})
    not_written(early, known, "slots that predict the next token, and no Markov head", out)
    module = mtp.Method.random(target, seed=5).weights()
    not_written(
        module, known, "target is a llama, for which llama.cpp has no multi-token prediction .* EAGLE-3 head", out
    )
    with pytest.raises(InputError, match="vllm has no dtype 'f16': it keeps the type of the head"):
        exports.export(made, "vllm", tmp_path / "folder", known, "f16")


def test_factors_of_the_target(target: Target, tmp_path: Path) -> None:
    """Guards Gemma's embeddings: a head that uses the target's factor gets it, as llama.cpp takes it from the head alone."""
    made, _ = block_parts(target, tmp_path / "head", "dflash")
    own = dataclasses.replace(made, config={**made.config, "embed_scale": None, "eyas": {}})
    exports.export(own, "gguf", tmp_path / "out.gguf", target_file(target, tmp_path / "gemma.gguf", "gemma3"))
    assert File(tmp_path / "out.gguf").get("dflash.embedding_scale") == pytest.approx(48**0.5)
    exports.export(own, "gguf", tmp_path / "plain.gguf", target_file(target, tmp_path / "llama.gguf"))
    assert File(tmp_path / "plain.gguf").get("dflash.embedding_scale") is None


# --- what is refused ---------------------------------------------------------------------------------


def test_files_without_a_head(target: Target, tmp_path: Path) -> None:
    """Guards one clear line of error for a whole model, for a module in another form, and for a file that is not GGUF."""
    parts = {"token_embd.weight": torch.ones(4, 4)}
    refused(
        tmp_path, (parts, {"block_count": 2}), "architecture 'llama' and no module of multi-token prediction", "llama"
    )
    refused(
        tmp_path, (parts, {"block_count": 3, "nextn_predict_layers": 1}), "the MTP module of a deepseek2", "deepseek2"
    )
    refused(tmp_path, (parts, {"split.count": 2}), "one of 2 parts: join them", "eagle3")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(CheckpointError, match=r"text\.gguf is corrupt or truncated"):
        checkpoints.load(tmp_path / "text.gguf")
    (tmp_path / "head.bin").write_text("something else")
    with pytest.raises(
        CheckpointError, match=r"this is a file; give a folder with a config\.json, or a file in GGUF format"
    ):
        checkpoints.load(tmp_path / "head.bin")


def test_a_truncated_file(target: Target, tmp_path: Path) -> None:
    """Guards a file that ends too early, as an interrupted download leaves it."""
    path = gguf_heads.write(tmp_path / "head.gguf", "eagle3", *eagle3_parts(target))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="corrupt or truncated"):
        checkpoints.load(path)


def test_refusals_of_eagle3(target: Target, tmp_path: Path) -> None:
    """Guards settings that a reader must not guess."""
    parts, settings = eagle3_parts(target)
    refused(
        tmp_path,
        ({**parts, "blk.0.attn_qkv.weight": torch.ones(4, 4)}, settings),
        "does not have: blk.0.attn_qkv.weight",
    )
    refused(tmp_path, (parts, settings | {"block_count": 2}), "has 2 layers; EAGLE-3 heads of llama.cpp have one")
    refused(tmp_path, (parts, settings | {"rope.dimension_count": 6}), "RoPE turns 6 of the 12 channels")
    refused(tmp_path, (parts, settings | {"rope.scaling.type": "yarn"}), "has no eagle3.rope.scaling.factor")
    without = {key: value for key, value in settings.items() if key != "target_layers"}
    refused(tmp_path, (parts, without), "has no eagle3.target_layers")
    broken = {**parts, "fc.weight": torch.full_like(parts["fc.weight"], float("nan"))}
    refused(tmp_path, (broken, settings), "tensor fc.weight holds NaN")
    refused(
        tmp_path,
        ({name: tensor for name, tensor in parts.items() if name != "fc.weight"}, settings),
        "missing fc.weight",
    )


@pytest.mark.parametrize(
    ("tensor", "setting", "says"),
    [
        ("blk.0.post_attention_norm.weight", {}, "the layers are Gemma 4's"),
        ("blk.0.attn_sinks.weight", {}, "the attention has sinks"),
        ("", {"hyper_connection.count": 4}, "DeepSeek-V4's"),
        ("", {"attention.value_scale": 0.5}, "values of the attention have a factor"),
    ],
)
def test_refusals_of_block_heads(
    tensor: str, setting: dict[str, Any], says: str, target: Target, tmp_path: Path
) -> None:
    """Guards layers that are computed in another way."""
    _, (tensors, settings) = block_parts(target, tmp_path / "head", "dflash")
    more = {tensor: torch.ones(48)} if tensor else {}
    refused(tmp_path, ({**tensors, **more}, settings | setting), says, "dflash")
