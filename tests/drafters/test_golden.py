"""Parity with what the reference implementations computed (../shared/golden; skipped where that is absent)."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas import checkpoints, drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.tree import Tree
from eyas.drafters import Drafter, eagle1
from eyas.drafters.eagle1 import REFERENCE_TREE
from eyas.nn import Documents
from eyas.targets.loading import load_target
from eyas_train.method_losses import packed
from eyas_train.own_outputs import training_time_test
from golden import GOLDEN, needs_golden
from reference import run

pytestmark = needs_golden


def cases(name: str) -> list[dict[str, Any]]:
    path = GOLDEN / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def drafter_of(method: str, case: dict[str, Any]) -> Drafter:
    kind, p = drafters.find(method), case["params"]
    tree: dict[str, Any] = {}
    if p:
        tree = {"tree.nodes": p["total_token"], "tree.depth": p["depth"] + 1, "tree.branch": p["top_k"]}
        tree["tree.confidence_temperature"] = 1
    if method == "seagle":
        size = case["window_size"] if case["enable_seagle"] else None
        tree |= {"window.size": size, "window.sink": case["sink_size"], "window.crop": "none"}
    weights = checkpoints.load(GOLDEN / case["head"])
    return kind.load(weights, load_target(GOLDEN / case["target"]), build_options(kind.Options, tree))


FILES = {"eagle1": "eagle1_static", "eagle2": "eagle2_dynamic", "eagle3": "eagle3", "seagle": "seagle"}
ALL = [(m, c) for m, f in FILES.items() for c in cases(f)]


def duplicates_slots(case: dict[str, Any], context: int) -> bool:
    """Whether the reference's window holds slots twice: it trims once exceeded; ours holds each once."""
    return bool(case.get("enable_seagle")) and case["window_size"] < context < case["window_size"] + case["sink_size"]


@pytest.mark.cover(case=14)
@pytest.mark.parametrize(("method", "case"), ALL, ids=[f"{m}-{c['id']}" for m, c in ALL])
def test_decoding(method: str, case: dict[str, Any]) -> None:
    """Guards pairing, positions, tree steps, rerank and windows: tokens, lengths, trees, masks, positions exactly."""
    prompt, answer = case["prompt_ids"], case["vanilla_greedy_ids"][len(case["prompt_ids"]) :]
    tokens, steps = run(Decoder((d := drafter_of(method, case)).target, d), [Request(tuple(prompt), len(answer))])
    assert tokens[0] == answer
    cycles = [s for s in steps if not s.prefill]
    contexts = [len(prompt) + sum(a + 1 for a in case["accept_lengths"][:i]) for i in range(len(cycles))]
    same = next((i for i, context in enumerate(contexts) if duplicates_slots(case, context)), len(cycles))
    # the reference stops only between cycles, and may run one more than is needed
    assert [len(s.path) - 1 for s in cycles][:same] == case["accept_lengths"][: len(cycles)][:same]
    assert len(cycles) >= case["num_cycles"] - 1 or same < len(cycles)
    for step, golden, context in list(zip(cycles, case["cycles"], contexts, strict=False))[:same]:
        tree = step.draft.tree
        assert golden["context_len"] == context
        assert step.draft.tokens_BN[0].tolist() == golden["tree_tokens"]
        assert tree.parents_BN[0].tolist() == golden["parents"]
        assert (tree.depth_BN[0] + golden["context_len"]).tolist() == golden["tree_position_ids"]
        assert ["".join("01"[int(x)] for x in row) for row in tree.mask_BNN[0]] == golden["tree_mask"]


def read_at_once(drafter: Drafter, features_NF: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """The net's output at pairs (feature of a token, next token), by the way that training takes."""
    embeddings_ND, rows = drafter.target.embed(ids_N), torch.arange(len(ids_N))
    documents = Documents((len(ids_N),))
    if isinstance(drafter.net, eagle1.Net):
        return packed(drafter.net, features_NF, embeddings_ND, rows, documents)
    return training_time_test(drafter.net, features_NF, lambda index: embeddings_ND, rows, documents, 1)[0]


@pytest.mark.cover(case=14)
@pytest.mark.parametrize(("method", "case"), ALL, ids=[f"{m}-{c['id']}" for m, c in ALL])
def test_hidden_states(method: str, case: dict[str, Any]) -> None:
    """Guards the net's arithmetic: every draft forward of the first cycle, the prompt's in one piece, to 1e-4."""
    tensors, drafter = load_file(GOLDEN / f"{FILES[method]}.safetensors"), drafter_of(method, case)
    calls = case["cycles"][0]["draft_calls"]
    outputs: list[torch.Tensor] = []
    drafter.net.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    decoder = Decoder(drafter.target, drafter)
    decoder.add(Request(tuple(case["prompt_ids"]), 40))
    decoder.step()
    assert calls[0]["position_ids"] == list(range(len(case["prompt_ids"])))
    name = f"{case['id']}.c0.call"
    if f"{name}0.hidden_in" in tensors:
        expected = tensors[f"{name}0.out_hidden"].reshape(len(calls[0]["input_ids"]), -1)
        with torch.no_grad():
            hidden = tensors[f"{name}0.hidden_in"].reshape(len(expected), -1)
            whole = read_at_once(drafter, hidden, torch.tensor(calls[0]["input_ids"]))
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(outputs[0][0], expected[-1], atol=1e-4, rtol=0)
    if duplicates_slots(case, len(case["prompt_ids"])):
        return
    checked = 0
    for j, hidden in enumerate(outputs[1:], start=1):
        if f"{name}{j}.out_hidden" in tensors:
            expected = tensors[f"{name}{j}.out_hidden"].reshape(hidden.shape)
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
            checked += 1
    assert checked >= min(3, len(outputs) - 1)


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
    target = load_target(GOLDEN / case["target"])
    vanilla = drafters.find("vanilla")(target)
    answer = case["vanilla_greedy_ids"][len(case["prompt_ids"]) :]
    assert run(Decoder(target, vanilla), [Request(tuple(case["prompt_ids"]), len(answer))])[0] == [answer]
