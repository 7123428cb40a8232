"""Through the server, texts equal those of `LLM.generate` byte by byte: alone and among others,
streamed and not, for every method."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest

import eyas
from eyas.serve.pool import Methods
from serving import PROMPTS, Running, running

NEW = 20
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 5},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"300": 2.0, "13": -100}, "seed": 6},
)  # fmt: skip
OWN = ("top_k", "min_p", "repetition_penalty")  # names that OpenAI's client does not know


@dataclass(frozen=True)
class Case:
    """A request with the answer that it must get."""

    prompt: str
    sampling: dict[str, Any]
    text: str
    new: int


def cases_of(llm: eyas.LLM, samplings: Sequence[dict[str, Any]] = SAMPLINGS, new: int = NEW) -> list[Case]:
    """Four prompts, each continued in two ways, with each of these samplings."""
    prompts = [*PROMPTS, *(f"{prompt} Please be quick." for prompt in PROMPTS)]
    return [Case(p, s, llm.generate(p, max_new_tokens=new, **s).text, new) for p in prompts for s in samplings]


@pytest.fixture(scope="module")
def cases(llm: eyas.LLM) -> list[Case]:
    """40 requests."""
    return cases_of(llm)


async def answered(client: openai.AsyncOpenAI, case: Case, stream: bool, delay: float = 0.0, **extra: Any) -> str:
    """The text that the server gives."""
    await asyncio.sleep(delay)
    known = {name: value for name, value in case.sampling.items() if name not in OWN}
    extra |= {name: value for name, value in case.sampling.items() if name in OWN}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": case.new, "extra_body": extra, **known}
    messages: Any = [{"role": "user", "content": case.prompt}]
    if stream:
        chunks = await client.chat.completions.create(messages=messages, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    whole = await client.chat.completions.create(messages=messages, **options)
    return whole.choices[0].message.content or ""


def compare(server: Running, cases: Sequence[Case], spread: float = 0.0, **extra: Any) -> None:
    """All cases at once, every second one streamed, begun within `spread` seconds."""

    async def every() -> list[Any]:
        async with server.async_client() as client:
            delays = [spread * i / len(cases) for i in range(len(cases))]
            asked = [answered(client, c, bool(i % 2), delays[i], **extra) for i, c in enumerate(cases)]
            return await asyncio.gather(*asked)

    for case, text in zip(cases, asyncio.run(every()), strict=True):
        assert text == case.text, case


@pytest.mark.slow
def test_alone(server: Running, cases: list[Case]) -> None:
    """One after another: the Decoder of a single row."""

    async def each() -> None:
        async with server.async_client() as client:
            for i, case in enumerate(cases[:8]):
                assert await answered(client, case, bool(i % 2)) == case.text

    asyncio.run(each())


@pytest.mark.cover(rows=1)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 16])  # one row: test_alone
def test_among_others(llm: eyas.LLM, cases: list[Case], rows: int) -> None:
    """40 at once, and again while they come and go: rows, chunks of prompts, reused prefixes and
    neighbours change no text."""
    with running(llm, rows=rows, prefill_budget=7) as server:
        compare(server, cases)
        compare(server, cases, spread=0.5)


@pytest.mark.exhaustive
def test_every_method(llm: eyas.LLM, server: Running, cases: list[Case]) -> None:
    """The request chooses the method, and the text stays: all methods of the server at once, on the
    rows of one engine.

    Methods whose children are drawn at random give another sample of the same distribution: greedy
    requests only. REST needs a datastore.
    """
    methods = Methods(llm)
    for method in [name for name in (*methods.names, False) if name != "rest"]:
        drawn = isinstance(method, str) and methods.drafter(method).samples_children
        asked = [case for case in cases[:5] if not drawn or case.sampling["temperature"] == 0]
        compare(server, asked, drafting=method)
