"""The service of all endpoints that generate text. Tokenizing and checking a request may take long, so it is
done in one worker thread, not in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from eyas.api import LLM
from eyas.arguments import MediaIds, Messages
from eyas.core.sockets import RUNNER
from eyas.serve.answers import Answer
from eyas.serve.engine import Engine
from eyas.serve.errors import ApiError, bad_request
from eyas.serve.images import holds_images, with_images
from eyas.serve.logprobs import TokenTexts
from eyas.serve.memory import Memory
from eyas.serve.metrics import Metrics
from eyas.serve.records import Job, check_ids
from eyas.serve.settings import Settings
from eyas.targets.pretrained import BASE
from eyas.text import encode, encode_part, render

T = TypeVar("T")


class Service:
    """The engine with its tokenizer, its limits and its counters."""

    def __init__(self, llm: LLM, settings: Settings, pools: Any = None, heads: Any = None) -> None:
        """`pools`: `recall.Pools`, texts to draft from; `heads`: `eyas_train.adapt.Heads`, which replaces and teaches
        the head."""
        self.llm = llm
        self.pools = pools
        self.heads = heads
        self.settings = settings
        self.metrics = Metrics(settings.name)
        self.token_texts = TokenTexts(llm.tokenizer, llm.target.vocab_size)
        self.memory = Memory(settings.remembered)
        self.engine = Engine(llm, settings, self.metrics, None if heads is None else heads.rest)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eyas-prepare")

    def warm_up(self) -> None:
        """Decode a little before the first client comes, on a GPU by every method: costs are measured."""
        if self.llm.target.runner.records_cycles and (runner := RUNNER.plug) is not None:
            for name in self.engine.methods.names:
                runner.warm_up(self.engine.methods.drafter(name))
        features = () if self.heads is None else (self.heads.private,)
        self.llm.generate(list(range(8)), max_new_tokens=16, ignore_eos=True, features=features)

    def start(self) -> None:
        """Start the engine's thread."""
        self.engine.start()

    def stop(self) -> None:
        """Stop the engine, and save pools and head."""
        self.engine.stop()
        self._worker.shutdown()
        if self.pools is not None:
            self.pools.save()
        if self.heads is not None:
            self.heads.save()

    @property
    def models(self) -> tuple[str, ...]:
        """The names that clients ask for: the target's, then its adapters'."""
        return self.settings.name, *self.llm.adapters

    def model_name(self, asked: str | None) -> str:
        """Return the model that a client asks for; None is the target, without an adapter."""
        name = self.settings.name if asked is None else asked
        if name not in self.models:
            served = ", ".join(map(repr, self.models))
            raise ApiError(
                404, f"there is no model {name!r} here; this server has {served}", param="model", code="model_not_found"
            )
        return name

    def adapter_keywords(self, name: str) -> dict[str, str]:
        """Return the keyword that chooses the adapter of this name; none where the model has no adapters."""
        return {"adapter": BASE if name == self.settings.name else name} if self.llm.adapters else {}

    async def in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the thread that tokenizes, and wait for its result."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    def encode(self, prompt: str | Sequence[int], special: bool = True) -> tuple[int, ...]:
        """Return a prompt as token ids, without a chat template; `special`: with the tokens that the tokenizer adds."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        return tuple(encode(self.tokenizer, prompt) if special else encode_part(self.tokenizer, prompt, "the prompt"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raise ApiError for ids outside the vocabulary."""
        check_ids(tokens, self.llm.target.vocab_size, "tokens")
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def render(self, messages: Messages, **template: Any) -> MediaIds:
        """Return a conversation as token ids, by the tokenizer's chat template; with images, by the processor's."""
        if holds_images(messages):
            return self.llm.media_prompt(with_images(messages), **template)
        return MediaIds(tuple(render(self.tokenizer, messages, **template)), {})

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; raise ApiError without one."""
        if self.llm.tokenizer is None:
            raise bad_request("this server has no tokenizer: give token ids to /v1/completions", "prompt")
        return self.llm.tokenizer

    async def submit(self, job: Job, owner: str) -> Answer:
        """Check a job and queue it. `owner`: see `auth.owner_of`; a job is drafted from its owner's texts alone."""
        self.engine.check_open()
        features: list[Any] = [] if self.pools is None else [self.pools[owner]]
        if self.heads is not None and job.private:
            features.append(self.heads.private)
        if features:
            job = replace(job, keywords={**job.keywords, "features": tuple(features)})
        prepared = await self.in_worker(self.engine.prepare, job)
        return self.engine.submit(job, prepared)
