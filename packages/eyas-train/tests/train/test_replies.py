"""Training learns what is served: the prompts that the server makes, and replies as the model
generates them, or the report says that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from chat_data import CHATML, FORGETFUL, MARKED, TWO, counted_texts, one, tokenizer_with, turns, write
from eyas.errors import InputError
from eyas.text import render, reply_message
from eyas_train.data import Data, read

TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
TOOLED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Cuts the reasoning from every turn, the last one too, and opens it in the prompt, as DeepSeek-R1's and its distillations'.
CUTTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CUTTING_MARKED = CUTTING.replace(
    "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1].strip() }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
CALLS_FIRST = CUTTING.replace(
    "{{ m.content.split",
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{{ m.content.split",
)
NOT_OPENING = CUTTING.replace("<think>\n", "")
REASONED = "Two and two make four.\n</think>\n\nFour."
ANALYSIS = "<|channel|>analysis<|message|>Hm."


def read_line(folder: Path, tokenizer: Any, **line: Any) -> Data:
    data = read(write(folder, line), tokenizer, heldout=0)
    assert len(data.train) == 1, data.report.problems
    return data


def reasoning() -> Any:
    """A tokenizer whose marks of reasoning are special tokens, as Magistral's and Kimi's."""
    tokenizer = tokenizer_with(CHATML)
    marks = [AddedToken(mark, special=True) for mark in ("<think>", "</think>")]
    tokenizer.add_tokens(marks, special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL])
def test_marks_that_are_special_tokens(template: str, tmp_path: Path) -> None:
    """Guards replies that the target has made anew: without its marks, reasoning ran into the answer, and a head learnt
    tokens that are never served."""
    tokenizer = reasoning()
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    reply = [*tokenizer("<think>Two and two.</think>Four.", add_special_tokens=False)["input_ids"], end]
    message = reply_message(tokenizer, reply, {end})
    assert message == {"role": "assistant", "content": "<think>Two and two.</think>Four."}
    asked = turns("two and two?")
    (example,) = read_line(tmp_path, tokenizer, messages=[*asked, message]).train
    served = render(tokenizer, asked)
    assert example.ids[: len(served) + len(reply)] == [*served, *reply]
    assert [token for token, counted in zip(example.ids, example.counted, strict=True) if counted] == reply
    later = render(tokenizer, [*asked, message, *turns("and three?")])
    assert ("Two and two." in tokenizer.decode(later)) == (template != FORGETFUL)


@pytest.mark.parametrize(("text", "expected"), [
    ("plain, <b>nothing</b> in it", {"content": "plain, <b>nothing</b> in it"}),
    ("a call <tool>{}</tool>", {"content": "a call <tool>{}</tool>"}),
    (f"{ANALYSIS}<|end|><|start|>assistant<|channel|>final<|message|>Yes.", {"content": "Yes.", "thinking": "Hm."}),
    ("<|channel|>final<|message|>Yes.", {"content": "Yes."}),
    ("<|channel|>analysis<|message|>Hm, cut", {"content": "", "thinking": "Hm, cut"}),
])  # fmt: skip
def test_replies_as_messages(text: str, expected: dict[str, str]) -> None:
    """Calls keep their marks; gpt-oss' template refuses channels in content, and reads them under their keys."""
    tokenizer = tokenizer_with(CHATML)
    marks = ("<tool>", "</tool>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    end = tokenizer.convert_tokens_to_ids("</s>")
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    ends = {end, ids[0]} if text.startswith("plain") else {end}
    assert reply_message(tokenizer, ids, ends) == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    "beside", [{"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"functions": [TOOLS[0]["function"]]}]
)
def test_prompts_with_tools_are_those_of_the_server(tmp_path: Path, beside: dict[str, Any]) -> None:
    """Guards against tools that are dropped without a word, and arguments that are JSON inside of
    JSON: the head would learn prompts and replies that are never served."""
    call = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "Oslo"}'}}
    question = turns("the time?")
    chat = [*question, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = tokenizer_with(TOOLED)
    data = read_line(tmp_path, tokenizer, messages=chat, **beside)
    served = render(tokenizer, question, tools=TOOLS)
    assert data.train[0].ids[: len(served)] == served
    (said,) = counted_texts(tokenizer, data.train[0])
    assert said == '<call>{"name": "now", "arguments": {"zone": "Oslo"}}</call><|im_end|>'
    assert data.report.unused_tools == 0


def test_the_variables_of_a_line(tmp_path: Path) -> None:
    """A line's chat_template_kwargs are the template's, as a request's are. Tools that the template leaves out are
    reported: the server refuses them."""
    report = read_line(tmp_path, tokenizer_with(CHATML), messages=TWO, tools=TOOLS).report
    assert report.unused_tools == 1
    assert "in 1 the template leaves out the tools" in str(report)
    tokenizer = tokenizer_with("{% if slow %}slow {% endif %}" + CHATML)
    data = read_line(tmp_path, tokenizer, messages=TWO[:2], chat_template_kwargs={"slow": True})
    served = render(tokenizer, TWO[:1], chat_template_kwargs={"slow": True})
    assert data.train[0].ids[: len(served)] == served


@pytest.mark.parametrize("parts", ["", " if p['type'] == 'text'", None])
def test_parts_and_developers_are_read_as_the_server_reads_them(tmp_path: Path, parts: str | None) -> None:
    """Guards against text parts that training joined otherwise than the server does (templates such as Idefics3's read a
    list of parts, in which strings are lost), and a role that the model never saw."""
    looped = "{{% for p in m['content']{} %}}{{{{ p['text'] }}}}{{% endfor %}}"
    template = CHATML if parts is None else CHATML.replace("{{ m['content'] }}", looped.format(parts))
    asked = [{"type": "text", "text": "Read this."}, {"type": "text", "text": " What is it?"}]
    chat = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": asked}]
    tokenizer = tokenizer_with(template)
    example = one(tmp_path, tokenizer, [*chat, {"role": "assistant", "content": "A movie."}], heldout=0)
    served = render(tokenizer, chat)
    assert example.ids[: len(served)] == served
    assert "system\nBe brief." in tokenizer.decode(served)
    assert f"Read this.{'' if parts is not None else chr(10)} What is it?" in tokenizer.decode(served)
    assert counted_texts(tokenizer, example) == ["A movie.<|im_end|>"]


def test_calls_and_system_text_in_sharegpts_form(tmp_path: Path) -> None:
    """Guards against a system text beside the turns that is dropped, and lines with calls that are
    refused: files for other trainers have both."""
    tokenizer = tokenizer_with(TOOLED)
    called = '{"name": "now", "arguments": {"zone": "Oslo"}}'
    said = (("human", "the time?"), ("function_call", called), ("observation", "12:00"), ("gpt", "Noon."))
    sharegpt = [{"from": role, "value": value} for role, value in said]
    data = read_line(tmp_path, tokenizer, conversations=sharegpt, system="Be brief.", tools=json.dumps(TOOLS))
    call = {"function": {"name": "now", "arguments": '{"zone": "Oslo"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *turns("the time?"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    assert data.train[0] == read_line(tmp_path, tokenizer, messages=chat, tools=TOOLS).train[0]
    served = render(tokenizer, chat[:-1], tools=TOOLS)
    assert data.train[0].ids[: len(served)] == served
    with pytest.raises(InputError, match="the call of message 1 is not JSON"):
        read(write(tmp_path, {"conversations": [{"from": "function_call", "value": "now()"}]}), tokenizer)


@pytest.mark.parametrize("template", [CUTTING, CUTTING_MARKED, NOT_OPENING])
@pytest.mark.parametrize("reply", [
    {"content": f"<think>\n{REASONED}"},
    {"content": REASONED},  # as the model writes it after a prompt that opens with <think>
    {"content": "Four.", "reasoning_content": "Two and two make four."},
    {"content": "Four.", "reasoning": "Two and two make four."},
])  # fmt: skip
def test_reasoning_that_the_template_cuts_is_learnt(tmp_path: Path, template: str, reply: dict[str, str]) -> None:
    """Guards against a head that learns the short answer alone: the prompt is the server's, and the
    reply what the model generates after it."""
    tokenizer = tokenizer_with(template)
    data = read_line(tmp_path, tokenizer, messages=[*turns("2 + 2?"), {"role": "assistant", **reply}])
    served = render(tokenizer, turns("2 + 2?"))
    assert data.train[0].ids[: len(served)] == served
    opened = template is not NOT_OPENING or reply["content"] == REASONED
    expected = REASONED if opened else f"<think>\n{REASONED}"
    assert counted_texts(tokenizer, data.train[0]) == [f"{expected}<|im_end|>"]
    assert tokenizer.decode(data.train[0].ids).count("<think>") == (template is not NOT_OPENING or not opened)
    assert (data.report.left_out, data.report.last_only) == (0, 0)


@pytest.mark.parametrize("template", [CUTTING, CUTTING_MARKED, NOT_OPENING])
def test_of_cut_turns_the_last_counts(tmp_path: Path, template: str) -> None:
    """Earlier replies without their reasoning are not what the model generates there: they are
    context, and the report says so."""
    tokenizer = tokenizer_with(template)
    chat = turns("1 + 1?", "One and one.\n</think>\n\nTwo.", "2 + 2?", REASONED)
    data = read_line(tmp_path, tokenizer, messages=chat)
    assert counted_texts(tokenizer, data.train[0]) == [f"{REASONED}<|im_end|>"]
    served = render(tokenizer, turns("1 + 1?", "Two.", "2 + 2?"))
    assert data.train[0].ids[: len(served)] == served
    assert data.report.last_only == 1


@pytest.mark.parametrize(("template", "reply"), [
    (CHATML, {"content": "Four.", "reasoning_content": "Two and two."}),  # it knows no reasoning
    (TOOLED.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}"), {"content": "Let me see."}),
    # writes calls before what was said, where the reasoning would have its place
    (CALLS_FIRST, {"content": None, "reasoning_content": "Two and two."}),
])  # fmt: skip
def test_words_that_cannot_be_learnt_are_reported(tmp_path: Path, template: str, reply: dict[str, Any]) -> None:
    """Guards against a silent loss where nothing tells how the model wrote what the template leaves out."""
    calls = {"tool_calls": [{"function": {"name": "now"}}]} if template is not CHATML else {}
    tokenizer = tokenizer_with(template)
    report = read_line(tmp_path, tokenizer, messages=[*turns("2 + 2?"), {"role": "assistant", **reply, **calls}]).report
    assert report.left_out == 1
    assert "in 1 the template leaves out a part of a reply, such as its reasoning" in str(report)


def test_calls_that_the_template_leaves_out(tmp_path: Path) -> None:
    """Guards against a call that is learnt as its end token alone, or as the words before it, without
    a word in the report."""
    tokenizer, calls = tokenizer_with(CHATML), [{"function": {"name": "now"}}]
    spoken = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    assert read_line(tmp_path, tokenizer, messages=[*turns("the time?"), spoken]).report.left_out == 1
    later = [*turns("the time?"), {**spoken, "content": None}, {"role": "tool", "content": "12"}, *TWO]
    data = read_line(tmp_path, tokenizer, messages=later)
    assert counted_texts(tokenizer, data.train[0]) == ["how are you<|im_end|>"]
    assert data.report.last_only == 1
    with pytest.raises(InputError, match="leaves out all that the assistant says last"):
        one(tmp_path, tokenizer, [*turns("the time?"), {**spoken, "content": None}])


def test_the_template_for_tools(tmp_path: Path) -> None:
    """Guards a tokenizer of several templates: with tools, the marks of its template for tools count."""
    tokenizer = tokenizer_with(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + MARKED}
    example = read_line(tmp_path, tokenizer, messages=TWO, tools=TOOLS).train[0]
    assert counted_texts(tokenizer, example) == ["fine thanks<|im_end|>", "how are you<|im_end|>"]
    served = render(tokenizer, TWO[:3], tools=TOOLS)
    assert example.ids[: len(served)] == served


def test_a_first_reply_that_the_template_leaves_out_is_reported(tmp_path: Path) -> None:
    """A template that begins with the first question drops a greeting; the other replies count."""
    dropping = CHATML.replace("in messages", "in messages[(messages[0].role == 'assistant')|int:]")
    tokenizer = tokenizer_with(dropping)
    data = read_line(tmp_path, tokenizer, messages=[{"role": "assistant", "content": "welcome"}, *TWO])
    assert counted_texts(tokenizer, data.train[0]) == ["fine thanks<|im_end|>", "how are you<|im_end|>"]
    assert (data.report.left_out, data.report.last_only) == (1, 0)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("silent", [{"content": "how are you", "weight": 0}, {"content": ""}, {"content": " \n"}])
@pytest.mark.parametrize("place", [1, 3])
def test_replies_that_do_not_count(tmp_path: Path, template: str, silent: dict[str, Any], place: int) -> None:
    """OpenAI's weight 0, and a reply that says nothing, whose end token alone was trained."""
    chat: list[dict[str, Any]] = [dict(turn) for turn in TWO]
    chat[place] |= silent
    tokenizer = tokenizer_with(template)
    (said,) = counted_texts(tokenizer, one(tmp_path, tokenizer, chat))
    assert said == ("fine thanks<|im_end|>" if place == 3 else "how are you<|im_end|>")


@pytest.mark.parametrize(("reply", "says"), [
    ({"content": "four", "weight": 0}, "no assistant token to train on"),
    ({"content": " "}, "no assistant token to train on"),
    ({"content": "four", "weight": 0.5}, "the weight of message 2 must be 0 or 1, it is 0.5"),
    ({"content": "four", "weight": "0"}, "the weight of message 2 must be 0 or 1"),
])  # fmt: skip
def test_lines_in_which_nothing_counts(tmp_path: Path, reply: dict[str, Any], says: str) -> None:
    tokenizer = tokenizer_with(CHATML)
    with pytest.raises(InputError, match=says):
        one(tmp_path, tokenizer, [*turns("2 + 2?"), {"role": "assistant", **reply}])
    for weight in (1, 1.0, None, True):  # weights that count
        assert one(tmp_path, tokenizer, [{**turn, "weight": weight} for turn in TWO]) == one(tmp_path, tokenizer, TWO)
