"""The whole pipeline at T > 0: the Decoder's tokens follow the target's distribution, for sampled
and deterministic trees and plain decoding.

Two statistics per method, over many requests with seeds 0, 1, 2, ... in one large batch, both chi-square:

    first    the first two tokens after one prompt, against their distribution from full forwards: cells of fixed probability
    pooled   every emitted token, by its rank in its own p (all methods) or by its rank in p - q (sampled trees: a draft that is followed
             too often, or avoided, shows here): observed minus expected counts, a martingale, over its covariance

False alarm: 4e-6 each for a right implementation, under 1e-4 over the 20 of this file; seeded, so
only a change of the generator rolls the dice again. Power: with 99 %, `pooled` finds a bias that
points the same way at every token when it is 0.042 in total variation (9,000 tokens of one
sampling, 7 degrees of freedom; half as many tokens for deterministic trees: 0.06), `first` one of 0.17 in
the distribution of two tokens (600 requests, 8 degrees). Enumeration in core/test_verify.py has no
such limit.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import zoo
from eyas import drafters
from eyas.core.adjustments import Adjustments
from eyas.core.engine import Decoder, Request, Step
from eyas.core.options import build_options
from eyas.core.sampling import Sampling, apply_sampling
from eyas.core.target import Target
from eyas.drafters import Drafter
from reference import plain_decode, run

VOCAB = 8
PROMPT = (1, 5, 3, 6)
ODDS = 4e-6
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 3, "repetition_penalty": 1.2},
    {"temperature": 1.6, "min_p": 0.02},
]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@functools.cache
def target() -> Target:
    """A model of 8 tokens: small enough that the draft of a random head is often right."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_key_value_heads": 1}
    return Target(zoo.tiny("llama", vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=2, **sizes))


def method(name: str, tree: object, folder: Path) -> Drafter:
    kind = drafters.find(name)
    if isinstance(tree, list):
        (folder / "tree.json").write_text(json.dumps(tree))
        tree = {"tree.choices": str(folder / "tree.json")}
    return kind.random(target(), build_options(kind.Options, tree or {}), seed=3)


METHODS: dict[str, tuple[str, object]] = {
    "vanilla": ("vanilla", None),
    "eagle1 tree": ("eagle1", TREE),
    "eagle1 chain": ("eagle1", {"tree.choices": "chain-3"}),
    "eagle2": ("eagle2", {"tree.nodes": 9, "tree.depth": 3, "tree.branch": 3}),
}


def true_distributions(tokens_RT: Tensor, sampling: Sampling) -> Tensor:
    """float64 [R, T - prompt, V]: p of every new token, from one forward over whole sequences."""
    logits_RTV = target().model(tokens_RT, use_cache=False).logits
    seen_RTV = torch.nn.functional.one_hot(tokens_RT, VOCAB).cumsum(1) > 0
    scores = apply_sampling(logits_RTV.flatten(0, 1), sampling, Adjustments(seen_RTV).flat()).view_as(logits_RTV)
    return scores[:, len(PROMPT) - 1 : -1].double().softmax(-1)


def first_tokens_p_value(tokens_RT: Tensor, sampling: Sampling) -> float:
    """p-value of the chi-square of the first two new tokens; cells that expect less than 6 are united."""
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    start = torch.tensor([PROMPT]).expand(len(pairs), -1)
    p_XTV = true_distributions(torch.cat([start, pairs], 1), sampling)
    every = torch.arange(len(pairs))
    expected_X = len(tokens_RT) * p_XTV[every, 0, pairs[:, 0]] * p_XTV[every, 1, pairs[:, 1]]
    first_R = tokens_RT[:, len(PROMPT)] * VOCAB + tokens_RT[:, len(PROMPT) + 1]
    observed_X = torch.bincount(first_R, minlength=len(pairs)).double()
    assert not observed_X[expected_X == 0].any(), "a token that the sampling drops"
    small_X = expected_X < 6
    observed = [*observed_X[~small_X].tolist(), float(observed_X[small_X].sum())]
    expected = [*expected_X[~small_X].tolist(), float(expected_X[small_X].sum())]
    if expected[-1] < 6:  # too little even together: it joins the smallest cell
        place = expected[:-1].index(min(expected[:-1]))
        for values in (observed, expected):
            values[place] += values.pop()
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


def pooled_p_value(p_XV: Tensor, key_XV: Tensor, token_X: Tensor) -> float:
    """p-value of the ranks of the tokens by their keys; the keys may depend on all that was known before the token."""
    order_XV = key_XV.argsort(-1, descending=True)
    ranked_XV = p_XV.gather(1, order_XV)
    hit_XV = (order_XV == token_X[:, None]).double()
    excess_V = (hit_XV - ranked_XV).sum(0)
    covariance_VV = torch.diag(ranked_XV.sum(0)) - ranked_XV.T @ ranked_XV
    frequent_V = covariance_VV.diagonal() > 10  # ranks that hardly ever occur say nothing
    value_Y, vector_VY = torch.linalg.eigh(covariance_VV[frequent_V][:, frequent_V])
    real_Y = value_Y > 1e-6 * value_Y.max()  # ranks that always sum to one leave a direction without variance
    squares_Y = (excess_V[frequent_V] @ vector_VY)[real_Y] ** 2 / value_Y[real_Y]
    return float(stats.chi2.sf(float(squares_Y.sum()), int(real_Y.sum())))


