"""Structured output and tools through the server, read by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import regex
from pydantic import BaseModel

import eyas
from serving import PROMPTS, Running, running, tooled_llm

pytest.importorskip("llguidance", reason="structured output needs llguidance")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 80}
MESSAGES: Any = [{"role": "user", "content": PROMPTS[0]}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "people": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True}}


class Answer(BaseModel):
    """The object that `parse` asks for."""

    kind: Literal["table", "movie"]
    seats: Literal[1, 2, 3]


def test_json_schema(server: Running, llm: eyas.LLM) -> None:
    """Guards response_format: the text validates, and is that of `LLM.generate`; streamed, too."""
    chat = server.client().chat.completions.create(messages=MESSAGES, response_format=FORMAT, **GREEDY)
    text = chat.choices[0].message.content
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chat.choices[0].finish_reason == "stop"
    assert text == llm.generate(PROMPTS[0], max_new_tokens=80, response_format=FORMAT).text
    stream = server.client().chat.completions.create(messages=MESSAGES, response_format=FORMAT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_a_structure_ends_before_min_tokens(server: Running) -> None:
    """Guards a complete choice while min_tokens bans every end: the request failed with drafts."""
    for fields in ({"draft": "auto"}, {"draft": "off"}):
        chat = server.client().chat.completions.create(
            messages=MESSAGES, extra_body={"choice": ["left or right"], "min_tokens": 60, **fields}, **GREEDY
        )
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("left or right", "stop")


def test_parse(server: Running) -> None:
    """Guards the client's `parse`, with a model of pydantic."""
    chat = server.client().chat.completions.parse(messages=MESSAGES, response_format=Answer, **GREEDY)
    parsed = chat.choices[0].message.parsed
    assert parsed is not None
    assert parsed.kind in ("table", "movie")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"], "disable_any_whitespace": False}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
        ({"structured_outputs": {"json": {"enum": ["u", "v"]}}}, '"[uv]"'),
        ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
    ],
)
def test_names_of_vllm(server: Running, fields: dict[str, Any], pattern: str) -> None:
    """Guards vLLM's fields, in chats and in completions."""
    chat = server.client().chat.completions.create(messages=MESSAGES, extra_body=fields, **GREEDY)
    assert regex.fullmatch(pattern, chat.choices[0].message.content or "")
    text = server.client().completions.create(prompt="Hello.", extra_body=fields, **GREEDY).choices[0].text
    assert regex.fullmatch(pattern, text)


@pytest.mark.quick("fields0-structural_tag")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of them"),
        ({"regex": "a", "guided_regex": "b"}, "twice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "Invalid type"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool"),
        ({"tools": [{"type": "function"}]}, "tool 1"),
        ({"tool_choice": "required"}, "no tools"),
    ],
)
def test_refusals(server: Running, fields: dict[str, Any], reason: str) -> None:
    """Guards against fields that are silently ignored: status 400, and what is wrong by its name."""
    with pytest.raises(openai.BadRequestError, match=reason):
        server.client().chat.completions.create(messages=MESSAGES, extra_body=fields, **GREEDY)


# --- tools ---------------------------------------------------------------------------------------------

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"day": "today"}}</tool_call>'


@pytest.fixture(scope="module")
def tooled(llm: eyas.LLM) -> Iterator[Running]:
    """A server whose chat template has a place for tools, and whose response template tells how
    calls are written."""
    with running(tooled_llm(), rows=2) as one:
        yield one


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_forced_calls(tooled: Running, choice: Any, stream: bool) -> None:
    """Guards tool_choice required, and a function by name: one call, whose arguments are of the
    function's schema."""
    made = tooled.client().chat.completions.create(
        messages=MESSAGES,
        tools=[WEATHER] if choice == "required" else [CLOCK, WEATHER],
        tool_choice=choice,
        stream=stream,
        **GREEDY,
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in made]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert call.index == 0
        reason, content = chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        (call,) = made.choices[0].message.tool_calls
        reason, content = made.choices[0].finish_reason, made.choices[0].message.content or ""
    assert (reason, content, call.type, call.function.name) == ("tool_calls", "", "function", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert call.id.startswith("call_")


@pytest.mark.slow
def test_calls_that_the_model_decides_on(tooled: Running) -> None:
    """Guards tool_choice auto. The model is made to write what a model with tools writes:
    reasoning, words, two calls."""
    text = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [WEATHER],
        "extra_body": {"choice": [text]},
        **GREEDY,
        "max_tokens": 400,
    }
    choice = tooled.client().chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra == {"reasoning_content": "Hm."}
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or []] == [{"day": "today"}] * 2
    usage = tooled.client().chat.completions.create(**asked).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    reasoning = usage.completion_tokens_details.reasoning_tokens
    assert reasoning is not None
    assert 0 < reasoning < 5
    stream = tooled.client().chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    *made, last = stream
    assert last.usage == usage
    chunks = [chunk.choices[0] for chunk in made]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert "".join((chunk.delta.model_extra or {}).get("reasoning_content") or "" for chunk in chunks) == "Hm."
    assert [call.index for chunk in chunks for call in chunk.delta.tool_calls or []] == [0, 1]
    assert chunks[-1].finish_reason == "tool_calls"
    single = tooled.client().chat.completions.create(parallel_tool_calls=False, **asked).choices[0]
    assert len(single.message.tool_calls or []) == 1


@pytest.mark.slow
def test_a_conversation_with_calls(tooled: Running) -> None:
    """Guards the messages of earlier calls: content is null there, and arguments are text that
    templates read as an object."""
    first = tooled.client().chat.completions.create(
        messages=MESSAGES, tools=[WEATHER], tool_choice="required", **GREEDY
    )
    call = (first.choices[0].message.tool_calls or [])[0]
    messages: Any = [
        *MESSAGES,
        first.choices[0].message.model_dump(exclude_none=False, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = tooled.client().chat.completions.create(
        messages=messages, tools=[WEATHER], tool_choice="none", **{**GREEDY, "max_tokens": 8}
    )
    assert second.choices[0].message.tool_calls is None


@pytest.mark.slow
def test_histories_that_clients_repeat(tooled: Running) -> None:
    """Guards conversations that could never go on: calls with arguments that are empty, cut or no
    object, lists of no calls, null content, developers; what is refused names its message."""

    def answer(*messages: Any) -> Any:
        return tooled.client().chat.completions.create(messages=[*MESSAGES, *messages], **{**GREEDY, "max_tokens": 1})

    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    for arguments in ("", " ", None, "null", "5", '["a"]', '{"day": "tod', "{}"):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        assert answer({"role": "assistant", "content": None, "tool_calls": [call]}, result).usage.completion_tokens == 1
    answer({"role": "assistant", "content": "Hello.", "tool_calls": []}, *MESSAGES)
    answer({"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": ""}}, *MESSAGES)
    brief = answer({"role": "developer", "content": "Be brief."}).usage.prompt_tokens
    assert brief == answer({"role": "system", "content": "Be brief."}).usage.prompt_tokens
    for wrong in (
        {"role": "assistant", "tool_calls": [{"id": "c1"}]},
        {"role": "user", "content": None},
        {"role": "x"},
    ):
        with pytest.raises(openai.BadRequestError, match=f"message {len(MESSAGES) + 1}"):
            answer(wrong)


@pytest.mark.slow
def test_parse_with_tools(tooled: Running) -> None:
    """Guards the client's `parse` of calls."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    chat = tooled.client().chat.completions.parse(messages=MESSAGES, tools=[strict], tool_choice="required", **GREEDY)
    (call,) = chat.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments in ({"day": "today"}, {"day": "tomorrow"})
