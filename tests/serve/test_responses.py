"""OpenAI's client reads /v1/responses, whole and as events: texts, calls, reasoning, what is remembered."""

import json
from typing import Any

import openai
import pytest

import eyas
from eyas.serve.memory import Memory
from eyas.serve.responses import messages_of
from serving import DAY, PROMPTS, WRITTEN, Running, running

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 24}


@pytest.mark.slow
def test_a_response_is_the_answer_of_generate(server: Running, llm: eyas.LLM) -> None:
    """Items of every kind of text, those of an earlier response included, are the messages of a chat."""
    items: Any = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello!", "annotations": []}
        ]},
        {"role": "user", "content": [{"type": "input_text", "text": PROMPTS[1]}]},
    ]  # fmt: skip
    turns = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", PROMPTS[1]))
    messages = [{"role": role, "content": text} for role, text in turns]
    own = llm.generate(messages, max_new_tokens=24)
    made = server.client().responses.create(input=items, instructions="Be brief.", **GREEDY)
    assert (made.output_text, made.status) == (own.text, "completed")
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(llm.ids(messages)), len(own.token_ids))
    alone = server.client().responses.create(input=PROMPTS[0], **GREEDY)
    assert alone.output_text == llm.generate(PROMPTS[0], max_new_tokens=24).text


@pytest.mark.slow
def test_events(server: Running, llm: eyas.LLM) -> None:
    """The events come in OpenAI's order with consecutive numbers; the deltas are the text; what is
    cut is incomplete."""
    own = llm.generate(PROMPTS[0], max_new_tokens=5)
    events = list(server.client().responses.create(input=PROMPTS[0], stream=True, **{**GREEDY, "max_output_tokens": 5}))
    kinds = [one.type.removeprefix("response.") for one in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == own.text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == own.text
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


WEATHER: Any = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": DAY, "strict": True}  # fmt: skip


@pytest.mark.slow
def test_reasoning_a_text_and_calls(tooled: Running) -> None:
    """Guards the order of items, and that events add up to them in the official client's own helper."""
    asked: dict[str, Any] = {**GREEDY, "input": PROMPTS[0], "tools": [WEATHER], "max_output_tokens": 400}
    asked["extra_body"] = {"choice": [WRITTEN]}
    made = tooled.client().responses.create(**asked)
    with tooled.client().responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
        streamed = stream.get_final_response()
    response: Any
    for response in (made, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == "Hm."
        assert response.output_text == "Let me see."
        assert [json.loads(item.arguments) for item in response.output[2:]] == [{"day": "today"}] * 2
        assert len({item.id for item in response.output}) == 4
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < 5
    deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert deltas == [item.arguments for item in response.output[2:]]
    numbers = [one.sequence_number for one in events if getattr(one, "sequence_number", None) is not None]
    assert numbers == list(range(len(numbers)))


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


@pytest.mark.slow
def test_the_second_turn(tooled: Running) -> None:
    """Guards clients that go on by the id of a response, or name its items: the texts are those of the whole
    conversation. What is not stored, or is too old, is refused in words that help."""

    def create(given: Any, **more: Any) -> Any:
        return tooled.client().responses.create(input=given, **GREEDY, **more)

    first = create(PROMPTS[1])
    asked, question = ({"role": "user", "content": text} for text in (PROMPTS[1], "Comedy."))
    said, named = (
        {"role": "assistant", "content": first.output_text},
        {"type": "item_reference", "id": first.output[0].id},
    )
    second = create([question], previous_response_id=first.id)
    texts = {create([asked, turn, question], store=False).output_text for turn in (said, named)}
    assert texts == {second.output_text}
    third = {"given": "And a drama?", "previous_response_id": second.id}
    assert list(create(stream=True, **third))[-1].response.output_text == create(**third).output_text
    forgotten = create("Hi", store=False)
    for name in (forgotten.id, first.id):  # the first one is the fourth from the end
        with pytest.raises(openai.BadRequestError, match="store set to false") as caught:
            create("Hi", previous_response_id=name)
        assert caught.value.param == "previous_response_id"


@pytest.mark.slow
def test_each_key_has_its_own_memory(llm: eyas.LLM) -> None:
    """Guards against reading what another key has said."""
    with running(llm, rows=2, keys=("a", "b")) as server:
        made = server.client(api_key="a").responses.create(input=PROMPTS[1], **GREEDY)
        body = {"input": "Hi", "previous_response_id": made.id, "max_output_tokens": 2}
        for headers, status in (
            ({"x-api-key": "a"}, 200),
            ({"authorization": "Bearer a"}, 200),
            ({"x-api-key": "b"}, 400),
        ):
            response = server.post("/v1/responses", body, headers=headers)
            assert (response.status_code, "no response" in response.text) == (status, status == 400)


def test_memory_is_bounded() -> None:
    """Guards the size in bytes, and that what is used stays: the least recently used goes first."""
    memory = Memory(max_responses=10, max_bytes=1000)
    for number in range(3):
        memory.keep("a", f"r{number}", [{"id": f"i{number}", "text": "x" * 300}])
    assert memory.conversation("a", "r0") is not None
    memory.keep("a", "r3", [{"id": "i3", "text": "x" * 300}])
    assert memory.conversation("a", "r1") is None
    kept = [memory.item(key, name) is not None for key, name in (("a", "i0"), ("a", "i1"), ("b", "i0"))]
    assert kept == [True, False, False]
    memory.keep("a", "huge", [{"text": "x" * 2000}])
    assert [memory.conversation("a", name) is not None for name in ("huge", "r3")] == [False, True]
