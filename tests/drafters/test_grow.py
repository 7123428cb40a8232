"""Trees as they are grown: shared noise, ways to expand and keep nodes, against a slow builder."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from core.test_verify import ToyModels, net_of, prefixes, roots_of
from eyas.core.adjustments import Adjustments
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling
from eyas.core.verify import verify
from eyas.drafters._grow import DraftNetSteps, DynamicTree, grow_dynamic, grow_static
from eyas.errors import OptionError

KINDS = (
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, top_k=3, seed=2),
    Sampling(),
    Sampling(temperature=1.4, min_p=0.05, repetition_penalty=1.5, seed=3),
    Sampling(temperature=0.9, top_p=0.9, seed=4),
    Sampling(temperature=0.0, repetition_penalty=1.5),
)


def seeds_of(sampling: Sampling, count: int) -> list[Sampling]:
    return [replace(sampling, seed=s) for s in range(count)]


def in_other_words(net_steps: DraftNetSteps, ids_v: Tensor) -> DraftNetSteps:
    """The same draft with a vocabulary of its own: the tokens `ids_v`, in that order."""
    return replace(net_steps, head=lambda hidden: net_steps.head(hidden)[..., ids_v], draft_ids_v=ids_v)


@pytest.mark.slow
@pytest.mark.parametrize("grown", ["dynamic", "static", "other words"])
@pytest.mark.parametrize("kind", [k for k in KINDS if not k.greedy], ids=str)
def test_a_draft_that_knows_the_law_knows_the_draw(kind: Sampling, grown: str) -> None:
    """Guards shared noise: with q = p the best chain is what is drawn. 32 seeds; near-ties: odds 1e-5."""
    world, start_B, root_B = ToyModels(6, 4, "same", kind), torch.arange(32) % 6 + 1, torch.arange(32) * 3 + 1
    kinds = seeds_of(kind, 32)
    noise = GumbelNoise.from_sampling(kinds)
    roots, net_steps = roots_of(world, start_B, root_B, noise, kinds), net_of(world, start_B)
    if grown == "static":
        draft = grow_static(net_steps, roots, ((0,), (0, 0), (0, 0, 0)), "coupled")
        assert draft.q_BNV is None
    else:
        net_steps = in_other_words(net_steps, torch.tensor([4, 0, 5, 2, 1, 3])) if grown == "other words" else net_steps
        draft = grow_dynamic(net_steps, roots, DynamicTree(nodes=4, depth=3, branch=1))
    verdict = verify(draft, world.scores_IV[prefixes(world, start_B, draft)], root_B, noise)
    assert verdict.length_B.tolist() == [4] * 32
    unaware = grow_dynamic(net_of(world, start_B), roots, DynamicTree(nodes=4, depth=3, branch=1, noise="none"))
    verdict = verify(unaware, world.scores_IV[prefixes(world, start_B, unaware)], root_B, noise)
    assert verdict.length_B.float().mean() < 3.5, "a draft that does not look at the noise must miss"


def slow_grow(
    world: ToyModels, start: int, root: int, kind: Sampling, shape: DynamicTree
) -> tuple[list[int], list[int], list[bool]]:
    """Parents, tokens and candidates of one row's tree, node by node."""
    noise, shared = GumbelNoise.from_sampling([kind]), shape.noise == "coupled"

    def children(prefix: int, depth: int) -> list[tuple[float, float, int]]:
        logits_V = world.q_logits_IV[prefix]
        if shared:
            seen_1V = world.text_I.seen_tokens[start][None].clone()
            at = prefix
            while at != start:
                seen_1V[0, (at - 1) % world.vocab] = True
                at = (at - 1) // world.vocab
            logits_V = apply_sampling(logits_V[None], kind, Adjustments(seen_1V))[0]
        own_V = logits_V.log_softmax(-1).clamp(max=0)
        key_V = own_V + noise.gumbel(torch.tensor([[root + depth + 1]]), world.vocab)[0, 0] if shared else own_V
        chance_V = (
            (key_V / shape.confidence_temperature).log_softmax(-1).clamp(max=0) if shared or kind.greedy else own_V
        )
        best = key_V.topk(min(shape.branch, world.vocab)).indices.tolist()
        return [(float(chance_V[t]), float(own_V[t]), t) for t in best]

    drafted: list[tuple[float, int, int]] = []  # value, token, parent
    beams: list[int] = []
    level, threshold = [(-1, start, 0.0)], math.log(shape.stop) if shape.stop else -math.inf
    for depth in range(shape.depth):
        found = []
        for parent, prefix, value in level:
            for confidence, _, token in children(prefix, depth):
                log_confidence = -math.inf if depth and value <= threshold else confidence
                drafted.append((value + log_confidence, token, parent))
                key = value + log_confidence if shape.expand == "value" else log_confidence
                found.append((key, len(drafted) - 1, prefix * world.vocab + token + 1))
        found.sort(key=lambda x: (-x[0], x[1]))
        level = [(place, prefix, drafted[place][0]) for _, place, prefix in found[: min(shape.branch, world.vocab)]]
        beams += [place for place, _, _ in level]
    ranked = sorted(range(len(drafted)), key=lambda i: (-drafted[i][0], i)) if shape.rerank else beams
    kept = sorted(ranked[: shape.nodes - 1])
    parents = [-1, *(0 if drafted[i][2] < 0 else kept.index(drafted[i][2]) + 1 for i in kept)]
    return parents, [drafted[i][1] for i in kept], [drafted[i][0] > -math.inf for i in kept]


