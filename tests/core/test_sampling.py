"""The law of the next token against transformers' processors, and the noise; odds are those of another generator."""

import itertools
import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import zoo
from eyas.core import sampling as sampling_module
from eyas.core.adjustments import Adjustments
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling, probs
from eyas.errors import OptionError

VOCAB = 40


def of_transformers(logits_NV: Tensor, sampling: Sampling, ids_NT: Tensor) -> Tensor:
    """Applies the processors of transformers' `generate` to these logits, in its order."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature > 0:
        steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
        steps.extend([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else [])
        steps.extend([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else [])
        steps.extend([MinPLogitsWarper(sampling.min_p)] if sampling.min_p else [])
    return steps(ids_NT, logits_NV.clone())


def cases(seed: int, nodes: int = 16, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with exact ties in half the rows, prefixes, and which tokens stand in them."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(nodes, VOCAB, generator=generator) * spread
    logits_NV[::2] = logits_NV[::2].round()
    ids_NT = torch.randint(VOCAB, (nodes, 9), generator=generator)
    return logits_NV, ids_NT, torch.zeros(nodes, VOCAB, dtype=torch.bool).scatter(1, ids_NT, True)


SINGLE: list[dict[str, Any]] = [
    *({"temperature": t} for t in (2e-5, 0.1, 0.7, 1.0, 1.9, 50.0, 1e30)),
    *({"temperature": 1.0, "top_k": k} for k in (1, 2, 7, VOCAB - 1, VOCAB, 10**9)),
    *({"temperature": 1.0, "top_p": p} for p in (1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0)),
    *({"temperature": 1.0, "min_p": p} for p in (1e-9, 0.05, 0.5, 1.0)),
    *({"temperature": 1.0, "repetition_penalty": r} for r in (0.5, 1.1, 1.0, 10.0)),
    {"temperature": 0.0, "repetition_penalty": 1.7},
]
COMBINED: list[dict[str, Any]] = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product((0.6, 1.4), (0, 5), (0.7, 1.0), (0.0, 0.1), (1.0, 1.3))
]


@pytest.mark.parametrize("options", [*SINGLE, *COMBINED], ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
def test_scores_are_those_of_transformers(options: dict[str, Any]) -> None:
    """Guards each processor and their order, ties and extreme values included: equal bit for bit."""
    sampling = Sampling(**options)
    for seed in range(3):
        logits_NV, ids_NT, seen_NV = cases(seed)
        before_NV = logits_NV.clone()
        scores_NV = apply_sampling(logits_NV, sampling, Adjustments(seen_NV))
        assert torch.equal(scores_NV, of_transformers(logits_NV, sampling, ids_NT))
        assert torch.equal(logits_NV, before_NV), "the target's logits were changed in place"
        assert torch.isfinite(scores_NV).any(-1).all(), "a node has no token left"


def test_scores_are_those_of_generate() -> None:
    """Guards the order against generate itself, over several tokens with a penalty."""
    model = zoo.tiny("llama", num_hidden_layers=1)
    prompt_1T = torch.tensor([[5, 9, 9, 31, 7]])
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4}
    torch.manual_seed(0)
    out = model.generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), max_new_tokens=8, do_sample=True, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, output_logits=True, **options,
    )  # fmt: skip
    dropped = 0
    for step, (logits_1V, scores_1V) in enumerate(zip(out.logits, out.scores, strict=True)):
        seen_1V = torch.zeros_like(logits_1V, dtype=torch.bool)
        seen_1V[0, out.sequences[0, : prompt_1T.shape[1] + step]] = True
        ours_1V = apply_sampling(logits_1V, Sampling(**options), Adjustments(seen_1V))
        torch.testing.assert_close(ours_1V, scores_1V, rtol=0, atol=1e-6)
        dropped += int(torch.isinf(scores_1V).sum())
    assert dropped > 0


@pytest.mark.parametrize("options", [SINGLE[9], SINGLE[16], COMBINED[-1]])
def test_a_node_is_processed_alone(options: dict[str, Any]) -> None:
    """Guards that a node's law does not depend on the tree around it, not even how ties are broken."""
    sampling = Sampling(**options)
    logits_NV, _, seen_NV = cases(7)
    together_NV = apply_sampling(logits_NV, sampling, Adjustments(seen_NV))
    nodes = [slice(n, n + 1) for n in range(len(logits_NV))]
    alone = [apply_sampling(logits_NV[n], sampling, Adjustments(seen_NV[n])) for n in nodes]
    assert torch.equal(together_NV, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_are_float32(dtype: torch.dtype) -> None:
    """Guards the law of a half-precision target: everything after the logits is float32. Deterministic."""
    logits_NV, _, seen_NV = cases(1)
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    scores_NV = apply_sampling(logits_NV.to(dtype), sampling, Adjustments(seen_NV))
    assert scores_NV.dtype == torch.float32
    assert torch.equal(scores_NV, apply_sampling(logits_NV.to(dtype).float(), sampling, Adjustments(seen_NV)))


def test_greedy_keeps_its_logits() -> None:
    """Guards that temperature 0, or too small to divide by, drops and scales nothing."""
    logits_NV, _, _ = cases(2)
    for temperature in (0.0, 0, 1e-6, 1e-300):
        sampling = Sampling(temperature=temperature, top_k=1, top_p=0.1, min_p=1.0)
        assert sampling.greedy
        assert torch.equal(apply_sampling(logits_NV, sampling), logits_NV)
    assert not Sampling(temperature=1e-5).greedy


def test_custom_processors_stand_between_penalty_and_temperature() -> None:
    """Guards where generate puts processors of the user's own. Deterministic."""
    logits_NV, ids_NT, seen_NV = cases(3)
    sampling = Sampling(temperature=0.5, top_k=4, repetition_penalty=1.5)
    penalised_NV = of_transformers(logits_NV, Sampling(repetition_penalty=1.5), ids_NT)
    given: list[Tensor] = []

    def custom(scores_NV: Tensor) -> Tensor:
        given.append(scores_NV)
        return scores_NV.flip(-1)

    scores_NV = apply_sampling(logits_NV, sampling, Adjustments(seen_NV), custom)
    assert torch.equal(given[0], penalised_NV)
    assert torch.equal(scores_NV, of_transformers(penalised_NV.flip(-1), Sampling(temperature=0.5, top_k=4), ids_NT))


def test_law() -> None:
    """Guards the law: a softmax that sums to one, or all mass on the argmax. Deterministic."""
    logits_NV, _, _ = cases(4)
    scores_NV = apply_sampling(logits_NV, Sampling(temperature=1.0, top_k=3))
    assert torch.equal(probs(scores_NV, greedy=False), scores_NV.softmax(-1))
    assert torch.equal(probs(logits_NV, greedy=True), torch.eye(VOCAB)[logits_NV.argmax(-1)])


NAN, INF = math.nan, math.inf
BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, INF, -INF, True, "1", None],
    "top_k": [-1, 2.0, NAN, True, "3", None],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INF, True, None],
    "min_p": [-0.1, 1.1, NAN, INF, False, None],
    "repetition_penalty": [0, 0.0, -1.0, NAN, INF, True, None],
    "seed": [-1, 2**63, 1.0, NAN, True, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    """Guards the user's own numbers: NaN passes every `<`, and a bool every isinstance of int."""
    with pytest.raises(OptionError, match=rf"^{name} must be .*got {str(value).replace('.', '[.]')}"):
        Sampling(**{name: value})


STREAMS = (GumbelNoise.TARGET, GumbelNoise.ACCEPT, GumbelNoise.DRAFT, GumbelNoise.BLOCK, GumbelNoise.SEARCH)
WORD = 2**64 - 1


def mix(x: int) -> int:
    """SplitMix64's finaliser in whole numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def uniform(seed: int, stream: int, position: int, index: int) -> float:
    """Computes the uniform number at (seed, stream, position, index) as the docstring of `sampling` defines it."""
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(seed + golden & WORD) + stream & WORD)
    key = mix(key + (position + 1) * golden & WORD)
    return ((mix(key + (index + 1) * golden & WORD) >> 12) + 0.5) / 2**52


def noise_of(*seeds: int) -> GumbelNoise:
    return GumbelNoise.from_sampling([Sampling(temperature=1.0, seed=s) for s in seeds])


def test_noise_is_the_published_generator() -> None:
    """Guards the int64 arithmetic, and the text of every seed from version to version."""
    seeds, positions = (0, 1, 2**62 + 12345, 2**63 - 1), (0, 1, 77, 2**40)
    for stream in STREAMS:
        gumbel_BNV = noise_of(*seeds).gumbel(torch.tensor([positions] * len(seeds)), 5, stream)
        for (b, seed), (n, position), v in itertools.product(enumerate(seeds), enumerate(positions), range(5)):
            expected = -math.log(-math.log(uniform(seed, stream, position, v)))
            assert abs(gumbel_BNV[b, n, v].item() - expected) <= 1e-6 * max(1, abs(expected))
    pinned = torch.tensor([-0.0049520, -0.2863769, -0.3989368])
    torch.testing.assert_close(noise_of(0).gumbel(torch.tensor([[0]]), 3).flatten(), pinned, rtol=0, atol=1e-6)


def test_noise_depends_on_nothing_else() -> None:
    """Guards one text per seed: no influence of batch, row, order of calls, other positions, or size of vocabulary."""
    seeds = (3, 11, 4, 2**50)
    position_BN = torch.tensor([[5, 6, 7, 6], [0, 9, 3, 1], [8, 8, 2, 0], [1, 2, 3, 4]])
    noise = noise_of(*seeds)
    all_BNV = noise.gumbel(position_BN, 13)
    assert torch.equal(all_BNV, noise.gumbel(position_BN, 13)), "a call moved some state"
    assert torch.equal(all_BNV[0, 1], all_BNV[0, 3]), "one position, two noises"
    order = [2, 0, 3, 1]
    assert torch.equal(all_BNV[order], noise_of(*(seeds[b] for b in order)).gumbel(position_BN[order], 13))
    assert torch.equal(all_BNV.flip(1), noise.gumbel(position_BN.flip(1), 13))
    assert torch.equal(all_BNV[..., :6], noise.gumbel(position_BN, 6))
    for b, n in itertools.product(range(4), range(4)):
        alone_11V = noise_of(seeds[b]).gumbel(position_BN[b : b + 1, n : n + 1], 13)
        assert torch.equal(all_BNV[b : b + 1, n : n + 1], alone_11V)


def test_noise_differs_by_seed_position_token_and_stream() -> None:
    """Guards each part of the key: 200,000 numbers, all different. A 52-bit collision: odds 5e-6."""
    noise, position_BN = noise_of(*range(40)), torch.arange(40).expand(40, 40)
    values = torch.stack([noise._uniform(stream, position_BN, torch.arange(25)) for stream in STREAMS])
    assert len(values.flatten().unique()) == values.numel() == 200_000


def test_greedy_rows_have_no_noise() -> None:
    """Guards rows of both kinds in one batch, and empty rows, which count as greedy. Deterministic."""
    noise = GumbelNoise.from_sampling([Sampling(temperature=1.0, seed=4), Sampling(seed=4), None])
    gumbel_BNV = noise.gumbel(torch.zeros(3, 2, dtype=torch.long), 6)
    assert noise.greedy_B.tolist() == [False, True, True]
    assert not noise.all_greedy
    assert GumbelNoise.from_sampling([None, Sampling()]).all_greedy
    assert gumbel_BNV[0].all()
    assert not gumbel_BNV[1:].any()
    assert torch.equal(gumbel_BNV[:1], noise_of(4).gumbel(torch.zeros(1, 2, dtype=torch.long), 6))


@pytest.mark.parametrize("word", [0, -1], ids=["zeros", "ones"])
def test_noise_is_finite_at_both_ends(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards u = 0 and u = 1 (53 bits are one too many): by infinite noise argmax takes a dropped token, as NaN."""
    monkeypatch.setattr(sampling_module, "_mix", lambda x: torch.full_like(x, word))
    assert torch.isfinite(noise_of(0).gumbel(torch.tensor([[0]]), 3)).all()


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_accept_tests_and_gumbels_are_uniform(stream: int) -> None:
    """Kolmogorov-Smirnov along tokens, positions, seeds: false alarm 1e-6; off by 0.017 anywhere is found with 99 %."""
    one, many = torch.tensor([[3]]), torch.arange(60_000)
    along = {
        "tokens": noise_of(9)._uniform(stream, one, torch.arange(60_000)),
        "positions": noise_of(9)._uniform(stream, many[None], torch.arange(1)),
        "seeds": noise_of(*range(60_000))._uniform(stream, one.expand(60_000, 1), torch.arange(1)),
        "last token of 32": noise_of(0)._uniform(stream, many[None, :60_000], torch.arange(32))[..., -1],
    }
    for name, values in along.items():
        assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-6, name
    gumbel_V = noise_of(9).gumbel(one, 60_000, stream).flatten().double()
    assert stats.kstest(gumbel_V.numpy(), "gumbel_r").pvalue > 1e-6


@pytest.mark.slow
def test_accepts_have_their_chances() -> None:
    """40,000 per chance and sibling: false alarm 1e-6, a chance off by 0.02 is found with 99 %; 0 and 1 never err."""
    noise, position_B = noise_of(*range(40_000)), torch.full((40_000,), 12)
    for sibling, chance in itertools.product((0, 1, 5), (0.03, 0.5, 0.9)):
        hits = int(noise.accepts(torch.full((40_000,), chance), position_B, sibling).sum())
        assert stats.binomtest(hits, 40_000, chance).pvalue > 1e-6
    assert not noise.accepts(torch.zeros(40_000), position_B, 0).any()
    assert noise.accepts(torch.ones(40_000), position_B, 0).all()
    assert noise.accepts(torch.full((40_000,), 7.5), position_B, 3).all()
    assert not noise.accepts(torch.full((40_000,), math.nan), position_B, 3).any()
    half_B = torch.full((40_000,), 0.5)
    first_B = noise.accepts(half_B, position_B, 0)
    for other_B in (noise.accepts(half_B, position_B, 1), noise.accepts(half_B, position_B + 1, 0)):
        assert abs(correlation(first_B.double(), other_B.double())) * 200 < 5.5
    assert torch.equal(first_B, noise.accepts(half_B, position_B, 0))
    picked = torch.tensor([7, 39_999, 0])
    assert torch.equal(first_B[picked], noise_of(*picked.tolist()).accepts(half_B[:3], position_B[:3], 0)), (
        "a row's test is not its own"
    )


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])


