"""Another head for a fleet that serves, by `serve deploy`. Skipped where Ray is not installed: `make scale` installs it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import eyas
import live
from eyas import checkpoints, drafters
from eyas.core.options import build_options
from processes import WorkLimit, unused_port

ray = pytest.importorskip("ray", reason="Ray is installed by `make scale`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules use deprecated parts of pydantic
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

from eyas_ray.fleet import VARIABLES  # noqa: E402 - what follows needs Ray
from eyas_ray.options import APPLICATION, DEPLOYMENT  # noqa: E402

pytestmark = [*live.MARKS, live.EMBEDDED]

SECONDS = 300  # that one request may take on a busy machine
PROMPTS = ("Tell me a story.", "Tell me a story about a hat.", "What is the weather like?", "Can you help me?")
OPTIONS = {"rows": 2, "replicas": 2, "tree.nodes": 6, "tree.depth": 3}
COUNTED = re.compile(r'^vllm:spec_decode_num_(draft|accepted)_tokens_total\{replica="(\w+)".*\} (\S+)$', re.MULTILINE)


def deploy(user_config: dict[str, str]) -> None:
    """Do what `serve deploy` does with such a file as deploy/ray/serve.yaml."""
    deployment = {"name": DEPLOYMENT, "user_config": user_config}
    application = {"name": APPLICATION, "import_path": "eyas_ray.serving:build_app", "args": OPTIONS}
    config = {"applications": [{**application, "route_prefix": "/", "deployments": [deployment]}]}
    _get_global_client().deploy_apps(ServeDeploySchema(**config))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait as long as Ray's processes, which are children of this one, do not work for too long."""
    limit = WorkLimit(os.getpid())
    while not condition():
        limit.check()
        time.sleep(0.2)


def serves() -> bool:
    """Whether the application runs."""
    application = serve.status().applications.get(APPLICATION)
    return application is not None and application.status == "RUNNING"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fleet of two replicas with the embedded model's own head."""
    for name, value in VARIABLES.items():
        monkeypatch.setitem(os.environ, name, value)
    port = unused_port()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        deploy({})
        wait_until(serves)
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def random_head(folder: Path) -> str:
    """Write a head of the same sizes that has learnt nothing: of its drafts hardly one is accepted."""
    kind = drafters.find("mtp")
    target = eyas.load(method="mtp").target
    checkpoints.save(kind.random(target, build_options(kind.Options, {}), 5).weights(), folder)
    return str(folder)


def streamed(url: str, prompt: str, session: str, begun: threading.Event | None = None, **more: Any) -> str:
    """Return the text of a stream that ends as it should."""
    body = {"prompt": prompt, "max_tokens": 160, "temperature": 0, "ignore_eos": True, "stream": True, **more}
    text, ended = "", False
    headers = {"x-session-id": session}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if begun is not None:
                    begun.set()
    assert ended
    return text


def counts(url: str) -> dict[str, dict[str, float]]:
    """Return the tokens that each replica has drafted, and those that were accepted."""
    found = defaultdict[str, dict[str, float]](dict)
    for name, replica, value in COUNTED.findall(httpx2.get(f"{url}/metrics", timeout=SECONDS).text):
        found[replica][name] = float(value)
    return found


def accepted_shares(url: str) -> dict[str, float]:
    """Return the share of drafts that each replica accepts now; replicas that draft nothing have none. Sessions are
    asked until both replicas have drafted."""
    before = counts(url)
    for session in range(100):
        streamed(url, PROMPTS[session % len(PROMPTS)], f"shares {session}", max_tokens=40)
        now = counts(url)
        drafted = {name: now[name]["draft"] - before.get(name, {}).get("draft", 0) for name in now}
        if len(drafted) == 2 and min(drafted.values()) > 0:
            break
    accepted = {name: now[name]["accepted"] - before.get(name, {}).get("accepted", 0) for name in now}
    return {name: accepted[name] / count for name, count in drafted.items() if count > 0}


def test_a_new_head_without_a_restart(url: str, tmp_path: Path) -> None:
    """Guards against requests that are lost or changed while replicas take another head, and against replicas that
    are started again for it or keep the old one. Clients stream all the time; plain decoding has the same texts."""
    head = random_head(tmp_path / "head")
    expected = {prompt: streamed(url, prompt, "plain", drafting="vanilla") for prompt in PROMPTS}
    own = accepted_shares(url)
    assert len(own) == 2
    assert min(own.values()) > 0.1

    def is_new(shares: dict[str, float]) -> bool:
        return len(shares) == 2 and max(shares.values()) < min(own.values()) / 4

    begun, enough = [threading.Event() for _ in PROMPTS], threading.Event()

    def client(number: int) -> list[str]:
        texts = list[str]()
        while not enough.is_set():
            texts.append(streamed(url, PROMPTS[number], f"client {number}", begun[number]))
        return texts

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        asked = [clients.submit(client, number) for number in range(len(PROMPTS))]
        try:
            assert all(event.wait(SECONDS) for event in begun)
            deploy({"draft": head})
            wait_until(lambda: is_new(accepted_shares(url)))
        finally:
            enough.set()
        texts = {prompt: one.result() for prompt, one in zip(PROMPTS, asked, strict=True)}
    assert {prompt: set(found) for prompt, found in texts.items()} == {prompt: {expected[prompt]} for prompt in PROMPTS}
    assert serve.status().applications[APPLICATION].deployments[DEPLOYMENT].status == "HEALTHY"
    changed = accepted_shares(url)
    assert changed.keys() == own.keys()
    assert is_new(changed)
