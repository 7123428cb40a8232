"""Requests of coding agents, as Claude Code, Codex, opencode and others send them."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import pytest

import eyas
from eyas import tiny
from eyas.errors import InputError
from eyas.serve.answers import Answer
from eyas.serve.chat import Chat, ChatBody
from eyas.serve.errors import ApiError, error_of
from eyas.serve.fields import GenerationBody
from eyas.serve.messages import Writer
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Choices, events_of
from eyas.serve.settings import Settings
from eyas.serve.tools import tools_of
from eyas.text import check_messages
from eyas.text.forms import other_forms
from serving import TOOL_RESPONSE, Running, events, running, small_llm

HI = {"role": "user", "content": "Hi"}
DAY = {"type": "object", "properties": {"day": {"enum": ["today"]}}, "required": ["day"], "additionalProperties": False}
COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
DIALECTS = (CHATS, RESPONSES, MESSAGES)
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


def post(
    server: Running, path: str, *talk: Any, tokens: int = 2, system: Any = None, see: bool = False, **body: Any
) -> httpx2.Response:
    """Send one request in the words of a dialect: its messages, length and system text, and with `see` its tool."""
    if path == COMPLETIONS:
        asked: dict[str, Any] = {"prompt": talk[0]["content"]}
    elif path == MESSAGES:
        asked = {"messages": talk, **({"system": system} if system else {})}
        asked |= {"tools": [{"name": "see", "input_schema": DAY}]} if see else {}
    elif path == RESPONSES:
        asked = {"input": [*([{"role": "system", "content": system}] if system else []), *talk]}
        asked |= {"tools": [{"type": "function", "name": "see", "parameters": DAY}]} if see else {}
    else:
        asked = {"messages": [*([{"role": "system", "content": system}] if system else []), *talk]}
        asked |= {"tools": [{"type": "function", "function": {"name": "see", "parameters": DAY}}]} if see else {}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return server.post(path, {"model": "tiny", "temperature": 0, limit: tokens, **asked, **body})


@pytest.fixture(scope="module")
def strict(llm: eyas.LLM) -> Iterator[Running]:
    """A server with a strict template."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, tokenizer.response_template = STRICT, TOOL_RESPONSE
    with running(small_llm(tokenizer=tokenizer), rows=2) as one:
        yield one


@pytest.mark.parametrize("path", [*DIALECTS, COMPLETIONS])
def test_an_answer_longer_than_there_is_room_for_is_cut(server: Running, path: str) -> None:
    """Guards Claude Code, which asks for 32,000 tokens of every model: status 400 for each of its requests."""
    made = post(server, path, HI, tokens=32_000, **{"stop_sequences" if path == MESSAGES else "stop": [" "]})
    assert made.status_code == 200, made.text


def test_a_cut_answer_says_so(llm: eyas.LLM) -> None:
    """The cut is one of the server's limit or of the room after the prompt, and is told as any other."""
    prompt = len(llm.ids("Hi"))
    for limits, tokens in (({"max_tokens": 3}, 3), ({"max_model_len": prompt + 4, "max_tokens": 100}, 4)):
        with running(llm, rows=1, **limits) as server:
            made = post(server, MESSAGES, HI, tokens=32_000, ignore_eos=True).json()
            assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", tokens)
            chat = post(server, CHATS, HI, tokens=32_000, ignore_eos=True).json()
            assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("length", tokens)


@pytest.mark.parametrize("path", [*DIALECTS, COMPLETIONS])
def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_know(server: Running, path: str) -> None:
    """Guards clients that shorten the conversation when they read OpenAI's or Anthropic's words, and stop at any others."""
    made = post(server, path, {"role": "user", "content": "word " * 5000})
    message = made.json()["error"]["message"]
    assert made.status_code == 400
    assert message.startswith("This model's maximum context length is 4096 tokens. However, your messages resulted in ")
    assert "prompt is too long: " in message
    assert "tokens > 4095 maximum" in message
    assert path == MESSAGES or made.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", DIALECTS)
def test_the_line_in_which_claude_code_counts_is_left_out(server: Running, path: str) -> None:
    """Guards the prefix cache: the line is the first of the prompt and differs in each request. Proxies translate it
    into the other dialects."""
    words = "You help people who plan their day. " * 20
    for parts in (True, False):
        read = []
        for number in ("36ee5", "36ee5", "0aaa9"):
            line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number};"
            listed = [{"type": "text", "text": line}, {"type": "text", "text": words}]
            usage = post(server, path, HI, system=listed if parts else f"{line}\n{words}").json()["usage"]
            details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
            read.append(usage.get("cache_read_input_tokens", details.get("cached_tokens")))
        assert read[2] == read[1] > 100
    other = {"role": "user", "content": "x-anthropic-billing-header: what is it?"}
    counts = [server.post("/tokenize", {"messages": [one]}).json()["count"] for one in (other, HI)]
    assert counts[0] > counts[1] + 3  # a user's words stay


