"""ChatOpenAI against a server: python langchain_chat.py BASE_URL ACTION PROMPT...; prints one JSON object."""

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The fields that the model fills in."""

    kind: Literal["table", "movie"]
    seats: Literal[1, 2, 3]


@tool
def get_weather(day: Literal["today", "tomorrow"]) -> str:
    """The weather of a day."""
    return f"sunny {day}"


def main() -> None:
    base_url, action, *prompts = sys.argv[1:]
    chat = ChatOpenAI(
        base_url=base_url, api_key="none", model="tiny", temperature=0, max_tokens=80, max_retries=0, stream_usage=True
    )
    print(json.dumps(ACTIONS[action](chat, prompts)))


def answers(chat: ChatOpenAI, prompts: list[str]) -> dict[str, Any]:
    """The first prompt whole and streamed, all of them as a batch and at once."""
    short = chat.model_copy(update={"max_tokens": 24})
    chunks = list(short.stream(prompts[0]))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    return {
        "invoked": figures(short.invoke(prompts[0])),
        "streamed": figures(streamed),
        "chunks": len(chunks),
        "batch": [message.text for message in short.batch(prompts)],
        "asynchronous": asyncio.run(at_once(short, prompts)),
    }


async def at_once(chat: ChatOpenAI, prompts: list[str]) -> list[str]:
    return [message.text for message in await asyncio.gather(*map(chat.ainvoke, prompts))]


def figures(message: Any) -> dict[str, Any]:
    return {"text": message.text, "finish": message.response_metadata["finish_reason"], "usage": message.usage_metadata}


def structured(chat: ChatOpenAI, prompts: list[str]) -> dict[str, Any]:
    """An object of a class, by LangChain's two ways that constrain the text."""
    methods = ("json_schema", "function_calling")
    return {
        method: chat.with_structured_output(Answer, method=method, strict=True).invoke(prompts[0]).model_dump()
        for method in methods
    }


def tools(chat: ChatOpenAI, prompts: list[str]) -> dict[str, Any]:
    """A call that the model must make, whole and streamed; and its answer to the result."""
    caller = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    message = caller.invoke(prompts[0])
    chunks = list(caller.stream(prompts[0]))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    (call,) = message.tool_calls
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    answer = chat.bind_tools([get_weather]).invoke([("user", prompts[0]), message, result])
    return {"call": call, "streamed": streamed.tool_calls, "answer": answer.text}


ACTIONS = {"answers": answers, "structured": structured, "tools": tools}

if __name__ == "__main__":
    main()
