"""Verification is exact: by enumeration of every draw, through the shipped code.

The law of the first tokens, summed over all that chance can do in cycles that follow each other, must be the target's.
Nothing is sampled except in tests that say so; the only error is float32's. Targets and drafters are ToyModels: random
laws after every prefix. Prefixes are numbered like a heap: 0 is empty, i followed by token t is i * V + t + 1.
B rows, N nodes, P nodes on the longest path, V vocabulary, I prefixes, W starting prefixes, D depth of the tree."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import kernels
from eyas.core.adjustments import Adjustments
from eyas.core.ops import REFERENCE
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling
from eyas.core.tree import Choices, Draft, Tree, Verdict
from eyas.core.verify import verify
from eyas.drafters import CycleInput
from eyas.drafters._grow import DraftNetSteps, grow_static
from eyas.runners.cpu_ops import CpuCycleOps

TOLERANCE = 1e-6
ONE = Sampling(temperature=1.0)


class KernelsBesideScripts(CpuCycleOps):
    """The kernels' operations; scripted noise, which they do not know, is drawn with by the reference."""

    def draw(
        self, scores_BNV: Tensor, tree: Tree, position_B: Tensor, noise: GumbelNoise
    ) -> tuple[Tensor, Tensor | None]:
        draw = REFERENCE.draw if isinstance(noise, Script) else super().draw
        return draw(scores_BNV, tree, position_B, noise)


@pytest.fixture(autouse=True, params=["kernels", pytest.param("torch", marks=pytest.mark.slow)])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for the reference's operations and for the kernels'."""
    if request.param == "kernels":
        if not kernels.available():
            pytest.skip(f"no kernels here: {kernels.why_not()}")
        monkeypatch.setitem(globals(), "verify", partial(verify, ops=KernelsBesideScripts()))


def texts(I: int, vocab: int, sampling: Sampling) -> Adjustments:  # noqa: E741
    """Adjustments of every prefix, counted by hand; with a logit bias token 2 ends a text, after two tokens or more."""
    seen_IV, counts_IV, length_I = torch.zeros(I, vocab) > 0, torch.zeros(I, vocab), torch.zeros(I, dtype=torch.long)
    seen_IV[0, 0] = True  # the first root is token 0, the prompt's
    for child in range(1, I):
        parent, token = divmod(child - 1, vocab)
        seen_IV[child], counts_IV[child], length_I[child] = seen_IV[parent], counts_IV[parent], length_I[parent] + 1
        seen_IV[child, token] = True
        counts_IV[child, token] += 1
    if not sampling.logit_bias:
        return Adjustments(seen_IV, counts_IV)
    bias_V = torch.tensor([dict(sampling.logit_bias).get(token, 0.0) for token in range(vocab)])
    return Adjustments(
        seen_IV, counts_IV, bias_V.expand(I, vocab), (torch.arange(vocab) == 2).expand(I, vocab), 2 - length_I
    )


class ToyModels:
    """Laws of a target and of a drafter after every prefix of up to `longest` tokens, both processed by `sampling`."""

    def __init__(self, vocab: int, longest: int, q: str = "near", sampling: Sampling = ONE, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.sampling = vocab, sampling
        self.first = [(vocab**k - 1) // (vocab - 1) for k in range(longest + 2)]  # the first prefix of each length
        I = self.first[-1]  # noqa: E741
        self.p_logits_IV = torch.randn(I, vocab, generator=generator) * 1.5
        other_IV = torch.randn(I, vocab, generator=generator)
        self.q_logits_IV = {
            "near": self.p_logits_IV + 0.7 * other_IV,
            "far": 2.5 * other_IV,
            "same": self.p_logits_IV.clone(),
            "flat": torch.zeros(I, vocab),
            "opposite": -2 * self.p_logits_IV,
            "point": torch.full((I, vocab), -math.inf).scatter(1, other_IV.argmax(-1, keepdim=True), 0.0),
            "two": other_IV.masked_fill(other_IV < other_IV.topk(2).values[:, -1:], -math.inf),
        }[q]
        self.order_IV = torch.rand(I, vocab, generator=generator).argsort(
            -1
        )  # what a deterministic tree proposes, best first
        self.text_I = texts(I, vocab, sampling)
        self.scores_IV = apply_sampling(self.p_logits_IV, sampling, self.text_I)
        self.p_IV = self.scores_IV.double().softmax(-1)
        self.q_scores_IV = apply_sampling(self.q_logits_IV, sampling, self.text_I)
        self.q_IV = self.q_scores_IV.double().softmax(-1)

    def child(self, prefix: Tensor, token: Tensor) -> Tensor:
        return prefix * self.vocab + token + 1

    def of_length(self, tokens: int) -> Tensor:
        return torch.arange(self.first[tokens], self.first[tokens + 1])

    def true_law(self, tokens: int) -> Tensor:
        """float64 [V ** tokens]: the law of the first tokens by plain sampling."""
        mass = torch.ones(1, dtype=torch.float64)
        for k in range(tokens):
            mass = (mass[:, None] * self.p_IV[self.of_length(k)]).flatten()
        return mass

    def read(self, prefix_B: Tensor, verdict: Verdict) -> Tensor:
        """The prefix of each row after what the verdict emits."""
        for d in range(1, verdict.tokens_BP.shape[1]):
            prefix_B = torch.where(verdict.length_B > d, self.child(prefix_B, verdict.tokens_BP[:, d]), prefix_B)
        return self.child(prefix_B, verdict.bonus_B)


# starts [W] -> for every event: start, end (prefixes), weight
Cycle = Callable[[ToyModels, Tensor], tuple[Tensor, Tensor, Tensor]]


def law_of(world: ToyModels, cycle: Cycle, tokens: int, lengths: int) -> Tensor:
    """float64 [V ** tokens]: the law of the first tokens: cycles up to `lengths` tokens, then plain sampling."""
    mass_I = torch.zeros(world.first[tokens + 1], dtype=torch.float64)
    mass_I[0] = 1.0
    for length in range(tokens):
        start_E, end_E, weight_E = (cycle if length < lengths else plain_cycle)(world, world.of_length(length))
        while (late_E := end_E >= len(mass_I)).any():
            end_E = torch.where(late_E, (end_E - 1) // world.vocab, end_E)
        mass_I.index_add_(0, end_E, mass_I[start_E] * weight_E)
    return mass_I[world.first[tokens] :]


def plain_cycle(world: ToyModels, start_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token from p."""
    end_WV = world.child(start_W[:, None], torch.arange(world.vocab))
    return start_W[:, None].expand_as(end_WV).flatten(), end_WV.flatten(), world.p_IV[start_W].flatten()


