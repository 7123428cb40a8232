"""What a bench lets run against each other: methods of eyas in its Decoder, and transformers' own generate, all measured alike.

A contestant answers one question at a time, alone in its batch. Seconds of a step are those of the whole cycle; with transformers they are
the time between two deliveries to its streamer, which gets one token a step, or all that an assisted step accepted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eyas.bench.record import Answer, Cycle, answer_from
from eyas.decode import Decoder, Request, Verify, Watch
from eyas.drafters import Drafter
from eyas.errors import ModelError
from eyas.sampling import Sampling
from eyas.target import Target
from eyas.verify import verify

__all__ = ["Contestant", "Drafting", "Question", "Transformers"]

LOOKUP_TOKENS = 10  # what transformers' own documentation uses for prompt_lookup_num_tokens


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

    def __init__(self, name: str, drafter: Drafter, head: str | None = None, verify: Verify = verify) -> None:
        self.name, self.drafter, self.head, self.verify = name, drafter, head, verify

    def answer(self, question: Question, watch: Watch | None = None) -> Answer:
        decoder = Decoder(self.drafter.target, self.drafter, verify=self.verify, watch=watch)
        decoder.add(question.request)
        steps = []
        while not decoder.finished:
            steps += decoder.step()
        return answer_from(steps, **question.about(self.name))

    def describe(self) -> dict[str, Any]:
        net = self.drafter.net
        parameters = {} if net is None else {"parameters": sum(p.numel() for p in net.parameters())}
        return {"tree": self.drafter.describe(), **parameters, **({"head": self.head} if self.head else {})}


class _Deliveries(BaseStreamer):
    """When transformers delivers tokens, and how many."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.tokens.append(value.numel())

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
        ids_1T = torch.tensor([request.prompt], device=self.target.device)
        model: Any = self.target.model
        torch.manual_seed(request.sampling.seed)
        began = time.perf_counter()
        with torch.inference_mode():
            try:
                found = model.generate(
                    ids_1T, attention_mask=torch.ones_like(ids_1T), streamer=deliveries, max_new_tokens=request.max_new_tokens,
                    **_ends(request), **_law(request.sampling), **self.how,
                )  # fmt: skip
            except (ValueError, RuntimeError, TypeError) as error:
                raise ModelError(f"{self.name}: transformers refuses: {' '.join(str(error).split())[:200]}") from error
        new = tuple(found[0, len(request.prompt) :].tolist())
        at, counts = deliveries.at[1:], deliveries.tokens[1:]  # the first delivery is the prompt
        cycles = tuple(Cycle(n, n - 1, 0, 0, 0, end - begin) for begin, end, n in zip(at, at[1:], counts[1:], strict=False))
        finish = "stop" if new and new[-1] in request.eos else "length"
        return Answer(
            token_ids=new, finish=finish, prefill_seconds=at[0] - began, cycles=cycles, comparable=request.sampling.greedy,
            **question.about(self.name),
        )  # fmt: skip


def _ends(request: Request) -> dict[str, Any]:
    """Where generate must stop. Without EOS ids it is told of one that is no token."""
    eos = sorted(request.eos)
    return {"eos_token_id": eos or [-1], "pad_token_id": eos[0] if eos else 0}


def _law(sampling: Sampling) -> dict[str, Any]:
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.greedy:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, **penalty}
    return {
        "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p or None, **penalty,
    }  # fmt: skip