def draft_distributions(steps: list[Step], row_of: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Where a sampled tree had a q at the node that emitted a token: row, index of the new token, q."""
    done: dict[int, int] = {}
    rows, indices, distributions = [], [], []
    for step in steps:
        at = done.get(step.request_id, 0)
        done[step.request_id] = at + len(step.tokens)
        if step.draft is not None and step.draft.q_BNV is not None and step.request_id in row_of:
            for i, node in enumerate(step.path[: len(step.tokens)]):
                q_V = step.draft.q_BNV[step.row, node]
                if q_V.any():
                    rows.append(row_of[step.request_id])
                    indices.append(at + i)
                    distributions.append(q_V)
    q_XV = torch.stack(distributions).double() if distributions else torch.zeros(0, VOCAB)
    return torch.tensor(rows), torch.tensor(indices), q_XV


def check_distribution(name: str, folder: Path, requests: int, new: int = 18) -> dict[str, float]:
    """p-values of every statistic of one method; asserts that none is below the odds."""
    method_name, tree = METHODS[name]
    decoder = Decoder(target(), method(method_name, tree, folder), rows=requests)
    which = [seed % len(SAMPLINGS) for seed in range(requests)]
    asked = [Request(PROMPT, new, Sampling(seed=seed, **SAMPLINGS[k])) for seed, k in enumerate(which)]
    tokens, steps = run(decoder, asked)
    assert {len(t) for t in tokens} == {new}
    if name != "vanilla":
        assert sum(s.accepted for s in steps) > requests * new / 10, "hardly anything was accepted"
    p_values: dict[str, float] = {}
    p_all, q_all, token_all, token_sampled, difference = [], [], [], [], []
    for k, options in enumerate(SAMPLINGS):
        seeds = [seed for seed in range(requests) if which[seed] == k]
        tokens_RT = torch.tensor([[*PROMPT, *tokens[seed]] for seed in seeds])
        p_values[f"first, sampling {k}"] = first_tokens_p_value(tokens_RT, Sampling(**options))
        p_RTV = true_distributions(tokens_RT, Sampling(**options))
        new_RT = tokens_RT[:, len(PROMPT) :]
        assert (p_RTV.gather(2, new_RT[..., None]) > 0).all(), "a token that the sampling drops"
        p_all.append(p_RTV.flatten(0, 1))
        token_all.append(new_RT.flatten())
        row_X, index_X, q_XV = draft_distributions(steps, {seed + 1: i for i, seed in enumerate(seeds)})
        if len(q_XV):
            q_all.append(p_RTV[row_X, index_X])
            difference.append(p_RTV[row_X, index_X] - q_XV)
            token_sampled.append(new_RT[row_X, index_X])
    for k, p_XV in enumerate(p_all):
        p_values[f"pooled by p, sampling {k}"] = pooled_p_value(p_XV, p_XV, token_all[k])
    for k, p_XV in enumerate(q_all):
        p_values[f"pooled by p - q, sampling {k}"] = pooled_p_value(p_XV, difference[k], token_sampled[k])
    assert len(q_all) == (len(SAMPLINGS) if method_name == "eagle1" else 0), "which trees are sampled?"
    for statistic, value in p_values.items():
        assert value > ODDS, f"{name}: {statistic}: p-value {value:.1e}: {p_values}"
    return p_values


@pytest.mark.cover(name=1)
@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_the_pipeline_keeps_the_distribution(name: str, tmp_path: Path) -> None:
    """Guards the law of the tokens, two samplings in a batch; odds and power: the file's docstring."""
    check_distribution(name, tmp_path, requests=1200 if name.startswith("eagle1") else 600)


def check_ids(name: str, folder: Path) -> None:
    """Rows of many samplings and ages in one batch: each returns what a plain loop with its seed returns."""
    others = ({"temperature": 0.4, "top_p": 0.8}, {"temperature": 0.0, "repetition_penalty": 2.0}, {"temperature": 2.5})
    samplings = [*SAMPLINGS, *others]
    requests = [
        Request((6, 1, 1, 6)[: 1 + i % 4], 9, Sampling(seed=70 + i // 2, **samplings[i % len(samplings)]))
        for i in range(12)
    ]
    tokens, steps = run(Decoder(target(), method(*METHODS[name], folder), rows=5), requests)
    assert [plain_decode(target().model, r) for r in requests] == tokens, "other ids than plain decoding"
    assert name == "vanilla" or any(s.accepted for s in steps)


@pytest.mark.quick("eagle2")
@pytest.mark.parametrize("name", ["vanilla", "eagle2"])
def test_chosen_trees_return_the_ids_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    """Guards "same seed, same ids" across samplings and ages. Near-ties: odds 1e-4, seeded."""
    check_ids(name, tmp_path)


def check_penalty() -> None:
    """Prompts of one token, six new ones, a heavy penalty: few tokens stand in the prefix before they are drafted."""
    requests = [
        Request((1 + i % 7,), 6, Sampling(1.0 * (i % 3 > 0), repetition_penalty=4.0, seed=i)) for i in range(24)
    ]
    tokens, steps = run(Decoder(target(), method(*METHODS["eagle2"], Path()), rows=8), requests)
    assert [plain_decode(target().model, r) for r in requests] == tokens, "other ids than plain decoding"
    assert sum(s.accepted for s in steps) > 20


@pytest.mark.slow
def test_a_penalty_sees_what_was_drafted() -> None:
    """Guards each node's prefix: a drafted token is penalised below itself. Near-ties: odds 1e-4, seeded."""
    check_penalty()
