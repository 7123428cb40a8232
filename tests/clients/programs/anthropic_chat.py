"""Anthropic's client against a server: python anthropic_chat.py URL ACTION PROMPT; prints one JSON object."""

import json
import sys
from typing import Any

import anthropic

DAYS = {"day": {"enum": ["today", "tomorrow"]}}
SCHEMA = {"type": "object", "properties": DAYS, "required": ["day"], "additionalProperties": False}
WEATHER: Any = {"name": "get_weather", "description": "The weather of a day.", "input_schema": SCHEMA}


def main() -> None:
    url, action, prompt = sys.argv[1:]
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}
    asked["extra_body"] = {"temperature": 0}  # newer versions of the client do not have it
    print(json.dumps(ACTIONS[action](client, asked)))


def answers(client: anthropic.Anthropic, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer whole, by the helper for streams, and as raw events; the count of the prompt; an error."""
    asked = {**asked, "system": "Be brief."}
    counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "system")})
    asked["max_tokens"] = 24
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    events = [one.type for one in client.messages.create(stream=True, **asked)]
    whole = client.messages.create(**asked)
    try:
        client.messages.create(**{**asked, "model": "another"})
    except anthropic.NotFoundError as error:
        refused = error.message
    messages = {"whole": whole.model_dump(mode="json"), "streamed": streamed.model_dump(mode="json")}
    return {**messages, "text": text, "events": events, "counted": counted.input_tokens, "refused": refused}


def tools(client: anthropic.Anthropic, asked: dict[str, Any]) -> dict[str, Any]:
    """A call that is forced, whole and streamed; the answer to its result."""
    asked |= {"max_tokens": 80, "tools": [WEATHER]}
    first = client.messages.create(tool_choice={"type": "any"}, **asked)
    with client.messages.stream(tool_choice={"type": "any"}, **asked) as stream:
        streamed = stream.get_final_message()
    (call,) = first.content
    asked["messages"] = [
        *asked["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    after = client.messages.create(tool_choice={"type": "none"}, **asked)
    made = {"first": first, "streamed": streamed, "after": after}
    return {name: message.model_dump(mode="json") for name, message in made.items()}


def agent(client: anthropic.Anthropic, asked: dict[str, Any]) -> dict[str, Any]:
    """Two turns as Claude Code sends them, and the errors that the client knows by their classes."""
    line = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
    usages = []
    for number in ("36ee5", "0aaa9"):
        system = [{"type": "text", "text": line.format(number)}, {"type": "text", "text": "You help people. " * 40}]
        between = [*asked["messages"], {"role": "system", "content": "No agents."}, {"role": "user", "content": "Go"}]
        fields: Any = {**asked, "system": system, "messages": between, "max_tokens": 32_000, "stop_sequences": [" "]}
        with client.messages.stream(**fields) as stream:
            usages.append(stream.get_final_message().usage.model_dump(mode="json"))
    asked |= {"max_tokens": 5}
    long = {"messages": [{"role": "user", "content": "word " * 9000}]}
    errors = {}
    for name, fields, path in (
        ("too long", long, client),
        ("no such path", {}, client.copy(base_url=f"{client.base_url}/v1")),
        ("a wrong body", {"messages": 5}, client),
    ):
        try:
            path.messages.create(**{**asked, **fields})
        except anthropic.APIStatusError as error:
            errors[name] = [type(error).__name__, error.type, error.body["error"]["message"]]  # type: ignore[index]
    return {"usages": usages, "errors": errors}


ACTIONS = {"answers": answers, "tools": tools, "agent": agent}

if __name__ == "__main__":
    main()
