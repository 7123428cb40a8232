"""Requests of coding agents, as Claude Code, Codex, opencode and others send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx2
import pytest

import eyas
from eyas import tiny
from eyas.errors import InputError
from eyas.serve.answers import Answer
from eyas.serve.blocks import _events
from eyas.serve.chat import Chat
from eyas.serve.errors import ApiError, error_of
from eyas.serve.messages import Writer
from eyas.serve.protocol.fields import GenerationBody
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Dialect, _chunks
from eyas.serve.tools import tools_of
from eyas.text import check_messages
from eyas.text.forms import other_forms
from serving import PROMPTS, TOOL_RESPONSE, Running, running, small_llm, tooled_llm

HI = {"role": "user", "content": "Hi"}
DAY = {"type": "object", "properties": {"day": {"enum": ["today"]}}, "required": ["day"], "additionalProperties": False}
DIALECTS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
# a chat template as strict as Mistral's and Qwen's: one system text, at the beginning; turns that alternate; ids of nine
# letters
STRICT = """{% set next = namespace(user=true) %}{% for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != next.user %}{{ raise_exception('turns alternate') }}{% endif %}{% set next.user = not next.user %}
{%- endif %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}
{%- for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}{{ c.id }}{% endfor %}
{%- if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif -%}
<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def post(server: Running, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json={"model": "tiny", "temperature": 0, **body}, timeout=120)


def in_dialect(
    path: str, tokens: int = 2, choice: Any = None, tools: tuple[str, ...] = (), **body: Any
) -> dict[str, Any]:
    """The fields of one request in each of the three dialects."""
    frames: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "/v1/chat/completions": lambda f: {"type": "function", "function": {**f, "parameters": DAY}},
        "/v1/responses": lambda f: {"type": "function", **f, "parameters": DAY},
        "/v1/messages": lambda f: {**f, "input_schema": DAY},
    }
    listed = {"tools": [frames[path]({"name": name}) for name in tools]} if tools else {}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {limit: tokens, **listed, **({} if choice is None else {"tool_choice": choice}), **body}


CALL = {"id": "1", "type": "function", "function": {"name": "see", "arguments": {}}}
CHAT: list[dict[str, Any]] = [
    HI, {"role": "user", "content": "Look"}, {"role": "assistant", "content": "Wait."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "sunny"},
    {"role": "user", "content": "(a reminder)"},
]  # fmt: skip
ROLES = ["user", "assistant", "tool"]  # of these turns, where they alternate


@pytest.fixture(scope="module")
def strict(llm: eyas.LLM) -> Iterator[Running]:
    """A server with a strict template."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, tokenizer.response_template = STRICT, TOOL_RESPONSE
    with running(small_llm(tokenizer=tokenizer), rows=2) as one:
        yield one


@pytest.fixture(scope="module")
def tooled(llm: eyas.LLM) -> Iterator[Running]:
    """A server whose model has tools."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    with running(tooled_llm(), rows=2) as one:
        yield one


# --- lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/completions"])
def test_an_answer_longer_than_there_is_room_for_is_cut(server: Running, path: str) -> None:
    """Guards Claude Code, which asks for 32,000 tokens of every model: status 400 for each of its requests."""
    asked = {"prompt": "Hi", "max_tokens": 32_000} if path == "/v1/completions" else in_dialect(path, 32_000)
    talk = {} if path == "/v1/completions" else {"input" if path == "/v1/responses" else "messages": [HI]}
    stops = {"stop_sequences": [" "]} if path == "/v1/messages" else {"stop": [" "]}
    made = post(server, path, **asked, **talk, **stops)
    assert made.status_code == 200, made.text


def test_a_cut_answer_says_so(llm: eyas.LLM) -> None:
    """The cut is one of the server's limit or of the room after the prompt, and is told as any other."""
    prompt = len(llm.ids("Hi"))
    for limits, tokens in (({"max_tokens": 3}, 3), ({"max_model_len": prompt + 4, "max_tokens": 100}, 4)):
        with running(llm, rows=1, **limits) as server:
            made = post(server, "/v1/messages", max_tokens=32_000, messages=[HI], ignore_eos=True).json()
            assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", tokens)
            body = {"messages": [HI], "max_tokens": 32_000, "ignore_eos": True}
            chat = post(server, "/v1/chat/completions", **body).json()
            assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("length", tokens)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_know(server: Running, path: str) -> None:
    """Guards clients that shorten the conversation when they read OpenAI's or Anthropic's words, and stop at any others."""
    long = [{"role": "user", "content": "word " * 5000}]
    talk = {"input" if path == "/v1/responses" else "messages": long}
    made = post(server, path, **in_dialect(path), **talk)
    message = made.json()["error"]["message"]
    assert made.status_code == 400
    assert message.startswith("This model's maximum context length is 4096 tokens. However, your messages resulted in ")
    assert "prompt is too long: " in message
    assert "tokens > 4095 maximum" in message
    assert path == "/v1/messages" or made.json()["error"]["code"] == "context_length_exceeded"


