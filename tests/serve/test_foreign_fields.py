"""Fields of vLLM, SGLang and llama.cpp are served, refused by name, or known to change no answer; the list of them is read
from their sources."""

from __future__ import annotations

import importlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.serve.errors import ApiError
from eyas.serve.messages import MessagesBody
from eyas.serve.protocol.chat import ChatBody, TokenizeBody
from eyas.serve.protocol.completions import CompletionBody, InfillBody
from eyas.serve.protocol.fields import REFUSED, WITHOUT_EFFECT, Body, foreign_fields
from eyas.serve.protocol.responses import ResponsesBody
from serving import Running

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HI}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}),
    "/v1/messages": (MessagesBody, {"model": "tiny", "max_tokens": 2, "messages": HI}),
    "/tokenize": (TokenizeBody, {"messages": HI}),
}
ODD = {"an unusual": "value"}  # that no field has as its default


def unserved() -> Iterator[tuple[str, str]]:
    for path, (kind, _) in BODIES.items():
        served = {*kind.model_fields, *(ChatBody.model_fields if kind is MessagesBody else ())}
        yield from ((path, name) for name in foreign_fields(path) if name not in served)


def read(path: str, **more: Any) -> Body:
    """Read a body as its route does."""
    kind, body = BODIES[path]
    made = kind.model_validate_json(json.dumps({**body, **more}))
    made.check()
    return made.chat() if isinstance(made, MessagesBody) else made


@pytest.mark.parametrize(("path", "name"), [*unserved()])
def test_no_field_of_others_is_ignored_in_silence(path: str, name: str) -> None:
    """Guards against status 200 without effect, field by field: each is refused by its name, unless it has its default
    or is known to change no answer."""
    if name in WITHOUT_EFFECT:
        assert not read(path, **{name: ODD}).ignored
        return
    with pytest.raises(ApiError) as caught:
        read(path, **{name: ODD})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message
    for default in (None, [], {}, *(REFUSED[name] if name in REFUSED else foreign_fields(path)[name])):
        assert not read(path, **{name: default}).ignored


def test_the_list_is_one_of_all_servers() -> None:
    """Guards against a list that was cut: each server has fields that no other has, on the paths that it serves."""
    for path, names in {
        "/v1/chat/completions": "thinking_token_budget custom_params session_params parse_tool_calls top_n_sigma",
        "/v1/completions": "prompt_embeds lora_path n_cmpl t_max_predict_ms",
        "/v1/responses": "previous_input_messages extra_key lora",
        "/v1/messages": "kv_transfer_params betas post_sampling_probs",
        "/tokenize": "return_token_strs add_special_tokens chat_template",
    }.items():
        assert set(names.split()) <= foreign_fields(path).keys()
    assert not WITHOUT_EFFECT & REFUSED.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_n_sigma", 1.0), ("guided_whitespace_pattern", "[ ]"), ("lora", [{"id": 0, "scale": 0.5}]), ("n_cmpl", 2),
        ("reasoning_format", "none"), ("watermark", True), ("messages", HI), ("include_reasoning", False), ("xtc_probability", 0.1),
    ],
)  # fmt: skip
def test_a_field_of_another_path_is_refused_too(server: Running, field: str, value: Any) -> None:
    """Guards fields that other servers have on one path, and clients send on another; through the server."""
    error = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2, field: value}).json()["error"]
    assert (error["param"], field in error["message"]) == (field, True)


def test_a_body_of_llama_cpps_page(server: Running) -> None:
    """Guards against refusing what changes nothing: llama.cpp's page and SillyTavern send every sampler with its default,
    and the finer settings of samplers that are off."""
    off = {"dry_multiplier": 0, "xtc_probability": 0.0, "mirostat": 0, "dynatemp_range": 0, "typical_p": 1, "top_n_sigma": -1,
           "reasoning_format": "auto", "samplers": None, "repeat_penalty": 1.0, "n_predict": None, "bad_words": []}  # fmt: skip
    fine = {"dry_base": 1.5, "dry_sequence_breakers": ["\n"], "xtc_threshold": 0.2, "mirostat_tau": 4, "mirostat_eta": 0.2,
            "dynatemp_exponent": 2, "cache_prompt": True, "return_progress": True, "id_slot": 1, "n_keep": 4}  # fmt: skip
    made = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2, **off, **fine})
    assert (made.status_code, made.headers.get("x-eyas-ignored-fields")) == (200, None), made.text