def check_exact(world: ToyModels, cycle: Cycle, tokens: int, lengths: int) -> float:
    """Asserts the target's law; returns the largest deviation. tokens: depth + `lengths`, for whole cycles."""
    mine, true = law_of(world, cycle, tokens, lengths), world.true_law(tokens)
    assert abs(float(mine.sum()) - 1) < TOLERANCE, (
        f"the events weigh {float(mine.sum())}, not 1: the enumeration does not fit the code"
    )
    deviation = float((mine - true).abs().max())
    assert deviation < TOLERANCE, f"the law of the first {tokens} tokens is off by {deviation:.2e}"
    return deviation


class Recorded(Tensor):
    """Noise that keeps what it is added to: the log of the law from which argmax(log law + noise) draws."""

    added: list[Tensor]

    @classmethod
    def of(cls, value: Tensor, added: list[Tensor]) -> "Recorded":
        noise = value.as_subclass(cls)
        noise.added = added
        return noise

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next((a for a in args if isinstance(a, Recorded)), None)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if mine is None or not isinstance(result, Recorded):
            return result
        if func in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__):
            mine.added.append(next(a for a in args[:2] if a is not mine).as_subclass(Tensor))
            return result.as_subclass(Tensor)
        result.added = mine.added
        return result


class Script(GumbelNoise):
    """Noise that is written down beforehand, and that checks where it is asked for.

    target_BPV: noise after depth 0, 1, ...; draft_BNV: the draft's at each node; answer_BC: of accept tests, by call.
    `weight_B` becomes the chance of those: each (position, sibling) has one uniform number, whose interval narrows."""

    def __init__(
        self,
        root_B: Tensor,
        depth: int,
        target_BPV: Tensor,
        answer_BC: Tensor | None = None,
        draft_BNV: Tensor | None = None,
        siblings: int = 1,
    ) -> None:
        B = len(root_B)
        super().__init__(torch.zeros(B, dtype=torch.long), torch.zeros(B, dtype=torch.bool))
        self.root_B, self.depth, self.siblings = root_B, depth, siblings
        self.target_BPV, self.answer_BC, self.draft_BNV = target_BPV, answer_BC, draft_BNV
        self.low_BK = torch.zeros(B, (depth + 1) * siblings, dtype=torch.float64)
        self.high_BK = torch.ones_like(self.low_BK)
        self.weight_B = torch.ones(B, dtype=torch.float64)
        self.calls = 0
        self.added: list[Tensor] = []

    def gumbel(self, position_BN: Tensor, vocab: int, stream: int = GumbelNoise.TARGET) -> Tensor:
        assert stream in (GumbelNoise.TARGET, GumbelNoise.DRAFT)
        if stream == GumbelNoise.DRAFT:
            table_BXV, index_BN = self.draft_BNV, position_BN - self.root_B[:, None] * self.draft_BNV.shape[1]
        else:
            table_BXV, index_BN = self.target_BPV, position_BN - self.root_B[:, None] - 1
        assert ((index_BN >= 0) & (index_BN < table_BXV.shape[1])).all(), "noise of a position that is not the tree's"
        noise_BNV = table_BXV.gather(1, index_BN[..., None].expand(-1, -1, vocab))
        return Recorded.of(noise_BNV, self.added)

    def accepts(self, chance_B: Tensor, position_B: Tensor, sibling: int, stream: int = GumbelNoise.ACCEPT) -> Tensor:
        if stream == GumbelNoise.BLOCK:  # keyed by the root and the length of the prefix
            position_B, sibling = position_B + sibling, 0
        depth_B = position_B - self.root_B - 1
        assert ((depth_B >= 0) & (depth_B <= self.depth)).all(), "an accept test at a position that is not the tree's"
        key_B1 = (depth_B * self.siblings + sibling)[:, None]
        low_B, high_B = self.low_BK.gather(1, key_B1)[:, 0], self.high_BK.gather(1, key_B1)[:, 0]
        cut_B = chance_B.double().nan_to_num(0.0).clamp(0, 1).clamp(low_B, high_B)
        assert sibling < self.siblings, "more accept tests than a node has children"
        assert self.calls < self.answer_BC.shape[1], "more accept tests than the tree has levels and siblings"
        yes_B = self.answer_BC[:, self.calls]
        share_B = (cut_B - low_B) / (high_B - low_B)
        self.weight_B = self.weight_B * torch.where(yes_B, share_B, 1 - share_B).nan_to_num(0.0)
        self.low_BK.scatter_(1, key_B1, torch.where(yes_B, low_B, cut_B)[:, None])
        self.high_BK.scatter_(1, key_B1, torch.where(yes_B, cut_B, high_B)[:, None])
        self.calls += 1
        return yes_B


def grid(*axes: Tensor) -> list[Tensor]:
    """Every combination: one column per axis, the first axis slowest."""
    index = torch.cartesian_prod(*(torch.arange(len(a)) for a in axes)).reshape(-1, len(axes))
    return [a[index[:, i]] for i, a in enumerate(axes)]


def depth_of(parents: Sequence[int]) -> int:
    return max(len(_line(parents, n)) for n in range(len(parents))) - 1


def _line(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*_line(parents, parents[node]), node]


def ranks(parents: Sequence[int]) -> list[int]:
    """Each node's place among its parent's children."""
    return [list(parents[:n]).count(parent) for n, parent in enumerate(parents)]


# --- deterministic trees ----------------------------------------------------------------------------
# name -> (parents, nodes that are no candidates); a batch holds all trees of a name
CHOSEN: dict[str, list[tuple[list[int], list[int]]]] = {
    "root": [([-1], [])],
    "chain": [([-1, 0, 1, 2], [])],
    "wide": [([-1, 0, 0, 0], [])],
    "binary": [([-1, 0, 0, 1, 1, 2, 2], [])],
    "not by level": [([-1, 0, 1, 2, 0, 4, 4], [])],
    "ragged": [([-1, 0, 0, 1, 1, 3], []), ([-1, 0, 1, 1, 2, 0], []), ([-1, 0, 0, 0, 3, 4], [])],
    "scouts": [([-1, 0, 0, 0, 1, 2, 2, 5], [2]), ([-1, 0, 0, 1, 1, 4, 0, 3], [3, 6, 7]), ([-1, 0, 0, 1, 1, 1, 2, 6], [1])],
}  # fmt: skip


