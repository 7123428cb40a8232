"""Fields of vLLM, SGLang and llama.cpp are served, refused by name, or known to change no answer; the list of them is read
from their sources."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.serve.chat import ChatBody
from eyas.serve.completions import CompletionBody, InfillBody
from eyas.serve.errors import ApiError
from eyas.serve.fields import REFUSED, WITHOUT_EFFECT, Body, foreign_fields
from eyas.serve.info import TokenizeBody
from eyas.serve.messages import MessagesBody
from eyas.serve.responses import ResponsesBody
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
