"""eyas behind the ingress of `ray.serve.llm`, which needs a package of vLLM or SGLang."""

import json
import os
from pathlib import Path

import pytest

import eyas
import eyas_ray
from interop_engines import asked

pytestmark = pytest.mark.slow
PORT = 18231
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_chats_streams_and_refusals(interop: Path) -> None:
    """Guards the protocol: what Ray's ingress passes on, and what it makes of the answers."""
    common = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    requests = [
        (CHAT, common),
        (CHAT, {**common, "stream": True}),
        (TEXT, {"model": "small", "prompt": "Once", "max_tokens": 3, "temperature": 0}),
        (CHAT, {**common, "logit_bias": {"x": 1}}),
    ]
    source = os.pathsep.join(str(Path(package.__file__).parents[1]) for package in (eyas, eyas_ray))
    answers = asked("ray_llm.py", interop, {"source": source, "port": PORT, "requests": requests})
    (_, chat), (_, stream), (_, text), (status, _) = answers
    said = json.loads(chat)["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line and "[DONE]" not in line]
    parts = [choice["delta"].get("content") for line in lines for choice in json.loads(line)["choices"]]
    assert said
    assert "".join(part or "" for part in parts) == said
    assert json.loads(text)["usage"]["completion_tokens"] == 3
    assert status == 400