# --- the system's texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECTS)
def test_the_line_in_which_claude_code_counts_is_left_out(server: Running, path: str) -> None:
    """Guards the prefix cache: the line is the first of the prompt and differs in each request. Proxies translate it
    into the other dialects."""
    words = "You help people who plan their day. " * 20
    for parts in (True, False):
        read = []
        for number in ("36ee5", "36ee5", "0aaa9"):
            line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number};"
            system: Any = (
                [{"type": "text", "text": line}, {"type": "text", "text": words}] if parts else f"{line}\n{words}"
            )
            if path == "/v1/messages":
                talk: dict[str, Any] = {"system": system, "messages": [HI]}
            elif path == "/v1/responses":
                talk = {"input": [{"role": "system", "content": system}, HI]}
            else:
                talk = {"messages": [{"role": "system", "content": system}, HI]}
            usage = post(server, path, **in_dialect(path), **talk).json()["usage"]
            details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
            read.append(usage.get("cache_read_input_tokens", details.get("cached_tokens")))
        assert read[2] == read[1] > 100
    other = {"role": "user", "content": "x-anthropic-billing-header: what is it?"}
    counts = [post(server, "/tokenize", messages=[one]).json()["count"] for one in (other, HI)]
    assert counts[0] > counts[1] + 3  # a user's words stay


@pytest.mark.parametrize("path", DIALECTS)
def test_system_messages_anywhere(strict: Running, path: str) -> None:
    """Guards Claude Code and Codex, which send texts of the system between turns: templates that want them first refused
    every request."""
    late = {"role": "system" if path == "/v1/messages" else "developer", "content": "No agents."}
    talk = [HI, late, {"role": "user", "content": "Go"}, {"role": "assistant", "content": "Yes"}, late, HI]
    if path == "/v1/messages":
        made = post(strict, path, **in_dialect(path), system="Be brief.", messages=talk)
    elif path == "/v1/responses":
        made = post(strict, path, **in_dialect(path), instructions="Be brief.", input=talk)
    else:
        made = post(
            strict, path, **in_dialect(path), messages=[{"role": "system", "content": "Be brief."}, late, *talk]
        )
    assert made.status_code == 200, made.text