def test_editors_are_told_and_not_refused() -> None:
    """llama.vscode sends samplers of its own to /infill: the header names them."""
    given = {
        "samplers": ["top_k", "infill"],
        "t_max_predict_ms": 500,
        "cache_prompt": True,
        "n_indent": 0,
        "mirostat": 0,
    }
    body = InfillBody.model_validate({"input_prefix": "a", "input_suffix": "b", **given})
    body.check()
    assert body.ignored == ["samplers", "t_max_predict_ms"]


# --- the script -----------------------------------------------------------------------------------------

PYDANTIC = b"""
class Mixin(BaseModel):
    session_id: str | None = None
    kind: ClassVar[str] = "x"
class ChatCompletionRequest(Mixin):
    messages: list
    top_k: int = 40
    seed: int | None = Field(None, ge=-1)
    echo: bool = Field(default=False, description="a")
    words: list[str] = Field(default_factory=list)
    penalty: float | None = -1.0
    _private: int = 1
    def top_p(self): pass
"""
SCHEMA = b"""
    add((new field_bool("stream", params.stream)));  // add((new field_num("comment", params.x)))
    add((new field_nested("options"))
        ->add_subfield((new field_bool("inner", params.inner))));
    add((new field_num("n_predict", params.n_predict))
        ->add_alias("max_tokens"));
#if 0
    add((new field_num("off", params.off)));
#endif
    add((new field_num("top_n_sigma", params.sampling.top_n_sigma)));
"""
CHAT = b"""
json oaicompat_chat_params_parse(
    json & body) {
    if (body.contains("grammar")) { json_value(body, "tools", json()); body.at("messages"); }
}
json other(json & body) { body.at("no"); }
"""


def test_the_script_reads_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the list against names that are no fields, and against defaults that are none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "runs"))
    script = importlib.import_module("foreign_fields")
    vllm, sglang, llama = names = ("vllm-1.0-cp38-abi3.whl", "sglang-2.0-cp311.whl", "llama_cpp_python-3.0.tar.gz")
    for name, classes, folder in ((vllm, script.VLLM, "vllm"), (sglang, script.SGLANG, "sglang/srt")):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file in {file for listed in classes.values() for file, _ in listed}:
                wheel.writestr(f"{folder}/entrypoints/{file}/protocol.py", PYDANTIC)
    sources = {
        "tools/server/server-schema.cpp": SCHEMA,
        "tools/server/server-common.cpp": CHAT,
        "tools/server/server-task.h": b"bool stream = true;\\n int32_t n_predict = -1;",
        "common/common.h": b"float top_n_sigma = -1.00f;",
    }
    with tarfile.open(tmp_path / llama, "w:gz") as archive:
        for path, text in sources.items():
            member = tarfile.TarInfo(f"llama_cpp_python-3.0/vendor/llama.cpp/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    files = [str(tmp_path / name) for name in names]
    output = tmp_path / "list.json"
    script.main(["--vllm", files[0], "--sglang", files[1], "--llama-cpp", files[2], "--output", str(output)])
    made = json.loads(output.read_text())
    assert made["sources"] == ["vllm-1.0", "sglang-2.0", "llama_cpp_python-3.0"]
    sampling = {"max_tokens": [-1], "n_predict": [-1], "options": [], "stream": [True], "top_n_sigma": [-1.0]}
    own = {"echo": [False], "messages": [], "penalty": [-1.0], "seed": [], "session_id": [], "top_k": [40], "words": []}
    chat = {**sampling, **own, "grammar": [], "tools": []}
    plain = dict.fromkeys(("/v1/completions", "/v1/responses", "/v1/messages"), sampling)
    assert made["fields"] == {"/v1/chat/completions": chat, **plain, "/tokenize": {}}
