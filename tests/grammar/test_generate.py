"""Structured output through `LLM` and the engine: plain decoding's ids under the same masks, for every method."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import regex

import eyas
import zoo
from eyas import drafters, tiny
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.errors import EyasError
from eyas.grammar import GrammarConstraint, Grammars, structure_of
from reference import SAMPLINGS, plain_decode, run
from test_lossless import DRAWN, make
from toy_tokenizer import VOCAB, byte_tokenizer
from wishes import wished

pytest.importorskip("llguidance", reason="structured output needs llguidance")

EOS = 1
MOST = 40  # tokens of an answer
FIELDS = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}}
PERSON = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"response_format": FORMAT},
    {"regex": r"(\w+ ){3,6}(yes|no)!?"},
    {"choice": ["😀 yes", "😀 yes, 日本", "😢 no"]},  # characters of several tokens
)


@cache
def target() -> Target:
    """A model of the byte tokenizer's size, and of a few ids that the tokenizer does not have."""
    return Target(zoo.tiny("llama", vocab_size=VOCAB + 10))


@cache
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(), VOCAB + 10)


def constraint(number: int, eos: Sequence[int] = (EOS,)) -> GrammarConstraint:
    structure = structure_of(STRUCTURES[number % len(STRUCTURES)])
    assert structure is not None
    return grammars().constraint(structure, eos)


def request(number: int) -> Request:
    """Requests of different prompts, structures and samplings; each call has a constraint of its own."""
    prompt = tuple(6 + (7 * number + 5 * i) % 200 for i in range(3 + 4 * number))
    return wished(prompt, MOST, SAMPLINGS[number % len(SAMPLINGS)], frozenset({EOS}), constraint=constraint(number))


@cache
def plain(number: int) -> tuple[int, ...]:
    """The new tokens of a request by full forwards."""
    return tuple(plain_decode(target().model, request(number)))


@pytest.mark.cover(name=5)
@pytest.mark.quick("suffix-1")
@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 3) for name in drafters.names()), *((name, 1) for name in ("suffix", "eagle2", "eagle1"))],
)
def test_every_method(name: str, rows: int) -> None:
    """Guards masks at every node, rows that join and leave, and ends; sampled children give valid texts."""
    requests = [request(number) for number in range(6 if rows > 1 else 3)]
    tokens, _ = run(Decoder(target(), make(name, target()), rows), requests)
    for number, (one, new) in enumerate(zip(requests, tokens, strict=True)):
        if one.sampling.greedy or name not in DRAWN:
            assert tuple(new) == plain(number), f"{one.sampling}"
        elif len(new) < one.max_new_tokens:
            follower = constraint(number)
            follower.accept(new)
            assert follower.finished


@cache
def embedded() -> eyas.LLM:
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return eyas.load(tree={"nodes": 8, "depth": 4, "branch": 3})


@pytest.mark.cover(keywords=1)
@pytest.mark.parametrize("keywords", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_json_of_the_embedded_model(keywords: dict[str, Any]) -> None:
    """Guards the whole way from a schema to a text: it validates, and is plain decoding's, streamed or not."""
    asked = {"response_format": FORMAT, "max_new_tokens": 80, **keywords}
    prompt = "I want to book a table for two in San Jose tonight."
    result = embedded().generate(prompt, **asked)
    assert result.finish_reason == "stop"
    jsonschema.validate(json.loads(result.text), PERSON)
    assert "".join(piece.text for piece in embedded().stream(prompt, **asked)) == result.text
    assert eyas.load(method="vanilla").generate(prompt, **asked).token_ids == result.token_ids


@pytest.mark.slow
def test_other_structures_of_the_embedded_model() -> None:
    """Guards each keyword of `generate`."""
    llm, prompt = embedded(), "Can you tell me what the weather is like?"
    assert regex.fullmatch("[A-Z][a-z]+ [0-9]{2}", llm.generate(prompt, regex="[A-Z][a-z]{1,8} [0-9]{2}").text)
    assert llm.generate(prompt, choice=["sunny", "rainy"]).text in ("sunny", "rainy")
    assert set(llm.generate(prompt, grammar='root ::= ("ha" | "ho"){2,5}').text) <= set("hao")
    assert llm.generate(prompt, response_format={"type": "json_object"}, max_new_tokens=20).text.startswith("{")
    assert llm.generate(prompt, choice=["only this"], ignore_eos=True).text == "only this"
    several = llm.generate([prompt, "Tell me a story."], choice=["left", "right"], batch_size=2)
    assert {result.text for result in several} <= {"left", "right"}
    samples = llm.generate(prompt, n=3, temperature=1.0, regex="[a-z]{4}")
    assert all(regex.fullmatch("[a-z]{4}", result.text) for result in samples)


@pytest.mark.slow
def test_mistakes_come_before_anything_is_decoded() -> None:
    """Guards one clear line where the structure is wrong."""
    with pytest.raises(EyasError, match="unclosed group"):
        embedded().generate("Hello.", regex="(a")
    with pytest.raises(EyasError, match="give one of them"):
        embedded().stream("Hello.", regex="a", choice=["b"])
