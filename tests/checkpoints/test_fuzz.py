"""Broken heads: whatever is changed in the files of the embedded heads, they load or are refused in
one line, never with a traceback."""

import copy
import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import tiny
from eyas.checkpoints import Weights, _weights, load
from eyas.errors import CheckpointError
from eyas.files import from_int8, to_int8

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, float("nan"),
    float("inf"), "", "silu", "384", "\u0000", [], [1], {}, {"rope_type": "llama3"}, {"type":
    ["default"]}, {"inputs": {}}, [[[]]], ["LlamaForCausalLMEagle3"],
    ["EyasEagle3ForCausalLM"], "x" * 3000,
)  # fmt: skip
KEYS = (
    "rope_scaling", "rope_parameters", "eagle_config", "bias", "qkv_bias", "attention_bias",
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids",
    "layer_types", "sliding_window", "use_sliding_window", "norm_output", "fc_norm",
    "norm_before_fc", "num_aux_hidden_states", "quantization_config", "speculators_model_type",
    "transformer_layer_config", "medusa_num_heads", "medusa_num_layers", "hydra_num_heads",
    "hydra_head_arch", "grounded_heads", "base_model_name_or_path", "max_sequence_length",
    "head_dim", "logit_scale",
)  # fmt: skip
INNER = (
    "inputs", "layer_ids", "feature_layers", "carries", "head", "fc_norm", "norm_before_fc",
    "norm_before_residual", "target_fingerprint", "layer", "draft_vocab_size",
    "layer_ids_as_published",
)  # fmt: skip


def mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to three values changed, added or removed, in config.json or in an object inside of it."""
    config = json.loads(json.dumps(config))
    for _ in range(rng.randint(1, 3)):
        place, keys = config, [*config, *KEYS]
        inner = rng.choice(["eyas", "eagle_config", "rope_scaling", None, None])
        if inner and isinstance(config.setdefault(inner, {}), dict):
            place, keys = config[inner], [*INNER, *KEYS, "factor", "rope_type"]
        key = rng.choice(keys)
        if rng.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return config


def outcome(folder: Path) -> Weights | None:
    """The head, or None where it is refused in one line."""
    try:
        return load(folder)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 4000
    return None


@pytest.fixture(params=sorted(tiny.HEADS))
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an embedded head in float16."""
    source = tiny.HEADS[request.param]
    shutil.copy(source / "config.json", tmp_path / "config.json")
    tensors = from_int8(load_file(source / "model.safetensors"))
    save_file({name: value.half() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def first_matrix(tensors: Mapping[str, Tensor]) -> str:
    """The name of the matrix that reads the features."""
    return next(name for name in tensors if name.endswith(("fc.weight", "eh_proj.weight")))


@pytest.mark.cover(head=1)
@pytest.mark.slow
def test_configs(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reading of every setting: 3,000 seeded mutants of each config.json are read or refused."""
    config, rng, read = json.loads((head / "config.json").read_text()), random.Random(17), 0
    tensors = _weights.read_tensors(head)
    monkeypatch.setattr(_weights, "read_tensors", lambda folder: dict(tensors))
    for _ in range(1000):
        mutant = json.dumps(mutated(config, rng))
        (head / "config.json").write_text(mutant)
        try:
            read += outcome(head) is not None
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} for {mutant}")
    assert 30 < read < (900 if config["model_type"] == "eyas_mtp" else 670)  # that one has few settings


@pytest.mark.quick("eagle1-float16")
@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_weights(head: Path, stored: str) -> None:
    """Guards against files that are cut off or changed anywhere: 300 seeded mutants of each safetensors file, in the
    header and behind it. A changed number cannot be noticed here (the embedded head's checksum is another test)."""
    if stored == "int8":
        save_file(to_int8(load_file(head / "model.safetensors")), head / "model.safetensors")
    whole, rng = (head / "model.safetensors").read_bytes(), random.Random(18)
    size = 8 + int.from_bytes(whole[:8], "little")
    whole = whole[: size + 400_000]  # the header with some of the tensors
    for turn in range(300):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(8 if turn % 10 == 0 else size)] = rng.randrange(256)
        (head / "model.safetensors").write_bytes(mutant[: rng.randrange(len(mutant))] if turn % 3 == 0 else mutant)
        assert outcome(head) is None


@pytest.mark.quick("eagle1-nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(head: Path, value: float) -> None:
    """Bug: a head full of NaN was loaded, and drafted nonsense without a word."""
    tensors = load_file(head / "model.safetensors")
    for name in (first_matrix(tensors), next(name for name in tensors if name.endswith("norm.weight"))):
        broken = {key: tensor.clone() for key, tensor in tensors.items()}
        broken[name].view(-1)[-1] = value
        save_file(broken, head / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name} "):
            load(head)
        torch.save(broken, head / "pytorch_model.bin")
        (head / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=f"pytorch_model.bin: tensor {name} "):
            load(head)
        (head / "pytorch_model.bin").unlink()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_dtypes(head: Path, dtype: torch.dtype) -> None:
    """Guards against weights that are no floating-point numbers of 16 bits or more."""
    tensors = load_file(head / "model.safetensors")
    name = first_matrix(tensors)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(head)