ONE_AWAY = ["token", "position", "seed", "seed and position", "position and token", "streams 01", "streams 12"]
TWO_AWAY = ["token 2", "position 2", "seed 2"]


@pytest.mark.parametrize("kind", ONE_AWAY + TWO_AWAY)
def test_neighbours_are_independent(kind: str) -> None:
    """Guards small seeds and neighbours: correlation of 64,000 pairs (false alarm 4e-8; 0.033 is found with 99 %), and
    a 16 x 16 contingency table (1e-6), which sees dependence without correlation."""
    position_BN = torch.arange(41).expand(41, 41)
    grid = torch.stack(
        [noise_of(*range(41))._uniform(stream, position_BN, torch.arange(41)) for stream in STREAMS]
    )  # [stream, seed, position, token]
    base = grid[0, :40, :40, :40]
    other = {
        "token": grid[0, :40, :40, 1:], "position": grid[0, :40, 1:, :40], "seed": grid[0, 1:, :40, :40],
        "seed and position": grid[0, 1:, 1:, :40], "position and token": grid[0, :40, 1:, 1:], "streams 01": grid[1, :40, :40, :40],
    }  # fmt: skip
    if kind == "streams 12":
        base, other[kind] = grid[1], grid[2]
    if kind.endswith(" 2"):  # against the next but one, folded: catches patterns that alternate
        where = {"token": grid[0].movedim(-1, 0), "position": grid[0].movedim(1, 0), "seed": grid[0]}[kind[:-2]]
        base, other[kind] = (where[:-2] - 0.5).abs(), (where[2:] - 0.5).abs()
    x, y = base.flatten(), other[kind].flatten()
    assert abs(correlation(x, y)) * len(x) ** 0.5 < 5.5
    scale = 2 if kind.endswith(" 2") else 1
    cell = (x * scale * 16).long() * 16 + (y * scale * 16).long()
    assert stats.chisquare(torch.bincount(cell, minlength=256).numpy()).pvalue > 1e-6


@pytest.mark.quick("positions")
@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_draws_follow_the_law(across: str) -> None:
    """Gumbel-max against p, rare and impossible tokens: false alarm 1e-6, a variation of 0.015 is found with 99 %."""
    p_V = torch.tensor([0.3, 0.0, 0.001, 0.2, 0.2, 0.099, 0.0, 0.2])
    draws = 80_000
    if across == "positions":
        gumbel_NV = noise_of(1).gumbel(torch.arange(draws)[None], len(p_V))[0]
    else:
        gumbel_NV = noise_of(*range(draws)).gumbel(torch.full((draws, 1), 30), len(p_V))[:, 0]
    count_V = torch.bincount((p_V.log() + gumbel_NV).argmax(-1), minlength=len(p_V))
    possible_V = p_V > 0
    assert not count_V[~possible_V].any()
    expected_V = (p_V.double() / p_V.double().sum() * draws)[possible_V]
    assert stats.chisquare(count_V[possible_V].numpy(), expected_V.numpy()).pvalue > 1e-6
