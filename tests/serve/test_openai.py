"""OpenAI's own client reads what the server sends."""

import httpx2
import pytest

import eyas
from serving import PROMPTS, Running

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_the_answer_of_generate(server: Running, llm: eyas.LLM) -> None:
    """Text, usage and the reason of the end are those of `LLM.generate`."""
    for prompt in PROMPTS:
        own = llm.generate(prompt, max_new_tokens=24)
        chat = server.client().chat.completions.create(messages=messages(prompt), **GREEDY)
        (choice,) = chat.choices
        assert (choice.message.role, choice.message.content) == ("assistant", own.text)
        assert choice.finish_reason == own.finish_reason
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(llm.ids(prompt)), len(own.token_ids))
        assert chat.id.startswith("chatcmpl-")


def test_a_streamed_chat(server: Running, llm: eyas.LLM) -> None:
    """The role comes first, then content, then the reason of the end, then usage without choices;
    all chunks share an id."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    *chunks, last = server.client().chat.completions.create(
        messages=messages(PROMPTS[0]), stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in choices) == own.text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [own.finish_reason]
    assert {chunk.object for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in (*chunks, last)}) == 1
    assert (last.choices, last.usage.completion_tokens) == ([], len(own.token_ids))
    assert all(chunk.usage is None for chunk in chunks)


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
    asked = {"model": "tiny", "messages": messages(PROMPTS[3]), "temperature": 1.0, "max_tokens": 16, "n": 3, "seed": 5}
    own = [llm.generate(PROMPTS[3], temperature=1.0, max_new_tokens=16, seed=5 + i).text for i in range(3)]
    assert len(set(own)) > 1, "samples that are all the same prove nothing"
    whole = server.client().chat.completions.create(**asked)
    assert [choice.message.content for choice in whole.choices] == own
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(llm.ids(PROMPTS[3]))
    texts = ["", "", ""]
    for chunk in server.client().chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == own


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


def test_headers(server: Running) -> None:
    """Open WebUI sends fields of its own: the answer comes, and a header names what changed nothing. The client's own id
    comes back and is part of the answer's; one that could break a log line does not."""

    def raw(name: str, **fields: str) -> httpx2.Response:
        body = {**GREEDY, "messages": messages("Hi"), "user": "me", "store": False, **fields}
        return server.post("/v1/chat/completions", body, headers={"x-request-id": name})

    response = raw("abc-1", chat_id="x")
    assert response.headers["x-eyas-ignored-fields"] == "chat_id"
    assert (response.headers["x-request-id"], response.json()["id"]) == ("abc-1", "chatcmpl-abc-1")
    assert raw("a b").headers["x-request-id"] != "a b"
