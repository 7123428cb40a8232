"""Parity with what the reference implementations computed (../shared/golden; skipped where that is absent)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas import checkpoints, drafters
from eyas.decode import Decoder, Request
from eyas.drafters import Drafter
from eyas.drafters._base import options_from
from eyas.drafters.eagle1 import REFERENCE_TREE
from eyas.target import Target
from eyas.tree import Tree
from reference import run

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data of the reference is not beside this checkout")


def cases(name: str) -> list[dict[str, Any]]:
    path = GOLDEN / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def drafter_of(method: str, case: dict[str, Any]) -> Drafter:
    kind, p = drafters.find(method), case["params"]
    tree = {"tree.nodes": p["total_token"], "tree.depth": p["depth"] + 1, "tree.branch": p["top_k"]} if p else {}
    weights = checkpoints.load(GOLDEN / case["head"])
    return kind.load(weights, Target.load(GOLDEN / case["target"]), options_from(kind.Options, tree))


ALL = [(m, c) for m, f in (("eagle1", "eagle1_static"), ("eagle2", "eagle2_dynamic")) for c in cases(f)]


@pytest.mark.parametrize(("method", "case"), ALL, ids=[f"{m}-{c['id']}" for m, c in ALL])
def test_decoding(method: str, case: dict[str, Any]) -> None:
    """Guards pairing, positions, tree growth and rerank: tokens, accepted lengths, trees, masks and positions exactly."""
    prompt, answer = case["prompt_ids"], case["vanilla_greedy_ids"][len(case["prompt_ids"]) :]
    tokens, steps = run(Decoder((d := drafter_of(method, case)).target, d), [Request(tuple(prompt), len(answer))])
    assert tokens[0] == answer
    cycles = [s for s in steps if not s.prefill]
    # the reference stops only between cycles, and may run one more than is needed
    assert [len(s.path) - 1 for s in cycles] == case["accept_lengths"][: len(cycles)]
    assert len(cycles) >= case["num_cycles"] - 1
    for step, golden in zip(cycles, case["cycles"], strict=False):
        tree = step.draft.tree
        assert step.draft.tokens_BN[0].tolist() == golden["tree_tokens"]
        assert tree.parents_BN[0].tolist() == golden["parents"]
        assert (tree.depth_BN[0] + golden["context_len"]).tolist() == golden["tree_position_ids"]
        assert ["".join("01"[int(x)] for x in row) for row in tree.mask_BNN[0]] == golden["tree_mask"]


@pytest.mark.parametrize(("method", "case"), ALL, ids=[f"{m}-{c['id']}" for m, c in ALL])
def test_hidden_states(method: str, case: dict[str, Any]) -> None:
    """Guards the net's arithmetic: every draft forward of the first cycle gives the reference's hidden states to 1e-4."""
    tensors = load_file(GOLDEN / f"{'eagle1_static' if method == 'eagle1' else 'eagle2_dynamic'}.safetensors")
    drafter, golden = drafter_of(method, case), case["cycles"][0]
    outputs: list[torch.Tensor] = []
    drafter.net.register_forward_hook(lambda module, args, out: outputs.append(out))
    decoder = Decoder(drafter.target, drafter)
    decoder.add(Request(tuple(case["prompt_ids"]), 40))
    decoder.step()
    # the first call of the reference reads the whole prompt; ours reads all but the last pair in the prefill, and that one with the root
    assert golden["draft_calls"][0]["position_ids"] == list(range(len(case["prompt_ids"])))
    prompt_calls = 1 if len(case["prompt_ids"]) > 1 else 0
    mine = [torch.cat([o[0] for o in outputs[:prompt_calls]] + [outputs[prompt_calls][0, :1]])]
    mine += [o[0] for o in outputs[prompt_calls + 1 :]]
    checked = 0
    for j, hidden in enumerate(mine):
        name = f"{case['id']}.c0.call{j}.out_hidden"
        if name in tensors:
            torch.testing.assert_close(hidden, tensors[name].reshape(hidden.shape), atol=1e-4, rtol=0)
            checked += 1
    assert checked >= min(3, len(mine))


def test_the_reference_tree() -> None:
    """Guards the default choices and their order."""
    golden = json.loads((GOLDEN / "eagle1_static_tree.json").read_text())
    assert [list(c) for c in REFERENCE_TREE] == golden["tree_choices"]
    number = {(): 0, **{c: n for n, c in enumerate(REFERENCE_TREE, start=1)}}
    tree = Tree.build(torch.tensor([[-1, *(number[c[:-1]] for c in REFERENCE_TREE)]]), 5)
    assert tree.depth_BN[0].tolist() == golden["tree_position_ids"]
    assert ["".join("01"[int(x)] for x in row) for row in tree.mask_BNN[0]] == golden["tree_mask"]


def test_vanilla_is_the_reference_baseline() -> None:
    """Guards the golden targets' configuration (old rope keys): plain decoding gives the baseline ids."""
    case = cases("eagle2_dynamic")[0]
    target = Target.load(GOLDEN / case["target"])
    vanilla = drafters.find("vanilla")(target)
    answer = case["vanilla_greedy_ids"][len(case["prompt_ids"]) :]
    assert run(Decoder(target, vanilla), [Request(tuple(case["prompt_ids"]), len(answer))])[0] == [answer]
