"""From logits to the distribution of the next token, and random numbers that are a pure function of
(seed, purpose, position, index).

`apply_sampling` applies a row's Sampling to its logits, in float32, in one fixed order. It is used
once per node, for the target's p and for the draft's q alike. Values that depend on the text before
a node are passed in (`core.adjustments`).

`GumbelNoise` gives every (seed, position, token) its own Gumbel variable (counter-based: no state,
no order of calls). The draw at a node is argmax(log p + noise of its position), so the drawn token depends on
the prefix and the noise, but not on the tree. At any temperature a deterministic tree yields the tokens of
plain sampling with the same seed. (Gumbel-max: Gumbel 1954; common random numbers for drafts: Daliri, Musco,
Suresh 2024, "Coupling without communication".)

This module knows no tree and no model. Letters: B rows, N nodes, V vocabulary, K siblings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.params import Sampling

__all__ = [
    "GumbelNoise", "Processor", "Sampling", "apply_sampling", "apply_sampling_rows", "equal_but_for_seeds", "probs",
]  # fmt: skip

# Hugging Face's LogitsProcessor: (ids [1, T], scores [1, V]) -> scores [1, V]
Processor = Callable[[Tensor, Tensor], Tensor]


def apply_sampling(
    logits_NV: Tensor,
    sampling: Sampling,
    adjustments: Adjustments | None = None,
    custom: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the processed logits ("scores"), float32 [N, V], whose softmax is the distribution to sample from.
    Excluded tokens are -inf.

    The steps, in this order:

        1. logit_bias is added to the raw logits;
        2. repetition_penalty divides positive and multiplies negative scores of tokens in prompt or
           answer;
        3. frequency_penalty, times the number of occurrences in the answer, and presence_penalty
           are subtracted;
        4. before `min_tokens`, tokens that end the text are excluded;
        5. `custom`: the mask of a constraint, then logits processors;
        6. temperature, 7. top_k, 8. top_p, 9. min_p.

    2 and 5 to 9 are in the order of transformers' generate, 1 to 3 in vLLM's. With greedy sampling
    steps 6 to 9 are left out, so rounding cannot move the argmax.

    Args:
        logits_NV: raw logits of any float dtype.
        adjustments: [N, ...], for the text up to each node; None if steps 1 to 4 do nothing.
        custom: scores [N, V] -> [N, V].
    """
    scores_NV = logits_NV.float()
    if adjustments is not None:
        scores_NV = _adjust(scores_NV, sampling, adjustments)
    else:
        assert not sampling.has_adjustments, "penalties and biases need the text of every node"
    if custom is not None:
        scores_NV = custom(scores_NV)
    if sampling.greedy:
        return scores_NV
    scores_NV = scores_NV / sampling.temperature
    if 0 < sampling.top_k < scores_NV.shape[-1]:
        kth_N1 = scores_NV.topk(sampling.top_k).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < kth_N1, -math.inf)
    if sampling.top_p < 1.0:
        ascending_NV, order_NV = scores_NV.sort(dim=-1)
        drop_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop_NV[:, -1].fill_(False)
        scores_NV = scores_NV.masked_fill(drop_NV.scatter(-1, order_NV, drop_NV), -math.inf)
    if sampling.min_p > 0.0:
        p_NV = scores_NV.softmax(-1)
        scores_NV = scores_NV.masked_fill(p_NV < sampling.min_p * p_NV.amax(-1, keepdim=True), -math.inf)
    return scores_NV


def _adjust(scores_NV: Tensor, sampling: Sampling, adjustments: Adjustments) -> Tensor:
    """Apply steps 1 to 4 of `apply_sampling`."""
    if sampling.logit_bias:
        assert adjustments.bias is not None
        scores_NV = scores_NV + adjustments.bias
    if sampling.repetition_penalty != 1.0:
        assert adjustments.seen_tokens is not None
        penalty = sampling.repetition_penalty
        penalised_NV = torch.where(scores_NV < 0, scores_NV * penalty, scores_NV / penalty)
        scores_NV = torch.where(adjustments.seen_tokens, penalised_NV, scores_NV)
    if sampling.frequency_penalty or sampling.presence_penalty:
        assert adjustments.counts is not None
        scores_NV = scores_NV - sampling.frequency_penalty * adjustments.counts
        scores_NV = scores_NV - sampling.presence_penalty * (adjustments.counts > 0)
    if adjustments.end_tokens is not None:
        assert adjustments.tokens_before_end is not None
        scores_NV = scores_NV.masked_fill(
            adjustments.end_tokens & (adjustments.tokens_before_end > 0)[:, None], -math.inf
        )
    return scores_NV


def equal_but_for_seeds(sampling: Sequence[Sampling]) -> bool:
    """Return whether these samplings differ in nothing but their seeds."""
    first = sampling[0]
    return all(s is first or replace(s, seed=first.seed) == first for s in sampling)


