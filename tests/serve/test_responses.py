"""OpenAI's client reads /v1/responses, whole and as events."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import eyas
from serving import PROMPTS, Running

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 24}


@pytest.mark.slow
def test_a_response_is_the_answer_of_generate(server: Running, llm: eyas.LLM) -> None:
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    made = server.client().responses.create(input=PROMPTS[0], **GREEDY)
    assert made.output_text == own.text
    assert made.status == "completed"
    assert made.usage is not None
    assert made.usage.output_tokens == len(own.token_ids)
    assert made.usage.input_tokens == len(llm.ids(PROMPTS[0]))


@pytest.mark.slow
def test_a_conversation_with_instructions(server: Running, llm: eyas.LLM) -> None:
    """Items of every kind of text, those of an earlier response included, are the messages of a chat."""
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello!", "annotations": []}
        ]},
        {"role": "user", "content": [{"type": "input_text", "text": PROMPTS[1]}]},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": PROMPTS[1]},
    ]
    made = server.client().responses.create(input=items, instructions="Be brief.", **GREEDY)  # type: ignore[arg-type]
    assert made.output_text == llm.generate(messages, max_new_tokens=24).text


@pytest.mark.slow
def test_events(server: Running, llm: eyas.LLM) -> None:
    """The events come in OpenAI's order with consecutive numbers; the deltas are the text; what is
    cut is incomplete."""
    own = llm.generate(PROMPTS[0], max_new_tokens=5)
    events = list(server.client().responses.create(input=PROMPTS[0], stream=True, **{**GREEDY, "max_output_tokens": 5}))
    kinds = [one.type for one in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == own.text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == own.text
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.slow
def test_the_helper_for_streams(server: Running, llm: eyas.LLM) -> None:
    """`responses.stream` adds the events up by itself and checks them."""
    with server.client().responses.stream(input=PROMPTS[1], **GREEDY) as stream:
        final = stream.get_final_response()
    assert final.output_text == llm.generate(PROMPTS[1], max_new_tokens=24).text


@pytest.mark.quick("change2", "change6", "change8", "change1", "change4", "change3")
@pytest.mark.parametrize(
    "change",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"store": True},
        {"tools": [{"type": "web_search"}]},
        {"truncation": "auto"},
        {"include": ["message.output_text.logprobs"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user"}]},
        {"input": []},
    ],
)
def test_what_is_not_served_is_refused(server: Running, change: dict[str, Any]) -> None:
    """A memory of responses, tools of the server's and images are named in the refusal."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().responses.create(**{"input": "Hi", **GREEDY, **change})
    ((name, value),) = change.items()
    assert name in str(caught.value.body) or name == "input"
    assert value is not None


@pytest.mark.slow
def test_an_error_in_a_stream(server: Running) -> None:
    """The deadline of a stream is a typed event."""
    options: dict[str, Any] = {"stream": True, "extra_body": {"timeout": 1e-3, "ignore_eos": True}}
    stream = server.client().responses.create(input=PROMPTS[0], **{**GREEDY, "max_output_tokens": 500, **options})
    *_, last = stream
    assert last.type == "error"
    assert "time" in last.message