def chosen_rows(
    world: ToyModels, start_B: Tensor, parents: list[int], scouts: list[int], depth: int
) -> tuple[Draft, Tensor]:
    """Each row's tree, whose tokens depend on the prefix, and nodes' prefixes; a scout has a sibling's token."""
    B, N = len(start_B), len(parents)
    tokens_BN, prefix_BN = torch.zeros(B, N, dtype=torch.long), start_B[:, None].repeat(1, N)
    rank = ranks(parents)
    for n in range(1, N):
        tokens_BN[:, n] = world.order_IV[prefix_BN[:, parents[n]], max(0, rank[n] - (n in scouts))]
        prefix_BN[:, n] = world.child(prefix_BN[:, parents[n]], tokens_BN[:, n])
    acceptable_BN = torch.tensor([[n not in scouts for n in range(N)]]).expand(B, N)
    return Draft(Tree.build(torch.tensor([parents]).repeat(B, 1), depth, acceptable_BN), tokens_BN), prefix_BN


def joined(drafts: list[Draft]) -> Draft:
    """One batch of several, all with one number of nodes and one bound of the depth."""
    parents_BN, acceptable_BN = (
        torch.cat([getattr(d.tree, x) for d in drafts]) for x in ("parents_BN", "acceptable_BN")
    )
    tree = Tree.build(parents_BN, drafts[0].tree.max_depth, acceptable_BN)
    q = [d.q_BNV for d in drafts if d.q_BNV is not None]
    return Draft(tree, torch.cat([d.tokens_BN for d in drafts]), None, torch.cat(q) if q else None)


def walk(world: ToyModels, draft: Draft, prefix_BN: Tensor, draw_BP: Tensor, tight: bool) -> tuple[Tensor, Tensor]:
    """Follow the draws from the root, in the test's own words: their weight, and noise [B, P, V] that causes them.

    At depth d token draw_BP[:, d] is drawn; behind the end of a path all draws but 0 weigh 0. tight: the noise lifts
    the drawn token just above the others *at that node*; with the law of another node it draws something else."""
    B, P = draw_BP.shape
    rows, tree = torch.arange(B), draft.tree
    usable_BN = ((tree.acceptable_BN[:, None] | ~tree.mask_BNN).all(-1)) & (tree.parents_BN >= 0)
    node_B, over_B = torch.zeros(B, dtype=torch.long), torch.zeros(B, dtype=torch.bool)
    weight_B, noise = torch.ones(B, dtype=torch.float64), []
    for d in range(P):
        p_BV, draw_B = world.p_IV[prefix_BN[rows, node_B]], draw_BP[:, d]
        one_BV = torch.nn.functional.one_hot(draw_B, world.vocab)
        level_BV = torch.where(p_BV > 0, -p_BV.log(), 0.0) if tight else torch.zeros_like(p_BV)
        noise.append(level_BV + one_BV * (0.01 if tight else 1e4))
        weight_B = weight_B * torch.where(over_B, (draw_B == 0).double(), p_BV[rows, draw_B])
        match_BN = (tree.parents_BN == node_B[:, None]) & (draft.tokens_BN == draw_B[:, None]) & usable_BN
        over_B = over_B | ~match_BN.any(-1)
        node_B = torch.where(over_B, node_B, match_BN.int().argmax(-1))
    return weight_B, torch.stack(noise, 1).float()


