"""The contestants of a bench: methods of eyas in its Decoder, and transformers' own generate, all
measured alike.

A contestant answers one question at a time, alone in its batch. The clock starts with the question:
the seconds of the first token include all preparations (caches, generate's own set-up). A cycle lasts from the
end of the one before to its own end. For transformers an end is a delivery to its streamer, which gets one
token a step, or all that an assisted step accepted. Reading Steps is not counted.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eyas.core.cycle import is_worth_keeping
from eyas.core.dormant import Policy, with_policy
from eyas.core.engine import Decoder, Request, Step, Verify
from eyas.core.options import option_values
from eyas.core.requests import check_steps
from eyas.core.target import Target
from eyas.core.verify import verify
from eyas.drafters import Drafter
from eyas.drafters.tools import Merged
from eyas.errors import ModelError, one_line
from eyas_lab.bench import cost
from eyas_lab.bench.record import Answer, Memory, answer_from
from eyas_lab.metrics import Cycle

__all__ = ["Contestant", "Drafting", "Question", "Transformers", "generate_ids"]

LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, as Spec-Bench sets it (evaluation/inference_pld.py)


@dataclass(frozen=True)
class Question:
    """One turn of one prompt, as token ids."""

    prompt: str  # the prompt's id
    task: str
    turn: int
    request: Request

    def about(self, method: str) -> dict[str, Any]:
        """Return the fields of an Answer that the question decides."""
        return {
            "method": method,
            "prompt": self.prompt,
            "task": self.task,
            "turn": self.turn,
            "temperature": self.request.sampling.temperature,
            "prompt_tokens": len(self.request.prompt),
        }


class Contestant(ABC):
    """Answers questions."""

    name: str

    @abstractmethod
    def answer(self, question: Question) -> Answer:
        """Return the answer, measured."""

    def describe(self) -> dict[str, Any]:
        """Settings for the summary. A bench goes on only with equal ones."""
        return {}


class Drafting(Contestant):
    """A method of eyas.

    Args:
        head: where its weights come from, for the summary.
        policy: decides on trees; keeps its knowledge from question to question.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        head: str | None = None,
        verify: Verify = verify,
        policy: Policy | None = None,
    ) -> None:
        self.name, self.drafter, self.head, self.verify, self.policy = name, drafter, head, verify, policy
        self._idle: Decoder | None = None  # serves the next question too

    def answer(self, question: Question) -> Answer:
        device = self.drafter.target.device
        # An idle decoder holds the caches of the question before, so nothing can be said of memory
        # beyond them.
        before = None if self._idle is not None else cost.memory(device)
        answer = answer_from(self.timed(question.request), **question.about(self.name))
        comparable = answer.comparable and self.verify is verify
        return answer.replace(memory=_memory(device, before), comparable=comparable)

    def timed(self, request: Request) -> Iterator[tuple[Step, float]]:
        """Yield every step and its seconds; the time that the reader of the steps uses in between is not counted."""
        since = time.perf_counter()
        decoder, self._idle = self._idle, None
        if decoder is None:
            decoder = Decoder(self.drafter.target, with_policy(self.drafter, self.policy), verify=self.verify)
        decoder.add(request)
        while not decoder.finished:
            for step in check_steps(decoder.step()):
                yield step, step.ended_at - since
                since = step.ended_at
            since = time.perf_counter()
        if is_worth_keeping(decoder.cycle_runner):
            self._idle = decoder

    def describe(self) -> dict[str, Any]:
        parts = _parts(self.drafter)
        nets = [part.net for part in parts if part.net is not None]
        description: dict[str, Any] = {
            "tree": self.drafter.describe(),
            "policy": "fixed" if self.policy is None else "auto",
            "options": [option_values(part.options) for part in parts],
        }
        if nets:
            description["parameters"] = sum(p.numel() for net in nets for p in net.parameters())
            description["weights"] = f"{_checksum(nets):08x}"
        return {**description, **({"head": self.head} if self.head else {})}


def _parts(drafter: Drafter) -> tuple[Drafter, ...]:
    """Return the methods that draft together."""
    return (
        tuple(inner for part in drafter.parts for inner in _parts(part)) if isinstance(drafter, Merged) else (drafter,)
    )


def _checksum(nets: Sequence[nn.Module]) -> int:
    """CRC-32 of every weight: tells apart heads that are written to one path one after another."""
    checksum = 0
    for net in nets:
        for value in net.state_dict().values():
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            checksum = zlib.crc32(data, checksum)
    return checksum


def _memory(device: torch.device, before: int | None) -> Memory:
    peak = cost.peak_memory(device)
    return Memory(peak, None if before is None else peak - before)


class _Deliveries(BaseStreamer):
    """Records when transformers delivers tokens, and how many."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Transformers(Contestant):
    """transformers' generate with the very same model: plain, with prompt lookup, or assisted by a
    smaller model."""

    def __init__(
        self, target: Target, name: str = "transformers", lookup: bool = False, assistant: PreTrainedModel | None = None
    ) -> None:
        self.target, self.name = target, name
        self.options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
        if assistant is not None:
            self.options = {"assistant_model": assistant}

    def answer(self, question: Question) -> Answer:
        request, deliveries = question.request, _Deliveries()
        before = cost.memory(self.target.device)
        began = time.perf_counter()
        vocab_size, more = self.target.vocab_size, {"streamer": deliveries, **self.options}
        token_ids = _cut(generate_ids(self.target.model, request, vocab_size, **more), request)
        # the first delivery is the prompt
        times, counts = deliveries.times[1:], _fit(deliveries.counts[1:], len(token_ids))
        stretches = zip(times, times[1:], counts[1:], strict=False)
        return Answer(
            token_ids=token_ids,
            finish="stop" if token_ids and token_ids[-1] in request.eos else "length",
            prefill_seconds=times[0] - began,
            cycles=tuple(Cycle(n, n - 1, end - begin) for begin, end, n in stretches if n),
            comparable=request.sampling.greedy and self.target.runner.weight_format.exact,
            memory=_memory(self.target.device, before),
            **question.about(self.name),
        )


def _cut(token_ids: Sequence[int], request: Request) -> tuple[int, ...]:
    """Return the tokens up to the first that ends the text, and no more than asked for: some
    versions also deliver tokens that an assisted step accepted after it."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in request.eos), len(token_ids))
    return tuple(token_ids[: min(end, request.max_new_tokens)])


def _fit(counts: Sequence[int], total: int) -> list[int]:
    """Return the deliveries, cut to `total` tokens."""
    fitted = list[int]()
    for count in counts:
        fitted.append(min(count, total - sum(fitted)))
    return fitted


def generate_ids(model: Any, request: Request, vocab_size: int, **options: Any) -> list[int]:
    """Return the new tokens by transformers' generate, with the request's seed and these further keywords. Raise
    ModelError when transformers refuses."""
    sampling, eos = request.sampling, sorted(token for token in request.eos if 0 <= token < vocab_size)
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    keywords = {
        "max_new_tokens": request.max_new_tokens,
        "eos_token_id": eos or [vocab_size],  # without EOS ids one that is not a token
        "pad_token_id": eos[0] if eos else 0,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": not sampling.greedy,
        **(dict.fromkeys(drawn) if sampling.greedy else {**drawn, "min_p": sampling.min_p or None}),
    }
    ids_1T = torch.tensor([request.prompt], device=model.device)
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        try:
            output = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **keywords, **options)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ModelError(f"transformers refuses to generate: {one_line(error, 200)}") from error
    return list(output[0, len(request.prompt) :].tolist())