@pytest.mark.parametrize("path", DIALECTS)
def test_system_messages_anywhere(strict: Running, path: str) -> None:
    """Guards Claude Code and Codex, which send texts of the system between turns: templates that want them first refused
    every request."""
    late = {"role": "system" if path == MESSAGES else "developer", "content": "No agents."}
    talk = [HI, late, {"role": "user", "content": "Go"}, {"role": "assistant", "content": "Yes"}, late, HI]
    made = post(strict, path, *([late] if path == CHATS else []), *talk, system="Be brief.")
    assert made.status_code == 200, made.text
    if path == RESPONSES:
        assert post(strict, path, *talk, instructions="Be brief.").status_code == 200


@pytest.mark.parametrize("path", DIALECTS)
def test_turns_of_one_side_in_a_row(strict: Running, path: str) -> None:
    """Guards Claude Code's reminders, which stand beside the result of a tool, and clients that send two messages at once:
    templates whose turns alternate refused every further request."""
    talk: list[Any] = [HI, {"role": "user", "content": "Look"}, {"role": "assistant", "content": "Wait."}]
    if path == MESSAGES:
        result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
        use = {"type": "tool_use", "id": "1", "name": "see", "input": {}}
        talk += [{"role": "assistant", "content": [use]}]
        talk += [{"role": "user", "content": [result, {"type": "text", "text": "(a reminder)"}]}]
    elif path == RESPONSES:
        talk += [{"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"}]
        talk += [{"type": "function_call_output", "call_id": "1", "output": "sunny"}]
    else:
        talk += [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "see", "arguments": "{}"}}]}]
        talk += [{"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    made = post(strict, path, *talk, {"role": "user", "content": "(another)"})
    assert made.status_code == 200, made.text


def test_turns_that_are_joined() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "see", "arguments": {}}}
    chat: list[dict[str, Any]] = [
        HI, {"role": "user", "content": "Look"}, {"role": "assistant", "content": "Wait."},
        {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "(a reminder)"},
    ]  # fmt: skip
    forms = [form for form in other_forms(check_messages(chat)) if len(form) == 3]
    assert [(one["role"], one["content"]) for one in forms[0]] == [
        ("user", "Hi\n\nLook"), ("assistant", "Wait."), ("tool", "sunny\n\n(a reminder)"),
    ]  # fmt: skip
    assert forms[0][1]["tool_calls"]


@pytest.mark.parametrize("path", DIALECTS)
def test_an_effort_that_the_template_does_not_read(server: Running, path: str) -> None:
    """Guards clients that set it for every model: the request was refused."""
    effort: dict[str, Any] = {"effort": "low"}
    asked = {CHATS: {"reasoning_effort": "low"}, RESPONSES: {"reasoning": effort}, MESSAGES: {"output_config": effort}}
    for stream in (False, True):
        made = post(server, path, HI, stream=stream, **asked[path])
        assert (made.status_code, made.headers.get("x-eyas-ignored-fields")) == (200, "reasoning_effort"), made.text


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_a_verbosity_that_the_template_does_not_read(server: Running, path: str, verbosity: str) -> None:
    """Guards clients that set it for every model, such as Codex and the AI SDK: the request was refused. Medium is the
    usual one, so nothing was ignored."""
    asked: dict[str, Any] = {CHATS: {"verbosity": verbosity}, RESPONSES: {"text": {"verbosity": verbosity}}}
    made = post(server, path, HI, **asked[path])
    header = made.headers.get("x-eyas-ignored-fields")
    assert (made.status_code, header) == (200, None if verbosity == "medium" else "verbosity"), made.text


def test_a_verbosity_that_the_template_reads() -> None:
    """Guards a field that the header calls served: the template must get it, and a variable of the request comes first."""
    body = ChatBody(messages=[HI], verbosity="low")
    body.check_variables("{{ verbosity }}")
    assert (body.ignored, body.template()["chat_template_kwargs"]) == ([], {"verbosity": "low"})
    own = ChatBody(messages=[HI], verbosity="low", chat_template_kwargs={"verbosity": "high"})
    assert own.template()["chat_template_kwargs"] == {"verbosity": "high"}


@pytest.mark.parametrize(("path", "header"), [(CHATS, "store"), (COMPLETIONS, "store"), (RESPONSES, None)])
def test_a_client_that_asks_to_store(server: Running, path: str, header: str | None) -> None:
    """Guards OpenAI's Agents SDK, which sends it with every chat: the request was refused. The server keeps responses
    alone, and says so."""
    bodies = {CHATS: {"messages": [HI]}, RESPONSES: {"input": "Hi"}, COMPLETIONS: {"prompt": "Hi"}}
    texts = []
    for store in (None, False, True):
        made = server.post(path, {**bodies[path], "temperature": 0, "max_tokens": 4, "store": store})
        assert (made.status_code, made.headers.get("x-eyas-ignored-fields")) == (200, header if store else None), (
            made.text
        )
        answer = made.json()
        texts.append(str([answer.get("output"), *(choice.get("message") for choice in answer.get("choices", ()))]))
    assert path == RESPONSES or len(set(texts)) == 1


