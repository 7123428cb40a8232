"""PARD: masks in one pass with the text, against the model's own forward; its checkpoints; PARD-2's features."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import zoo
from eyas import checkpoints, drafters
from eyas.api import load
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.errors import CheckpointError
from eyas.pard.method_pard import Method, Session
from reference import SAMPLINGS, plain_decode, run

SMALL = {"tree.nodes": 9, "tree.depth": 4, "tree.branch": 3}
MASK = 3
LAYERS = [1, 4]  # the fourth: after the final norm
SCALE = 0.5


def draft_model(pard2: bool = False, width: int = 0, **config: Any) -> PreTrainedModel:
    model = zoo.tiny("llama", seed=5, num_hidden_layers=2)
    model.config.pard_token = MASK
    if pard2:
        config |= {"pard2": True, "pard2_scale": SCALE, "pard2_target_layers": LAYERS, "pard2_target_dim": width}
    model.config.update(config)
    return model


def method(target: Target, model: PreTrainedModel, **options: Any) -> Method:
    return Method(target, build_options(Method.Options, {**SMALL, **options}), Target(model))


def pard2(folder: Path, target: Target, **options: Any) -> Method:
    drafter = Method.from_pretrained(folder, target, build_options(Method.Options, {**SMALL, **options}))
    assert isinstance(drafter, Method)
    return drafter


TWO = [Request(tuple(range(7, 18)), 20), Request((5, 6, 7), 9)]
REQUESTS = [Request(tuple(range(7, 7 + n)), 14 - i, SAMPLINGS[i % 4]) for i, n in enumerate((5, 23, 1, 12))]


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor]]:
    """Return a list that gets (position of the root, logits [S, V] of the levels) of the first row in every cycle."""
    seen: list[tuple[int, Tensor]] = []
    plain = Session._read_levels

    def spy(self: Session, cycle_input: Any, levels: int) -> Tensor:
        logits_BSV = plain(self, cycle_input, levels)
        if bool(cycle_input.active_B[0]):
            seen.append((int(cycle_input.position_B[0]), logits_BSV[0].clone()))
        return logits_BSV

    monkeypatch.setattr(Session, "_read_levels", spy)
    return seen


def test_levels_are_those_of_the_models_own_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards positions, masks and what the cache holds: in every cycle the distributions are those of one causal
    forward over the text up to the root and the masks, as the authors' code runs it. Two rows of different
    ages, so that padding is there to be seen."""
    seen, model = rows_read(monkeypatch), draft_model()
    tokens, _ = run(Decoder(target, method(target, model), 2), TWO)
    text = [*TWO[0].prompt, *tokens[0]]
    assert len(seen) > 3
    for position, logits_SV in seen:
        ids = [*text[: position + 1], MASK, MASK, MASK]
        own_SV = model(torch.tensor([ids])).logits[0, -4:]
        torch.testing.assert_close(logits_SV, own_SV, rtol=1e-4, atol=1e-4)


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    """A PARD-2 model as its authors publish one."""
    torch.manual_seed(4)
    width = len(LAYERS) * target.hidden_size
    model = draft_model(True, width)
    model.save_pretrained(tmp_path / "pard2")
    weight = torch.randn(model.config.hidden_size, width) * width**-0.5
    torch.save({"target_proj.weight": weight}, tmp_path / "pard2" / "warp_model.bin")
    return tmp_path / "pard2"


@pytest.mark.slow
def test_features_are_read_as_the_authors_do(target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards PARD-2: each token is read with the target's features of the token before it, the first with none, a
    mask with the newest ones. Compared with a forward over the whole text, in every cycle."""
    seen, drafter = rows_read(monkeypatch), pard2(folder, target)
    assert drafter.describe()["features"] == LAYERS
    tokens, _ = run(Decoder(target, drafter, 2), TWO)
    assert tokens == [plain_decode(target.model, request) for request in TWO]
    text = [*TWO[0].prompt, *tokens[0]]
    model = zoo.tiny("llama", seed=5, num_hidden_layers=2)
    weight = torch.load(folder / "warp_model.bin")["target_proj.weight"]
    for position, logits_SV in seen:
        ids = torch.tensor([[*text[: position + 1], MASK, MASK, MASK]])
        hidden = target.model(ids[:, : position + 1], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[k] for k in LAYERS], dim=-1)[0, :position]
        before = torch.cat([torch.zeros_like(features[:1]), features, *[features[-1:]] * 3])
        embeddings = model.get_input_embeddings()(ids) + nn.functional.linear(before, weight)[None] * SCALE
        own_SV = model(inputs_embeds=embeddings).logits[0, -4:]
        torch.testing.assert_close(logits_SV, own_SV, rtol=1e-4, atol=1e-4)
    assert len(seen) > 3


@pytest.mark.quick("False")
@pytest.mark.parametrize("features", [True, False])
def test_pard2_is_lossless(features: bool, target: Target, folder: Path) -> None:
    """Guards its session with rows that join and leave, sampled too; and the way without features."""
    drafter = pard2(folder, target, features=features)
    assert bool(drafter.feature_layers) == features
    tokens, _ = run(Decoder(target, drafter, 2), REQUESTS)
    assert tokens == [plain_decode(target.model, request) for request in REQUESTS]


@pytest.mark.slow
def test_folders(target: Target, tmp_path: Path) -> None:
    """Guards reading and writing: `load` takes such a folder for what it is, and a saved model drafts as before."""
    drafter = drafters.find("pard").random(target, build_options(Method.Options, SMALL), seed=1)
    checkpoints.save(drafter.weights(), tmp_path / "pard")
    assert checkpoints.load(tmp_path / "pard").method == "pard"
    llm = load(target.model, tmp_path / "pard", tokenizer=False, tree="fixed")
    assert llm.method == "pard"
    again = Method.load(checkpoints.load(tmp_path / "pard"), target, build_options(Method.Options, SMALL))
    for one in (drafter, again):
        tokens, _ = run(Decoder(target, one), REQUESTS[:1])
        assert tokens[0] == plain_decode(target.model, REQUESTS[0])
    assert llm.generate(list(REQUESTS[0].prompt), max_new_tokens=14).token_ids == tuple(tokens[0])


def test_refusals(target: Target, folder: Path, tmp_path: Path) -> None:
    """Guards one clear line for each folder that cannot be read."""
    zoo.tiny("llama", seed=5).save_pretrained(tmp_path / "plain")
    with pytest.raises(
        CheckpointError, match=r"not trained on masks \(its config.json has no pard_token\).*small_model"
    ):
        Method.from_pretrained(tmp_path / "plain", target)
    draft_model(pard_token=10**6).save_pretrained(tmp_path / "far")
    with pytest.raises(CheckpointError, match="mask token 1000000, but there are"):
        Method.from_pretrained(tmp_path / "far", target)
    config = json.loads((folder / "config.json").read_text())
    for told, message in (
        ({"ptd_token_id": 4}, "must name one mask token"),
        ({"pard2_target_layers": "all"}, "must be a list of layers"),
        ({"pard2_scale": -1}, "pard2_scale -1; it must be a number above 0"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **told}))
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"target_proj.weight": torch.zeros(2, 2)}, folder / "warp_model.bin")
    with pytest.raises(CheckpointError, match=r"target_proj.weight is \[2, 2\] and should be"):
        Method.from_pretrained(folder, target)
    (folder / "warp_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no warp_model\.bin.*--features false"):
        Method.from_pretrained(folder, target)
    with pytest.raises(CheckpointError, match=r"not a whole language model|holds a head of"):
        Method.load(replace(checkpoints.load(folder), method="eagle1"), target)
