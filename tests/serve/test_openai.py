"""OpenAI's own client reads what the server sends."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

import eyas
from serving import PROMPTS, Running

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models(server: Running) -> None:
    """Open WebUI reads data[].id, `vllm bench serve` data[0].root, inspect-ai max_model_len."""
    (model,) = server.client().models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "eyas")
    assert model.root == "embedded"
    assert model.max_model_len == 4096
    assert server.client().models.retrieve("tiny").id == "tiny"


def test_a_chat_is_the_answer_of_generate(server: Running, llm: eyas.LLM) -> None:
    """Text, usage and the reason of the end are those of `LLM.generate`."""
    for prompt in PROMPTS:
        own = llm.generate(prompt, max_new_tokens=24)
        chat = server.client().chat.completions.create(messages=messages(prompt), **GREEDY)
        (choice,) = chat.choices
        assert choice.message.content == own.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == own.finish_reason
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(llm.ids(prompt))
        assert chat.usage.completion_tokens == len(own.token_ids)
        assert chat.id.startswith("chatcmpl-")


def test_a_streamed_chat(server: Running, llm: eyas.LLM) -> None:
    """The role comes first, then content, then the reason of the end, then usage without choices;
    all chunks share an id."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    stream = server.client().chat.completions.create(
        messages=messages(PROMPTS[0]), stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == own.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [own.finish_reason]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(own.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.slow
def test_completions_of_every_kind_of_prompt(server: Running, llm: eyas.LLM) -> None:
    """A text, texts, ids and lists of ids: lm-eval sends lists of ids even for one prompt, and
    sorts choices by their index."""
    texts = ["Once upon a time", "The weather today is"]
    ids = [list(llm.ids(text, raw=True)) for text in texts]
    own = [llm.generate(text, raw=True, max_new_tokens=12).text for text in texts]
    for prompt, which in ((texts[0], [0]), (texts, [0, 1]), (ids[0], [0]), (ids, [0, 1]), ([ids[1]], [1])):
        made = server.client().completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert [choice.text for choice in sorted(made.choices, key=lambda c: c.index)] == [own[i] for i in which]
        assert made.usage is not None
        assert made.usage.prompt_tokens == sum(len(ids[i]) for i in which)


@pytest.mark.slow
def test_samples(server: Running, llm: eyas.LLM) -> None:
    """Sample i has the seed `seed + i`, so it equals one request with that seed; every sample of a
    stream has its own index."""
    options = {"temperature": 1.0, "max_tokens": 16}
    own = [llm.generate(PROMPTS[3], temperature=1.0, max_new_tokens=16, seed=5 + i).text for i in range(3)]
    assert len(set(own)) > 1, "samples that are all the same prove nothing"
    whole = server.client().chat.completions.create(model="tiny", messages=messages(PROMPTS[3]), n=3, seed=5, **options)
    assert [choice.message.content for choice in whole.choices] == own
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(llm.ids(PROMPTS[3]))
    texts = ["", "", ""]
    for chunk in server.client().chat.completions.create(
        model="tiny", messages=messages(PROMPTS[3]), n=3, seed=5, stream=True, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == own


@pytest.mark.slow
def test_without_a_seed_answers_differ(server: Running) -> None:
    """Requests without a seed must not share one: 16 tokens at temperature 1.5 agree with a chance
    below 1e-6."""
    made = [
        server.client().completions.create(
            model="tiny", prompt="Hello", max_tokens=16, temperature=1.5, extra_body={"ignore_eos": True}
        )
        for _ in range(3)
    ]
    assert len({one.choices[0].text for one in made}) == 3


def test_a_message_that_the_model_continues(server: Running, llm: eyas.LLM) -> None:
    """vLLM's fields of the chat template: the answer begins within the last message, or a variable
    of the template is set."""
    begun = [*messages(PROMPTS[0]), {"role": "assistant", "content": "What time"}]
    fields = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"some_variable": 1},
    }
    made = server.client().chat.completions.create(messages=begun, extra_body=fields, **GREEDY)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert made.choices[0].message.content == llm.generate(ids, max_new_tokens=24).text
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(ids)


