"""Conversations answered anew: each reply is what plain decoding says, whatever the rows, the order
and what comes before."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from command_line import tokenizer
from eyas import drafters
from eyas.core.engine import Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import Drafter
from eyas.errors import InputError
from eyas.text import render
from eyas_train.regenerate import (
    Conversation,
    DataLine,
    GenerationSettings,
    Regenerated,
    parse_conversation,
    read_lines,
    regenerate,
)
from reference import plain_decode

WORDS = tokenizer()
EOS = frozenset([2, *range(20, 50)])  # a random model seldom says the real one


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    torch.set_num_threads(1)
    target = Target(zoo.FAMILIES["llama"]())
    return drafters.find("vanilla")(target)


def line(record: Any, number: int = 1) -> DataLine:
    return DataLine(f"chat.jsonl:{number}", json.dumps(record).encode())


def chat(*contents: str, first: str = "user") -> dict[str, Any]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


CHATS = [
    chat("hello", "x", "why", "y"),
    chat("one", "z"),
    chat("what is this", "a", "and that", "b", "so?", "c"),
    chat("bye"),
]


def answered(
    drafter: Drafter, records: Sequence[Any], settings: GenerationSettings, rows: int = 2
) -> list[Regenerated]:
    conversations = [parse_conversation(line(record, i), settings) for i, record in enumerate(records)]
    found = list(regenerate(drafter, WORDS, EOS, conversations, settings, rows))
    return sorted(found, key=lambda one: conversations.index(one.conversation))


def plainly(drafter: Drafter, conversation: Conversation, settings: GenerationSettings, seed: int) -> list[str]:
    """The replies, turn by turn, each from forwards over the whole conversation so far."""
    messages, replies = list(conversation.messages[: conversation.turns[0]]), list[str]()
    for turn, after in zip(conversation.turns, [*conversation.turns[1:], None], strict=True):
        ids = tuple(render(WORDS, messages))
        law = Sampling(settings.sampling.temperature, seed=seed)
        new = plain_decode(drafter.target.model, Request(ids, settings.max_new_tokens, law, EOS))
        replies.append(WORDS.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
        messages += conversation.messages[turn + 1 : after] if after else []
    return replies


def messages_of(found: Sequence[Regenerated]) -> list[Any]:
    return [one.messages for one in found if one.finish]


@pytest.mark.quick("3")
@pytest.mark.parametrize("rows", [1, 3])
def test_every_turn_is_the_targets_own(drafter: Drafter, rows: int) -> None:
    """Guards the conversation so far (regenerated turns, not those of the data), and keys and
    values that are used again."""
    settings = GenerationSettings(max_new_tokens=12)
    found = answered(drafter, CHATS, settings, rows)
    assert len(found) == 4
    for one, record in zip(found, CHATS, strict=True):
        said = [message["content"] for message in one.messages if message["role"] == "assistant"]
        assert said == plainly(drafter, one.conversation, settings, 0)
        asked = [message for message in one.messages if message["role"] == "user"]
        assert asked == [message for message in record["messages"] if message["role"] == "user"]
        assert len(one.finish) == len(one.tokens) == len(said)
        assert list(one.finish) == ["length" if count == 12 else "stop" for count in one.tokens]
    assert {finish for one in found for finish in one.finish} == {"length", "stop"}


def test_marks_stay_in_a_reply(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens that end nothing are marks: they were left out, and what they part ran together."""
    special = next(token for token in WORDS.all_special_ids if token not in EOS)
    settings = GenerationSettings(Sampling(logit_bias=((special, 100.0),)), max_new_tokens=3)
    (one,) = answered(drafter, [chat("hello")], settings)
    assert WORDS(one.messages[-1]["content"], add_special_tokens=False)["input_ids"] == [special] * 3


