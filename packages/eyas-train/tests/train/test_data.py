"""Which tokens count, which lines are refused and how, and that batches are a function of (seed, epoch)."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

from chat_data import (
    CHATML,
    DEFAULT_SYSTEM,
    FORGETFUL,
    FORGETFUL_MARKED,
    INSTRUCT,
    MARKED,
    MARKED_CONTENT,
    MARKED_NEWLINE,
    STRICT,
    THINKING,
    TWO,
    byte_level,
    counted_texts,
    merging,
    metaspace,
    one,
    tokenizer_with,
    turns,
    write,
)
from eyas.errors import InputError, OptionError
from eyas.text import render
from eyas_train.data import Batches, Example, Examples, Report, data_hash, read
from eyas_train.new_heads import choose_draft_vocabulary


@pytest.mark.parametrize("make", [byte_level, merging, metaspace])
@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_CONTENT, MARKED_NEWLINE, INSTRUCT])
def test_exactly_the_replies_with_their_end_of_turn_count(tmp_path: Path, template: str, make: Any) -> None:
    """Guards marks without the end-of-turn token (it would never be learnt), the newline after it
    (nobody generates it), counted headers, and offsets that do not begin where a token's text
    begins (trimmed spaces, a space put before the text)."""
    tokenizer = tokenizer_with(template, make)
    example = one(tmp_path, tokenizer, TWO)
    end = "</s>" if template is INSTRUCT else "<|im_end|>"
    assert [said.strip() for said in counted_texts(tokenizer, example)] == [f"fine thanks{end}", f"how are you{end}"]
    assert example.ids == tokenizer.apply_chat_template(TWO, return_dict=True)["input_ids"]


@pytest.mark.parametrize("template", [MARKED, MARKED_CONTENT, CHATML])
@pytest.mark.parametrize("content", ["fine ", " fine", "fïne ☕", "a  b\n\n", "日本", "x"])
def test_spaces_and_wide_characters_at_the_edges(tmp_path: Path, template: str, content: str) -> None:
    """A reply that ends with a space once made everything after it count: its last character has no
    token of its own where offsets are trimmed. Characters of several tokens share one offset."""
    tokenizer = tokenizer_with(template, merging)
    texts = counted_texts(tokenizer, one(tmp_path, tokenizer, turns("hi", content, "hi", "ok")))
    assert len(texts) == 2
    assert texts[0].lstrip() == content.lstrip() + "<|im_end|>"
    assert texts[1] == "ok<|im_end|>"


@pytest.mark.parametrize("template", [FORGETFUL, FORGETFUL_MARKED])
def test_a_template_that_rewrites_earlier_turns_counts_the_last_reply_only(tmp_path: Path, template: str) -> None:
    """In the whole text an earlier reply follows no reasoning; the model never generated it there.
    Seen per conversation: one without reasoning is not rewritten and counts whole (with prefixes;
    those marks are on the last reply anyway)."""
    tokenizer = tokenizer_with(template)
    reasoned = turns("hi", "<think>greet</think>hello", "more", "<think>end</think>bye", "left over")
    data = read(write(tmp_path, {"messages": reasoned}), tokenizer)
    assert counted_texts(tokenizer, data.train[0]) == ["<think>end</think>bye<|im_end|>"]
    assert data.report.last_only == 1
    assert "rewrites earlier turns" in str(data.report)
    plain = read(write(tmp_path, {"messages": turns("hi", "hello", "more", "bye")}), tokenizer)
    assert counted_texts(tokenizer, plain.train[0]) == (
        ["hello<|im_end|>", "bye<|im_end|>"] if template is FORGETFUL else ["bye<|im_end|>"]
    )
    assert plain.report.last_only == 0


def test_an_opening_that_replies_lack(tmp_path: Path) -> None:
    """Openings of thinking models end with <think>: the reply still begins after the part of the
    opening that is there."""
    tokenizer = tokenizer_with(THINKING)
    data = read(write(tmp_path, {"messages": TWO}, {"messages": TWO[:2]}), tokenizer, heldout=0)
    assert [counted_texts(tokenizer, example) for example in data.train] == [
        ["how are you<|im_end|>"],
        ["fine thanks<|im_end|>"],
    ]
    assert data.report.last_only == 1


def test_replies_in_a_row_and_a_reply_before_any_question(tmp_path: Path) -> None:
    """A reply that opens the conversation counts like the others. With prefixes it once did not, without a word: a
    template may write a default system text before it, so the prompt of no messages is no prefix."""
    messages = [{"role": "assistant", "content": "welcome"}, *TWO[:2], {"role": "assistant", "content": "and more"}]
    replies = ["welcome<|im_end|>", "fine thanks<|im_end|>", "and more<|im_end|>"]
    for template in (CHATML, DEFAULT_SYSTEM, MARKED):
        tokenizer = tokenizer_with(template)
        assert counted_texts(tokenizer, one(tmp_path, tokenizer, messages)) == replies
        assert counted_texts(tokenizer, one(tmp_path, tokenizer, messages[:1])) == replies[:1]


@pytest.mark.parametrize(
    "name", ["chats.jsonlines", "train.jsonl-00000-of-00004", "chats.jsonl.1", "chats.txt", "chats"]
)
def test_every_form_of_a_conversation_and_of_its_file(tmp_path: Path, name: str) -> None:
    """Parts of a data set, rotated files and other endings: the JSON was trained as text, the user's words with it.
    A .gz by its first bytes, a JSON array as ShareGPT is published, a byte-order mark, blank lines."""
    tokenizer, names = tokenizer_with(CHATML), {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in TWO]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TWO]
    same = [{"messages": TWO}, {"conversations": TWO}, {"id": "x", "conversations": sharegpt}, {"messages": parts}]
    lines = [{"messages": TWO}, {"conversations": TWO[:2]}]
    found = read(write(tmp_path, *same), tokenizer, heldout=0).train
    assert (len(found), [example == found[0] for example in found]) == (4, [True] * 4)
    expected = read(write(tmp_path, *lines), tokenizer, heldout=0).train
    file = write(tmp_path, lines[0], "", lines[1], name=name)
    array = json.dumps(lines, indent=1).encode()
    forms = {"packed": gzip.compress(file.read_bytes()), "array": array}
    forms |= {"marked": b"\xef\xbb\xbf" + file.read_bytes(), "marked-array": b"\xef\xbb\xbf" + array}
    for form, content in {"": file.read_bytes(), **forms}.items():
        (tmp_path / f"{form}{name}").write_bytes(content)
        assert list(read(tmp_path / f"{form}{name}", tokenizer, heldout=0).train) == list(expected), form
    both = [file, tmp_path / f"packed{name}"]
    data = read(both, tokenizer, heldout=0)
    assert (len(data.train), data.sha256) == (4, data_hash(both))
    assert data_hash(both) != data_hash(both[::-1])
    assert data_hash(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    other = write(tmp_path, {"text": "a web page"}, {"text": "another"}, name=name)
    with pytest.raises(InputError, match='no list "messages"'):
        read(other, tokenizer, heldout=0)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}\nis JSON, they say', "{\n", "[1] A footnote.\nMore.", "{{ braces }}\n{{ again }}", "[", '"messages"'],
)
def test_plain_text_that_looks_like_json(tmp_path: Path, text: str) -> None:
    """A text stays a text: its first two lines are not both JSON objects."""
    file = write(tmp_path, text, "and so on, for a while", name="a.txt")
    (example,) = read(file, tokenizer_with(None), heldout=0).train
    assert all(example.counted)


def test_the_same_examples_on_every_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of Llama 3, Granite and gpt-oss write today's date: the examples were others on the next day, and the same
    command could not go on. What is served has the date of its day."""
    asked = "{% set form = '%A' %}{{ strftime_now('%d %b %Y') }}, {{ strftime_now(form) if strftime_now is defined }}"
    dated = f"<|im_start|>system\n{asked}<|im_end|>\n" + CHATML
    tokenizer, file, found, served = tokenizer_with(dated), write(tmp_path, {"messages": TWO}), [], []
    for day in (27, 28):
        monkeypatch.setattr(chat_template_utils, "datetime", _at(day))
        found.append(list(read(file, tokenizer, heldout=0).train))
        served.append(tokenizer.decode(render(tokenizer, TWO[:1])))
    assert found[0] == found[1]
    assert "01 Jan 2026, Thursday" in tokenizer.decode(found[0][0].ids)
    assert ["27 Nov 2026, Friday" in served[0], "28 Nov 2026, Saturday" in served[1]] == [True, True]


