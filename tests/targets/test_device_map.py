"""Targets that accelerate has spread with a device map: weights wait on a disk, and every method
gives the text of the whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import eyas
import zoo
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.targets.fingerprints import fingerprint
from reference import plain_decode, run
from test_lossless import DRAWN, make

pytest.importorskip("accelerate", reason="device maps need accelerate")


def halves(model: PreTrainedModel) -> dict[str, str]:
    """A map that puts every second layer on the disk."""
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    return parts | {f"model.layers.{k}": ("cpu", "disk")[k % 2] for k in range(model.config.num_hidden_layers)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a small llama."""
    path = tmp_path_factory.mktemp("llama")
    zoo.FAMILIES["llama"]().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return zoo.FAMILIES["llama"]()


@pytest.fixture(scope="module")
def spread(folder: Path, whole: PreTrainedModel) -> PreTrainedModel:
    places = {"device_map": halves(whole), "offload_folder": folder / "off"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **places)
    assert any(weight.device.type == "meta" for weight in model.parameters())
    return model


@pytest.mark.cover(name=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in drafters.names() if name not in ("kangaroo", "self_speculative")])
def test_text_is_the_whole_models(name: str, spread: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Four requests share three rows, greedy ones and sampled ones; a later prompt begins like an earlier one."""
    target = Target(spread)
    laws = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=9, seed=4), Sampling())
    prompts = ((5, 9, 3), tuple(range(20, 43)), (7,), (*range(20, 40), 3, 4))
    requests = [Request(p, 12, s) for p, s in zip(prompts, laws, strict=True) if s.greedy or name not in DRAWN]
    texts, _ = run(Decoder(target, make(name, target), 3, reuse=True), requests)
    assert texts == [plain_decode(whole, request) for request in requests]


def test_eyas_loads_with_a_map(folder: Path, whole: PreTrainedModel, tmp_path: Path) -> None:
    """The fingerprint is that of the whole model, so its heads are accepted without a warning; no
    kernels keep copies of weights."""
    placed = tmp_path / "map.json"
    placed.write_text(json.dumps(halves(whole)))
    llm = eyas.load(folder, "suffix", device_map=str(placed), offload_folder=tmp_path / "off")
    assert llm.target.runner.name == "model"
    assert fingerprint(llm.target) == fingerprint(Target(whole))
    assert list(llm.generate([5, 9, 3], max_new_tokens=8).token_ids) == plain_decode(whole, Request((5, 9, 3), 8))
