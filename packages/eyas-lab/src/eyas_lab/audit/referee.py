"""The referee: the target's own forward, by transformers' code, over texts that a deployment has written.

It reads each answer in one forward and gives for every token its probability, its distance from the most
probable one, and the numbers that `audit.statistics` needs. Temperature, top-k and top-p are applied by
transformers' own processors. So no line of eyas' decoding is part of the judgement.

**When is another token a near tie?** Take a stored number to be off by a relative error of root mean square e:
0.4 times half the distance between neighbouring numbers of the dtype (errors are uniform between two
neighbours, and mantissas spread over an octave). That is 0.4 x 2^-24 for float32, 0.4 x 2^-11 for float16 and
0.4 x 2^-8 for bfloat16. Weights in int8 with a scale for each row are off by half a step of max / 127,
uniformly. With a maximum of four standard deviations that is 4 / 254 / sqrt(3) = 0.0091 of a weight. Sums are
float32 in all of these, of d products in 16 partial sums or more, and add sqrt(d / 16) errors of float32. The
errors of the d elements are independent. So each operation on the hidden state moves a logit by e times the
standard deviation s of the logits over the vocabulary. A layer rounds about 24 times: two norms of three steps,
seven products with rounded weights, rotation, scores, softmax, activation, two additions. The errors add up
like a random walk: over L layers a logit is off by e s sqrt(24 L). Two logits are compared, in two runs that
round differently: a factor of 2. Four standard deviations are allowed:

    tolerance = 4 x 2 x sqrt(24 L) x sqrt(e^2 + (d / 16) (0.4 x 2^-24)^2) x s + 1e-5

The last term is float32's spacing at logits of 64, and the error of a log-softmax over many tokens.
For 30 layers, d = 576 and s = 3 that is 1e-4 in float32, 0.13 in float16, 1.0 in bfloat16 and 5.9 for int8. So
a greedy text in eight bits says little about losslessness. Measured (the embedded model, 16 layers, 100 random
tokens): the largest error of 819,200 logits is 0.014 in float16 (tolerance 0.07) and 0.11 in bfloat16
(tolerance 0.58). Root mean squares are a sixth of e s sqrt(24 L).

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyas.core.params import Sampling
from eyas.errors import InputError
from eyas_lab.audit.deployments import Answer
from eyas_lab.audit.statistics import LAGS, Evidence

__all__ = ["DTYPES", "GreedyJudgement", "Referee", "SampledJudgement", "tolerance"]

ACCUMULATED = 0.4 * 2.0**-24
FLOOR = 1e-5
DTYPES = {"float32": ACCUMULATED, "float16": 0.4 * 2.0**-11, "bfloat16": 0.4 * 2.0**-8, "int8": 4 / 254 / math.sqrt(3)}


def tolerance(dtype: str, layers: int, width: int, spread: Any) -> Any:
    """Return the largest difference of two logits that rounding explains; see above."""
    operation = math.hypot(DTYPES[dtype], math.sqrt(width / 16) * ACCUMULATED)
    return 8 * math.sqrt(24 * layers) * operation * spread + FLOOR


@dataclass(frozen=True)
class GreedyJudgement:
    """Compare each of the N tokens of a greedy answer with the referee's choice.

    Attributes:
        best: the referee's token, given the answer's own text before it.
        margin: its logit less the logit of the answer's token; 0 where they are the same.
        tolerance: the margin that rounding explains.
        logprob: of the answer's token, from the raw logits.
    """

    best: np.ndarray
    margin: np.ndarray
    tolerance: np.ndarray
    logprob: np.ndarray


@dataclass(frozen=True)
class SampledJudgement:
    """Rate the tokens of a sampled answer by the referee's probabilities.

    Attributes:
        evidence: of the tokens inside the support.
        outside: places of tokens that cannot be drawn.
        at_the_edge: how many tokens are outside, but so near the edge of top-k or top-p that
            rounding explains it.
    """

    evidence: Evidence
    outside: tuple[int, ...]
    at_the_edge: int


class Referee:
    """The target, in float32 if possible, as a judge.

    Args:
        model: its own forward is used.
        eos: tokens that end an answer.
        dtype: the dtype in which the deployment computes, a key of DTYPES.
        seed: of the numbers v.
    """

    def __init__(self, model: PreTrainedModel, eos: Collection[int], dtype: str = "float32", seed: int = 0) -> None:
        self.model, self.eos, self.dtype, self.seed = model, frozenset(eos), dtype, seed
        config = model.config.get_text_config()
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.vocab = int(config.vocab_size)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return the raw logits, float32 [N + 1, V], of each token of an answer and of the one that
        would follow it."""
        ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            raise InputError("an answer has token ids that the target does not have: it comes from another model")
        keep = {"logits_to_keep": len(answer) + 1} if self._keeps else {}
        logits_NV: Tensor = self.model(ids, use_cache=False, **keep).logits[0, -len(answer) - 1 :]
        return logits_NV.float().cpu()

    def _slack(self, logits_NV: Tensor) -> Tensor:
        slack_N: Tensor = tolerance(self.dtype, self.layers, self.width, logits_NV.std(-1))
        return slack_N

    def judge_greedy(self, prompt: Sequence[int], answer: Answer) -> GreedyJudgement:
        """Compare each token with the most probable one, given the answer's own text before it."""
        logits_NV, token_N1 = self.logits(prompt, answer.ids)[:-1], torch.tensor(answer.ids)[:, None]
        margin_N = logits_NV.amax(-1) - logits_NV.gather(1, token_N1)[:, 0]
        best_N = torch.where(margin_N == 0, token_N1[:, 0], logits_NV.argmax(-1))
        logprob_N = logits_NV.double().log_softmax(-1).gather(1, token_N1)[:, 0]
        return GreedyJudgement(*(x.numpy() for x in (best_N, margin_N, self._slack(logits_NV), logprob_N)))

    def probabilities(self, logits_NV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return p after temperature, top-k and top-p, and before top-k and top-p; float64 [N, V]."""
        no_ids: Any = None
        scores_NV = TemperatureLogitsWarper(float(sampling.temperature))(no_ids, logits_NV)
        whole_NV = scores_NV.double().softmax(-1)
        if sampling.top_k:
            scores_NV = TopKLogitsWarper(sampling.top_k)(no_ids, scores_NV)
        if sampling.top_p < 1:
            scores_NV = TopPLogitsWarper(sampling.top_p)(no_ids, scores_NV)
        return scores_NV.double().softmax(-1), whole_NV

    def judge_sampled(
        self, prompt: Sequence[int], answer: Answer, sampling: Sampling, number: int, of_prompt: int
    ) -> SampledJudgement:
        """Return the findings about an answer that the tests need.

        Args:
            number: of the answer, which also keys the numbers v.
            of_prompt: the number of its prompt.
        """
        logits_NV = self.logits(prompt, answer.ids)[:-1]
        p_NV, whole_NV = self.probabilities(logits_NV, sampling)
        token_N = torch.tensor(answer.ids)
        chance_N = p_NV.gather(1, token_N[:, None])[:, 0]
        edge_N = (chance_N == 0) & self._near_the_edge(logits_NV, p_NV, whole_NV, token_N, sampling)
        evidence = self._evidence(p_NV, token_N, number, of_prompt, answer.cycles)
        inside_N = (chance_N > 0).numpy()
        if not inside_N.all():
            evidence = Evidence(**{name: values[inside_N] for name, values in vars(evidence).items()})
        outside_N = (chance_N == 0) & ~edge_N
        return SampledJudgement(evidence, tuple(outside_N.nonzero()[:, 0].tolist()), int(edge_N.sum()))

    def _near_the_edge(
        self, logits_NV: Tensor, p_NV: Tensor, whole_NV: Tensor, token_N: Tensor, sampling: Sampling
    ) -> Tensor:
        """Return which tokens, all of them outside, would be inside if logits were moved by rounding."""
        slack_N = self._slack(logits_NV)
        token_N1 = token_N[:, None]
        least_N = logits_NV.masked_fill(p_NV == 0, math.inf).amin(-1)
        is_near_N = least_N - logits_NV.gather(1, token_N1)[:, 0] <= slack_N
        if sampling.top_p < 1:
            before_N = whole_NV.masked_fill(whole_NV <= whole_NV.gather(1, token_N1), 0).sum(-1)
            is_near_N = is_near_N | (before_N <= sampling.top_p + slack_N / sampling.temperature)
        return is_near_N

    def _evidence(
        self, p_NV: Tensor, token_N: Tensor, number: int, of_prompt: int, cycles: Sequence[int] | None
    ) -> Evidence:
        N, token_N1 = len(token_N), token_N[:, None]
        chance_N1 = p_NV.gather(1, token_N1)
        ids_V = torch.arange(p_NV.shape[1])
        is_before_NV = (p_NV > chance_N1) | ((p_NV == chance_N1) & (ids_V < token_N1))
        by_rank_N = (p_NV * is_before_NV).sum(-1)
        by_id_N = (p_NV * (ids_V < token_N1)).sum(-1)
        logp_NV = p_NV.log().masked_fill(p_NV == 0, 0)
        mean_N = (p_NV * logp_NV).sum(-1)
        v_2N = torch.from_numpy(np.random.default_rng([self.seed, number]).random((2, N)))
        repeat_NK = torch.full((N, len(LAGS)), math.nan, dtype=torch.float64)
        for k, lag in enumerate(LAGS):
            repeat_NK[lag:, k] = p_NV[lag:].gather(1, token_N1[:-lag])[:, 0]
        known = cycles is not None and sum(cycles) == N
        cycle_N = np.repeat(np.arange(len(cycles)), cycles) if cycles and known else np.full(N, -1)
        tensors = {
            "rank": by_rank_N + v_2N[0] * chance_N1[:, 0],
            "id": by_id_N + v_2N[1] * chance_N1[:, 0],
            "top": p_NV.amax(-1),
            "level": logp_NV.gather(1, token_N1)[:, 0] - mean_N,
            "variance": (p_NV * (logp_NV - mean_N[:, None]) ** 2).sum(-1),
            "repeat": repeat_NK,
            "token": token_N,
        }
        arrays = {name: values.numpy() for name, values in tensors.items()}
        return Evidence(
            answer=np.full(N, number), place=np.arange(N), prompt=np.full(N, of_prompt), cycle=cycle_N, **arrays
        )

    def law(self, prompt: Sequence[int], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
        """Return the probability of every answer of at most so many tokens, for a small top-k."""
        open_answers: dict[tuple[int, ...], float] = {(): 1.0}
        law: dict[tuple[int, ...], float] = {}
        for _ in range(length):
            longer = dict[tuple[int, ...], float]()
            logits_NV = self._last_logits([(*prompt, *answer) for answer in open_answers])
            for p_V, (answer, chance) in zip(
                self.probabilities(logits_NV, sampling)[0], open_answers.items(), strict=True
            ):
                for token in p_V.nonzero()[:, 0].tolist():
                    ends = token in self.eos
                    (law if ends else longer)[(*answer, token)] = chance * float(p_V[token])
            open_answers = longer
        return law | open_answers

    @torch.inference_mode()
    def _last_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after texts of one length, float32 [N, V]."""
        ids = torch.tensor([list(text) for text in texts], device=self.model.device)
        return torch.cat(
            [self.model(some, use_cache=False).logits[:, -1].float().cpu() for some in torch.split(ids, 16)]
        )
