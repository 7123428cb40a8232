"""Another head in the place of the one that drafts, while requests run."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import checkpoints, drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import CheckpointError, OptionError
from eyas_train.adapt import HeadMismatchError, adapting, swap_draft
from eyas_train.adapt.swap import load_like, prepare, put
from learning import RUNNERS, requests, target_by
from reference import plain_decode, run
from test_exact_pipeline import PROMPT, VOCAB, true_distributions
from test_exact_pipeline import target as small_target
from test_lossless import OPTIONS, make


def other(name: str, target: Target, seed: int = 9, options: dict[str, Any] | None = None) -> Any:
    kind: Any = drafters.find(name)
    usual: Any = OPTIONS[name]
    return kind.random(target, build_options(kind.Options, {**usual, **(options or {})}), seed=seed)


@pytest.mark.cover
@pytest.mark.quick("mtp-model", "eagle3-kernels")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["eagle2", "eagle3", "mtp", "seagle", "peagle"])
def test_a_swap_between_cycles(name: str, runner: str) -> None:
    """Guards the texts of requests that are in flight when the head changes, and that everything that was made of the
    old weights is made again: after the swap, a new text is drafted exactly as by the other head alone."""
    target = target_by(runner)
    drafter, new = make(name, target), other(name, target)
    wanted = [plain_decode(target.model, request) for request in requests(4)]
    decoder = Decoder(target, drafter, 4)
    ids = [decoder.add(request) for request in requests(4)]
    found: dict[int, list[int]] = {number: [] for number in ids}
    for cycle in itertools.count():
        if decoder.finished:
            break
        if cycle in (3, 6):
            put(drafter, new if cycle == 3 else make(name, target))  # type: ignore[arg-type]
        for step in decoder.step():
            found[step.request_id] += step.tokens
    assert [found[number] for number in ids] == wanted
    put(drafter, new)  # type: ignore[arg-type]
    assert drafted(decoder) == drafted(Decoder(target, other(name, target), 4))


def drafted(decoder: Decoder) -> list[list[int]]:
    """Return the trees of a request's cycles."""
    steps = run(decoder, [Request((1, 5, 3, 6), 16)])[1]
    return [step.draft.tokens_BN[step.row].tolist() for step in steps if step.draft is not None]


@pytest.mark.slow
def test_the_law_of_sampled_children_when_heads_change() -> None:
    """Guards q: with EAGLE-1 children are drawn from it, and a swap between draft and verification, or a q of other
    weights, would bend the distribution. The head changes in every cycle. Counts of the third token, against their
    means given the first two; seeded, a false alarm in 1 of 10,000 seeds."""
    target, kind = small_target(), drafters.find("eagle1")
    options = build_options(kind.Options, {"tree.choices": "chain-3"})
    heads: Any = [kind.random(target, options, seed=seed) for seed in (3, 4)]
    drafter: Any = kind.random(target, options, seed=3)
    count = 1500
    decoder = Decoder(target, drafter, 100)
    ids = [decoder.add(Request(PROMPT, 3, Sampling(1.0, seed=seed))) for seed in range(count)]
    found: dict[int, list[int]] = {number: [] for number in ids}
    cycle = 0
    while not decoder.finished:
        put(drafter, heads[cycle % 2])
        for step in decoder.step():
            found[step.request_id] += step.tokens
        cycle += 1
    tokens = torch.tensor([[*PROMPT, *found[number]] for number in ids])
    with torch.no_grad():
        p_RTV = true_distributions(tokens, Sampling(1.0))
    expected = p_RTV[:, 2].sum(0)
    observed = torch.bincount(tokens[:, -1], minlength=VOCAB).double()
    variance = (p_RTV[:, 2] * (1 - p_RTV[:, 2])).sum(0)
    largest = float(((observed - expected).abs() / variance.sqrt()).max())
    assert largest < NormalDist().inv_cdf(1 - 1e-4 / 2 / VOCAB)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Guards the sizes that sessions rely on: another layer, other fused layers, another vocabulary, another method."""
    target = Target(zoo.tiny("llama"), "tiny")
    drafter: Any = make("eagle3", target)
    kind: Any = drafters.find("eagle3")
    before = vars(drafter).copy()
    for head, error, words in (
        (other("eagle3", target, options={"head.layers": "0,1,3"}), HeadMismatchError, "fused layers"),
        (kind.random(target, drafter.options, 1, intermediate_size=96), HeadMismatchError, "layer"),
        (other("eagle3", target, options={"head.draft_vocab": 20}), HeadMismatchError, "architecture"),
        (make("mtp", target), CheckpointError, "."),
        (None, CheckpointError, "."),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        if head is not None:
            checkpoints.save(head.weights(), folder)
        with pytest.raises(error, match=words) as refused:
            load_like(drafter, folder)
        assert "\n" not in str(refused.value)
    assert vars(drafter) == before


@pytest.mark.quick("False")
@pytest.mark.parametrize("learns", [False, True])
def test_swap_draft(tmp_path: Path, learns: bool) -> None:
    model = zoo.tiny("llama")
    target = Target(model)
    for seed in (1, 9):
        checkpoints.save(other("eagle3", target, seed).weights(), tmp_path / str(seed))
    llm = eyas.load(model, tmp_path / "1", tokenizer=False, tree={"nodes": 8, "depth": 3, "branch": 2})
    if learns:
        llm = adapting(llm, share=1e9, steps=1)
    text = llm.generate([3, 4, 5], max_new_tokens=30).token_ids
    stream = llm.stream([3, 4, 5], max_new_tokens=30)
    tokens = list(next(stream).token_ids)
    swap_draft(llm, tmp_path / "9")
    tokens += [token for piece in stream for token in piece.token_ids]
    assert tuple(tokens) == text == llm.generate([3, 4, 5], max_new_tokens=30).token_ids
    assert llm.draft_name == str(tmp_path / "9")
    head: Any = llm.learner.given if learns else llm.drafter  # type: ignore[attr-defined]
    expected = eyas.load(model, tmp_path / "9", tokenizer=False).drafter.net.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(value, expected[name]) for name, value in head.net.state_dict().items())
    with pytest.raises(OptionError, match="only heads"):
        swap_draft(eyas.load(model, tokenizer=False), tmp_path / "9")


def test_nothing_is_left_to_compute() -> None:
    """Bug: the first cycle after a swap waits until the weights are packed."""
    drafter: Any = make("mtp", target_by("model"))
    prepare(drafter)
    assert {"decoding_net", "fused_tree_builder", "compiled"} <= vars(drafter).keys()
