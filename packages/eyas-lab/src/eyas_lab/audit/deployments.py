"""Deployments: each turns a prompt into tokens, and can be asked again.

    Deployment    the protocol: implement `generate`, and your engine can be audited
    EyasDeployment           eyas in this process
    TransformersDeployment   `model.generate` of transformers, with an assistant or without

`audit.server` has servers. None of these knows the tests of the audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from eyas.api import LLM
from eyas.core.dormant import with_policy
from eyas.core.engine import Decoder
from eyas.core.params import Sampling
from eyas.core.requests import Request, Step, check_steps
from eyas.core.verify import verify
from eyas_lab.bench.contestants import generate_ids

__all__ = ["Answer", "Ask", "Deployment", "EyasDeployment", "TransformersDeployment", "answer_all"]


@dataclass(frozen=True)
class Answer:
    """The new tokens of one request.

    Attributes:
        cycles: how many tokens each cycle emitted, where that is known.
        logprobs: log-probabilities of the tokens, from the raw logits, where they are known.
    """

    ids: tuple[int, ...]
    cycles: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Answer:
        """Return the answer of a record."""
        lists = (record[name] for name in ("ids", "cycles", "logprobs"))
        return cls(*(None if values is None else tuple(values) for values in lists))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ask:
    """One request: the arguments that `Deployment.generate` is called with."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `Deployment.generate`."""
        s = self.sampling
        sampled = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "seed": s.seed}
        return {"max_new_tokens": self.max_new_tokens, **sampled}


class Deployment(Protocol):
    """Interface of a deployment that can be audited. It needs `generate`; `generate_together` is optional.

    Attributes:
        name: for the report.
    """

    name: str

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
    ) -> Answer:
        """Answer one request, alone. It ends after an end token, which is part of the answer, or at
        max_new_tokens. temperature 0: greedy; top_k 0 and top_p 1: off."""


def answer_all(deployment: Deployment, asks: Sequence[Ask], together: bool) -> list[Answer]:
    """Return the answers to all requests, at the same time if `together` and if the deployment can do that."""
    side_by_side = getattr(deployment, "generate_together", None)
    if together and side_by_side is not None:
        return list(side_by_side(asks))
    return [deployment.generate(ask.prompt_ids, **ask.keywords()) for ask in asks]


class EyasDeployment:
    """eyas in this process.

    Args:
        rows: requests that are decoded at a time when several are asked together.
        verify: the verification rule; another one than eyas' own is a bias put in on purpose.
    """

    def __init__(self, llm: LLM, name: str = "", rows: int = 4, verify: Any = verify) -> None:
        self.llm, self.rows, self.verify = llm, rows, verify
        self.name = name or f"eyas, {llm.method}"

    def generate(self, prompt_ids: Sequence[int], **keywords: Any) -> Answer:
        """Answer one request in a Decoder of its own."""
        return self._decode([self._request(prompt_ids, keywords)], 1)[0]

    def generate_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer several requests, `rows` of them at a time."""
        return self._decode([self._request(ask.prompt_ids, ask.keywords()) for ask in asks], self.rows)

    def _request(self, prompt_ids: Sequence[int], keywords: Mapping[str, Any]) -> Request:
        return self.llm.request(list(prompt_ids), logprobs=0, **keywords)[0]

    def _decode(self, requests: Sequence[Request], rows: int) -> list[Answer]:
        llm = self.llm
        decoder = Decoder(llm.target, with_policy(llm.drafter, llm.policy), rows, verify=self.verify)
        numbers = [decoder.add(request) for request in requests]
        steps: dict[int, list[Step]] = {number: [] for number in numbers}
        while not decoder.finished:
            for step in check_steps(decoder.step()):
                steps[step.request_id].append(step)
        return [_answer(steps[number]) for number in numbers]


def _answer(steps: Sequence[Step]) -> Answer:
    logprobs = tuple(entry.logprob for step in steps for entry in step.extra.get("logprobs", ()))
    cycles = tuple(len(step.tokens) for step in steps if step.tokens)
    return Answer(tuple(token for step in steps for token in step.tokens), cycles, logprobs or None)


class TransformersDeployment:
    """`generate` of transformers; torch's own generator gets the seed.

    Args:
        options: further keywords of `generate`, such as `assistant_model` or `prompt_lookup_num_tokens`.
    """

    def __init__(self, model: PreTrainedModel, name: str, eos: Sequence[int], **options: Any) -> None:
        self.model, self.name, self.eos, self.options = model, name, frozenset(eos), options

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, **sampling: Any) -> Answer:
        """Answer one request."""
        request = Request(tuple(prompt_ids), max_new_tokens, Sampling(**sampling), self.eos)
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        return Answer(tuple(generate_ids(self.model, request, vocab_size, **self.options)))
