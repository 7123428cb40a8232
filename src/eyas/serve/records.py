"""The internal request, which every dialect is turned into, and the stream that comes back for it.

Job      prompts x samples, with the parameters of `LLM.generate`
Delta    what one cycle, or the prompt's own pass, adds to one sequence of a job
Totals   a sequence so far: its Deltas added up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from eyas.core.logprobs import TokenLogprobs
from eyas.serve.errors import bad_request


@dataclass(frozen=True)
class Job:
    """A client's request for text: one sequence for each sample of each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    keywords: Mapping[str, Any]  # keywords of `LLM.request`
    n: int = 1
    method: str | None = None  # a drafting method other than the server's own
    media: Mapping[str, Tensor] = field(default_factory=dict)  # images of the only prompt
    timeout: float | None = None  # seconds; None: the server's
    cycles: bool = False  # every Delta is one cycle and says what happened in it
    private: bool = False  # nothing of it is kept for the head to learn from


SUMMED = ("text", "token_ids", "cycles", "cached_tokens", "predicted", "logprobs", "prompt_logprobs")  # of a Delta


@dataclass(frozen=True)
class Delta:
    """The tokens that one cycle adds to one sequence. Several in a row of one sequence can be joined."""

    index: int  # number of the sequence: prompt number x n + sample number
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str | None = None  # "stop" | "length" | "error"
    stop_reason: str | int | None = None  # the stop string, or the one of `stop_token_ids`, that ended the text
    cycles: tuple[CycleFigures, ...] = ()  # empty for the prompt's own pass
    prefill: bool = False  # holds the first token, which comes from the prompt's own pass
    cached_tokens: int = 0  # prompt tokens that were not read again; comes with the first token
    predicted: int = 0  # accepted tokens that the job's prediction proposed
    logprobs: tuple[TokenLogprobs, ...] = ()  # those of `token_ids`, if the job asks for them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # come with the first token
    cycle: Mapping[str, Any] | None = None  # the record of the cycle, if the job asks for it
    error: Exception | None = None

    def joined(self, later: Delta) -> Delta:
        """Return this Delta and the next one of the same sequence as one."""
        sums = {name: getattr(self, name) + getattr(later, name) for name in SUMMED}
        return replace(later, prefill=self.prefill or later.prefill, **sums)


@dataclass(frozen=True)
class CycleFigures:
    """The counts of one cycle of one sequence."""

    emitted: int  # tokens, the bonus token included
    accepted: int  # drafted tokens on the accepted path, before cutting
    drafted: int  # candidate nodes that were verified
    seconds: float
    plan: str  # `Step.drafted_by`


@dataclass(frozen=True)
class CycleSums:
    """Counts over cycles, from which everything that the server says about drafts is computed."""

    cycles: int
    emitted: int  # tokens
    seconds: float
    drafts: int  # cycles in which something was drafted
    drafted: int  # draft tokens
    accepted: int  # draft tokens
    accepted_at: tuple[int, ...]  # cycles that accepted a draft token at depth 1, 2, ...
    plans: Mapping[str, int]  # cycles by what was drafted

    @classmethod
    def from_cycles(cls, cycles: Sequence[CycleFigures]) -> CycleSums:
        """Return the counts over some cycles."""
        return cls(
            cycles=len(cycles),
            emitted=sum(cycle.emitted for cycle in cycles),
            seconds=sum(cycle.seconds for cycle in cycles),
            drafts=sum(cycle.drafted > 0 for cycle in cycles),
            drafted=sum(cycle.drafted for cycle in cycles),
            accepted=sum(cycle.accepted for cycle in cycles),
            accepted_at=tuple(
                sum(cycle.accepted > depth for cycle in cycles)
                for depth in range(max((cycle.accepted for cycle in cycles), default=0))
            ),
            plans=Counter(cycle.plan for cycle in cycles),
        )


@dataclass
class Totals:
    """A sequence so far: its Deltas added up."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    cycles: list[CycleFigures] = field(default_factory=list)
    cached_tokens: int = 0
    predicted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Add the next Delta."""
        for name in SUMMED:
            vars(self)[name] += getattr(delta, name)
        self.finish = delta.finish or self.finish
        self.stop_reason = delta.stop_reason or self.stop_reason

    def as_delta(self, index: int = 0) -> Delta:
        """Return everything so far as one Delta."""
        ids, values, of_prompt = tuple(self.token_ids), tuple(self.logprobs), tuple(self.prompt_logprobs)
        ends = self.finish, self.stop_reason
        return Delta(index, self.text, ids, *ends, prefill=True, logprobs=values, prompt_logprobs=of_prompt)

    def acceptance(self) -> dict[str, Any]:
        """Return acceptance, under the names of vLLM's `metrics.speculative_decoding`; without drafts 1.0 and 0.0, as there."""
        drafts = [cycle for cycle in self.cycles if cycle.drafted]
        sums = CycleSums.from_cycles(drafts)
        widest = max((cycle.drafted for cycle in drafts), default=0)
        # aiperf refuses a histogram without a place for every count of accepted tokens that a draft allows
        reached = (sums.drafts, *sums.accepted_at, *[0] * (widest + 1 - len(sums.accepted_at)))
        return {
            "mean_acceptance_length": 1 + sums.accepted / sums.drafts if drafts else 1.0,
            "draft_acceptance_rate": sums.accepted / sums.drafted if drafts else 0.0,
            "acceptance_histogram": [here - deeper for here, deeper in pairwise(reached)],
            "num_spec_steps": sums.drafts,
            "num_accepted_draft_tokens": sums.accepted,
            "num_draft_tokens": sums.drafted,
            "num_spec_tokens": widest,
            "per_step_accepted": [c.accepted for c in drafts],
            "per_step_drafted": [c.drafted for c in drafts],
        }

    def meta_info(self) -> dict[str, Any]:
        """Return counts under the names of SGLang's `meta_info`. Like SGLang, leave drafts out where nothing was drafted."""
        sums = CycleSums.from_cycles(self.cycles)
        counts = {"completion_tokens": len(self.token_ids), "cached_tokens": self.cached_tokens}
        if not sums.drafted:
            return counts
        return {
            **counts,
            "spec_verify_ct": sums.cycles,
            "spec_accept_length": len(self.token_ids) / sums.cycles,
            "spec_accept_rate": sums.accepted / sums.drafted,
            "spec_num_correct_drafts": sums.accepted,
            "spec_num_proposed_drafts": sums.drafted,
        }


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary; `param` is the field that they come from."""
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        message = f"token id {outside} is outside the vocabulary of {vocab_size} (0..{vocab_size - 1})"
        raise bad_request(message, param)