def chosen_cycle(name: str, tight: bool) -> Cycle:
    """A cycle with deterministic trees: every draw at every node that is reached."""

    def cycle(world: ToyModels, start_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shapes = CHOSEN[name]
        depth = max(depth_of(parents) for parents, _ in shapes)
        draw_XP = torch.cartesian_prod(*[torch.arange(world.vocab)] * (depth + 1)).reshape(-1, depth + 1)
        drafts, prefixes, starts, draws = [], [], [], []
        for s, (parents, scouts) in enumerate(shapes):
            start_B, index_B = grid(start_W[start_W % len(shapes) == s], torch.arange(len(draw_XP)))
            draft, prefix_BN = chosen_rows(world, start_B, parents, scouts, depth)
            drafts.append(draft)
            prefixes.append(prefix_BN)
            starts.append(start_B)
            draws.append(draw_XP[index_B])
        draft, prefix_BN, start_B, draw_BP = joined(drafts), torch.cat(prefixes), torch.cat(starts), torch.cat(draws)
        weight_B, noise_BPV = walk(world, draft, prefix_BN, draw_BP, tight)
        root_B = 3 + torch.arange(len(start_B)) % 7
        verdict = verify(draft, world.scores_IV[prefix_BN], root_B, Script(root_B, depth, noise_BPV))
        return start_B, world.read(start_B, verdict), weight_B

    return cycle


SAMPLINGS = {
    "T=1": ONE,
    "T=0.6": Sampling(temperature=0.6),
    "T=1.5,k=2": Sampling(temperature=1.5, top_k=2),
    "all": Sampling(temperature=0.9, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
    "counts": Sampling(temperature=0.8, presence_penalty=0.6, frequency_penalty=0.9, logit_bias=((1, 1.5),)),
}


def chosen_cases() -> list[Any]:
    """Every tree with every sampling, tight; forced, each of both once."""
    names, samplings = list(CHOSEN), list(SAMPLINGS)
    tight = [pytest.param(n, s, True, id=f"{n}-{s}-tight") for n in names for s in samplings]
    forced = [(n, samplings[k % len(samplings)]) for k, n in enumerate(names)]
    return [*tight, *(pytest.param(n, s, False, id=f"{n}-{s}-forced", marks=pytest.mark.slow) for n, s in forced)]


@pytest.mark.cover
@pytest.mark.quick("kernels-binary-T=1-tight", "kernels-ragged-all-tight")
@pytest.mark.parametrize(("name", "sampling", "tight"), chosen_cases())
def test_chosen_trees_are_exact(name: str, sampling: str, tight: bool) -> None:
    """Guards deterministic trees, scouts, mixed shapes. tight: a bonus or child of another node shows."""
    depth = max(depth_of(parents) for parents, _ in CHOSEN[name])
    check_exact(ToyModels(4, depth + 3, sampling=SAMPLINGS[sampling]), chosen_cycle(name, tight), depth + 2, 2)


# --- sampled trees -----------------------------------------------------------------------------------------------------------------------
DRAWN: dict[str, list[list[int]]] = {
    "chain": [[-1, 0, 1, 2]],
    "pair": [[-1, 0, 0]],
    "three": [[-1, 0, 0, 0]],
    "binary": [[-1, 0, 0, 1, 1, 2, 2]],
    "ragged": [[-1, 0, 0, 1, 1, 3]],
    "mixed": [[-1, 0, 0, 1, 1], [-1, 0, 0, 1, 2], [-1, 0, 0, 2, 2]],
}


def children_of(parents: list[int]) -> dict[int, list[int]]:
    """Inner node -> its children, in node order."""
    return {m: [n for n, p in enumerate(parents) if p == m] for m in range(len(parents)) if m in parents}


def drawn_rows(world: ToyModels, start_W: Tensor, parents: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every draft without replacement: start_B, tokens_BN, prefix_BN, chance weight_B, all tokens' order order_BNV."""
    V, N, inner = world.vocab, len(parents), children_of(parents)
    orders = [
        torch.tensor(
            [[*x, *(v for v in range(V) if v not in x)] for x in itertools.permutations(range(V), len(inner[m]))]
        )
        for m in inner
    ]
    start_B, *index = grid(start_W, *(torch.arange(len(order)) for order in orders))
    B = len(start_B)
    tokens_BN, prefix_BN = torch.zeros(B, N, dtype=torch.long), start_B[:, None].repeat(1, N)
    order_BNV, weight_B = torch.arange(V).repeat(B, N, 1), torch.ones(B, dtype=torch.float64)
    for (m, kids), order, index_B in zip(inner.items(), orders, index, strict=True):
        order_BNV[:, m] = order[index_B]
        q_BV = world.q_IV[prefix_BN[:, m]].clone()
        for rank, n in enumerate(kids):
            tokens_BN[:, n] = token_B = order_BNV[:, m, rank]
            prefix_BN[:, n] = world.child(prefix_BN[:, m], token_B)
            rest_B, own_B = q_BV.sum(-1), q_BV.gather(1, token_B[:, None])[:, 0]
            # nothing left: whatever token
            weight_B = weight_B * torch.where(rest_B > 0, own_B / rest_B, 1.0 / (V - rank))
            q_BV.scatter_(1, token_B[:, None], 0.0)
    keep_B = weight_B > 0
    return start_B[keep_B], tokens_BN[keep_B], prefix_BN[keep_B], weight_B[keep_B], order_BNV[keep_B]


def given_drafts(
    world: ToyModels, start_W: Tensor, parents: list[int], depth: int
) -> tuple[Tensor, Draft, Tensor, Tensor]:
    """Drafts written down by the test: start_B, the draft, prefix_BN, weight_B."""
    start_B, tokens_BN, prefix_BN, weight_B, _ = drawn_rows(world, start_W, parents)
    inner_N1 = torch.tensor([n in parents for n in range(len(parents))])[:, None]
    q_BNV = (world.q_IV[prefix_BN] * inner_N1).float()
    tree = Tree.build(torch.tensor([parents]).repeat(len(start_B), 1), depth)
    return start_B, Draft(tree, tokens_BN, None, q_BNV), prefix_BN, weight_B


def choices_of(parents: list[int]) -> Choices:
    """The static tree as paths of ranks; only for trees whose nodes stand in the order of paths."""
    rank = ranks(parents)
    return tuple(tuple(rank[m] for m in _line(parents, n)[1:]) for n in range(1, len(parents)))


def net_of(world: ToyModels, start_B: Tensor) -> DraftNetSteps:
    """A draft net whose feature of a node is the number of its prefix."""

    def expand(tokens_BQ: Tensor, features_BQD: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
        return world.child(features_BQD[..., 0].long(), tokens_BQ)[..., None].double()

    return DraftNetSteps(
        lambda: start_B[:, None].double(), lambda hidden: world.q_logits_IV[hidden[..., 0].long()], expand
    )


def roots_of(
    world: ToyModels, start_B: Tensor, root_B: Tensor, noise: GumbelNoise, sampling: Sequence[Sampling] | None = None
) -> CycleInput:
    """Makes the input that the loop gives to a drafter."""
    own = tuple(sampling or [world.sampling] * len(start_B))
    adjustments = world.text_I[start_B] if any(s.has_adjustments for s in own) else None
    tokens_B = torch.where(start_B > 0, (start_B - 1) % world.vocab, 0)
    return CycleInput(
        tokens_B, root_B, torch.ones_like(start_B, dtype=torch.bool), own, noise, int(root_B.max()), adjustments
    )


def prefixes(world: ToyModels, start_B: Tensor, draft: Draft) -> Tensor:
    """The prefix of each node."""
    prefix_BN = start_B[:, None].repeat(1, draft.tree.nodes)
    for n in range(1, draft.tree.nodes):
        above_B = prefix_BN.gather(1, draft.tree.parents_BN[:, n : n + 1])[:, 0]
        prefix_BN[:, n] = world.child(above_B, draft.tokens_BN[:, n])
    return torch.where(prefix_BN < len(world.p_IV), prefix_BN, 0)


def grown_drafts(
    world: ToyModels, start_W: Tensor, parents: list[int], depth: int
) -> tuple[Tensor, Draft, Tensor, Tensor]:
    """Drafts grown by the shipped `grow_static`, whose noise brings the tokens into every possible order."""
    start_B, _, _, weight_B, order_BNV = drawn_rows(world, start_W, parents)
    B, N = order_BNV.shape[:2]
    root_B = 2 + torch.arange(B) % 5
    force_BNV = torch.zeros(B, N, world.vocab).scatter(
        2, order_BNV, torch.arange(world.vocab, 0, -1).float().mul(1e4).expand(B, N, -1)
    )
    noise = Script(root_B, depth, torch.zeros(B, depth + 1, world.vocab), draft_BNV=force_BNV)
    draft = grow_static(net_of(world, start_B), roots_of(world, start_B, root_B, noise), choices_of(parents))
    return start_B, draft, prefixes(world, start_B, draft), weight_B


Cut = Callable[[Tensor, Draft], Draft]  # (start_B, the draft) -> with fewer candidates


def drawn_cycle(name: str, grown: bool = False, block: bool = False, cut: Cut | None = None) -> Cycle:
    """A cycle with sampled trees, or blocks: every draft, every answer of the accept tests, every bonus."""

    def cycle(world: ToyModels, start_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shapes = DRAWN[name]
        depth, siblings = max(map(depth_of, shapes)), max(1 + max(ranks(parents)) for parents in shapes)
        made = [
            (grown_drafts if grown else given_drafts)(world, start_W[start_W % len(shapes) == s], parents, depth)
            for s, parents in enumerate(shapes)
            if (start_W % len(shapes) == s).any()
        ]
        draft = joined([m[1] for m in made])
        start_B, prefix_BN, weight_B = (torch.cat([m[i] for m in made]) for i in (0, 2, 3))
        answers = (depth + 1) * siblings
        answer_XC = torch.cartesian_prod(*[torch.tensor([False, True])] * answers).reshape(-1, answers)
        index_B, answer_B = grid(torch.arange(len(start_B)), torch.arange(len(answer_XC)))
        start_B, prefix_BN, weight_B = start_B[index_B], prefix_BN[index_B], weight_B[index_B]
        tree = Tree.build(draft.tree.parents_BN[index_B], depth, draft.tree.acceptable_BN[index_B])
        root_B = 2 + torch.arange(len(start_B)) % 5
        noise = Script(
            root_B, depth, torch.zeros(len(start_B), depth + 1, world.vocab), answer_XC[answer_B], None, siblings
        )
        drafted = Draft(tree, draft.tokens_BN[index_B], None, draft.q_BNV[index_B], block)
        drafted = drafted if cut is None else cut(start_B, drafted)
        verdict = verify(drafted, world.scores_IV[prefix_BN], root_B, noise)
        weight_B = weight_B * noise.weight_B * 0.5 ** (answers - noise.calls)
        # the law from which the bonus is drawn, up to a factor that argmax does not see
        bonus_BV = noise.added[-1].double().exp()
        assert bonus_BV.shape == (len(start_B), world.vocab)
        live_B = weight_B > 0
        bonus_BV = bonus_BV / bonus_BV.sum(-1, keepdim=True)
        before_B = (world.read(start_B, verdict) - 1) // world.vocab  # without the bonus
        every_BV = world.child(before_B[:, None], torch.arange(world.vocab))
        events = live_B[:, None] & (bonus_BV > 0)
        return start_B[:, None].expand_as(every_BV)[events], every_BV[events], (weight_B[:, None] * bonus_BV)[events]

    return cycle


@pytest.mark.cover("torch-three-two")
@pytest.mark.quick("kernels-three-near", "kernels-mixed-near", "kernels-three-far")
@pytest.mark.parametrize("q", ["near", "far", "same", "flat", "opposite", "point", "two"])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_trees_are_exact(name: str, q: str) -> None:
    """Guards recursive rejection: residuals (mass 0 too), q without the refused, fewer tokens than siblings."""
    depth, vocab = max(map(depth_of, DRAWN[name])), 4 if name in ("pair", "three", "chain") else 3
    check_exact(ToyModels(vocab, depth + 3, q), drawn_cycle(name), depth + 2, 2)


@pytest.mark.cover
@pytest.mark.quick("kernels-binary-T=1.5,k=2-3-2", "kernels-binary-all-3-2")
@pytest.mark.parametrize(("name", "sampling", "vocab", "lengths"), [
    ("binary", "T=1", 3, 2), ("chain", "T=0.6", 4, 1), ("ragged", "T=0.6", 3, 2), ("three", "T=1.5,k=2", 4, 3),
    ("binary", "T=1.5,k=2", 3, 2), ("pair", "all", 5, 3), ("binary", "all", 3, 2),
    ("binary", "counts", 3, 2), ("three", "counts", 4, 3), ("chain", "counts", 4, 1),
])  # fmt: skip
def test_static_trees_as_grown_are_exact(name: str, sampling: str, vocab: int, lengths: int) -> None:
    """Guards `grow_static` to `verify`: siblings out of draw order, a q that is another law, dropped tokens."""
    tokens = max(map(depth_of, DRAWN[name])) + lengths
    check_exact(
        ToyModels(vocab, tokens + 2, sampling=SAMPLINGS[sampling]), drawn_cycle(name, grown=True), tokens, lengths
    )


@pytest.mark.parametrize("gap", [0.0, 80.0, 95.0, 101.0])
def test_steep_drafts_are_exact(gap: float) -> None:
    """Guards low temperatures: all tokens but one are rarer than float32 says, and q is still their law."""
    world, parents = ToyModels(4, 4), DRAWN["three"][0]
    level_IV = torch.tensor([0.0, -gap, -gap - 0.7, -gap - 1.5]).expand_as(world.q_logits_IV)
    world.q_logits_IV = world.q_logits_IV.scatter(1, world.order_IV, level_IV)
    start_B = torch.zeros(1, dtype=torch.long)
    noise = Script(start_B + 2, 1, torch.zeros(1, 2, 4), draft_BNV=torch.zeros(1, len(parents), 4))
    grow_static(net_of(world, start_B), roots_of(world, start_B, start_B + 2, noise), choices_of(parents))
    world.q_IV[0] = noise.added[-1][0, 0].double().softmax(-1)
    check_exact(world, drawn_cycle("three", grown=True), 2, 1)


# --- blocks ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("kernels-opposite")
@pytest.mark.parametrize("q", ["near", "far", "same", "flat", "opposite", "point", "two"])
def test_blocks_are_exact(q: str) -> None:
    """Guards block verification: weights, residuals, which prefix, bonus; two blocks one after the other."""
    check_exact(ToyModels(3, 6, q), drawn_cycle("chain", block=True), 5, 2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_blocks_as_grown_are_exact(sampling: str) -> None:
    """Guards a block's way through `grow_static`, with the row's own Sampling."""
    check_exact(ToyModels(3, 5, sampling=SAMPLINGS[sampling]), drawn_cycle("chain", grown=True, block=True), 4, 1)


def accepted_by(world: ToyModels, block: bool) -> float:
    """Expected number of accepted draft tokens of a chain of two, by enumeration."""
    start_B, draft, prefix_BN, weight_B = given_drafts(world, torch.zeros(1, dtype=torch.long), [-1, 0, 1], 2)
    answer_XC = torch.cartesian_prod(*[torch.tensor([False, True])] * 3)
    index_B, answer_B = grid(torch.arange(len(start_B)), torch.arange(len(answer_XC)))
    drafted = Draft(Tree.chain(len(index_B), 3), draft.tokens_BN[index_B], None, draft.q_BNV[index_B], block)
    noise = Script(start_B[index_B], 2, torch.zeros(len(index_B), 3, world.vocab), answer_XC[answer_B])
    verdict = verify(drafted, world.scores_IV[prefix_BN[index_B]], start_B[index_B], noise)
    return float((weight_B[index_B] * noise.weight_B * 0.5 ** (3 - noise.calls) * (verdict.length_B - 1)).sum())


def test_blocks_accept_more() -> None:
    """The paper's example (section 2) gives 11/9 tokens instead of 10/9, and no world gives fewer."""
    world = ToyModels(2, 3)
    world.p_logits_IV, world.q_logits_IV = (
        torch.tensor(probs).log().expand(len(world.p_IV), 2) for probs in ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    )
    world.scores_IV = world.p_logits_IV
    world.p_IV, world.q_IV = world.p_logits_IV.double().softmax(-1), world.q_logits_IV.double().softmax(-1)
    assert accepted_by(world, False) == pytest.approx(10 / 9, abs=1e-6)
    assert accepted_by(world, True) == pytest.approx(11 / 9, abs=1e-6)
    for q in ("near", "far", "same", "flat", "opposite", "two"):
        for seed in range(4):
            world = ToyModels(3, 3, q, seed=seed)
            assert accepted_by(world, True) > accepted_by(world, False) - 1e-6


def slow_block(tokens: list[int], p_NV: Tensor, q_NV: Tensor, root: int, noise: GumbelNoise) -> tuple[int, int]:
    """(accepted draft tokens, bonus) of one row, in float64, from the longest prefix down."""
    weights = [1.0]
    for n, token in enumerate(tokens[1:]):
        weights.append(min(1.0, weights[-1] * float(p_NV[n, token] / q_NV[n, token])))
    left_NV = (torch.tensor(weights, dtype=torch.float64)[:, None] * p_NV - q_NV).clamp(min=0)
    end = len(tokens) - 1
    while end:
        mass = left_NV[end].sum()
        if noise.accepts((mass / (mass + 1 - weights[end]))[None], torch.tensor([root]), end, noise.BLOCK)[0]:
            break
        end -= 1
    return end, int(
        (left_NV[end].log() + noise.gumbel(torch.tensor([[root + end + 1]]), p_NV.shape[1])[0, 0].double()).argmax()
    )


@pytest.mark.slow
def test_a_block_against_a_slow_one() -> None:
    """Guards positions, uniform numbers and rows of blocks with the real noise. Odds of a near-tie: 1e-4, seeded."""
    world, generator = ToyModels(5, 7), torch.Generator().manual_seed(4)
    kinds = [Sampling(temperature=1.0, seed=s) for s in range(300)]
    start_B, root_B = torch.randint(1, 6, (300,), generator=generator), torch.randint(50, (300,), generator=generator)
    noise = GumbelNoise.from_sampling(kinds)
    roots = roots_of(world, start_B, root_B, noise, kinds)
    draft = grow_static(net_of(world, start_B), roots, choices_of([-1, 0, 1, 2, 3]))
    prefix_BN = prefixes(world, start_B, draft)
    block = Draft(draft.tree, draft.tokens_BN, None, draft.q_BNV, True)
    verdict = verify(block, world.scores_IV[prefix_BN], root_B, noise)
    found = []
    for b in range(300):
        own, q_NV = GumbelNoise.from_sampling([kinds[b]]), draft.q_BNV[b].double()
        found.append(slow_block(draft.tokens_BN[b].tolist(), world.p_IV[prefix_BN[b]], q_NV, int(root_B[b]), own))
    assert list(zip((verdict.length_B - 1).tolist(), verdict.bonus_B.tolist(), strict=True)) == found
    assert len({length for length, _ in found}) == 5


def test_a_block_ends_at_what_is_no_candidate() -> None:
    """Guards shorter chains: nothing beyond is accepted, the bonus is that of a short chain; greedy rows are chosen."""
    world, kinds = ToyModels(4, 5), [ONE, ONE, Sampling()]
    start_B, root_B = torch.tensor([1, 1, 2]), torch.tensor([5, 5, 6])
    noise = GumbelNoise.from_sampling(kinds)
    roots = roots_of(world, start_B, root_B, noise, kinds)
    draft = grow_static(net_of(world, start_B), roots, choices_of([-1, 0, 1, 2]))
    scores_BNV, tokens_BN, q_BNV = world.scores_IV[prefixes(world, start_B, draft)], draft.tokens_BN, draft.q_BNV
    cut_BN = torch.tensor([True, True, False, True]).expand(3, 4)
    ended = Draft(Tree.build(draft.tree.parents_BN, 3, cut_BN), tokens_BN, None, q_BNV, True)
    cut = verify(ended, scores_BNV, root_B, noise)
    short = Draft(Tree.chain(3, 2), tokens_BN[:, :2], None, q_BNV[:, :2] * torch.tensor([[1.0], [0.0]]), True)
    alone = verify(short, scores_BNV[:, :2], root_B, noise)
    assert torch.equal(cut.length_B, alone.length_B)
    assert torch.equal(cut.bonus_B, alone.bonus_B)
    greedy = verify(Draft(draft.tree, tokens_BN), scores_BNV, root_B, noise)
    block = verify(Draft(draft.tree, tokens_BN, None, q_BNV, True), scores_BNV, root_B, noise)
    assert greedy.length_B[2] == block.length_B[2]
    assert greedy.bonus_B[2] == block.bonus_B[2]


# --- what grow_static promises to verify -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drawn_siblings_come_in_draw_order_from_the_processed_q(sampling: str) -> None:
    """Guards that draws are made with the law that q_BNV states, and stay in order: 0.01 a rank above -log q reorders
    under any other law (no temperature, another node's, another prefix's)."""
    world, parents = ToyModels(4, 4, sampling=SAMPLINGS[sampling]), DRAWN["binary"][0]
    start_B, tokens_BN, prefix_BN, _, order_BNV = drawn_rows(world, world.of_length(1), parents)
    q_BNV, B, N = world.q_IV[prefix_BN], *tokens_BN.shape
    lift_BNV = torch.zeros(B, N, 4).scatter(2, order_BNV, torch.arange(4, 0, -1).float().mul(0.01).expand(B, N, -1))
    noise_BNV = (torch.where(q_BNV > 0, -q_BNV.log(), 0.0) + lift_BNV).float()
    root_B = torch.arange(B) % 9
    noise = Script(root_B, 2, torch.zeros(B, 3, 4), draft_BNV=noise_BNV)
    draft = grow_static(net_of(world, start_B), roots_of(world, start_B, root_B, noise), choices_of(parents))
    assert torch.equal(draft.tree.parents_BN, torch.tensor([parents]).expand(B, N))
    possible_BN = q_BNV[:, [0, 0, 0, 1, 1, 2, 2]].gather(2, tokens_BN[..., None])[..., 0] > 0
    possible_BN[:, 0] = True
    # nothing is promised below a node that cannot be drawn
    real_BN = (possible_BN[:, None] | ~draft.tree.mask_BNN).all(-1)
    assert torch.equal(draft.tree.acceptable_BN[real_BN], possible_BN[real_BN])
    assert torch.equal(draft.tokens_BN[:, 1:][real_BN[:, 1:]], tokens_BN[:, 1:][real_BN[:, 1:]]), (
        "tokens are not those drawn from q, in order"
    )
    inner_BN = real_BN & torch.tensor([True, True, True, False, False, False, False])
    torch.testing.assert_close(draft.q_BNV[inner_BN].double(), q_BNV[inner_BN], rtol=0, atol=1e-6)
    own_BN = q_BNV[:, [0, 0, 0, 1, 1, 2, 2]].gather(2, tokens_BN[..., None])[..., 0].log().float()
    below_BN = real_BN & possible_BN & (draft.tree.depth_BN > 0)
    torch.testing.assert_close(draft.log_q_BN[below_BN], own_BN[below_BN], rtol=0, atol=1e-4)


# --- against a slow verification, with the real noise ----------------------------------------------------------------------------------


def slow_verify(
    draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise
) -> list[tuple[list[int], int]]:
    """(path, bonus) of each row: one row, one node, one child at a time, in float64."""
    found = []
    for b in range(draft.tree.rows):
        own = GumbelNoise(noise.seed_B[b : b + 1], noise.greedy_B[b : b + 1])
        parents, tokens, root = draft.tree.parents_BN[b].tolist(), draft.tokens_BN[b].tolist(), int(position_B[b])
        candidates = [n for n in range(len(parents)) if draft.tree.acceptable_BN[b, n]]
        path = [0]
        while True:
            position = root + len(path)
            p_V = scores_BNV[b, path[-1]].double().softmax(-1)
            gumbel_V = own.gumbel(torch.tensor([[position]]), len(p_V))[0, 0].double()
            kids = [n for n in candidates if parents[n] == path[-1]]
            if draft.q_BNV is None or noise.greedy_B[b]:
                draw = int((p_V.log() + gumbel_V).argmax())
                step = next((n for n in kids if tokens[n] == draw), None)
            else:
                step, p_V = _reject_slowly(kids, tokens, p_V, draft.q_BNV[b, path[-1]].double(), position, own)
                draw = int((p_V.log() + gumbel_V).argmax())
            if step is None:
                found.append((path, draw))
                break
            path.append(step)
    return found


def _reject_slowly(
    kids: list[int], tokens: list[int], p_V: Tensor, q_V: Tensor, position: int, own: GumbelNoise
) -> tuple[int | None, Tensor]:
    for sibling, n in enumerate(kids):
        x = tokens[n]
        if q_V[x] <= 0:
            continue
        if own.accepts((p_V[x] / q_V[x])[None].float(), torch.tensor([position]), sibling)[0]:
            return n, p_V
        rest_V = (p_V - q_V).clamp(min=0)
        p_V = rest_V / rest_V.sum() if rest_V.sum() > 0 else p_V
        q_V = q_V.clone()
        q_V[x] = 0
        q_V = q_V / q_V.sum() if q_V.sum() > 0 else q_V
    return None, p_V


def random_batch(seed: int, drawn: bool, B: int = 24, V: int = 6) -> tuple[Draft, Tensor, Tensor, GumbelNoise]:
    """Random trees of 10 nodes, scouts among them, laws with dropped tokens, rows of every kind and age."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    N, depth = 10, 5
    parents, tokens, candidates = [], [], []
    scores_BNV = torch.randn(B, N, V, generator=generator) * 1.2
    q_BNV = (scores_BNV + torch.randn(B, N, V, generator=generator)).softmax(-1)
    scores_BNV = scores_BNV.masked_fill(torch.rand(B, N, V, generator=generator) < 0.15, -math.inf)
    scores_BNV[..., 0] = scores_BNV[..., 0].clamp(min=-1)
    for b in range(B):
        line, level, drawn_here = [-1], [0], [below(V)]
        useful = [True]
        for n in range(1, N):
            room = [m for m in range(n) if level[m] < depth and line.count(m) < V - 1]
            parent = room[below(len(room))]
            taken = [drawn_here[m] for m in range(1, n) if line[m] == parent and useful[m]]
            free = [v for v in range(V) if v not in taken]
            q_V = q_BNV[b, parent][free]
            drawn_here.append(free[int(torch.multinomial(q_V, 1, generator=generator))])
            useful.append(below(6) > 0 and useful[parent])
            line.append(parent)
            level.append(level[parent] + 1)
        parents.append(line)
        tokens.append(drawn_here)
        candidates.append(useful)
    samplings = [Sampling(temperature=float(b % 3 > 0), seed=seed * 100 + b // 2) for b in range(B)]
    tree = Tree.build(torch.tensor(parents), depth, torch.tensor(candidates))
    draft = Draft(tree, torch.tensor(tokens), None, q_BNV if drawn else None)
    return draft, scores_BNV, torch.randint(0, 400, (B,), generator=generator), GumbelNoise.from_sampling(samplings)


@pytest.mark.cover
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_random_trees_against_a_slow_verification(drawn: bool) -> None:
    """Guards keys and positions of noise, greedy rows among others, every shape. Odds of near-ties: 1e-3, seeded."""
    lengths = []
    for seed in range(40):
        draft, scores_BNV, position_B, noise = random_batch(seed, drawn)
        verdict = verify(draft, scores_BNV, position_B, noise)
        for b, (path, bonus) in enumerate(slow_verify(draft, scores_BNV, position_B, noise)):
            rest = draft.tree.max_depth + 1 - len(path)
            assert verdict.path_BP[b].tolist() == path + [-1] * rest
            assert verdict.tokens_BP[b].tolist() == [int(draft.tokens_BN[b, n]) for n in path] + [0] * rest
            assert (int(verdict.length_B[b]), int(verdict.bonus_B[b])) == (len(path), bonus)
            assert scores_BNV[b, path[-1], bonus] > -math.inf, "the bonus is a token that was dropped"
            lengths.append(len(path))
    assert lengths.count(1) > 100
    assert sum(n >= 3 for n in lengths) > 100, "the test tests little"


# --- edges -----------------------------------------------------------------------------------------------------------------------------


def one_row(
    parents: list[int], tokens: list[int], vocab: int, q_NV: Tensor | None = None, scouts: Sequence[int] = ()
) -> Draft:
    acceptable_BN = torch.tensor([[n not in scouts for n in range(len(parents))]])
    tree = Tree.build(torch.tensor([parents]), max(1, depth_of(parents)), acceptable_BN)
    return Draft(tree, torch.tensor([tokens]), None, None if q_NV is None else q_NV[None])


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_siblings_must_differ(drawn: bool) -> None:
    """Two with one token count its mass twice; under other parents and in a scout it is fine."""
    scores_BNV, q_NV = torch.zeros(1, 5, 4), torch.full((5, 4), 0.25) if drawn else None
    position_B, noise = torch.tensor([3]), GumbelNoise.from_sampling([ONE])
    refused = ""
    try:
        verify(one_row([-1, 0, 0, 2, 0], [0, 2, 1, 3, 2], 4, q_NV), scores_BNV, position_B, noise)
    except (RuntimeError, AssertionError) as error:
        refused = str(error)
    assert "siblings" in refused, "two siblings with one token were verified"
    verify(one_row([-1, 0, 0, 1, 2], [2, 2, 1, 2, 2], 4, q_NV), scores_BNV, position_B, noise)
    verify(one_row([-1, 0, 0, 2, 0], [0, 2, 1, 3, 2], 4, q_NV, scouts=[4]), scores_BNV, position_B, noise)


def test_children_of_scouts_are_never_accepted() -> None:
    """Guards Lookahead's window: a node that is no candidate ends the path even where its own child says otherwise."""
    for q_NV in (None, torch.full((3, 4), 0.25)):
        draft = one_row([-1, 0, 1], [0, 2, 3], 4, q_NV, scouts=[1])
        scores_BNV = torch.full((1, 3, 4), -40.0).scatter(2, torch.tensor([[[2], [3], [0]]]), 0.0)
        verdict = verify(draft, scores_BNV, torch.tensor([3]), GumbelNoise.from_sampling([ONE]))
        assert verdict.path_BP.tolist() == [[0, -1, -1]]
        assert (verdict.length_B.tolist(), verdict.bonus_B.tolist()) == ([1], [2])
        made = (verdict.path_BP, verdict.tokens_BP, verdict.length_B, verdict.bonus_B)
        assert {tensor.dtype for tensor in made} == {torch.int64}


def bonus_law(draft: Draft, scores_BNV: Tensor) -> Tensor:
    """The law of the bonus when every accept test says no."""
    depth, K = draft.tree.max_depth, draft.tree.nodes
    root_B, no_BC = torch.tensor([2]), torch.zeros(1, depth * K + K, dtype=torch.bool)
    noise = Script(root_B, depth, torch.zeros(1, depth + 1, scores_BNV.shape[-1]), no_BC, siblings=K)
    verify(draft, scores_BNV, root_B, noise)
    return noise.added[-1][0].exp()


def test_no_residual_mass() -> None:
    """Guards rounding: a refusal although p = q, or q a hair above p everywhere, leaves p itself, not 0 / 0."""
    scores_BNV = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(1))
    p_NV = scores_BNV[0].softmax(-1)
    for q_NV in (p_NV, p_NV * (1 + 1e-6), torch.nextafter(p_NV, torch.ones(()))):
        torch.testing.assert_close(bonus_law(one_row([-1, 0, 1], [0, 3, 1], 5, q_NV), scores_BNV), p_NV[0])
    # the second sibling: p is p again, q lacks token 3
    residual_V = bonus_law(one_row([-1, 0, 0], [0, 3, 1], 5, p_NV), scores_BNV)
    q_V = p_NV[0].scatter(0, torch.tensor([3]), 0.0)
    expected_V = (p_NV[0] - q_V / q_V.sum()).clamp(min=0)
    torch.testing.assert_close(residual_V, expected_V / expected_V.sum())


def test_greedy_rows_in_a_drawn_batch() -> None:
    """Guards rows at temperature 0 beside sampled ones: argmax all the way, whatever their q. Deterministic."""
    scores_BNV = torch.zeros(2, 3, 4).scatter(2, torch.tensor([[[3], [0], [2]]] * 2), 1.0)
    for q_BNV in (torch.full((2, 3, 4), 0.25), torch.zeros(2, 3, 4), torch.full((2, 3, 4), math.nan)):
        draft = Draft(Tree.build(torch.tensor([[-1, 0, 0]] * 2), 1), torch.tensor([[1, 1, 3]] * 2), None, q_BNV)
        verdict = verify(draft, scores_BNV, torch.tensor([3, 3]), GumbelNoise.from_sampling([Sampling(), ONE]))
        assert (verdict.path_BP[0].tolist(), int(verdict.bonus_B[0])) == ([0, 2], 2)


# --- golden ----------------------------------------------------------------------------------------------------------------------------