def test_replies_are_asked_with_the_tools_of_the_line(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tools that are dropped: the server, and training on the output, have them in the prompt."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    tooled = "{% if tools %}{{ tools | tojson }}{% endif %}" + str(WORDS.chat_template)
    monkeypatch.setattr(WORDS, "chat_template", tooled)
    settings = GenerationSettings(max_new_tokens=8)
    (one,) = answered(drafter, [{**chat("hello"), "tools": json.dumps(tools)}], settings)
    assert one.conversation.template == {"tools": tools}
    prompt = tuple(render(WORDS, chat("hello")["messages"], tools=tools))
    new = plain_decode(drafter.target.model, Request(prompt, 8, Sampling(), EOS))
    assert one.messages[-1]["content"] == WORDS.decode(new, skip_special_tokens=True)


@pytest.mark.slow
def test_order_and_rows_do_not_change_what_is_drawn(drafter: Drafter) -> None:
    """Sampled, in float32, each reply with a seed of its own: so a run that was interrupted goes on
    as if it had not been."""
    settings = GenerationSettings(Sampling(temperature=0.9, seed=3), max_new_tokens=10)
    whole = messages_of(answered(drafter, CHATS, settings, 3))
    order = [2, 0, 3, 1]
    shuffled = messages_of(answered(drafter, [CHATS[i] for i in order], settings, 1))
    assert shuffled == [whole[i] for i in order]
    assert messages_of(answered(drafter, CHATS, GenerationSettings(Sampling(0.9, seed=4), 10), 3)) != whole
    first = [m["content"] for one in whole for m in one[1:2]]
    assert len(set(first)) == 4


def test_the_last_turn_only(drafter: Drafter) -> None:
    (one,) = answered(drafter, CHATS[2:3], GenerationSettings(max_new_tokens=5, last_only=True))
    assert one.messages[:5] == CHATS[2]["messages"][:5]
    assert len(one.finish) == 1
    expected = plainly(drafter, one.conversation, GenerationSettings(max_new_tokens=5), 0)
    assert [message["content"] for message in one.messages[5:]] == expected


def test_what_does_not_fit_the_context(drafter: Drafter) -> None:
    """512 tokens: a first question that is too long is passed over, a later one ends the
    conversation before it, and a reply has the room that is left; the others go on."""
    records = [chat("x" * 511, "a"), chat("hi", "a", "y" * 600, "b"), chat("z" * 505, "a"), chat("hello", "x")]
    settings = GenerationSettings(max_new_tokens=8)
    long, later, tight, fine = answered(drafter, records, settings)
    assert not long.finish
    assert not long.dropped
    assert "513 tokens before the reply do not fit the context of 512" in long.ended
    assert [message["role"] for message in later.messages] == ["user", "assistant"]
    assert "do not fit" in later.ended
    assert tight.tokens[0] <= 5
    assert fine.ended == ""


@pytest.mark.slow
def test_cut_replies_can_be_left_out(drafter: Drafter) -> None:
    """Kept, they are marked; dropped, the conversation ends before them."""
    chats = [chat(f"question {i}", "a", f"and then {i}", "b") for i in range(12)]
    whole = answered(drafter, chats, GenerationSettings(max_new_tokens=4), 4)
    kept = [one for one in whole if one.finish]
    cut = [next((i for i, finish in enumerate(one.finish) if finish == "length"), None) for one in kept]
    assert None in cut
    assert any(cut), "a conversation that is cut after a whole reply"
    dropping = answered(drafter, chats, GenerationSettings(max_new_tokens=4, drop_cut=True), 4)
    for one, at, before in zip(dropping, cut, kept, strict=True):
        if at == 0:
            assert (one.finish, one.dropped, one.tokens) == ((), True, (4,))
        else:
            assert one.messages == (before.messages if at is None else before.messages[: 2 * at])
            assert bool(one.ended) == (at is not None)


ASKED, SAID = chat("a")["messages"], {"role": "assistant", "content": "b"}
GOOD: dict[str, tuple[Any, tuple[int, ...]]] = {
    "every turn": (chat("a", "b", "c", "d"), (1, 3)),
    "a question at the end": (chat("a", "b", "c"), (1, 3)),
    "a question alone": (chat("a"), (1,)),
    "a prompt": ({"prompt": "a"}, (1,)),
    "what is said before anybody asked": (chat("welcome", "a", "b", first="assistant"), (2,)),
    "a reply of weight 0 stays": ({"messages": [*ASKED, {**SAID, "weight": 0}, *ASKED, SAID]}, (3,)),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, (1,)),
}


@pytest.mark.parametrize("name", GOOD)
def test_which_turns_are_answered(name: str) -> None:
    record, turns = GOOD[name]
    assert parse_conversation(line(record), GenerationSettings()).turns == turns
    assert parse_conversation(line(record), GenerationSettings(last_only=True)).turns == turns[-1:]


LATER = chat("c", "d", first="assistant")["messages"]
TOOL = {"messages": [*chat("a", "b")["messages"], {"role": "tool", "content": "7"}, *LATER]}
BAD: dict[str, tuple[Any, str]] = {
    "nobody asks": (chat("a", first="assistant"), "nobody asks anything"),
    "nothing": ({"messages": []}, "nobody asks anything"),
    "no messages": ({"text": "x"}, 'no list "messages"'),
    "another role": ({"messages": [{"role": "usr", "content": "a"}]}, "unknown role 'usr'"),
    "tools": (TOOL, "a tool's turn belongs to a reply that would be replaced"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_answered(name: str) -> None:
    record, words = BAD[name]
    with pytest.raises(InputError, match=words):
        parse_conversation(line(record), GenerationSettings())


def test_a_template_that_refuses(drafter: Drafter) -> None:
    """Its reason is handed on; the other conversations go on."""
    words = tokenizer()
    strict = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    words.chat_template = strict + str(words.chat_template)
    settings = GenerationSettings(max_new_tokens=3)
    records = [chat("a", "b", "c", "d"), chat("q", "r"), chat("w", "a", "b", first="assistant")]
    conversations = [parse_conversation(line(record), settings) for record in records]
    found = {id(one.conversation): one for one in regenerate(drafter, words, EOS, conversations, settings, 2)}
    first, *others = (found[id(conversation)] for conversation in conversations)
    assert (len(first.finish), "too many" in first.ended) == (1, True)
    assert all(one.finish for one in others)


def test_keys_follow_the_content(tmp_path: Path) -> None:
    """Not the place: lines may be added, dropped or reordered between two runs."""
    lines = [json.dumps(record) for record in CHATS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    random.Random(0).shuffle(lines)
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines) + "\n")
    a, b = ([one.key["key"] for one in read_lines([tmp_path / name])] for name in ("a.jsonl", "b.jsonl"))
    assert a != b
    assert sorted(a) == sorted(b)
    assert len(set(a)) == 4
    (tmp_path / "novel.txt").touch()
    with pytest.raises(InputError, match="is plain text, and has no questions"):
        list(read_lines([tmp_path / "novel.txt"]))
