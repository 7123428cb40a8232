"""What a bench lets run against each other: methods of eyas in its Decoder, and transformers' own generate, all measured alike.

A contestant answers one question at a time, alone in its batch. The clock runs from the question: the first token's seconds hold whatever
is made ready for it (caches, generate's own preparations), a cycle's run from the end of the one before to its own. With transformers an
end is a delivery to its streamer, which gets one token a step, or all that an assisted step accepted. Reading Steps is not counted.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eyas.bench import cost
from eyas.bench.record import Answer, Cycle, Memory, answer_from
from eyas.core.engine import Decoder, Policy, Request, StageTimer, Step, Verify, Watch
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.verify import verify
from eyas.drafters import Drafter
from eyas.drafters._merge import Merged
from eyas.errors import ModelError
from eyas.train.record import options_of

__all__ = ["Contestant", "Drafting", "Question", "Transformers"]

LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens; what Spec-Bench gives prompt lookup (evaluation/inference_pld.py)


@dataclass(frozen=True)
class Question:
    """One turn of one prompt, as token ids."""

    prompt: str  # id
    task: str
    turn: int
    request: Request

    def about(self, method: str) -> dict[str, Any]:
        return {
            "method": method, "prompt": self.prompt, "task": self.task, "turn": self.turn,
            "temperature": self.request.sampling.temperature, "prompt_tokens": len(self.request.prompt),
        }  # fmt: skip


class Contestant(ABC):
    """Somebody who answers questions."""

    name: str

    @abstractmethod
    def answer(self, question: Question) -> Answer:
        """Measured."""

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {}


class Drafting(Contestant):
    """A method of eyas."""

    def __init__(
        self, name: str, drafter: Drafter, head: str | None = None, verify: Verify = verify, policy: Policy | None = None
    ) -> None:  # fmt: skip
        """policy: keeps what it learns from question to question."""
        self.name, self.drafter, self.head, self.verify, self.policy = name, drafter, head, verify, policy
        self._idle: Decoder | None = None  # one that lasts

    def answer(self, question: Question, watch: Watch | None = None) -> Answer:
        device = self.drafter.target.device
        before = cost.memory(device)
        if self._idle is not None:  # it holds the caches of the question before
            before = None
        answer = answer_from(self.timed(question.request, watch), **question.about(self.name))
        return answer.but(memory=_memory(device, before), comparable=answer.comparable and self.verify is verify)

    def timed(
        self, request: Request, watch: Watch | None = None, clock: Callable[[], StageTimer] | None = None
    ) -> Iterator[tuple[Step, float]]:  # fmt: skip
        """Every step and its seconds; what a watch or the reader of the steps does in between is not in them."""
        since = time.perf_counter()
        decoder, self._idle = self._idle, None
        if decoder is None or watch is not None or clock is not None:
            decoder = Decoder(self.drafter.target, self.drafter, verify=self.verify, watch=watch, policy=self.policy, clock=clock)
        decoder.add(request)
        while not decoder.finished:
            for step in decoder.step():
                yield step, step.ended_at - since
                since = step.ended_at
            since = time.perf_counter()
        if decoder.lasts and watch is None and clock is None:
            self._idle = decoder

    def describe(self) -> dict[str, Any]:
        parts = _parts(self.drafter)
        nets = [part.net for part in parts if part.net is not None]
        policy = "fixed" if self.policy is None else "auto"
        about: dict[str, Any] = {"tree": self.drafter.describe(), "policy": policy, "options": [options_of(part.options) for part in parts]}
        if nets:
            about["parameters"] = sum(p.numel() for net in nets for p in net.parameters())
            about["weights"] = f"{_checksum(nets):08x}"
        return {**about, **({"head": self.head} if self.head else {})}


def _parts(drafter: Drafter) -> tuple[Drafter, ...]:
    """The methods that draft together."""
    return tuple(inner for part in drafter.parts for inner in _parts(part)) if isinstance(drafter, Merged) else (drafter,)


def _checksum(nets: Sequence[nn.Module]) -> int:
    """CRC-32 of every weight: heads that lie in the same place one after another are told apart."""
    found = 0
    for net in nets:
        for value in net.state_dict().values():
            found = zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), found)
    return found


def _memory(device: torch.device, before: int | None) -> Memory:
    peak = cost.peak_memory(device)
    return Memory(peak, None if before is None else peak - before)


class _Deliveries(BaseStreamer):
    """When transformers delivers tokens, and how many."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Transformers(Contestant):
    """transformers' generate with the very same model: plain, with prompt lookup, or assisted by a smaller model."""

    def __init__(self, target: Target, name: str = "transformers", lookup: bool = False, assistant: PreTrainedModel | None = None) -> None:
        self.target, self.name = target, name
        self.how: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
        if assistant is not None:
            self.how = {"assistant_model": assistant}

    def answer(self, question: Question) -> Answer:
        request, deliveries = question.request, _Deliveries()
        model: Any = self.target.model
        before = cost.memory(self.target.device)
        torch.manual_seed(request.sampling.seed)
        began = time.perf_counter()
        ids_1T = torch.tensor([request.prompt], device=self.target.device)
        with torch.inference_mode():
            try:
                found = model.generate(
                    ids_1T, attention_mask=torch.ones_like(ids_1T), streamer=deliveries, max_new_tokens=request.max_new_tokens,
                    **_ends(request, self.target.vocab_size), **_law(request.sampling), **self.how,
                )  # fmt: skip
            except (ValueError, RuntimeError, TypeError) as error:
                raise ModelError(f"{self.name}: transformers refuses: {' '.join(str(error).split())[:200]}") from error
        new = _cut(found[0, len(request.prompt) :].tolist(), request)
        at, counts = deliveries.at[1:], _fit(deliveries.counts[1:], len(new))  # the first delivery is the prompt
        cycles = tuple(Cycle(n, n - 1, end - begin) for begin, end, n in zip(at, at[1:], counts[1:], strict=False) if n)
        comparable = request.sampling.greedy and self.target.run.form.exact
        finish = "stop" if new and new[-1] in request.eos else "length"
        return Answer(
            token_ids=new, finish=finish, prefill_seconds=at[0] - began, cycles=cycles, comparable=comparable,
            memory=_memory(self.target.device, before), **question.about(self.name),
        )  # fmt: skip


def _cut(new: Sequence[int], request: Request) -> tuple[int, ...]:
    """Up to the first token that ends a text, and no longer than asked: some versions deliver what an assisted step accepted behind it."""
    end = next((i + 1 for i, token in enumerate(new) if token in request.eos), len(new))
    return tuple(new[: min(end, request.max_new_tokens)])


def _fit(counts: Sequence[int], total: int) -> list[int]:
    """The deliveries that make up so many tokens."""
    fitted = list[int]()
    for count in counts:
        fitted.append(min(count, total - sum(fitted)))
    return fitted


def _ends(request: Request, vocab_size: int) -> dict[str, Any]:
    """Where generate must stop. Without EOS ids it is told of one that is no token."""
    eos = sorted(request.eos)
    return {"eos_token_id": eos or [vocab_size], "pad_token_id": eos[0] if eos else 0}


def _law(sampling: Sampling) -> dict[str, Any]:
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, **penalty}
    return {
        "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p or None, **penalty,
    }  # fmt: skip
