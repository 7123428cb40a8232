"""Further clients against a server: python others.py URL ACTION PROMPT; prints one JSON object."""

import json
import sys
from typing import Any, Literal


def main() -> None:
    url, action, prompt = sys.argv[1:]
    print(json.dumps(ACTIONS[action](url, prompt)))


def agents(url: str, prompt: str) -> dict[str, Any]:
    """OpenAI's Agents SDK: a function is called through /v1/responses, and its output goes back; then a second
    turn, by the id of the response."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    asked = []

    @function_tool
    def get_weather(day: Literal["today", "tomorrow"]) -> str:
        """The weather of a day."""
        asked.append(day)
        return f"sunny {day}"

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
    agent = Agent(
        name="a",
        model=OpenAIResponsesModel(model="tiny", openai_client=client),
        model_settings=settings,
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )
    first = Runner.run_sync(agent, prompt)
    plain = Agent(name="b", model=agent.model, model_settings=ModelSettings(temperature=0, max_tokens=24))
    second = Runner.run_sync(plain, prompt)
    third = Runner.run_sync(plain, "And then?", previous_response_id=second.last_response_id)
    return {"asked": asked, "first": first.final_output, "second": second.final_output, "third": third.final_output}


def litellm(url: str, prompt: str) -> dict[str, Any]:
    """litellm through its two ways: OpenAI's chats and Anthropic's messages; whole and streamed."""
    import litellm as library

    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}
    made = {}
    for name, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        way = {"model": f"{name}/tiny", "api_base": base, "api_key": "none", **asked}
        whole = library.completion(**way)
        chunks = library.completion(stream=True, **way)
        made[name] = {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "tokens": whole.usage.completion_tokens,
        }
    return made


ACTIONS = {"agents": agents, "litellm": litellm}

if __name__ == "__main__":
    main()