def _at(day: int) -> type[datetime]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 11, day, 12)

    return Clock


def test_plain_text(tmp_path: Path) -> None:
    """Documents are parted by <|endoftext|> wherever it stands; a long one becomes pieces; everything counts."""
    tokenizer, digits = tokenizer_with(None), "0123456789" * 3
    lines = ["first one", "on two lines<|endoftext|>second", "<|endoftext|>", "<|endoftext|>", digits]
    data = read(write(tmp_path, *lines, name="a.txt"), tokenizer, heldout=0, max_length=23)
    said = [tokenizer.decode(example.ids) for example in data.train]
    assert said == ["first one\non two lines", "second", digits[:23], "3456789"]
    assert all(all(example.counted) for example in data.train)
    whole = write(tmp_path, "no mark at all", name="b.txt")
    assert tokenizer.decode(read(whole, tokenizer, heldout=0).train[0].ids) == "no mark at all"


IMAGE = [{"type": "image", "url": "x"}]


@pytest.mark.parametrize(("line", "said"), [
    ("{broken", r"not JSON .* repair or drop the line"),
    ("[" * 100_000, r"JSON"),
    ("3", r"not a JSON object"),
    ({"text": "hi"}, r'no list "messages" or "conversations"'),
    ({"messages": "hi"}, r'no list "messages"'),
    ({"messages": []}, r"no assistant's turn"),
    ({"messages": TWO[:1]}, r"no assistant's turn"),
    ({"messages": ["hi"]}, r"message 1 must be a dict"),
    (
        {"messages": [*TWO, {"role": "asistant", "content": "x"}]},
        r"5 has the unknown role 'asistant'; did you mean",
    ),
    ({"messages": [*TWO, {"content": "x"}]}, r'message 5 has no "role"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r'"role" of message 1 must be a string'),
    ({"messages": [{"role": "user", "content": None}]}, r'"content" of message 1 must be a string'),
    (
        {"messages": [{"role": "user", "content": IMAGE}]},
        "part 1 of message 1 is of type 'image': only parts of text",
    ),
    ({"messages": turns("x" * 400, "y")}, r"the assistant's first token is number 4\d\d, max_length is 200"),
    ({"messages": turns("\ud800", "x")}, r"Unicode"),
    (b'{"messages": "\xff"}', "not UTF-8 at byte 14; save the file as UTF-8 or drop the line"),
])  # fmt: skip
def test_a_bad_line_is_reported_and_reading_goes_on(tmp_path: Path, line: Any, said: str) -> None:
    """One clear line with the file, the number and what to do; the good lines around it are read."""
    file = write(tmp_path, {"messages": TWO}, "LINE" if isinstance(line, bytes) else line, {"messages": TWO})
    if isinstance(line, bytes):
        file.write_bytes(file.read_bytes().replace(b"LINE", line))
    data = read(file, tokenizer_with(STRICT), max_length=200, heldout=0)
    assert len(data.train) == 2
    assert (data.report.lines, data.report.bad) == (3, 1)
    (problem,) = data.report.problems
    assert problem.startswith(f"{file}:2: ")
    assert "\n" not in problem
    assert re.search(said, problem), problem


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer, packed, missing = tokenizer_with(CHATML), tmp_path / "chat.jsonl.gz", tmp_path / "missing.jsonl"
    compressed = gzip.compress(json.dumps({"messages": TWO}).encode() * 50)
    for file, said in (
        (lambda: write(tmp_path, "{", "["), r"none of its 2 lines can be used; the first: .*:1: not JSON"),
        (lambda: write(tmp_path, "", ""), "is empty"),
        (lambda: missing, "does not exist"),
        (lambda: tmp_path, "is a folder"),
        (lambda: write(tmp_path, "[{}", name="x.json"), "array"),
        (lambda: write(tmp_path, "a", name="x.txt"), "tokens, at least 3 are needed"),
    ):
        with pytest.raises(InputError, match=said):
            read(file(), tokenizer)
    for damaged in (compressed[:-9], compressed[:20]):
        packed.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            read(packed, tokenizer)
    with pytest.raises(InputError, match="no chat template"):
        read(write(tmp_path, {"messages": TWO}), tokenizer_with(None))
    for options in ({"max_length": 2}, {"heldout": 1.0}, {"heldout": -0.1}):
        with pytest.raises(OptionError):
            read("nowhere", tokenizer, **options)


@pytest.mark.slow
def test_the_split_depends_on_content_not_on_order(tmp_path: Path) -> None:
    """Copies stay on one side, more lines move none, and 400 lines at 10 % hold out 40 (hash: deterministic)."""
    tokenizer = tokenizer_with(CHATML)
    lines = [{"messages": turns(f"question {i}", f"answer {i}")} for i in range(400)]

    def sides(*lines: Any) -> tuple[set[str], set[str]]:
        data = read(write(tmp_path, *lines), tokenizer, heldout=0.1)
        return {tokenizer.decode(e.ids) for e in data.train}, {tokenizer.decode(e.ids) for e in data.heldout}

    train, heldout = sides(*lines)
    assert 20 < len(heldout) < 60
    assert not train & heldout
    assert sides(*lines[::-1], *lines[:50]) == (train, heldout)
    few_train, few_heldout = sides(*lines[:200])
    assert few_train <= train
    assert few_heldout <= heldout
    assert [len(side) for side in sides(*lines[:2])] == [1, 1]
    assert [len(side) for side in sides(*lines[:1])] == [1, 0]


def test_every_line_is_told(tmp_path: Path) -> None:
    """And what is too long is cut."""
    tokenizer, seen = tokenizer_with(CHATML), list[int]()
    lines = write(tmp_path, {"messages": TWO}, "{", {"messages": TWO})
    whole = read(lines, tokenizer, heldout=0, on_line=lambda report: seen.append(report.lines)).train[0]
    assert seen == [1, 2, 3]
    assert str(Report()) == "0 examples, 0 tokens, 0 of them counted"
    data = read(write(tmp_path, {"messages": TWO}), tokenizer, max_length=60)
    assert data.train[0] == Example(whole.ids[:60], whole.counted[:60])
    assert (data.report.truncated, data.report.tokens) == (1, 60)
    assert data.report.counted_tokens == sum(whole.counted[:60])


def some(*lengths: int) -> Examples:
    examples = Examples()
    for length in lengths:
        examples.append(Example(list(range(1, length + 1)), [i >= length // 2 for i in range(length)]))
    return examples


def test_batches_hold_everything_once_and_fit() -> None:
    """They are a function of seed and epoch."""
    lengths = [3 + (7 * i) % 61 for i in range(500)]
    examples = some(*lengths)
    batches = Batches(examples, 256, seed=3)
    for epoch in (0, 1, None):
        plan = batches.plan(epoch)
        assert sorted(i for batch in plan for i in batch) == list(range(500))
        sizes = [len(batch) * max(lengths[i] for i in batch) for batch in plan]
        assert max(sizes) <= 256
        assert sum(lengths) / sum(sizes) > 0.8  # of what is computed is not padding
    again, other = Batches(examples, 256, seed=3), Batches(examples, 256, seed=2)
    assert batches.plan(5) == again.plan(5)
    assert batches.plan(5) not in (again.plan(6), other.plan(5))
    assert batches.plan(None) == other.plan(None)


def test_examples_are_packed_end_to_end() -> None:
    examples = some(3, 5)
    batches = Batches(examples, 64)
    tokens, counted, documents = batches.load([0, 1])
    assert tokens.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert counted.tolist() == [t in (2, 5, 6, 7) for t in range(8)]  # nothing foresees the first two of each
    assert documents.lengths == (3, 5)
    assert batches.tokens([0, 1]) == 8
    with pytest.raises(OptionError, match="batch_tokens is 4, the longest example has 5 tokens"):
        Batches(examples, 4)
    assert (examples[-1], examples[1:]) == (examples[1], [examples[1]])
    with pytest.raises(IndexError):
        examples[2]


def test_a_draft_vocabulary_larger_than_the_data(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an error after the data is read, where a note and the smaller size would do."""
    counts_V = torch.tensor([0, 3, 1, 0, 2])
    with caplog.at_level(logging.INFO, "eyas"):
        assert choose_draft_vocabulary(counts_V, 2).tolist() == [1, 4]
        assert not caplog.messages
        assert choose_draft_vocabulary(counts_V, 4).tolist() == [1, 2, 4]
    assert caplog.messages == ["head.draft_vocab 4: the training data has 3 different tokens that count, so it is 3"]
