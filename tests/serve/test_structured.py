"""Structured output and tools through the server, read by OpenAI's own client."""

import json
from typing import Any

import jsonschema
import openai
import pytest
import regex

import eyas
from serving import DAY, PROMPTS, WRITTEN, Running

pytest.importorskip("llguidance", reason="structured output needs llguidance")

TALK: Any = [{"role": "user", "content": PROMPTS[0]}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 80, "messages": TALK}
FIELDS = {"city": {"type": "string", "maxLength": 10}, "people": {"type": "integer", "minimum": 1, "maximum": 9}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True}}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": DAY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


def test_json_schema(server: Running, llm: eyas.LLM) -> None:
    """Guards response_format: the text validates, and is that of `LLM.generate`; streamed, too."""
    chat = server.client().chat.completions.create(response_format=FORMAT, **GREEDY)
    text = chat.choices[0].message.content
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chat.choices[0].finish_reason == "stop"
    assert text == llm.generate(PROMPTS[0], max_new_tokens=80, response_format=FORMAT).text
    stream = server.client().chat.completions.create(response_format=FORMAT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


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
    for path, asked in (("chat/completions", {"messages": TALK}), ("completions", {"prompt": "Hello."})):
        choice = server.post(f"/v1/{path}", {"temperature": 0, "max_tokens": 80, **asked, **fields}).json()["choices"][
            0
        ]
        assert regex.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_forced_calls(tooled: Running, choice: Any, stream: bool) -> None:
    """Guards tool_choice required, and a function by name: one call, whose arguments are of the function's schema."""
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    made = tooled.client().chat.completions.create(tools=tools, tool_choice=choice, stream=stream, **GREEDY)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    (call,) = [call for part in parts for call in part.tool_calls or []]
    assert not stream or call.index == 0
    assert "".join(part.content or "" for part in parts) == ""
    assert (choices[-1].finish_reason, call.type, call.function.name) == ("tool_calls", "function", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), DAY)
    assert call.id.startswith("call_")


@pytest.mark.slow
def test_calls_that_the_model_decides_on(tooled: Running) -> None:
    """Guards tool_choice auto: reasoning, words, two calls."""
    asked: dict[str, Any] = {**GREEDY, "tools": [WEATHER], "extra_body": {"choice": [WRITTEN]}, "max_tokens": 400}
    create = tooled.client().chat.completions.create
    made = create(**asked)
    choice, usage = made.choices[0], made.usage
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.model_extra == {"reasoning_content": "Hm."}
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"day": "today"}] * 2
    assert 0 < usage.completion_tokens_details.reasoning_tokens < 5
    *chunks, last = create(stream=True, stream_options={"include_usage": True}, **asked)
    assert last.usage.total_tokens == usage.total_tokens
    assert last.usage.completion_tokens_details == usage.completion_tokens_details
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert [call.index for delta in deltas for call in delta.tool_calls or []] == [0, 1]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len(create(parallel_tool_calls=False, **asked).choices[0].message.tool_calls) == 1


@pytest.mark.slow
def test_histories_that_clients_repeat(tooled: Running) -> None:
    """Guards conversations that could never go on: calls with arguments that are empty, cut or no
    object, lists of no calls, null content, developers; what is refused names its message."""

    def answer(*messages: Any) -> Any:
        asked = {**GREEDY, "messages": [*TALK, *messages], "max_tokens": 1}
        return tooled.client().chat.completions.create(**asked)

    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    for arguments in ("", " ", None, "null", "5", '["a"]', '{"day": "tod', "{}"):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        assert answer({"role": "assistant", "content": None, "tool_calls": [call]}, result).usage.completion_tokens == 1
    answer({"role": "assistant", "content": "Hello.", "tool_calls": []}, *TALK)
    answer({"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": ""}}, *TALK)
    brief = {answer({"role": role, "content": "Be brief."}).usage.prompt_tokens for role in ("developer", "system")}
    assert len(brief) == 1
    wrong = ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, {"role": "user", "content": None}, {"role": "x"})
    for message in wrong:
        with pytest.raises(openai.BadRequestError, match="message 2"):
            answer(message)