@pytest.mark.parametrize("path", DIALECTS)
def test_turns_of_one_side_in_a_row(strict: Running, path: str) -> None:
    """Guards Claude Code's reminders, which stand beside the result of a tool, and clients that send two messages at once:
    templates whose turns alternate refused every further request."""
    talk: list[Any] = [HI, {"role": "user", "content": "Look"}, {"role": "assistant", "content": "Wait."}]
    if path == "/v1/messages":
        result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
        use = {"type": "tool_use", "id": "1", "name": "see", "input": {}}
        content = [result, {"type": "text", "text": "(a reminder)"}]
        talk += [{"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
    elif path == "/v1/responses":
        talk += [{"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"}]
        talk += [{"type": "function_call_output", "call_id": "1", "output": "sunny"}]
    else:
        talk += [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "see", "arguments": "{}"}}]}]
        talk += [{"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    talk += [{"role": "user", "content": "(another)"}]
    name = "input" if path == "/v1/responses" else "messages"
    made = post(strict, path, **in_dialect(path), **{name: talk})
    assert made.status_code == 200, made.text
    form = next(form for form in other_forms(check_messages(CHAT)) if [one["role"] for one in form] == ROLES)
    assert [one["content"] for one in form] == ["Hi\n\nLook", "Wait.", "sunny\n\n(a reminder)"]
    assert form[1]["tool_calls"]


# --- calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECTS)
def test_a_call_of_the_server_can_be_answered(strict: Running, path: str) -> None:
    """Guards Mistral's templates, which refuse ids of calls that are not nine letters and digits: the server's own."""
    name = "input" if path == "/v1/responses" else "messages"
    asked = in_dialect(path, 60, {"type": "any"}, ("see",))
    made = post(strict, path, **asked, **{name: [HI]}).json()
    if path == "/v1/messages":
        result = {"type": "tool_result", "tool_use_id": made["content"][-1]["id"], "content": "sunny"}
        turns: list[Any] = [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
    elif path == "/v1/responses":
        call = made["output"][-1]
        turns = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    else:
        call = made["choices"][0]["message"]
        turns = [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "sunny"}]
    again = post(strict, path, **{**asked, "tool_choice": "none"}, **{name: [HI, *turns]})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('"hello"', {}), (r'"{\"day\": \"tod"', {}), (r'"{\"day\": \"today\"}"', {"day": "today"}), ("[1, 2]", {}), ("5", {}),
        ('"[1]"', {}), ("true", {}), ('""', {}), (r'"{\"a\": 1e999}"', {}), ('{"day": "å"}', {"day": "å"}),
    ],
)  # fmt: skip
def test_the_input_of_a_call_is_an_object(tooled: Running, arguments: str, value: dict[str, Any]) -> None:
    """Guards /v1/messages against status 500, and against deltas that Anthropic's client cannot read, at arguments that
    are not an object."""
    text = '<tool_call>{"name": "see", "arguments": %s}</tool_call>' % arguments  # noqa: UP031
    asked = {**in_dialect("/v1/messages", 200, None, ("see",), messages=[HI]), "choice": [text]}
    (block,) = post(tooled, "/v1/messages", **asked).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", value)
    lines = post(tooled, "/v1/messages", **asked, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == value


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": DAY}}


def test_tools_and_a_format(tooled: Running) -> None:
    """Guards agents with an output type: the format made every call impossible, without a word. A forced call has no
    text that a format could bind."""
    tools = in_dialect(DIALECTS[0], 60, None, ("see",), messages=[HI])
    formats = ({"response_format": FORM}, {"response_format": {"type": "json_object"}}, {"guided_json": DAY},
               {"structured_outputs": {"json": DAY}})  # fmt: skip
    for form in formats:
        refused = post(tooled, DIALECTS[0], **tools, **form)
        assert (refused.status_code, "tools and a response_format" in refused.text) == (400, True)
        for choice, called in (("required", True), ("none", False)):
            message = post(tooled, DIALECTS[0], **tools, **form, tool_choice=choice).json()["choices"][0]["message"]
            assert ("tool_calls" in message, (message["content"] or "{")[0]) == (called, "{")
    assert post(tooled, DIALECTS[0], **tools, response_format={"type": "text"}).status_code == 200
    flat = {"type": "json_schema", "name": "n", "schema": DAY}
    for path, form in ((DIALECTS[1], {"text": {"format": flat}}), (DIALECTS[2], {"output_config": {"format": flat}})):
        talk = {"input" if path == DIALECTS[1] else "messages": [HI]}
        refused = post(tooled, path, **in_dialect(path, 60, None, ("see",)), **talk, **form)
        assert (refused.status_code, "tools and a response_format" in refused.text) == (400, True)


def test_many_tools_that_describe_themselves(llm: eyas.LLM) -> None:
    """Guards tool_choice required with the tools of an agent: what they say of themselves is no part of the grammar."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    field = {"enum": ["x"], "description": "What it is for. " * 150, "title": "t" * 999, "examples": ["x"] * 99}
    names = {"description": field, "title": {**field, "default": "x"}}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(60)]
    text = llm.generate("Hi", max_new_tokens=60, grammar=tools_of(tools, "required", None).grammar()).text
    assert json.loads(text)["arguments"] == {"description": "x", "title": "x"}


def test_an_error_of_the_grammar_of_tools_speaks_of_tools(tooled: Running) -> None:
    """Guards "the grammar cannot be used", said of a grammar that the client never sent."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    error = post(tooled, DIALECTS[0], messages=[HI], tools=[tool], tool_choice="required").json()["error"]
    assert error["message"].startswith("the grammar of the tools cannot be used: ")
    assert error["param"] == "tools"
    long = InputError("grammar has 9 characters: at most 8 are served")
    for fields, words, param in (
        (("tools", "messages"), "the grammar of the tools has 9", "tools"),
        (("tools", "grammar"), "grammar has 9", "grammar"),
    ):
        made = error_of(long, fields)
        assert (made.message[: len(words)], made.param) == (words, param)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": DAY}} for name in ("see", "hear")]


@pytest.mark.parametrize(
    ("choice", "listed", "forced"),
    [
        (None, 2, ()), ("auto", 2, ()), ({"type": "auto"}, 2, ()), ("none", 0, ()), ({"type": "none"}, 0, ()), ("NONE", 0, ()),
        ("required", 2, ("see", "hear")), ("any", 2, ("see", "hear")), ({"type": "any"}, 2, ("see", "hear")),
        ({"type": "required"}, 2, ("see", "hear")), ({"type": "function", "function": {"name": "see"}}, 2, ("see",)),
        ({"type": "function", "name": "see"}, 2, ("see",)), ({"type": "tool", "name": "see"}, 2, ("see",)),
        ({"function": {"name": "see"}}, 2, ("see",)),
        ({"type": "function", "function": "see"}, 2, ("see",)), ({"name": "see"}, 2, ("see",)), ("see", 2, ("see",)),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "hear"}]}, 1, ("hear",)),
    ],
)  # fmt: skip
def test_spellings_of_tool_choice(choice: Any, listed: int, forced: tuple[str, ...]) -> None:
    """Guards status 400 for the words of another dialect: proxies and SDKs pass them on."""
    made = tools_of(TOOLS, choice, None)
    assert (len(made.listed), made.forced, made.parallel) == (listed, forced, True)


