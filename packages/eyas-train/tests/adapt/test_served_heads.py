"""A server whose head is replaced while requests run, and learns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import eyas
from eyas import checkpoints, drafters
from eyas.core.options import build_options
from eyas_train.adapt import Heads, adapting
from serving import PROMPTS, Running, running, small_llm

ADMIN = "the admin's key"


@pytest.fixture
def llm() -> eyas.LLM:
    """The embedded model, with an MTP module of its own."""
    return small_llm()


def random_head(llm: eyas.LLM, folder: Path) -> Path:
    """Write a head of the same sizes that has learnt nothing."""
    kind = drafters.find("mtp")
    checkpoints.save(kind.random(llm.target, build_options(kind.Options, {}), 5).weights(), folder)
    return folder


@pytest.fixture
def served(llm: eyas.LLM) -> Iterator[Running]:
    with running(llm, heads=Heads(llm), rows=4, admin_key=ADMIN) as made:
        yield made


def post(server: Running, key: str | None, **body: Any) -> httpx2.Response:
    return server.post("/v1/draft", body, headers={} if key is None else {"authorization": f"Bearer {key}"})


def answers(server: Running, swap: Any = None, **more: Any) -> list[str]:
    """Return the answers to some prompts that are asked for together, half of them sampled; `swap` is called when
    all of them have begun."""
    texts, begun = [""] * len(PROMPTS), [threading.Event() for _ in PROMPTS]

    def ask(number: int) -> None:
        stream = server.client().completions.create(
            model="tiny", prompt=PROMPTS[number], max_tokens=160, temperature=number % 2, seed=number, stream=True,
            extra_body={"ignore_eos": True, **more},
        )  # fmt: skip
        for piece in stream:
            texts[number] += piece.choices[0].text
            begun[number].set()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    if swap is not None:
        assert all(event.wait(600) for event in begun)
        swap()
    for thread in threads:
        thread.join()
    return texts


@pytest.mark.slow
def test_heads_that_cannot_be_used(served: Running, llm: eyas.LLM, tmp_path: Path) -> None:
    """Each refusal is one clear line, and leaves the head in place."""
    net = llm.drafter.net
    eagle3 = llm.own_heads["eagle3"]
    (tmp_path / "empty").mkdir()
    for key, body, status, words in (
        (None, {"path": "x"}, 403, "key"),
        ("another", {"path": "x"}, 403, "key"),
        (ADMIN, {}, 400, "path"),
        (ADMIN, {"path": "x", "name": "y"}, 400, "either"),
        (ADMIN, {"path": str(tmp_path / "missing")}, 400, "no such folder"),
        (ADMIN, {"path": "~nobody-of-that-name/head"}, 400, "no such folder"),
        (ADMIN, {"path": "a" * 5000}, 400, "no such folder"),
        (ADMIN, {"path": str(tmp_path / "empty")}, 409, "empty"),
        (ADMIN, {"path": eagle3}, 409, "multi-token"),
    ):
        refused = post(served, key, **body)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, words in message, "\n" in message) == (status, True, False), message
    assert llm.drafter.net is net


@pytest.mark.slow
@pytest.mark.parametrize("admin", ["", ADMIN], ids=["none", "one"])
def test_only_an_admin_replaces_the_head(llm: eyas.LLM, admin: str) -> None:
    with running(llm, keys=("user",), heads=Heads(llm), **({"admin_key": admin} if admin else {})) as server:
        for key, status in (("user", 403), (None, 401), (ADMIN, 200 if admin else 401)):
            assert post(server, key, name="given").status_code == status


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_server_learns_and_swaps_while_it_serves(llm: eyas.LLM, tmp_path: Path) -> None:
    """Guards requests that are in flight while heads change: their texts stay the same. Steps are made when requests
    have ended, nothing is kept of requests with store set to false, and the head is written at the end."""
    learning, folder = adapting(llm, share=1e9, steps=2), random_head(llm, tmp_path / "other")
    replaced = list[Any]()

    def swap() -> None:
        for body in ({"path": str(folder)}, {"name": "given"}, {"path": str(folder)}):
            replaced.append(post(server, ADMIN, **body))

    with running(learning, heads=Heads(learning, str(tmp_path / "saved")), rows=4, admin_key=ADMIN) as server:
        before = answers(server, store=False)
        server.wait_until_idle()
        assert stats(server)["tokens"] == stats(server)["steps"] == 0
        during = answers(server, swap)
        assert [response.status_code for response in replaced] == [200, 200, 200]
        assert replaced[0].json() == {"object": "draft", "head": str(folder), "method": "mtp"}
        while stats(server)["steps"] < 4:
            time.sleep(0.05)
        assert before == during == answers(server)
        learning.learner.kept = 1  # what a longer test would come to
    assert eyas.load(method="mtp", draft=str(tmp_path / "saved")).method == "mtp"


def stats(server: Running) -> dict[str, Any]:
    learnt: dict[str, Any] = server.get("/stats").json()["learnt"]
    return learnt


@pytest.mark.slow
def test_a_step_that_fails_ends_the_learning_only(llm: eyas.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(adapting(llm))

    def fail(idle: bool) -> bool:
        raise RuntimeError("no memory")

    monkeypatch.setattr(heads.learner, "rest", fail)
    assert not heads.rest(True)
    assert heads.failed
