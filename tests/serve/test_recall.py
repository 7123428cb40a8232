"""A server that drafts from earlier answers and from corpora, each key from its own."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import eyas
from eyas.recall import Pools
from serving import Running, running

SAMPLED = {"max_tokens": 60, "temperature": 1, "seed": 5}
QUESTION: dict[str, Any] = {"prompt": "The old house by the river", "drafting": "suffix", **SAMPLED}


@pytest.fixture
def recalling(llm: eyas.LLM) -> Iterator[Running]:
    with running(llm, pools=Pools(2**20)) as made:
        yield made


def post(server: Running, path: str, key: str, **body: Any) -> httpx2.Response:
    return server.post(f"/v1/{path}", body, headers={"authorization": f"Bearer {key}"})


def answer(server: Running, key: str) -> tuple[str, int]:
    """Return the text, and how many drafted tokens were accepted."""
    found = post(server, "completions", key, **QUESTION).json()
    return found["choices"][0]["text"], found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]


@pytest.mark.slow
def test_a_repeated_question_is_drafted_from_its_owners_answer(recalling: Running) -> None:
    """Bugs: another key's texts are drafted from; a text changes."""
    (text, _), (same, often), (stranger, seldom) = (answer(recalling, key) for key in ("a", "a", "b"))
    assert text == same == stranger
    assert often > 30
    assert seldom < often


@pytest.mark.slow
def test_a_corpus_is_drafted_from(recalling: Running) -> None:
    text, seldom = answer(recalling, "a")
    added = post(recalling, "corpora", "b", input=[QUESTION["prompt"] + text]).json()
    assert (added["object"], added["texts"]) == ("corpus", 1)
    assert added["tokens"] > 60
    same, often = answer(recalling, "b")
    assert same == text
    assert often > max(30, seldom)
    assert post(recalling, "corpora", "b", input=[1, 2, 3]).json()["tokens"] == 3
    several = post(recalling, "corpora", "b", input=[[1, 2, 3], [4]]).json()
    assert several == {"object": "corpus", "texts": 2, "tokens": 4}
    assert post(recalling, "corpora", "b", input=[10**7]).status_code == 400


def test_a_server_that_remembers_nothing_says_so(server: Running) -> None:
    refused = post(server, "corpora", "a", input="text")
    assert refused.status_code == 400
    assert "--recall" in refused.json()["error"]["message"]
