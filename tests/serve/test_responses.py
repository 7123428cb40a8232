"""OpenAI's client reads /v1/responses, whole and as events: texts, calls, reasoning, what is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

import eyas
from eyas.serve.memory import Memory
from eyas.serve.protocol.responses import messages_of
from serving import PROMPTS, Running, running, tooled_llm

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


@pytest.mark.quick("change0", "change2", "change4", "change6", "change10")
@pytest.mark.parametrize(
    "change",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "conv_1"},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"truncation": "auto"},
        {"include": ["message.output_text.logprobs"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user"}]},
        {"input": []},
    ],
)
def test_what_is_not_served_is_refused(server: Running, change: dict[str, Any]) -> None:
    """What is not remembered, tools of the server's own and images are named in the refusal."""
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


# --- calls and reasoning ---------------------------------------------------------------------------

DAY = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}},
    "required": ["day"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": DAY,
    "strict": True,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"day": "today"}}</tool_call>'


@pytest.fixture(scope="module")
def tooled(llm: eyas.LLM) -> Iterator[Running]:
    """A server whose model has tools; it remembers three responses."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    with running(tooled_llm(), rows=2, remembered=3) as one:
        yield one


@pytest.mark.cover(choice=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "get_weather"},
     {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_a_call_and_its_output(tooled: Running, choice: Any) -> None:
    """Guards function tools: the call is an item that the client parses, and goes back with its output."""
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}
    tools = [WEATHER] if choice == "required" else [clock, WEATHER]
    client = tooled.client()
    made = client.responses.create(
        input=PROMPTS[0], tools=tools, tool_choice=choice, **{**GREEDY, "max_output_tokens": 80}
    )
    (call,) = made.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["day"] in ("today", "tomorrow")
    items: Any = [
        {"role": "user", "content": PROMPTS[0]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    after = client.responses.create(input=items, tools=tools, tool_choice="none", **GREEDY)
    assert after.output_text
    assert [item.type for item in after.output] == ["message"]


@pytest.mark.slow
def test_reasoning_a_text_and_calls(tooled: Running) -> None:
    """Guards the order of items, and that events add up to them in the official client's own helper. The
    model is made to write what a model with tools writes."""
    written = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
    asked: dict[str, Any] = {
        "input": PROMPTS[0], "tools": [WEATHER], "extra_body": {"choice": [written]}, **GREEDY, "max_output_tokens": 400,
    }  # fmt: skip
    made = tooled.client().responses.create(**asked)
    with tooled.client().responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (made, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == "Hm."  # type: ignore[union-attr,index]
        assert response.output_text == "Let me see."
        assert [json.loads(item.arguments) for item in response.output[2:]] == [{"day": "today"}] * 2  # type: ignore[union-attr]
        assert len({item.id for item in response.output}) == 4
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < 5  # type: ignore[union-attr]
    deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert deltas == [item.arguments for item in streamed.output[2:]]  # type: ignore[union-attr]
    assert [one.sequence_number for one in stream_of(events)] == list(range(len(stream_of(events))))


def stream_of(events: list[Any]) -> list[Any]:
    """The events that came from the server."""
    return [one for one in events if getattr(one, "sequence_number", None) is not None]


def test_items_as_messages() -> None:
    """Guards agents' histories: reasoning, text and calls in a row are one turn; empty reasoning is none."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        call("f"), call("g"),
        {"type": "function_call_output", "call_id": "f", "output": "1"},
        {"type": "function_call_output", "call_id": "g", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        call("h"),
    ]  # fmt: skip
    messages, places = messages_of(items)
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = messages[1]
    assert (turn["reasoning_content"], turn["content"]) == ("hm", [{"type": "text", "text": "b"}])
    assert [one["function"]["name"] for one in turn["tool_calls"]] == ["f", "g"]
    assert messages[3] == {"role": "tool", "tool_call_id": "g", "content": [{"type": "text", "text": "2"}]}
    assert [one["function"]["name"] for one in messages[4]["tool_calls"]] == ["h"]
    assert places == [f"input item {number}" for number in (1, 5, 6, 7, 9)]
    assert messages_of(items, before=6)[1] == [*["an earlier response"] * 3, "input item 1", "input item 3"]


