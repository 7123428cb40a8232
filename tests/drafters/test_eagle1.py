"""EAGLE-1's ablation (`--head.inputs`): what each net reads, drafting and training; lossless, stored as what it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import heads
import zoo
from eyas import checkpoints, drafters
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters.eagle1 import INPUTS, Net
from eyas.nn import DecoderLayer
from heads import make
from reference import run

WIDE = {"tree.nodes": 40, "tree.depth": 3, "tree.branch": 12}


# --- a plain loop over what the docstring of the net says --------------------------------------------------------------------------------


def layer_at(layer: DecoderLayer, x_TD: Tensor) -> Tensor:
    """One decoder layer over a whole sequence, by hand."""
    attention, T = layer.attention, len(x_TD)
    q_THh = attention.query(x_TD, torch.arange(T))
    pair = attention.rotated_key_value(x_TD, torch.arange(T))
    k_THh, v_THh = (x.repeat_interleave(q_THh.shape[1] // x.shape[1], dim=1) for x in pair)
    scores_HTT = torch.einsum("thd,shd->hts", q_THh, k_THh) * q_THh.shape[-1] ** -0.5
    causal_TT = torch.arange(T)[:, None] >= torch.arange(T)
    law_HTT = scores_HTT.masked_fill(~causal_TT, -torch.inf).softmax(-1)
    return layer.finish(x_TD, attention.o(torch.einsum("hts,shd->thd", law_HTT, v_THh).flatten(1)))


@torch.no_grad()
def foretold(net: Net, target: Target, tokens: list[int], features_TD: Tensor) -> Tensor:
    """The net's feature of the last of `tokens`; those of the first tokens are true, the others are the net's own."""
    e_TD, known = target.embed(torch.tensor(tokens)), list(features_TD)
    while True:
        f_SD = torch.stack(known[: len(tokens) - 1])
        here_SD, next_SD = e_TD[: len(f_SD)], e_TD[1 : len(f_SD) + 1]
        inputs = {"shifted": [next_SD, f_SD], "unshifted": [here_SD, f_SD], "feature": [f_SD], "token": [next_SD]}
        out_SD = layer_at(net.layer, net.fc(torch.cat(inputs[net.inputs], -1)))
        if len(out_SD) == len(tokens) - 1:
            return out_SD[-1]
        known.append(out_SD[-1])


@pytest.mark.cover
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("method", "options", "law"), [("eagle1", {}, Sampling(1.0, seed=3)), ("eagle2", WIDE, Sampling())]
)
def test_the_law_of_every_node(family: str, inputs: str, method: str, options: dict[str, Any], law: Sampling) -> None:
    """Guards which token and feature a slot reads, in prompts, commits and trees; gpt2 adds positions to embeddings."""
    target = Target(zoo.FAMILIES[family]())
    drafter, cycles = make(method, target, **{"head.inputs": inputs, **options}), list[tuple[CycleInput, Draft]]()
    requests = [Request(tuple(range(5, 14)), 12, law), Request(tuple(range(40, 63)), 9, law)]
    decoder = Decoder(target, drafter, 2, watch=lambda roots, draft, scores, verdict: cycles.append((roots, draft)))
    answers, steps = run(decoder, requests)
    assert sum(s.accepted for s in steps) > 0, "no path was committed: this test would prove little"
    whole = [[*r.prompt, *answer] for r, answer in zip(requests, answers, strict=True)]
    features = [target.encode(torch.tensor([ids]), (target.num_layers,))[0] for ids in whole]
    checked, laws = 0, dict[tuple[int, int, int], list[Tensor]]()
    for number, (roots, draft) in enumerate(cycles):
        for b in roots.active_B.nonzero()[:, 0].tolist():
            place, parents = int(roots.position_B[b]), draft.tree.parents_BN[b].tolist()
            before, drafted = whole[b][:place], draft.tokens_BN[b].tolist()
            for parent in sorted(set(parents[1:])):
                path, node = list[int](), parent
                while node >= 0:
                    path, node = [drafted[node], *path], parents[node]
                hidden_D = foretold(drafter.net, target, [*before, *path], features[b][:place])
                logq_V = target.head(hidden_D).log_softmax(-1)
                laws.setdefault((number, b, len(path)), []).append(logq_V)
                for n in (n for n in range(1, len(parents)) if parents[n] == parent):
                    torch.testing.assert_close(draft.log_q_BN[b, n], logq_V[drafted[n]], rtol=1e-3, atol=1e-3)
                    checked += 1
                if draft.q_BNV is not None:
                    torch.testing.assert_close(draft.q_BNV[b, parent], logq_V.exp(), rtol=1e-3, atol=1e-4)
    assert checked > 100
    second = [found for (_, _, depth), found in laws.items() if depth == 2 and len(found) > 1]
    alike = [torch.allclose(found[0], other, atol=1e-4) for found in second for other in found[1:]]
    assert alike
    assert all(alike) if inputs in ("unshifted", "feature") else not any(alike), "do siblings have children of one law?"


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_loss(target: Target, inputs: str) -> None:
    """Guards what a slot reads while it is trained, at the edges of documents too, against a plain loop."""
    drafter, batch = make("eagle1", target, **{"head.inputs": inputs}), heads.batch_of(target, target.num_layers)
    total = 0.0
    begins = [sum(batch.documents.lengths[:i]) for i in range(len(batch.documents.lengths))]
    counted = heads.predictions(batch, 1)
    for _, t, goal in counted:
        begin = max(b for b in begins if b <= t)
        tokens, features_TF = batch.tokens_N[begin : t + 2].tolist(), batch.features_NF[begin : t + 1]
        predicted_D = foretold(drafter.net, target, tokens, features_TF)
        true_D = batch.features_NF[goal - 1]
        law_loss = F.cross_entropy(target.head(predicted_D)[None], target.head(true_D).softmax(-1)[None])
        total += float((F.smooth_l1_loss(predicted_D, true_D) + 0.1 * law_loss).detach())
    loss = drafter.loss(batch)
    assert int(loss.count) == len(counted)
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-4)


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {}),
    ("eagle1", {"tree.noise": "coupled"}),
    ("eagle1", {"tree.choices": "chain-3", "verification": "block"}),
    ("eagle2", WIDE),
    ("eagle2", {**WIDE, "window.size": 7, "window.sink": 2}),
]


@pytest.mark.cover
@pytest.mark.parametrize("inputs", INPUTS[1:])
@pytest.mark.parametrize(("method", "options"), SHAPES, ids=str)
def test_same_text_as_plain_decoding(
    target: Target, answered: list[tuple[Request, list[int]]], inputs: str, method: str, options: dict[str, Any]
) -> None:
    """Guards losslessness, rows joining and leaving; drawn rows are compared with themselves alone."""
    drafter = make(method, target, **{"head.inputs": inputs, **options})
    tokens, _ = run(Decoder(target, drafter, 3), [r for r, _ in answered])
    for (request, expected), got in zip(answered, tokens, strict=True):
        drawn = method == "eagle1" and options.get("tree.noise") != "coupled" and not request.sampling.greedy
        assert got == (run(Decoder(target, drafter, 1), [request])[0][0] if drawn else expected)


@pytest.mark.cover(inputs=2)
@pytest.mark.parametrize("inputs", INPUTS)
def test_trained_saved_and_loaded(tmp_path: Path, target: Target, inputs: str) -> None:
    """Guards that a head comes back as what it was trained as, by both methods, whatever the flags say."""
    drafter = make("eagle1", target, "init_for_training", **{"head.inputs": inputs})
    first, losses, figures = heads.short_training(drafter, tmp_path)
    assert losses[-1]["loss"] < 0.9 * losses[0]["loss"]
    assert figures["loss"] < 0.9 * first
    weights = checkpoints.load(tmp_path)
    for method in ("eagle1", "eagle2"):
        again = drafters.find(method).load(weights, target)
        assert again.net.inputs == inputs
        assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in drafter.net.state_dict().items())
    kind = drafters.find("eagle1")
    assert kind.load(weights, target, build_options(kind.Options, {"head.inputs": "token"})).net.inputs == inputs
    chain = again.chain(2)
    assert chain.net is again.net
    run(Decoder(target, chain), [Request((5, 6, 7), 4)])
