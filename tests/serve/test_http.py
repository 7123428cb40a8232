"""The bytes that the server sends, without a client library between: headers, errors, keys, events,
small endpoints."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2
import pytest

import eyas
from eyas.serve.app import make_app
from eyas.serve.records import Settings
from eyas.serve.service import Service
from serving import PROMPTS, Running, running, tooled_llm

BODY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
PLAIN = {"content-type": "text/plain"}
SECONDS = 120  # that a response may take on a busy machine


def post(server: Running, path: str, body: Any, **options: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=SECONDS, **options)


def get(url: str, **options: Any) -> httpx2.Response:
    return httpx2.get(url, timeout=SECONDS, **options)


def events(response: httpx2.Response) -> list[Any]:
    """The data of each event, in order."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_stream_as_events(server: Running) -> None:
    """Events end in [DONE]; proxies are told not to hold them back; with continuous usage every
    chunk counts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = post(server, "/v1/completions", {**BODY, "stream": True, "stream_options": options})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == chunks[-1]["usage"]["total_tokens"] - chunks[-1]["usage"]["prompt_tokens"] > 0
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.slow
def test_figures_of_speculation(server: Running) -> None:
    """The figures fit the tokens: cycles emit their accepted tokens and one more each, but for the
    last, which may be cut."""
    made = post(server, "/v1/completions", {**BODY, "prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True}).json()
    figures, tokens = made["metrics"]["speculative_decoding"], made["usage"]["completion_tokens"]
    assert tokens == 40
    steps, accepted = figures["num_spec_steps"], figures["num_accepted_draft_tokens"]
    assert (
        accepted
        == sum(figures["per_step_accepted"])
        == sum(i * count for i, count in enumerate(figures["acceptance_histogram"]))
    )
    assert steps == sum(figures["acceptance_histogram"]) == len(figures["per_step_drafted"])
    assert tokens <= 1 + steps + accepted <= tokens + 3
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert "timings" not in made
    timed = post(
        server,
        "/v1/completions",
        {**BODY, "prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True, "timings_per_token": True},
    )
    timings, usage = timed.json()["timings"], timed.json()["usage"]
    assert (
        timings["draft_n"]
        == timed.json()["metrics"]["speculative_decoding"]["num_draft_tokens"]
        >= timings["draft_n_accepted"]
        > 0
    )
    assert timings["predicted_n"] == 40
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(1000 / timings["predicted_per_token_ms"])
    *chunks, _ = events(post(server, "/v1/completions", {**BODY, "stream": True, "timings_per_token": True}))
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    several = post(server, "/v1/completions", {**BODY, "n": 2}).json()
    assert several["metrics"]["speculative_decoding"] is None


@pytest.mark.quick("content4-400-JSON", "{-400-JSON", "[]-400-object")
@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 400, "JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "JSON"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", 400, ""),
        (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "x", "metadata": {"a": [NaN]}}', 400, "NaN"),
        (b'{"prompt": [1, 99999999]}', 400, "99999999"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": ""}', 400, "empty"),
        (b'{"max_tokens": 1}', 400, "prompt"),
        (b'{"prompt": "x", "stop": ["a", ""]}', 400, "stop"),
        (b'{"prompt": "x", "stop": 5}', 400, "stop"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
        (b'{"prompt": "x", "seed": 9223372036854775808}', 400, "seed"),
        (b'{"prompt": "x", "cycles": true}', 400, "stream"),
        (b'{"prompt": "x", "suffix": "y"}', 400, "suffix"),
        (b'{"prompt": "x", "n": true}', 400, "n"),
        (b'{"prompt": "x", "speculation": 0}', 400, "speculation"),
    ],
)
def test_bodies_that_cannot_be_used(server: Running, content: bytes, status: int, words: str) -> None:
    """Each gets one line in OpenAI's form."""
    response = httpx2.post(
        f"{server.v1}/completions", content=content, headers={"content-type": "application/json"}, timeout=SECONDS
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"] + str(error["param"])
    assert "\n" not in error["message"]


def test_a_text_about_nan(server: Running) -> None:
    """Bug: the word is taken for the number."""
    body = {"prompt": "NaN, Infinity", "metadata": {"NaN": "-Infinity"}, "max_tokens": 1}
    assert httpx2.post(f"{server.v1}/completions", json=body, timeout=SECONDS).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.quick("best_of-*", "return_tokens_as_token_ids-*", "top_p-*", "messages-value23")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "b"), ("best_of", 4), ("bad_words", ["a"]), ("top_p", 1.5), ("typical_p", 0.9), ("temperature", "hot"),
        ("n", 0), ("stop", [""]), ("stop_token_ids", ["a"]), ("logit_bias", {"a": 1}), ("response_format", {"type": "x"}),
        ("regex", "(a"), ("speculation", "nothing"), ("max_tokens", -2), ("return_tokens_as_token_ids", True), ("mirostat", 2),
        ("allowed_token_ids", [1]), ("prompt", 5), ("echo", "x"), ("logprobs", "x"), ("chat_template", "{{ 1 }}"),
        ("tools", {}), ("tool_choice", 5), ("messages", [5]), ("messages", [{"role": "user"}]), ("chat_template_kwargs", 1),
        ("chat_template_kwargs", {"tokenize": False}), ("chat_template_kwargs", {"messages": []}),
        ("thinking_token_budget", 5), ("include_reasoning", False),
    ],
)  # fmt: skip
def test_a_refusal_names_its_field(server: Running, field: str, value: Any) -> None:
    """Guards against `param: null`, against pydantic's words, and against fields of other servers that
    change an answer and were ignored."""
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        if field in ("messages", "tools", "tool_choice", "chat_template_kwargs") and body is BODY:
            continue
        if field == "prompt" and body is CHAT:
            continue
        response = post(server, path, {**body, field: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error
        assert not any(words in error["message"] for words in ("Input should", "valid", "Field required", "Extra"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_of_an_answer(path: str, server: Running) -> None:
    """Guards `return_token_ids`, by which an audit and llama-benchy read what was drawn: every token once, those without
    text too."""
    asked = (
        {"prompt": PROMPTS[3]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPTS[3]}]}
    )
    body = {**asked, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    assert "token_ids" not in post(server, path, body).text
    found = []
    for stream in (False, True):
        response = post(server, path, {**body, "return_token_ids": True, "stream": stream})
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "choices" in line]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        found.append([token for choice in choices for token in choice.get("token_ids", [])])
    assert len(found[0]) == 9
    assert found[0] == found[1]


@pytest.mark.slow
def test_values_of_others(server: Running) -> None:
    """Every int64 is a seed: -1 is another one each time, as in vLLM and llama.cpp; the others repeat.
    top_p 0 leaves the most probable token. best_of may be n."""

    def text(**more: Any) -> str:
        made = post(server, "/v1/completions", {"prompt": PROMPTS[3], "max_tokens": 24, "ignore_eos": True, **more})
        assert made.status_code == 200, made.text
        return str(made.json()["choices"][0]["text"])

    assert len({text(seed=-1, temperature=2.0) for _ in range(3)}) > 1
    for seed in (-(2**63), -2, 2**63 - 1):
        assert text(seed=seed) == text(seed=seed)
    assert text(top_p=0, temperature=1.5) == text(temperature=0)
    assert text(top_p=0, top_k=50, seed=3) == text(temperature=0)
    assert text(n=2, best_of=2)


@pytest.mark.slow
def test_formats_that_nobody_knows(server: Running) -> None:
    """Guards `format` of a JSON schema as the annotation that it is; a property may be called so; a
    format that is known holds."""
    date, other = {"type": "string", "format": "date"}, {"type": "string", "format": "phone", "maxLength": 3}
    properties = {"format": other, "day": date, "n": {"enum": [1], "format": "int32"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    made = post(server, "/v1/chat/completions", {**CHAT, "max_tokens": 120, "response_format": form, "seed": 1})
    answer = json.loads(made.json()["choices"][0]["message"]["content"])
    assert answer.keys() == properties.keys()
    assert len(answer["day"].split("-")) == 3


def test_probes_and_wrong_base_urls(server: Running) -> None:
    """HEAD is answered like GET, without a body; a path that lacks /v1 or has it twice gets a 404
    that says what to change."""
    for path in ("/", "/health", "/v1/models"):
        response = httpx2.head(server.url + path, timeout=SECONDS)
        assert (response.status_code, response.content) == (200, b"")
    for path, words in (("/chat/completions", "must end in /v1"), ("/models", "must end in /v1"), ("/api/chat", "Ollama"),
                        ("/v1/v1/chat/completions", "leave it out"), ("/nothing", "there is no /nothing")):  # fmt: skip
        response = post(server, path, CHAT)
        assert response.status_code == 404
        assert words in response.json()["error"]["message"]


def test_other_paths_and_methods(server: Running) -> None:
    """A path that is not there and a method that is not taken get OpenAI's form too; a form of a
    web page is no JSON."""
    for response, status in (
        (get(f"{server.v1}/nothing"), 404),
        (get(f"{server.v1}/completions"), 405),
        (httpx2.post(f"{server.v1}/completions", data={"prompt": "x"}, timeout=SECONDS), 415),
        (httpx2.post(f"{server.v1}/completions", content=b"{}", headers=PLAIN, timeout=SECONDS), 415),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


@pytest.mark.slow
def test_tokens_there_and_back(server: Running, llm: eyas.LLM) -> None:
    """lm-eval asks for tokens with and without special ones, and for the text of tokens."""
    text = "The weather, na\u00efvely: 5 \u20ac"
    made = post(server, "/tokenize", {"prompt": text}).json()
    assert tuple(made["tokens"]) == llm.ids(text, raw=True)
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 4096
    plain = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert len(plain["token_strs"]) == plain["count"]
    assert llm.tokenizer is not None
    assert plain["tokens"] == llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert post(server, "/detokenize", {"tokens": plain["tokens"]}).json()["prompt"].strip() == text
    assert post(server, "/detokenize", {"tokens": [10**9]}).status_code == 400
    chat = post(server, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert tuple(chat["tokens"]) == llm.ids("Hi")
    assert post(server, "/tokenize", {}).status_code == 400
    info = get(f"{server.url}/tokenizer_info").json()
    assert info["chat_template"] == llm.tokenizer.chat_template
    assert info["eos_token"] == llm.tokenizer.eos_token


@pytest.mark.slow
def test_tokens_of_a_chat() -> None:
    """Agents count by /tokenize what /v1/chat/completions reads: tools, earlier calls whose content is
    null, the fields of the template."""
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"day": {"enum": ["today"]}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"day": "today"}'}}
    user: dict[str, Any] = {"role": "user", "content": "Hi."}
    history = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    with running(tooled_llm(), rows=2) as server:
        counts = []
        for body in ({"messages": [user]}, {"messages": [user], "tools": tools}, {"messages": history, "tools": tools},
                     {"messages": [user], "tools": tools, "tool_choice": "none"},
                     {"messages": history[:2], "continue_final_message": True}):  # fmt: skip
            chat = post(server, "/v1/chat/completions", {**body, "max_tokens": 1}).json()
            counts.append(post(server, "/tokenize", body).json()["count"])
            assert counts[-1] == chat["usage"]["prompt_tokens"]
        assert counts[0] < counts[1] < counts[2]
        assert counts[3] == counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_a_template_without_tools(server: Running, choice: Any) -> None:
    """Guards advice that the next request shows to be false: tool_choice is never the way out of a
    template that has no place for tools."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    error = post(server, "/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": choice}).json()["error"]
    assert (error["param"], "no place for tools" in error["message"]) == ("tools", True)


def test_small_endpoints(server: Running) -> None:
    """The endpoints for probes and for the page."""
    assert get(f"{server.url}/health").status_code == 200
    assert get(f"{server.url}/version").json() == {"version": eyas.__version__}
    stats = get(f"{server.url}/stats").json()
    assert stats["rows"] == 4
    assert "vanilla" in stats["methods"]


def test_the_page_of_the_interface(llm: eyas.LLM) -> None:
    """The description names every body, and refers only to schemas that it has; the page is an option."""
    service = Service(llm, Settings("tiny"))
    apps = [make_app(service), make_app(service, docs=True)]
    described = apps[1].openapi()
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill", "/tokenize"):
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["properties"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert named
    assert named <= described["components"]["schemas"].keys()
    assert [any(getattr(route, "path", "") == "/docs" for route in app.routes) for app in apps] == [False, True]


def counters(server: Running) -> dict[str, float]:
    """Prometheus' samples by name with labels; of a fleet, their sums."""
    sums: dict[str, float] = {}
    for line in get(f"{server.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = re.sub(r'replica="\w+",', "", line).rpartition(" ")
            sums[name] = sums.get(name, 0) + float(value)
    return sums


@pytest.mark.slow
def test_metrics_under_the_names_of_vllm(server: Running) -> None:
    """`vllm bench serve` sums these counters before and after; they must agree with the figures in
    the answer."""
    before = counters(server)
    made = post(server, "/v1/completions", {**BODY, "prompt": PROMPTS[1], "max_tokens": 30, "ignore_eos": True}).json()
    after = counters(server)

    def grown(name: str, labels: str = "") -> float:
        key = f'{name}{{model_name="tiny"{labels}}}'
        return after[key] - before.get(key, 0)

    figures = made["metrics"]["speculative_decoding"]
    assert grown("vllm:spec_decode_num_drafts_total") == figures["num_spec_steps"]
    assert grown("vllm:spec_decode_num_draft_tokens_total") == figures["num_draft_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == figures["num_accepted_draft_tokens"]
    by_position = [grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", f',position="{i}"') for i in range(3)]
    assert sum(by_position) == figures["num_accepted_draft_tokens"]
    assert by_position == sorted(by_position, reverse=True)
    assert grown("vllm:generation_tokens_total") == 30
    assert grown("vllm:prompt_tokens_total") == made["usage"]["prompt_tokens"]
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert after['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert after['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0
    assert not any("_created" in name for name in after)


@pytest.mark.slow
def test_a_prefix_is_read_once(server: Running) -> None:
    """The second of two prompts with a common beginning starts behind it: fewer tokens are read,
    and usage says how many."""
    ids = list(range(100, 400))
    first = post(server, "/v1/completions", {"prompt": [*ids, 7], "max_tokens": 2, "temperature": 0}).json()
    second = post(server, "/v1/completions", {"prompt": [*ids, 8], "max_tokens": 2, "temperature": 0}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 10
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] in (299, 300)  # a head may read one token again


@pytest.mark.slow
def test_a_prediction(server: Running, llm: eyas.LLM) -> None:
    """OpenAI's predicted output drafts the text that is announced: fewer cycles, the same text, and
    usage counts what was of use."""
    own = llm.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    chat = {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    plain = post(server, "/v1/chat/completions", chat).json()
    helped = post(
        server, "/v1/chat/completions", {**chat, "prediction": {"type": "content", "content": own.text}}
    ).json()
    assert helped["choices"][0]["message"]["content"] == own.text == plain["choices"][0]["message"]["content"]
    details = helped["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    figures = [made["metrics"]["speculative_decoding"]["num_spec_steps"] for made in (helped, plain)]
    assert figures[0] < figures[1]
    wrong = [{"type": "text", "text": "Nothing of this is ever said, "}, {"type": "text", "text": "not even once."}]
    missed = post(server, "/v1/chat/completions", {**chat, "prediction": {"type": "content", "content": wrong}}).json()
    assert missed["choices"][0]["message"]["content"] == own.text
    assert missed["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 5


@pytest.mark.slow
def test_a_switch_for_drafts(server: Running) -> None:
    """`speculation` turns drafts off or bounds them for one request; the text stays the same."""
    asked = {**BODY, "prompt": PROMPTS[0], "max_tokens": 30, "ignore_eos": True}
    made = {
        str(how): post(server, "/v1/completions", {**asked, "speculation": how}).json()
        for how in (None, "auto", False, 2, "suffix")
    }
    assert len({one["choices"][0]["text"] for one in made.values()}) == 1
    figures = {how: one["metrics"]["speculative_decoding"] for how, one in made.items()}
    assert figures["False"]["num_draft_tokens"] == 0
    assert figures["False"]["mean_acceptance_length"] == 1.0  # a number, as vLLM's clients expect
    assert figures["2"]["num_spec_tokens"] <= 2
    assert figures["None"]["num_spec_tokens"] > 2
    assert figures["auto"] == figures["None"]


@pytest.mark.slow
def test_tokens_that_end_an_answer(server: Running, llm: eyas.LLM) -> None:
    """`stop_token_ids` end it and are named; `min_tokens` holds every end off until so many tokens
    are there."""
    ids = llm.generate(PROMPTS[0], raw=True, max_new_tokens=30, ignore_eos=True).token_ids
    asked = {**BODY, "prompt": PROMPTS[0], "max_tokens": 30, "ignore_eos": True, "stop_token_ids": [ids[3]]}
    made = post(server, "/v1/completions", asked).json()
    (choice,) = made["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    assert made["usage"]["completion_tokens"] == ids.index(ids[3]) + 1
    longer = post(server, "/v1/completions", {**asked, "min_tokens": 20}).json()
    assert longer["usage"]["completion_tokens"] > 20


@pytest.mark.slow
def test_keys(llm: eyas.LLM) -> None:
    """Without a right key nothing but probes answers; the second of two keys is as good as the first."""
    with running(llm, keys=("first", "second"), rows=1) as server:
        url = f"{server.v1}/models"
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic first"}, 401),
            ({"authorization": "Bearer"}, 401),
            ({"authorization": "Bearer first"}, 200),
            ({"authorization": "bearer second"}, 200),
        ):
            response = get(url, headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert post(server, "/v1/completions", BODY).status_code == 401
        assert post(server, "/tokenize", {"prompt": "x"}).status_code == 401
        assert get(f"{server.url}/stats").status_code == 401
        assert get(f"{server.url}/health").status_code == 200
        assert server.client(api_key="first").models.list().data[0].id == "tiny"


@pytest.mark.slow
def test_other_origins(llm: eyas.LLM, server: Running) -> None:
    """A browser lets pages of other origins read nothing unless the server names them."""
    asks = {"origin": "http://page.example", "access-control-request-method": "POST"}
    allowed = httpx2.options(f"{server.v1}/models", headers=asks, timeout=SECONDS).headers
    assert "access-control-allow-origin" not in allowed
    with running(llm, origins=("http://page.example",), rows=1) as open_server:
        allowed = httpx2.options(f"{open_server.v1}/models", headers=asks, timeout=SECONDS).headers
        assert allowed["access-control-allow-origin"] == "http://page.example"
        other = get(f"{open_server.v1}/models", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_a_preflight_for_a_private_network(llm: eyas.LLM) -> None:
    """Guards pages that ask a server on their visitor's machine: Chromium asks for its permission, which --cors-origin
    gives to the origin that it names, and to no other. A slash at its end is none of an origin."""
    asks = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    with running(llm, origins=("https://chat.example/",), rows=1) as server:
        for origin, status in (("https://chat.example", 200), ("https://other.example", 400)):
            made = httpx2.options(f"{server.v1}/chat/completions", headers={**asks, "origin": origin}, timeout=SECONDS)
            assert (made.status_code, made.headers.get("access-control-allow-origin") == origin) == (
                status,
                status == 200,
            )
        assert made.headers.get("access-control-allow-origin") is None
        private = httpx2.options(
            f"{server.v1}/models", headers={**asks, "origin": "https://chat.example"}, timeout=SECONDS
        )
        assert private.headers["access-control-allow-private-network"] == "true"


def test_idle_connections_are_kept(llm: eyas.LLM) -> None:
    """Guards pools of clients and proxies, which meet a reset where the server closes first: nginx keeps a connection for
    60 s, Go for 90, Google's proxies for 600. The seconds are those of uvicorn's own connection."""
    with running(llm, rows=1) as server, httpx2.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        (connection,) = server.server.server_state.connections
        assert connection.config.timeout_keep_alive > 600


@pytest.mark.slow
def test_large_bodies(llm: eyas.LLM) -> None:
    """A body beyond the limit is refused, announced or not."""
    with running(llm, rows=1, max_body_bytes=1000) as server:
        large = json.dumps({"prompt": "x" * 1000}).encode()
        sent: dict[str, Any] = {"headers": {"content-type": "application/json"}, "timeout": SECONDS}
        assert httpx2.post(f"{server.v1}/completions", content=large, **sent).status_code == 413
        parts = (large[i : i + 100] for i in range(0, len(large), 100))  # sent in chunks, without a length
        assert httpx2.post(f"{server.v1}/completions", content=parts, **sent).status_code == 413
        assert post(server, "/v1/completions", BODY).status_code == 200


@pytest.mark.slow
def test_the_application_without_a_socket(llm: eyas.LLM) -> None:
    """The application is plain ASGI: it runs in other servers than uvicorn."""

    async def asked() -> httpx2.Response:
        app = make_app(Service(llm, Settings("tiny", rows=1)))
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post("/v1/completions", json=BODY)

    assert asyncio.run(asked()).json()["choices"][0]["text"] == llm.generate("Hello", raw=True, max_new_tokens=8).text
