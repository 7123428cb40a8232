"""Constraints: their masks against an independent matcher, over trees, tokenizers and the ends of texts."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import jsonschema
import pytest
import regex
import torch

from eyas import tiny
from eyas.errors import EyasError, InputError, OptionError
from eyas.grammar import GrammarConstraint, Grammars, Structure, structure_of
from eyas.grammar._structure import without_annotations
from test_text import TOKENIZERS
from toy_tokenizer import byte_tokenizer

pytest.importorskip("llguidance", reason="structured output needs llguidance")

EOS = 1
PADDING = 40  # ids of the model that the embedded tokenizer does not have
SIZE = 8192 + PADDING
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def json_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def structure(**keywords: Any) -> Structure:
    made = structure_of(keywords)
    assert made is not None
    return made


@cache
def grammars() -> Grammars:
    return Grammars(tiny.tokenizer(), SIZE)


def constraint(eos: Sequence[int] = (EOS,), **keywords: Any) -> GrammarConstraint:
    return grammars().constraint(structure(**keywords), eos)


def root_mask(made: GrammarConstraint) -> torch.Tensor:
    mask_1V = made.mask([-1], [0])
    assert mask_1V.shape == (1, SIZE)
    assert mask_1V.dtype == torch.bool
    return mask_1V[0]


@cache
def texts() -> list[str]:
    tokenizer = tiny.tokenizer()
    return [tokenizer.decode([token]) for token in range(8192)] + [""] * PADDING


def words(made: GrammarConstraint, seed: int, most: int, ascii_only: bool = False) -> Iterator[list[int]]:
    """Random tokens of the mask until the text ends; every third closes something if it can."""
    rng, ids = random.Random(seed), list[int]()
    while not made.finished and len(ids) < most:
        yield ids
        allowed = root_mask(made).nonzero().flatten().tolist()
        closing = [token for token in allowed if texts()[token] in ('"', "}", "]")] if rng.random() < 0.3 else []
        fitting = [token for token in allowed if not ascii_only or token < 6 or texts()[token].isascii()]
        ids.append(rng.choice(closing or fitting))
        made.accept(ids[-1:])
    yield ids


EXPRESSIONS = [
    r"[0-9]{3}-[0-9]{4}",
    r"(the |a )?(cat|dog)s? (sat|ran)\.",
    r"\w+@\w+\.(com|org)",
    r"a.b|x\d*y",
    r"[^a-z]{2,5}!",
]


@pytest.mark.cover(expression=2)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_are_those_of_another_matcher(expression: str) -> None:
    """Guards every mask bit by the package `regex`; the end if the text matches; special and padding ids never."""
    whole = regex.compile(expression, regex.ASCII)
    for seed in range(2):
        made = constraint(regex=expression)
        for ids in words(made, seed, 8, ascii_only=True):
            if made.finished:
                break
            mask_V, before = root_mask(made), tiny.tokenizer().decode(ids)
            for token, text in enumerate(texts()[:8192]):
                if text and text.isascii():
                    fits = whole.fullmatch(before + text, partial=True) is not None
                    assert bool(mask_V[token]) == fits, f"{before!r} + {text!r}"
            assert bool(mask_V[EOS]) == (whole.fullmatch(before) is not None)
            assert not mask_V[[0, 2, 3, 4, 5, *range(8192, SIZE)]].any()


@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_masks_of_a_tree_are_those_of_its_paths(nodes: int) -> None:
    """Guards the walk: rollbacks, siblings, rows. Forbidden nodes and all below are True; the constraint stays."""
    for seed in range(6):
        rng = random.Random(seed)
        begun = [t for ids in words(constraint(**json_format(PERSON)), seed, rng.randrange(12)) for t in ids[-1:]]
        made = constraint(**json_format(PERSON))
        made.accept(begun)
        if made.finished:
            continue
        parents, tokens, paths, masks = [-1], [begun[-1] if begun else 0], [begun], [root_mask(made)]
        for _ in range(nodes - 1):
            parent = rng.randrange(len(parents))
            path, mask_V = paths[parent], masks[parent]
            kinds = mask_V.nonzero().flatten().tolist() if path is not None and rng.random() < 0.7 else range(SIZE)
            token = rng.choice(list(kinds))
            parents.append(parent)
            tokens.append(token)
            reached = path is not None and bool(mask_V[token]) and token != EOS
            paths.append([*path, token] if reached else None)
            follower = constraint(**json_format(PERSON))
            if reached:
                follower.accept(paths[-1])
            masks.append(root_mask(follower) if reached else torch.ones(SIZE, dtype=torch.bool))
        before = root_mask(made).clone()
        assert torch.equal(made.mask(parents, tokens), torch.stack(masks))
        assert torch.equal(root_mask(made), before)


@pytest.mark.parametrize("eos", [(), (EOS,), (EOS, 5, SIZE - 1)], ids=["none", "one", "several"])
def test_ends(eos: tuple[int, ...]) -> None:
    """Guards texts without an end id, and with several: allowed where the grammar is complete."""
    made = constraint(eos, regex="ab?")
    a, b = texts().index("a"), texts().index("b")
    assert not root_mask(made)[list(eos)].any()
    made.accept([a])
    assert not made.finished
    assert root_mask(made).nonzero().flatten().tolist() == sorted([*eos, b])
    made.accept([b])
    assert made.finished
    ended = constraint(eos, regex="ab?")
    ended.accept([a, *eos[:1]])
    assert ended.finished == bool(eos)


@pytest.mark.cover(keywords=1)
@pytest.mark.parametrize(
    "keywords", [json_format(PERSON), json_format({"type": "object"}), {"response_format": {"type": "json_object"}}]
)
def test_random_texts_validate(keywords: dict[str, Any]) -> None:
    """Guards the whole chain, from schema to bytes: what random tokens of the masks say validates."""
    ended = 0
    schema = keywords["response_format"].get("json_schema", {}).get("schema", {"type": "object"})
    for seed in range(12):
        made = constraint(**keywords)
        *_, ids = words(made, seed, 200)
        if made.finished:
            ended += 1
            jsonschema.validate(json.loads(tiny.tokenizer().decode(ids, skip_special_tokens=True)), schema)
    assert ended > 1


KINDS = ["byte_level", "llama", "gemma", "metaspace_bytes", "unigram", "toy"]


@pytest.mark.quick("byte_level", "llama")
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers(kind: str) -> None:
    """Guards the bytes of tokens for every kind of fast tokenizer, and the split of forced text."""
    tokenizer: Any = byte_tokenizer() if kind == "toy" else TOKENIZERS[kind]
    made_by = Grammars(tokenizer, len(tokenizer) + 7)
    asked = structure(regex="(I|you) (like|see) the [a-z]{1,3}, (1|2|3)!")
    for seed in range(10):
        rng, ids = random.Random(seed), list[int]()
        made = made_by.constraint(asked, (tokenizer.eos_token_id,))
        while not made.finished and len(ids) < 60:
            for step, token in enumerate(made.forced(8)):
                assert made_by.constraint(structure(regex=".*"), ()).mask([-1], [0])[0, token], step
            ids.append(rng.choice(made.mask([-1], [0])[0].nonzero().flatten().tolist()))
            made.accept(ids[-1:])
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        assert regex.fullmatch("(I|you) (like|see) the [a-z]{1,3}, [123]!", text)


FAMILY = "👨\u200d👩\u200d👧"
KEYS = {
    "名前": {"type": "string", "pattern": "^[あ-ん]{2}😀$"},
    "é": {"enum": ["😀 happy", "😢 sad"]},
    "z": {"const": FAMILY},
}
ANSWER = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
SEVERAL_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["😀 happy", "😃 happy", f"日本語 {FAMILY}"]}, f"😀 happy|😃 happy|日本語 {FAMILY}"),
    "regex": ({"regex": "(😀|日本){2,3}[а-я]?!"}, "(😀|日本){2,3}[а-я]?!"),
    "grammar": ({"grammar": 'root ::= ("é" | "😀")+ "。"'}, "[é😀]+。"),
    "keys": (json_format(ANSWER), f'{{"名前": "[あ-ん]{{2}}😀", "é": "(😀 happy|😢 sad)", "z": "{FAMILY}"}}'),
    "special": ({"choice": ["a <s> b </s>"]}, "a <s> b </s>"),
}


@pytest.mark.cover
@pytest.mark.quick("byte_level-*")
@pytest.mark.parametrize("asked", SEVERAL_TOKENS)
@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma", "metaspace_bytes", "toy"])
def test_characters_of_several_tokens(kind: str, asked: str) -> None:
    """Guards characters cut by tokens, forced text that begins or ends within one, special tokens spelled in a text."""
    tokenizer: Any = byte_tokenizer() if kind == "toy" else TOKENIZERS[kind]
    keywords, expression = SEVERAL_TOKENS[asked]
    grammars = Grammars(tokenizer, len(tokenizer) + 7)
    for seed in range(2):
        rng, ids = random.Random(seed), list[int]()
        made = grammars.constraint(structure(**keywords), (tokenizer.eos_token_id,))
        while not made.finished and len(ids) < 150:
            forced = made.forced(8)
            chain = made.mask(range(-1, len(forced)), [0, *forced])
            assert all(chain[place, token] for place, token in enumerate(forced))
            ids.append(rng.choice(made.mask([-1], [0])[0].nonzero().flatten().tolist()))
            made.accept(ids[-1:])
        assert made.finished or asked == "grammar"
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert regex.fullmatch(expression, text, partial=not made.finished), text


def test_forced_text() -> None:
    """Guards drafts of forced text: what must come, cut to the limit, and never the last token."""
    tokenizer = tiny.tokenizer()
    made = constraint(**json_format(PERSON))
    assert tokenizer.decode(made.forced(50)) == '{"name":'
    assert len(made.forced(2)) == 2
    assert made.forced(0) == []
    made.accept(tokenizer.encode('{"name": "Bo"', add_special_tokens=False))
    assert tokenizer.decode(made.forced(50)).startswith(', "age"')
    free = constraint(regex=".+")
    assert free.forced(10) == []


def test_annotations_are_not_a_part_of_the_grammar() -> None:
    """Guards large descriptions, properties named like words of the standard, data that looks like a schema."""
    inner = {"type": "string", "title": "x", "description": "y", "default": "z", "examples": ["z"], "format": ["odd"]}
    names = {"title": inner, "description": {"enum": [{"title": "kept"}]}, "format": {"$ref": "#/$defs/default"}}
    schema = {"type": "object", "properties": names, "$defs": {"default": inner}, "dependentRequired": {"title": ["a"]}}
    bare = {"type": "string"}
    kept = {"title": bare, "description": {"enum": [{"title": "kept"}]}, "format": {"$ref": "#/$defs/default"}}
    assert without_annotations({**schema, "$comment": "c"}) == {
        "type": "object", "properties": kept, "$defs": {"default": bare}, "dependentRequired": {"title": ["a"]},
    }  # fmt: skip


WRONG: list[tuple[type[EyasError], str, dict[str, Any]]] = [
    (InputError, "Invalid type: foo", json_format({"type": "foo"})),
    (InputError, "Unimplemented keys", json_format({"not": {"type": "string"}})),
    (InputError, "'/nope' does not exist", json_format({"$ref": "#/nope"})),
    (InputError, "minimum", json_format({"type": "integer", "minimum": 5, "maximum": 3})),
    (InputError, "at most", json_format({"enum": ["x" * 200_000]})),
    (InputError, "unclosed group", {"regex": "(a"}),
    (InputError, "backreferences", {"regex": r"(\w)\1"}),
    (InputError, 'unknown name: "foo"', {"grammar": "start: foo"}),
    (InputError, "'foo' not found", {"grammar": 'root ::= "a" foo'}),
    (InputError, "nested too deeply", {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}),
    (InputError, "list of texts", {"choice": []}),
    (InputError, "at most 1000", {"choice": [str(i) for i in range(2000)]}),
    (OptionError, "give one of them", {"choice": ["a"], "regex": "b"}),
    (OptionError, "text, json_object, json_schema", {"response_format": {"type": "xml"}}),
]


@pytest.mark.parametrize(
    ("kind", "part", "keywords"), WRONG, ids=[f"{i}-{part[:20]}" for i, (_, part, _) in enumerate(WRONG)]
)
def test_mistakes_are_one_line(kind: type[EyasError], part: str, keywords: dict[str, Any]) -> None:
    """Guards the messages: one line that names what is wrong."""
    with pytest.raises(kind) as caught:
        constraint(**keywords)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


EXPLODING = ["(((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000})b", "(a?){500}(a{500}|b*)*c", "(x+x+)+y"]


@pytest.mark.parametrize("expression", EXPLODING)
def test_expressions_that_would_explode(expression: str) -> None:
    """Guards a server against one request: it is refused, or serves its masks within bounds."""
    with suppress(EyasError):
        list(words(constraint(regex=expression), 0, 5))