EVERY_WAY = itertools.product(("value", "confidence"), (True, False), (0.0, 0.15), ("coupled", "none"), (1.0, 0.5))
# With an even number of second choices: any four of the options in all combinations, in half of the trees.
HALF = [way for number, way in enumerate(EVERY_WAY) if number.bit_count() % 2 == 0]


@cache
def slow_world() -> ToyModels:
    """The laws that all ways to grow are tried on."""
    return ToyModels(5, 6, seed=7)


@pytest.mark.quick("value-False-0.15-coupled-1.0")
@pytest.mark.parametrize(
    ("expand", "rerank", "stop", "noise", "temperature"),
    [pytest.param(*way, marks=[pytest.mark.slow] if number % 2 else []) for number, way in enumerate(HALF)],
)
def test_against_a_slow_grower(expand: str, rerank: bool, stop: float, noise: str, temperature: float) -> None:
    """Guards every way to grow, rows of all kinds in a batch: nodes, parents, padding. Near-ties: 1e-4, seeded."""
    world, shape = slow_world(), DynamicTree(19 if stop else 11, 4, 3, noise, expand, rerank, stop, temperature)
    start_B, root_B = torch.arange(1, 25) % 30, torch.arange(24) * 2 + 1
    kinds = [replace(KINDS[b % len(KINDS)], seed=b) for b in range(24)]
    roots = roots_of(world, start_B, root_B, GumbelNoise.from_sampling(kinds), kinds)
    draft = grow_dynamic(net_of(world, start_B), roots, shape)
    padded = 0
    for b, kind in enumerate(kinds):
        parents, tokens, candidates = slow_grow(world, int(start_B[b]), int(root_B[b]), kind, shape)
        assert draft.tree.acceptable_BN[b, 1:].tolist() == candidates
        # what padding stands for is nobody's matter
        for n in [n for n, candidate in enumerate(candidates, start=1) if candidate]:
            assert int(draft.tree.parents_BN[b, n]) == parents[n]
            assert int(draft.tokens_BN[b, n]) == tokens[n - 1]
        padded += candidates.count(False)
    assert padded or not stop, "the early stop must stop something, or this test proves little"


@pytest.mark.slow
def test_scores_are_the_processed_law() -> None:
    """Guards `log_q_BN`: log q of the row's own Sampling, whatever the children were ranked by."""
    kind = Sampling(temperature=0.7, top_k=4)
    world, start_B, root_B = ToyModels(6, 4, sampling=kind), torch.arange(1, 7), torch.arange(6)
    kinds = seeds_of(kind, 6)
    roots = roots_of(world, start_B, root_B, GumbelNoise.from_sampling(kinds), kinds)
    draft = grow_dynamic(net_of(world, start_B), roots, DynamicTree(15, 3, 3))
    prefix_BN = prefixes(world, start_B, draft)
    q_BV = world.q_IV[prefix_BN.gather(1, draft.tree.parents_BN.clamp(min=0))].log()
    expected_BN = q_BV.gather(2, draft.tokens_BN[..., None])[..., 0].float()
    expected_BN[:, 0] = 0
    torch.testing.assert_close(draft.log_q_BN, expected_BN, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("options", "words"), [
    ({"tree.noise": "cuopled"}, "coupled"), ({"tree.expand": "values"}, "value"), ({"tree.stop": 1.0}, "below 1"),
    ({"tree.stop": -0.1}, "0 or more"), ({"tree.rerank": 1}, "true or false"), ({"tree.confidence_temperature": 0}, "0.001 or more"),
    ({"tree.confidence_temperature": float("nan")}, "0.001 or more"),
])  # fmt: skip
def test_bad_options(options: dict[str, object], words: str) -> None:
    """Guards the one clear line."""
    with pytest.raises(OptionError, match=words):
        build_options(DynamicTree, {name.removeprefix("tree."): value for name, value in options.items()})
