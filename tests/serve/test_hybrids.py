"""A hybrid target behind the server: requests that come and go, share prefixes and are closed early
get the texts that they get alone."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

import eyas
import zoo
from eyas import tiny
from serving import PROMPTS, Running, running

pytestmark = pytest.mark.slow
NEW = 12
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})
MODELS = {
    "lfm2": {"layer_types": zoo.CONV_THEN_ATTENTION},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, **zoo.MAMBA_1},
}


@pytest.fixture(params=MODELS)
def llm(request: pytest.FixtureRequest) -> eyas.LLM:
    tokenizer = tiny.tokenizer()
    model = zoo.tiny(request.param, vocab_size=len(tokenizer), max_position_embeddings=1024, **MODELS[request.param])
    return eyas.load(model, method="self_speculative", skip="exit:2", depth=3, tokenizer=tokenizer)


async def text_of(client: openai.AsyncOpenAI, prompt: str, stream: bool, delay: float, sampling: dict[str, Any]) -> str:
    await asyncio.sleep(delay)
    messages: Any = [{"role": "user", "content": prompt}]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": NEW, **sampling}
    if stream:
        chunks = await client.chat.completions.create(messages=messages, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    return (await client.chat.completions.create(messages=messages, **options)).choices[0].message.content or ""


async def close_early(client: openai.AsyncOpenAI, prompt: str, delay: float) -> None:
    await asyncio.sleep(delay)
    messages: Any = [{"role": "user", "content": prompt}]
    chunks = await client.chat.completions.create(
        model="tiny", max_tokens=400, temperature=0.0, stream=True, messages=messages
    )
    async for _ in chunks:
        break
    await chunks.close()


# httpx's generator of a stream that the client closes early may be collected while it runs; the server is not concerned
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator object BoundAsyncStream")
def test_rows_come_and_go(llm: eyas.LLM) -> None:
    prompts = [*PROMPTS, *(f"{prompt} Please be quick." for prompt in PROMPTS)]
    cases = [
        (prompt, sampling, llm.generate(prompt, max_new_tokens=NEW, **sampling).text)
        for prompt in prompts
        for sampling in SAMPLINGS
    ]

    async def every(server: Running) -> list[str | None]:
        async with server.async_client() as client:
            answers = [
                text_of(client, prompt, bool(i % 2), 0.02 * i, sampling)
                for i, (prompt, sampling, _) in enumerate(cases)
            ]
            closed = [close_early(client, prompt, 0.05 * i) for i, prompt in enumerate(PROMPTS)]
            return await asyncio.gather(*answers, *closed)

    with running(llm, rows=3, prefill_budget=7) as server:
        for _ in range(2):  # the second time behind kept prefixes
            texts = asyncio.run(every(server))
            assert texts[: len(cases)] == [text for _, _, text in cases]