def apply_sampling_rows(
    logits_BNV: Tensor, sampling: Sequence[Sampling], adjustments: Adjustments | None = None
) -> Tensor:
    """Return the scores [B, N, V] of `apply_sampling` with each row's Sampling. Rows that are equal but for their
    seeds share one call.

    `adjustments`: [B, N, ...].
    """
    if equal_but_for_seeds(sampling):
        flat = None if adjustments is None else adjustments.flat()
        return apply_sampling(logits_BNV.flatten(0, 1), sampling[0], flat).reshape(logits_BNV.shape)
    each = enumerate(sampling)
    return torch.stack(
        [apply_sampling(logits_BNV[b], s, None if adjustments is None else adjustments[b]) for b, s in each]
    )


def probs(scores_NV: Tensor, greedy: bool) -> Tensor:
    """Return the distribution float32 [N, V] of scores from `apply_sampling`: their softmax; greedy: all
    mass on the argmax."""
    if greedy:
        return torch.zeros_like(scores_NV).scatter_(-1, scores_NV.argmax(-1, keepdim=True), 1.0)
    return scores_NV.softmax(-1)


# SplitMix64 (Steele, Lea, Flood 2014): the finaliser is a bijection of 64-bit words that mixes
# every bit into every other; applied to key + counter * golden it is a generator that can be
# entered anywhere. int64 products wrap around as needed.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 words to the right, with zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


class GumbelNoise:
    """Random numbers of B rows as pure functions of (seed, stream, position, index). A row with
    greedy sampling gets no noise.

    Streams keep uses apart (docs/design/random_numbers.md says who reads which number, and why none is read twice):

        TARGET   the target's draw                     (absolute position, token)
        ACCEPT   acceptance tests of drawn siblings    (position of the sibling, its number among its siblings)
        DRAFT    the draft's own draws                 (position of the root x nodes of the tree + node, token)
        BLOCK    acceptance tests of prefixes          (position of the root, tokens in the prefix)
        SEARCH   text generated to choose the layers   (absolute position, token)
                 that self_speculative skips
    """

    TARGET, ACCEPT, DRAFT, BLOCK, SEARCH = range(5)

    def __init__(self, seed_B: Tensor, greedy_B: Tensor, all_greedy: bool | None = None) -> None:
        """Args:
        seed_B: int64.
        greedy_B: bool, rows whose Gumbel noise is zero.
        all_greedy: whether all rows are greedy, if the host knows it. None: read it from `greedy_B`.
        """
        self.seed_B, self.greedy_B = seed_B, greedy_B
        self.all_greedy = bool(greedy_B.all()) if all_greedy is None else all_greedy

    @classmethod
    def from_sampling(cls, sampling: Sequence[Sampling | None], device: torch.device | str = "cpu") -> GumbelNoise:
        """Return the noise of rows with these samplings; None stands for an empty row."""
        rows = [s or Sampling() for s in sampling]
        greedy = [s.greedy for s in rows]
        return cls(
            torch.tensor([s.seed for s in rows], device=device), torch.tensor(greedy, device=device), all(greedy)
        )

    def _uniform(self, stream: int, position_BN: Tensor, index_K: Tensor) -> Tensor:
        """Return float64 [B, N, K] strictly inside (0, 1), with 52 random bits each."""
        key_B1 = _mix(_mix(self.seed_B + _GOLDEN) + stream)[:, None]
        key_BN = _mix(key_B1 + (position_BN + 1) * _GOLDEN)
        bits_BNK = _shift(_mix(key_BN[..., None] + (index_K + 1) * _GOLDEN), 12)
        return (bits_BNK.double() + 0.5) * 2.0**-52

    def gumbel(self, position_BN: Tensor, vocab: int | Tensor, stream: int = TARGET) -> Tensor:
        """Return the noise, float32 [B, N, V], of every token at these absolute positions; zero in greedy rows.

        Args:
            vocab: size of the vocabulary, or int64 [V]: the token ids whose noise is wanted.
        """
        tokens_V = torch.arange(vocab, device=position_BN.device) if isinstance(vocab, int) else vocab
        noise_BNV = -torch.log(-torch.log(self._uniform(stream, position_BN, tokens_V)))
        return noise_BNV.masked_fill_(self.greedy_B[:, None, None], 0.0).float()

    def accepts(self, chance: Tensor, position_B: Tensor, index: int | Tensor, stream: int = ACCEPT) -> Tensor:
        """Return which acceptance tests pass, bool [B], or [B, K] for indices int64 [K]: True with probability
        `chance`, by the uniform numbers of (stream, position, index)."""
        index_K = torch.full((1,), index, device=position_B.device) if isinstance(index, int) else index
        uniform_BK = self._uniform(stream, position_B[:, None], index_K)[:, 0]
        return (uniform_BK[:, 0] if isinstance(index, int) else uniform_BK) < chance