def test_stop(server: Running, llm: eyas.LLM) -> None:
    """The text ends before the stop string, in a stream too, and the stop string is named."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24).text
    stop = own[len(own) // 2 :][:4]
    expected = own[: own.index(stop)]
    whole = server.client().chat.completions.create(messages=messages(PROMPTS[0]), stop=[stop, "\n\n\n"], **GREEDY)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (expected, "stop")
    assert whole.choices[0].stop_reason == stop
    stream = server.client().chat.completions.create(messages=messages(PROMPTS[0]), stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


@pytest.mark.slow
def test_many_at_once(server: Running, llm: eyas.LLM) -> None:
    """Twelve asynchronous requests on four rows, every second one streamed, each get their own answer."""
    own = {prompt: llm.generate(prompt, max_new_tokens=24).text for prompt in PROMPTS}

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, str]:
        prompt = PROMPTS[i % len(PROMPTS)]
        if i % 2:
            stream = await client.chat.completions.create(messages=messages(prompt), stream=True, **GREEDY)
            return prompt, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(messages=messages(prompt), **GREEDY)
        return prompt, whole.choices[0].message.content or ""

    async def every() -> list[tuple[str, str]]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(12)))

    for prompt, text in asyncio.run(every()):
        assert text == own[prompt]


@pytest.mark.quick("change0-NotFoundError-model")
@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"n": 200}, openai.BadRequestError, "n"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, openai.BadRequestError, "messages"),
        ({"extra_body": {"speculation": "no_such_method"}}, openai.BadRequestError, "speculation"),
        ({"extra_body": {"best_of": 4}}, openai.BadRequestError, "best_of"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
            openai.BadRequestError,
            "chat_template_kwargs",
        ),
        ({"store": True}, openai.BadRequestError, "store"),
        ({"modalities": ["text", "audio"]}, openai.BadRequestError, "modalities"),
    ],
)
def test_errors(
    server: Running, change: dict[str, object], error: type[openai.APIStatusError], param: str | None
) -> None:
    """A bad value is refused in OpenAI's form; a field that is known but not served is named."""
    with pytest.raises(error) as caught:
        server.client().chat.completions.create(**{"messages": messages("Hi"), **GREEDY, **change})
    body = caught.value.body
    assert isinstance(body, dict)
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["param"] == param
    refused = {"store", "modalities"} & change.keys() or change.get("extra_body", {}).keys() - {
        "speculation",
        "chat_template_kwargs",
    }
    assert all(name in body["message"] for name in refused)


def test_too_long_is_said_as_openai_says_it(server: Running) -> None:
    """Clients that shorten a conversation look for this code."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="tiny", prompt=[5] * 4096, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_fields_are_listed(server: Running) -> None:
    """Open WebUI sends fields of its own: the answer comes, and a header names what changed nothing."""
    raw = server.client().chat.completions.with_raw_response.create(
        messages=messages("Hi"), extra_body={"chat_id": "x", "user": "me", "store": False}, **GREEDY
    )
    assert raw.headers["x-eyas-ignored-fields"] == "chat_id"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_effort_that_the_template_does_not_read(server: Running, path: str) -> None:
    """Clients set it for every model: the request was refused."""
    body: dict[str, Any] = {"messages": messages("Hi"), "max_tokens": 2, "reasoning_effort": "low"}
    if path == "/v1/responses":
        body = {"input": "Hi", "max_output_tokens": 2, "reasoning": {"effort": "low"}}
    elif path == "/v1/messages":
        body = {"messages": messages("Hi"), "max_tokens": 2, "output_config": {"effort": "low"}}
    for stream in (False, True):
        made = httpx2.post(server.url + path, json={"model": "tiny", "stream": stream, **body}, timeout=60)
        assert (made.status_code, made.headers.get("x-eyas-ignored-fields")) == (200, "reasoning_effort"), made.text


def test_request_id(server: Running) -> None:
    """The client's own id comes back and is part of the answer's; one that could break a log line
    does not."""
    raw = server.client().chat.completions.with_raw_response.create(
        messages=messages("Hi"), extra_headers={"x-request-id": "abc-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.parse().id == "chatcmpl-abc-1"
    raw = server.client().chat.completions.with_raw_response.create(
        messages=messages("Hi"), extra_headers={"x-request-id": "a b"}, **GREEDY
    )
    assert raw.headers["x-request-id"] != "a b"
