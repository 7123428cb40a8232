"""The bytes that the server sends, without a client library between: headers, errors, keys, events,
small endpoints."""

import json
import re
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running, events, running

BODY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON, PLAIN = {"content-type": "application/json"}, {"content-type": "text/plain"}
COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TALKS: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    MESSAGES: {"model": "tiny", **CHAT},
}


def test_a_stream_as_events(server: Running) -> None:
    """Events end in [DONE]; proxies are told not to hold them back; with continuous usage every chunk counts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BODY, "stream": True, "stream_options": options, "timings_per_token": True}
    response = server.post(COMPLETIONS, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == chunks[-1]["usage"]["total_tokens"] - chunks[-1]["usage"]["prompt_tokens"] > 0
    timed = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert timed == sorted(timed)
    assert timed[-1] > 0
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.slow
def test_figures_of_drafts(server: Running) -> None:
    """The figures fit the tokens: cycles emit their accepted tokens and one more each, but for the
    last, which may be cut."""
    asked = {**BODY, "prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True}
    made = server.post(COMPLETIONS, asked).json()
    figures, tokens = made["metrics"]["speculative_decoding"], made["usage"]["completion_tokens"]
    assert tokens == 40
    steps, accepted, counts = (
        figures[name] for name in ("num_spec_steps", "num_accepted_draft_tokens", "acceptance_histogram")
    )
    assert accepted == sum(figures["per_step_accepted"]) == sum(i * count for i, count in enumerate(counts))
    assert steps == sum(counts) == len(figures["per_step_drafted"])
    assert len(counts) == figures["num_spec_tokens"] + 1  # aiperf leaves another length out
    assert tokens <= 1 + steps + accepted <= tokens + 3
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert "timings" not in made
    timed = server.post(COMPLETIONS, {**asked, "timings_per_token": True}).json()
    timings, figures = timed["timings"], timed["metrics"]["speculative_decoding"]
    assert timings["draft_n"] == figures["num_draft_tokens"] >= timings["draft_n_accepted"] > 0
    assert timings["predicted_n"] == 40
    assert timings["prompt_n"] + timings["cache_n"] == timed["usage"]["prompt_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(1000 / timings["predicted_per_token_ms"])
    assert server.post(COMPLETIONS, {**BODY, "n": 2}).json()["metrics"]["speculative_decoding"] is None


@pytest.mark.quick("content3-JSON", "[]-object")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"), (b"[]", "object"), (b'{"prompt": "\\ud800", "max_tokens": 1}', "JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", ""),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"), (b'{"prompt": "x", "metadata": {"a": [NaN]}}', "NaN"),
        (b'{"prompt": [1, 99999999]}', "99999999"), (b'{"prompt": []}', "prompt"), (b'{"prompt": ""}', "empty"),
        (b'{"max_tokens": 1}', "prompt"), (b'{"prompt": "x", "stop": ["a", ""]}', "stop"), (b'{"prompt": "x", "stop": 5}', "stop"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens"), (b'{"prompt": "x", "seed": 9223372036854775808}', "seed"),
        (b'{"prompt": "x", "cycles": true}', "stream"), (b'{"prompt": "x", "suffix": "y"}', "suffix"),
        (b'{"prompt": "x", "n": true}', "n"), (b'{"prompt": "x", "drafting": 0}', "drafting"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be_used(server: Running, content: bytes, words: str) -> None:
    """Each gets one line in OpenAI's form."""
    response = server.request("POST", COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"] + str(error["param"])
    assert "\n" not in error["message"]


@pytest.mark.quick("best_of-*", "return_tokens_as_token_ids-*", "top_p-*", "messages-value21")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "b"), ("best_of", 4), ("top_p", 1.5), ("typical_p", 0.9), ("temperature", "hot"), ("temperature", -1),
        ("n", 0), ("n", 200), ("stop", [""]), ("stop_token_ids", ["a"]), ("logit_bias", {"a": 1}), ("echo", "x"), ("prompt", 5),
        ("response_format", {"type": "x"}), ("regex", "(a"), ("drafting", "nothing"), ("max_tokens", -2), ("logprobs", "x"),
        ("return_tokens_as_token_ids", True), ("messages", [5]), ("messages", []), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "nobody", "content": "x"}]), ("tools", {}), ("tool_choice", 5), ("chat_template_kwargs", 1),
        ("chat_template_kwargs", {"tokenize": False}), ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"chat_template": "x"}), ("chat_template", "{{ 1 }}"), ("verbosity", "loud"), ("model", "another"),
    ],
)  # fmt: skip
def test_a_refusal_names_its_field(server: Running, field: str, value: Any) -> None:
    """Guards against `param: null`, against pydantic's words, and against fields of other servers that
    change an answer and were ignored."""
    for path, body in ((COMPLETIONS, BODY), (CHATS, CHAT)):
        if field in ("messages", "tools", "tool_choice", "chat_template_kwargs", "verbosity") and body is BODY:
            continue
        if field == "prompt" and body is CHAT:
            continue
        response = server.post(path, {**body, field: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (404 if field == "model" else 400, field), error
        assert not any(words in error["message"] for words in ("Input should", "valid", "Field required", "Extra"))


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
DOCUMENT = [{"role": "user", "content": [{"type": "document", "source": {}}]}]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHATS, {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        (CHATS, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        (CHATS, {"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        (CHATS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of them"),
        (CHATS, {"regex": "a", "guided_regex": "b"}, "twice"),
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "Invalid type"),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool"),
        (CHATS, {"tools": [{"type": "function"}]}, "tool 1"),
        (CHATS, {"tool_choice": "required"}, "no tools"),
        *((RESPONSES, {name: value}, name) for name, value in {
            "previous_response_id": "resp_1", "background": True, "conversation": "conv_1", "tools": [{"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"}, "truncation": "auto",
            "include": ["message.output_text.logprobs"],
        }.items()),
        *((RESPONSES, {"input": value}, "") for value in ([], [{"role": "user"}], [{"type": "item_reference", "id": "x"}], IMAGE)),
        (MESSAGES, {"model": "gpt"}, "no model"), (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice"),
        *((MESSAGES, {name: value}, name) for name, value in {
            "max_tokens": None, "messages": [], "best_of": 2, "top_p": 3, "mcp_servers": [{"url": "x"}],
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        }.items()),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"), (MESSAGES, {"messages": DOCUMENT}, "document"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "no place for tools"),
    ],
)  # fmt: skip
def test_refusals(server: Running, path: str, change: dict[str, Any], words: str) -> None:
    """Guards against fields that are silently ignored: the refusal has the dialect's form, and says what is wrong."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    response = server.post(path, {**TALKS[path], **change})
    assert response.status_code == (404 if "model" in change else 400), response.text
    body = response.json()
    assert body["error"].keys() == ({"type", "message"} if path == MESSAGES else {"message", "type", "param", "code"})
    assert (body.get("type") == "error") == (path == MESSAGES)
    assert words in json.dumps(body)


@pytest.mark.slow
@pytest.mark.parametrize("path", TALKS)
def test_an_error_in_a_stream(server: Running, path: str) -> None:
    """The deadline of a stream is an event of the dialect's form."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    more = {limit: 500, "stream": True, "timeout": 1e-3, "ignore_eos": True}
    last = [event for event in events(server.post(path, {**TALKS[path], **more})) if event != "[DONE]"][-1]
    error = last if path == RESPONSES else last["error"]
    assert "time" in error["message"]
    assert path == CHATS or last["type"] == "error"
    assert path != MESSAGES or error["type"] == "timeout_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_token_ids_of_an_answer(path: str, server: Running) -> None:
    """Guards `return_token_ids`, by which an audit and llama-benchy read what was drawn: every token once, those without
    text too."""
    asked = {"prompt": PROMPTS[3]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPTS[3]}]}
    body = {**asked, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    assert "token_ids" not in server.post(path, body).text
    whole = server.post(path, {**body, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    *chunks, _ = events(server.post(path, {**body, "return_token_ids": True, "stream": True}))
    assert len(whole) == 9
    assert [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids", [])] == whole


def test_meta_info_of_a_chat(server: Running) -> None:
    """z-lab's benchmark asks with `return_meta_info` and reads the response, SGLang's clients read the choice."""
    asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 40, "temperature": 0}
    body = {**asked, "ignore_eos": True, "return_meta_info": True}
    made = server.post(CHATS, body).json()
    info, figures = made["meta_info"], made["metrics"]["speculative_decoding"]
    assert info == made["choices"][0]["meta_info"]
    assert info["completion_tokens"] == 40
    assert info["spec_num_correct_drafts"] == figures["num_accepted_draft_tokens"] > 0
    assert info["spec_num_proposed_drafts"] == figures["num_draft_tokens"]
    assert info["spec_verify_ct"] >= figures["num_spec_steps"]
    assert info["spec_accept_length"] == pytest.approx(40 / info["spec_verify_ct"])
    several = server.post(CHATS, {**body, "n": 2}).json()
    assert "meta_info" not in several
    assert all(choice["meta_info"] for choice in several["choices"])
    plain = server.post(CHATS, {**body, "drafting": "off"}).json()["meta_info"]
    assert not any(name.startswith("spec_") for name in plain)
    assert "meta_info" not in server.post(CHATS, asked).json()
    assert server.post(CHATS, {**body, "stream": True}).status_code == 400


def test_paths_and_methods(server: Running) -> None:
    """HEAD is answered like GET, without a body. A path that lacks /v1 or has it twice gets a 404 that says what to
    change; a path that is not there, a method that is not taken and a body that is not JSON get OpenAI's form."""
    for path in ("/", "/health", "/v1/models"):
        response = server.request("HEAD", path)
        assert (response.status_code, response.content) == (200, b"")
    for method, path, how, status, words in (
        ("POST", "/chat/completions", {"json": CHAT}, 404, "must end in /v1"),
        ("POST", "/models", {"json": CHAT}, 404, "must end in /v1"),
        ("POST", "/api/chat", {"json": CHAT}, 404, "Ollama"),
        ("POST", "/v1/v1/chat/completions", {"json": CHAT}, 404, "leave it out"),
        ("POST", "/nothing", {"json": CHAT}, 404, "there is no /nothing"),
        ("GET", "/v1/nothing", {}, 404, ""),
        ("GET", COMPLETIONS, {}, 405, ""),
        ("POST", COMPLETIONS, {"data": {"prompt": "x"}}, 415, ""),  # a form of a web page
        ("POST", COMPLETIONS, {"content": b"{}", "headers": PLAIN}, 415, ""),
    ):
        response = server.request(method, path, **how)
        message = response.json()["error"]["message"]
        assert (response.status_code, bool(message), words in message) == (status, True, True), path


@pytest.mark.slow
def test_tokens_there_and_back(server: Running, llm: eyas.LLM) -> None:
    """lm-eval asks for tokens with and without special ones, and for the text of tokens."""
    text = "The weather, na\u00efvely: 5 \u20ac"
    made = server.post("/tokenize", {"prompt": text}).json()
    assert tuple(made["tokens"]) == llm.ids(text, raw=True)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 4096)
    asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    plain = server.post("/tokenize", asked).json()
    assert len(plain["token_strs"]) == plain["count"]
    assert llm.tokenizer is not None
    assert plain["tokens"] == llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json()["prompt"].strip() == text
    assert server.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert tuple(chat["tokens"]) == llm.ids("Hi")
    assert server.post("/tokenize", {}).status_code == 400
    info = server.get("/tokenizer_info").json()
    assert info["chat_template"] == llm.tokenizer.chat_template
    assert info["eos_token"] == llm.tokenizer.eos_token


@pytest.mark.slow
def test_tokens_of_a_chat(tooled: Running) -> None:
    """Agents count by /tokenize what /v1/chat/completions reads: tools, earlier calls whose content is
    null, the fields of the template."""
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"day": {"enum": ["today"]}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"day": "today"}'}}
    user: dict[str, Any] = {"role": "user", "content": "Hi."}
    history = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    counts = []
    for body in ({"messages": [user]}, {"messages": [user], "tools": tools}, {"messages": history, "tools": tools},
                 {"messages": [user], "tools": tools, "tool_choice": "none"},
                 {"messages": history[:2], "continue_final_message": True}):  # fmt: skip
        chat = tooled.post(CHATS, {**body, "max_tokens": 1}).json()
        counts.append(tooled.post("/tokenize", body).json()["count"])
        assert counts[-1] == chat["usage"]["prompt_tokens"]
    assert counts[3] == counts[0] < counts[1] < counts[2]


def test_small_endpoints(server: Running) -> None:
    """The endpoints for probes, for the page, and for `vllm bench serve`."""
    assert server.get("/health").status_code == 200
    assert server.get("/version").json() == {"version": eyas.__version__}
    stats = server.get("/stats").json()
    assert stats["rows"] == 4
    assert "vanilla" in stats["methods"]


def counters(server: Running) -> dict[str, float]:
    """Prometheus' samples by name with labels; of a fleet, their sums."""
    sums: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = re.sub(r'replica="\w+",', "", line).rpartition(" ")
            sums[name] = sums.get(name, 0) + float(value)
    return sums


@pytest.mark.slow
def test_metrics_under_the_names_of_vllm(server: Running) -> None:
    """`vllm bench serve` sums these counters before and after; they must agree with the figures in the answer."""
    before = counters(server)
    made = server.post(COMPLETIONS, {**BODY, "prompt": PROMPTS[1], "max_tokens": 30, "ignore_eos": True}).json()
    after = counters(server)

    def grown(name: str, labels: str = "") -> float:
        key = f'vllm:{name}{{model_name="tiny"{labels}}}'
        return after[key] - before.get(key, 0)

    figures = made["metrics"]["speculative_decoding"]
    by_position = [grown("spec_decode_num_accepted_tokens_per_pos_total", f',position="{i}"') for i in range(3)]
    assert sum(by_position) == figures["num_accepted_draft_tokens"] > 0
    assert by_position == sorted(by_position, reverse=True)
    expected = {
        "spec_decode_num_drafts_total": figures["num_spec_steps"],
        "spec_decode_num_draft_tokens_total": figures["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": figures["num_accepted_draft_tokens"],
        "generation_tokens_total": 30,
        "prompt_tokens_total": made["usage"]["prompt_tokens"],
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }
    assert {name: grown(name) for name in expected} == expected
    assert after['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert after['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0
    assert not any("_created" in name for name in after)


@pytest.mark.slow
def test_a_prediction(server: Running, llm: eyas.LLM) -> None:
    """OpenAI's predicted output drafts the text that is announced: fewer cycles, the same text, and
    usage counts what was of use."""
    own = llm.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    talk = [{"role": "user", "content": PROMPTS[0]}]
    wrong = [{"type": "text", "text": "Nothing of this is ever said, "}, {"type": "text", "text": "not even once."}]

    def made(**more: Any) -> tuple[dict[str, Any], int]:
        asked = {"messages": talk, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
        answer = server.post(CHATS, asked).json()
        assert answer["choices"][0]["message"]["content"] == own.text
        details: dict[str, Any] = answer["usage"]["completion_tokens_details"]
        return details, answer["metrics"]["speculative_decoding"]["num_spec_steps"]

    (plain, steps), (helped, fewer) = made(), made(prediction={"type": "content", "content": own.text})
    assert helped["accepted_prediction_tokens"] > 10
    assert plain["accepted_prediction_tokens"] == 0
    assert fewer < steps
    assert made(prediction={"type": "content", "content": wrong})[0]["rejected_prediction_tokens"] > 5


@pytest.mark.slow
def test_keys(llm: eyas.LLM) -> None:
    """Without a right key nothing but probes answers; the second of two keys is as good as the first. Anthropic's
    clients send x-api-key."""
    with running(llm, keys=("first", "second"), rows=1) as server:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic first"}, 401),
            ({"authorization": "Bearer"}, 401),
            ({"authorization": "Bearer first"}, 200),
            ({"authorization": "bearer second"}, 200),
            ({"x-api-key": "first"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer first", "x-api-key": "other"}, 200),
        ):
            response = server.get("/v1/models", headers=headers)
            assert response.status_code == status, headers
            assert status == 200 or response.json()["error"]["code"] == "invalid_api_key"
        for method, path in (("POST", COMPLETIONS), ("POST", "/tokenize"), ("POST", "/v1/messages"), ("GET", "/stats")):
            assert server.request(method, path, json={"prompt": "x"}).status_code == 401
        assert server.get("/health").status_code == 200
        assert server.client(api_key="first").models.list().data[0].id == "tiny"


@pytest.mark.slow
def test_other_origins(llm: eyas.LLM, server: Running) -> None:
    """Guards the answers of a visitor's server: a browser lets pages of other origins read nothing unless --cors-origin
    names them, and asks it before it asks a private network. A slash at its end is none of an origin."""
    asks = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    page, allowed = "https://page.example", "access-control-allow-origin"
    assert allowed not in server.request("OPTIONS", "/v1/models", headers={**asks, "origin": page}).headers
    with running(llm, origins=(f"{page}/",), rows=1) as named:
        for origin, status, header in ((page, 200, page), ("https://other.example", 400, None)):
            made = named.request("OPTIONS", CHATS, headers={**asks, "origin": origin})
            assert (made.status_code, made.headers.get(allowed)) == (status, header)
            assert status == 400 or made.headers["access-control-allow-private-network"] == "true"
            assert named.get("/v1/models", headers={"origin": origin}).headers.get(allowed) == header


@pytest.mark.slow
def test_large_bodies(llm: eyas.LLM) -> None:
    """A body beyond the limit is refused, announced or not."""
    with running(llm, rows=1, max_body_bytes=1000) as server:
        large = json.dumps({"prompt": "x" * 1000}).encode()
        parts = (large[i : i + 100] for i in range(0, len(large), 100))  # sent in chunks, without a length
        for content, status in ((large, 413), (parts, 413), (json.dumps(BODY).encode(), 200)):
            assert server.request("POST", COMPLETIONS, content=content, headers=JSON).status_code == status
