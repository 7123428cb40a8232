"""Classes of z-lab's package and of the speculators library compute our logits for block heads, in every setting that
is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from eyas import checkpoints
from eyas.blocks._method import BlockMethod, BlockSession
from eyas.checkpoints import ExportTarget, Weights
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas_train import exports
from interop_engines import compute
from reference import run

pytestmark = pytest.mark.slow
SMALL = {"head.layers": "1,2", "head.depth": 2, "head.block": 6, "tree.nodes": 9, "tree.branch": 3}
SECOND = {"head.taps": 3, "head.channels": 8, "head.selector_rank": 6, "head.candidates": 5}
WINDOWS = {"windows": (None, 7), "causal": (False, True)}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DRAFTED = 40
# library -> name -> (method, options, changes of our config)
HEADS: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "dflash": {
        "plain": ("dflash", {}, {}),
        "windows": ("dflash", {}, WINDOWS),
        "windows, both ways": ("dflash", {}, {**WINDOWS, "causal": ()}),
        "causal": ("dflash", {}, {"causal": (True, True)}),
        "scales": ("dflash", {}, {"embed_scale": 3.0, "logit_scale": 0.5, "logit_cap": 2.0}),
        "yarn": ("dflash", {}, {"rope_scaling": YARN}),
        "DFlash 2": ("dflash2", SECOND, {}),
        "DFlash 2 with windows": ("dflash2", SECOND, WINDOWS),
    },
    "speculators": {
        "dflash": ("dflash", {}, {"anchored": True}),
        "dflash, windows": ("dflash", {}, {**WINDOWS, "anchored": True}),
        "dflash, windows, both ways": ("dflash", {}, {**WINDOWS, "causal": (), "anchored": True}),
        "dflash, a draft vocabulary": ("dflash", {}, {"draft_vocab": DRAFTED}),
        "dflash from the anchor": ("dflash", {}, {"from_anchor": True}),
        "dspark": ("dspark", {"head.markov_rank": 8}, {}),
        "dspark, all": ("dspark", {"head.markov_rank": 8}, {**WINDOWS, "anchored": True, "draft_vocab": DRAFTED}),
        "dflash2": ("dflash2", SECOND, {}),
        "dflash2, windows": ("dflash2", SECOND, {**WINDOWS, "causal": (), "anchored": True}),
    },
}


@pytest.mark.parametrize("library", HEADS)
def test_logits_of_block_heads(library: str, interop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a setting that the authors' code reads otherwise: windows and where they begin, the order of
    slots, factors, a draft vocabulary, convolutions, what a selector sees; with random weights, in the last cycle
    of a decoding, so that the cache takes part. Each head is written by eyas, read by both.

    No false alarms: equal arithmetic in another order differs by 1e-5 of logits whose deviation is 1.
    """
    target, prompt = Target(zoo.FAMILIES["llama"]()), tuple(range(7, 30))
    tables = {"embed": target.family.embedding.weight, "lm_head": target.family.head.weight}
    shared = {name: table.detach().clone() for name, table in tables.items()}
    folders, ours = dict[str, Path](), dict[str, Tensor]()
    for number, (name, (method, options, changes)) in enumerate(HEADS[library].items()):
        folder = folders[name] = tmp_path / str(number)
        write(library, made(method, target, options, changes), folder)
        kind = find(method)
        drafter = kind.load(checkpoints.load(folder), target, build_options(kind.Options, TREE))
        assert isinstance(drafter, BlockMethod)
        text, path, ours[name] = last_levels(drafter, prompt, monkeypatch)
        features = target.encode(torch.tensor([text[:-1]]), drafter.feature_layers)[0].contiguous()
        inputs = {**shared, "features": features, "path": path, "tokens": torch.tensor(text)}
        save_file(inputs, folder / "inputs.safetensors")
    compute(interop, "block_logits.py", library, *folders.values())
    for name, folder in folders.items():
        theirs_SV, finite = load_file(folder / "logits.safetensors")["logits"], ours[name].isfinite()
        assert torch.equal(theirs_SV.isfinite(), finite), name
        theirs_X, ours_X = theirs_SV[finite], ours[name][finite]
        largest = (theirs_X - ours_X).abs().max()
        print(f"{library}, {name}: largest difference {largest:.1e}, deviation {ours_X.std():.1f}")
        torch.testing.assert_close(theirs_X, ours_X, rtol=1e-3, atol=1e-3)


TREE = {"tree.nodes": 9, "tree.branch": 3}


def made(method: str, target: Target, options: dict[str, Any], changes: dict[str, Any]) -> Weights:
    """Return a head with random weights and these settings."""
    kind = find(method)
    weights = kind.random(target, build_options(kind.Options, {**SMALL, **options}), seed=1).weights()
    generator, tensors = torch.Generator().manual_seed(2), dict(weights.tensors)
    for name in tensors:
        if name.endswith(("norm.weight", "conv.base")):
            tensors[name] = tensors[name] + 0.3 * torch.randn(tensors[name].shape, generator=generator)
        elif name.startswith("selector."):
            tensors[name] = 2 * tensors[name]
    if drafted := changes.get("draft_vocab"):
        tensors["draft_ids"] = torch.arange(drafted) * 3 + 1
        tensors["head.weight"] = torch.randn(drafted, target.hidden_size, generator=generator) * 0.2
        if "markov.after.weight" in tensors:
            tensors["markov.after.weight"] = tensors["markov.after.weight"][:drafted]
    config = {**weights.config, "embed_scale": 1.0, "logit_scale": 1.0, **changes}
    return replace(weights, config=config, tensors=tensors)


def write(library: str, weights: Weights, folder: Path) -> None:
    if library == "dflash":
        checkpoints.save(weights, folder)
    else:
        exports.export(weights, "speculators", folder, ExportTarget("some/target", ("LlamaForCausalLM",)))


@torch.no_grad()
def last_levels(
    drafter: BlockMethod, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Tensor, Tensor]:
    """Return the text up to the root of the last cycle of a decoding, the token before that of each level on the best
    path, and the logits [S, v] of the levels along it."""
    seen: list[tuple[list[int], Tensor]] = []
    plain = BlockSession._read_block

    def spy(session: BlockSession, cycle_input: Any) -> Tensor:
        hidden_BnD = plain(session, cycle_input)
        seen.append((list(cycle_input.row_tokens[0]), hidden_BnD.clone()))
        return hidden_BnD

    with monkeypatch.context() as patch:
        patch.setattr(BlockSession, "_read_block", spy)
        run(Decoder(drafter.target, drafter), [Request(prompt, 12)])
    text, hidden_1nD = seen[-1]
    block_format, net = drafter.block_format, drafter.decoding_net
    hidden_1SD = hidden_1nD[:, block_format.first_slot :]
    logits_1SV = drafter.head(hidden_1SD, net)
    path, levels = [text[-1]], []
    for level in range(block_format.levels):
        levels.append(drafter.level_logits(net, logits_1SV, hidden_1SD, torch.tensor([path[-1:]]), level)[0, 0])
        best = int(levels[-1].argmax())
        path.append(best if drafter.draft_ids_v is None else int(drafter.draft_ids_v[best]))
    return text, torch.tensor(path[:-1]), torch.stack(levels)
