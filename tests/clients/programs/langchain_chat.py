"""ChatOpenAI against a server: python langchain_chat.py BASE_URL ACTION PROMPT...; prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI


def main() -> None:
    base_url, action, *prompts = sys.argv[1:]
    chat = ChatOpenAI(base_url=base_url, api_key="none", model="tiny", temperature=0, max_tokens=24, max_retries=0, stream_usage=True)
    print(json.dumps(ACTIONS[action](chat, prompts)))


def answers(chat: ChatOpenAI, prompts: list[str]) -> dict[str, Any]:
    """The first prompt whole and streamed, all of them as a batch and at once."""
    chunks = list(chat.stream(prompts[0]))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    return {
        "invoked": figures(chat.invoke(prompts[0])),
        "streamed": figures(streamed),
        "chunks": len(chunks),
        "batch": [message.text for message in chat.batch(prompts)],
        "asynchronous": asyncio.run(at_once(chat, prompts)),
    }


async def at_once(chat: ChatOpenAI, prompts: list[str]) -> list[str]:
    return [message.text for message in await asyncio.gather(*map(chat.ainvoke, prompts))]


def figures(message: Any) -> dict[str, Any]:
    return {"text": message.text, "finish": message.response_metadata["finish_reason"], "usage": message.usage_metadata}


ACTIONS = {"answers": answers}

if __name__ == "__main__":
    main()