@pytest.mark.parametrize(
    ("path", "field"), [(CHATS, "max_tokens"), (CHATS, "max_completion_tokens"), (COMPLETIONS, "max_tokens")]
)
def test_an_answer_without_a_limit(server: Running, path: str, field: str) -> None:
    """Guards clients of llama.cpp and LM Studio, whose word for it is -1: the request was refused."""
    text = "one two three four five six seven eight nine ten eleven twelve thirteen"  # more than 16 tokens
    body = {"messages": [HI]} if path == CHATS else {"prompt": "Hi"}
    made = server.post(path, {**body, "choice": [text], field: -1})
    assert made.status_code == 200, made.text
    assert text in made.text
    assert made.json()["choices"][0]["finish_reason"] == "stop"
    assert Settings("m", max_model_len=100, max_tokens=50).answer_tokens(10, -1, default=16) == 50
    assert Settings("m", max_model_len=100, max_tokens=500).answer_tokens(10, -1) == 90


@pytest.mark.parametrize("path", DIALECTS)
def test_a_call_of_the_server_can_be_answered(strict: Running, path: str) -> None:
    """Guards Mistral's templates, which refuse ids of calls that are not nine letters and digits: the server's own."""
    made = post(strict, path, HI, tokens=60, see=True, tool_choice={"type": "any"}).json()
    if path == MESSAGES:
        result = {"type": "tool_result", "tool_use_id": made["content"][-1]["id"], "content": "sunny"}
        turns: list[Any] = [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
    elif path == RESPONSES:
        call = made["output"][-1]
        turns = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    else:
        call = made["choices"][0]["message"]
        turns = [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "sunny"}]
    again = post(strict, path, HI, *turns, tokens=60, see=True, tool_choice="none")
    assert again.status_code == 200, again.text


@pytest.mark.cover(arguments=5)
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
    asked: dict[str, Any] = {"tokens": 200, "see": True, "choice": [text]}
    (block,) = post(tooled, MESSAGES, HI, **asked).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", value)
    streamed = events(post(tooled, MESSAGES, HI, **asked, stream=True))
    deltas = [e["delta"]["partial_json"] for e in streamed if e["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == value


def test_tools_and_a_format(tooled: Running) -> None:
    """Guards agents with an output type: the format made every call impossible, without a word. A forced call has no
    text that a format could bind."""
    named = {"name": "n", "schema": DAY}
    schema, flat = {"type": "json_schema", "json_schema": named}, {"type": "json_schema", **named}
    formats: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHATS, {"response_format": schema}),
        (CHATS, {"response_format": {"type": "json_object"}}),
        (CHATS, {"guided_json": DAY}),
        (CHATS, {"structured_outputs": {"json": DAY}}),
        (RESPONSES, {"text": {"format": flat}}),
        (MESSAGES, {"output_config": {"format": flat}}),
    )
    for path, form in formats:
        refused = post(tooled, path, HI, tokens=60, see=True, **form)
        assert (refused.status_code, "tools and a response_format" in refused.text) == (400, True)
        for choice, called in (("required", True), ("none", False)) if path == CHATS else ():
            made = post(tooled, path, HI, tokens=60, see=True, **form, tool_choice=choice).json()
            message = made["choices"][0]["message"]
            assert ("tool_calls" in message, (message["content"] or "{")[0]) == (called, "{")
    assert post(tooled, CHATS, HI, see=True, response_format={"type": "text"}).status_code == 200


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
    error = post(tooled, CHATS, HI, tools=[tool], tool_choice="required").json()["error"]
    assert error["message"].startswith("the grammar of the tools cannot be used: ")
    assert error["param"] == "tools"
    long = InputError("grammar has 9 characters: at most 8 are served")
    for other, words, param in (
        ("messages", "the grammar of the tools", "tools"),
        ("grammar", "grammar has 9", "grammar"),
    ):
        made = error_of(long, ("tools", other))
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
    named = ({"type": "tool", "name": "see"}, {"type": "function", "function": {"name": "see"}})
    for choice in ("any", {"type": "any"}, *named):
        made = post(tooled, path, HI, tokens=60, see=True, tool_choice=choice)
        assert (made.status_code, "today" in made.text) == (200, True), made.text
    assert not tools_of(TOOLS, {"type": "auto", "disable_parallel_tool_use": True}, None).parallel


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


class MuteDialect(Choices):
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
        chunks = MuteDialect(job, "m", "1", GenerationBody())
        writer = chunks if dialect == "chunks" else Writer(Chat(job, "m", Mute), "1")
        async for _ in events_of(writer, answer, 1.0):
            times.append(loop.time())
        answer.close()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(read())
    times = [0.0, *times]
    assert times[-1] == pytest.approx(20 * pause)
    assert max(after - before for before, after in pairwise(times)) <= 1.0 + 1e-6
    assert len(times) < 20 * pause + 15