@pytest.mark.parametrize("choice", ["maybe", "", 5, [], {}, {"type": "custom", "name": "see"}, {"type": "function"}, {"name": "x"},
                                    {"type": "function", "name": ["see"]}, {"type": 5}])  # fmt: skip
def test_a_tool_choice_that_is_none(choice: Any) -> None:
    """A choice that names nothing is refused, whatever its type."""
    with pytest.raises(ApiError) as caught:
        tools_of(TOOLS, choice, None)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_takes_every_spelling(tooled: Running, path: str) -> None:
    """Guards bodies whose type checks know one spelling alone."""
    talk = {"input" if path == "/v1/responses" else "messages": [HI]}
    for choice in (
        "any",
        {"type": "any"},
        {"type": "tool", "name": "see"},
        {"type": "function", "function": {"name": "see"}},
    ):
        made = post(tooled, path, **in_dialect(path, 60, choice, ("see",)), **talk)
        assert (made.status_code, "today" in made.text) == (200, True), made.text
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert not tools_of(TOOLS, single, None).parallel


# --- silence --------------------------------------------------------------------------------------------


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer: nothing waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        plain = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "nothing is left to wait for"
            self.now += timeout
            return plain(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Mute:
    """A reader that tells of a call when it is whole."""

    called = True

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        function = {"name": "see", "arguments": "{}"}
        return [{"tool_calls": [{"index": 0, "id": "1", "function": function}]}] if delta.finish else []


class MuteDialect(Dialect):
    """The same as chunks."""

    def choice(self, index: int, totals: Totals) -> dict[str, Any]:
        return {}

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        return [{"finish_reason": delta.finish}] if delta.finish else []


@pytest.mark.parametrize("dialect", ["chunks", "blocks"])
@pytest.mark.parametrize("pause", [0.3, 0.9, 1.7], ids=["fast", "slow", "slower"])
def test_a_call_is_not_written_in_silence(dialect: str, pause: float) -> None:
    """Guards clients and proxies with an idle limit: tokens of a call came, but nothing that the client could read, and
    no comment either. A clock of the test's own."""
    times = []

    async def read() -> None:
        loop = asyncio.get_running_loop()
        answer, job = Answer(1, lambda _: None), Job(((1,),), {})
        for number in range(1, 21):
            loop.call_later(pause * number, answer.put, [Delta(0, "x", (1,), "stop" if number == 20 else None)])
        chunks = _chunks(MuteDialect(job, "m", "1"), answer, GenerationBody(), 1.0)
        events = chunks if dialect == "chunks" else _events(Writer(Chat(job, "m", Mute), "1"), answer, 1.0)
        async for _ in events:
            times.append(loop.time())
        answer.close()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(read())
    times = [0.0, *times]
    assert times[-1] == pytest.approx(20 * pause)
    assert max(after - before for before, after in pairwise(times)) <= 1.0 + 1e-6
    assert len(times) < 20 * pause + 15


@pytest.mark.slow
def test_comments_while_a_call_is_written(llm: eyas.LLM) -> None:
    """The same through the server: a comment at each cycle, where silence may last no time at all."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    text = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 200, "maxLength": 200}},
        "required": ["text"],
    }
    tool = {"type": "function", "function": {"name": "write", "parameters": text}}
    with running(tooled_llm(), rows=1, keep_alive=1e-4) as server:
        asked = {"max_tokens": 500, "stream": True, "tools": [tool], "tool_choice": "required"}
        body = post(server, DIALECTS[0], messages=[{"role": "user", "content": PROMPTS[0]}], **asked).text
    begins = body.index('"role":"assistant"')
    assert body.count(": keep-alive", begins, body.index('"tool_calls"')) > 5