@pytest.mark.slow
def test_options_that_change_nothing(server: Running, llm: eyas.LLM) -> None:
    """Guards what clients send by themselves: empty reasoning, effort none, an include of what there never is."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24).text
    changes: list[dict[str, Any]] = [
        {"reasoning": {}}, {"reasoning": {"effort": None}}, {"reasoning": {"effort": "none", "summary": "auto"}},
        {"include": []}, {"include": ["reasoning.encrypted_content"]}, {"tools": [], "tool_choice": "auto"}, {"max_tool_calls": 5},
        {"extra_body": {"best_of": 1}}, {"store": True}, {"prompt_cache_key": "x"}, {"tools": [WEATHER], "tool_choice": "none"},
    ]  # fmt: skip
    for change in changes:
        assert server.client().responses.create(input=PROMPTS[0], **GREEDY, **change).output_text == own


# --- what is remembered ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_second_turn(tooled: Running) -> None:
    """Guards clients that go on by the id of a response, or name its items: the texts are those of the whole
    conversation. What is not stored, or is too old, is refused in words that help."""
    client = tooled.client()
    first = client.responses.create(input=PROMPTS[1], **GREEDY)
    question = {"role": "user", "content": "Comedy."}
    item = first.output[0]
    whole: Any = [
        {"role": "user", "content": PROMPTS[1]},
        {"role": "assistant", "content": first.output_text},
        question,
    ]
    expected = client.responses.create(input=whole, store=False, **GREEDY).output_text
    named: Any = [whole[0], {"type": "item_reference", "id": item.id}, question]
    second = client.responses.create(input=[question], previous_response_id=first.id, **GREEDY)  # type: ignore[list-item]
    assert second.output_text == client.responses.create(input=named, store=False, **GREEDY).output_text == expected
    third: Any = {"input": "And a drama?", "previous_response_id": second.id, **GREEDY}
    streamed = list(client.responses.create(stream=True, **third))[-1]
    assert streamed.response.output_text == client.responses.create(**third).output_text  # type: ignore[union-attr]
    forgotten = client.responses.create(input="Hi", store=False, **GREEDY)
    for name in (forgotten.id, first.id):  # the first one is the fourth from the end
        with pytest.raises(openai.BadRequestError, match="store set to false") as caught:
            client.responses.create(input="Hi", previous_response_id=name, **GREEDY)
        assert caught.value.param == "previous_response_id"


@pytest.mark.slow
def test_each_key_has_its_own_memory(llm: eyas.LLM) -> None:
    """Guards against reading what another key has said."""
    with running(llm, rows=2, keys=("a", "b")) as server:
        made = server.client(api_key="a").responses.create(input=PROMPTS[1], **GREEDY)
        more: Any = {"input": "Hi", "previous_response_id": made.id, **GREEDY}
        assert server.client(api_key="a").responses.create(**more).output_text
        with pytest.raises(openai.BadRequestError, match="no response"):
            server.client(api_key="b").responses.create(**more)
        body = {"input": "Hi", "previous_response_id": made.id, "max_output_tokens": 2}
        assert (
            httpx2.post(f"{server.v1}/responses", json=body, headers={"x-api-key": "a"}, timeout=120).status_code == 200
        )


def test_memory_is_bounded() -> None:
    """Guards the size in bytes, and that what is used stays: the least recently used goes first."""
    memory = Memory(max_responses=10, max_bytes=1000)
    for number in range(3):
        memory.keep("a", f"r{number}", [{"id": f"i{number}", "text": "x" * 300}])
    assert memory.conversation("a", "r0") is not None
    memory.keep("a", "r3", [{"id": "i3", "text": "x" * 300}])
    assert memory.conversation("a", "r1") is None
    assert memory.item("a", "i0") is not None
    assert memory.item("a", "i1") is None
    assert memory.item("b", "i0") is None
    memory.keep("a", "huge", [{"text": "x" * 2000}])
    assert memory.conversation("a", "huge") is None
    assert memory.conversation("a", "r3") is not None
