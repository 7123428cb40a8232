"""The text of a conversation, and the characters in it that the assistant would have generated.

The chat template is a foreign program that writes messages as one text. The assistant's replies in
this text are found by

    marks       where the template has {% generation %}, it marks them itself
    prefixes    otherwise: reply k is the text between two prefixes of the whole text: the messages before the reply, with
                the opening of an assistant's turn, and the messages up to the reply:

                    <|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>Ciao!<|end|>
                    |-- before 1, opening --------|
                    |-- up to 1 ---------------------------|
                                                  ^^^^^^^^^^ reply 1

Some templates rewrite earlier turns (they drop the reasoning of old replies): the whole text then does not
contain the text that the model once generated. This is noticed per conversation, by an "up to k" that is not a
prefix, or that lacks words of reply k; then only the last reply counts.

Some templates cut the last reply too. It is then put together as the server would have seen it: the
prompt, the reply as it was generated, and the template's text after a reply.

This module knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from eyas.core.cache import common_prefix
from eyas.errors import InputError
from eyas.text import REASONING, Span

Messages = Sequence[Mapping[str, Any]]
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
LAST_TAG = re.compile(r"(<[^<>]*>|\[[^\[\]]*\])\s*$")  # an opening may end with one that begins the reasoning: <think>
PLACE = "@reply@"  # stands for a reply, to see what the template writes around it


class Write(Protocol):
    """`text.write_chat` with a tokenizer and the line's tools."""

    def __call__(
        self, messages: Messages, *, add_generation_prompt: bool = True, marks: bool = False
    ) -> tuple[str, list[Span]]: ...


class Found(NamedTuple):
    """The replies of a conversation."""

    whole: str  # the text of the conversation
    spans: list[Span]  # the characters of the replies that count
    last_only: bool  # only the last reply counts, because the template rewrites earlier turns
    left_out: bool  # words of a reply are not in the text, so they do not count


def is_trained(message: Mapping[str, Any], number: int) -> bool:
    """Return whether a message is a reply that counts: one that says something, and has weight.
    InputError as in `has_weight`.
    """
    if message["role"] != "assistant" or not has_weight(message, number):
        return False
    return bool(message["content"].strip() or _reasoning(message).strip() or message.get("tool_calls"))


def has_weight(message: Mapping[str, Any], number: int) -> bool:
    """Return whether the `weight` of a reply, as in OpenAI's files, is not 0.

    Raises:
        InputError: it is neither 0 nor 1.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise InputError(f"the weight of message {number} must be 0 or 1, it is {str(weight)[:40]}; repair the line")
    return bool(weight)


def find_replies(write: Write, messages: Messages, template: str) -> Found:
    """Return the text of a conversation that ends with a reply that counts, and where the replies are.

    Raises:
        InputError: the template does not write the conversation as a prompt with a reply after it, or
            leaves that reply out.
    """
    has_marks = bool(GENERATION_TAG.search(template))
    whole, marks = write(messages, add_generation_prompt=False, marks=has_marks)
    earlier = [k for k, message in enumerate(messages[:-1]) if is_trained(message, k + 1)]
    texts = {k: _text(write, messages[: k + 1]) for k in earlier}
    kept = [k for k in earlier if _holds(texts[k], messages[k], template)]
    left_out = 0 in earlier and 0 not in kept  # the template begins with the first question
    rewritten = not all(whole.startswith(text) for text in texts.values()) or len(earlier) - left_out > len(kept)
    if has_marks:
        spans = _without_untrained(write, messages, marks)
    else:
        spans, changed = _between_prefixes(write, messages, whole, {k: len(texts[k]) for k in kept})
        rewritten |= changed
    spans = spans[-1:] if rewritten else spans
    if not _holds(whole, messages[-1], template):
        served = _as_served(write, messages, template)
        left_out |= served is None
        if served is None and not (messages[-1]["content"].strip() or "tool_calls" in template):
            raise InputError("the chat template leaves out all that the assistant says last; drop the line")
        if served is not None:
            prompt, reply = served
            spans = [span for span in spans[:-1] if prompt.startswith(whole[: span[1]])]
            whole, spans = prompt + reply, [*spans, (len(prompt), len(prompt + reply))]
    return Found(whole, spans, rewritten, left_out)


def _without_untrained(write: Write, messages: Messages, marks: list[Span]) -> list[Span]:
    """Return the template's marks, less those in replies that do not count."""
    for k, message in enumerate(messages):
        if message["role"] == "assistant" and not is_trained(message, k + 1):
            begin = len(_text(write, messages[:k])) if k else 0
            end = len(_text(write, messages[: k + 1]))
            marks = [mark for mark in marks if not begin <= mark[0] < end]
    return marks


def _between_prefixes(write: Write, messages: Messages, whole: str, ends: Mapping[int, int]) -> tuple[list[Span], bool]:
    """Return the characters of the replies that end at `ends` and of the last one, and whether a
    prompt before one of them reads otherwise in the whole text.
    """
    last = len(messages) - 1
    prompts = {k: write(messages[:k])[0] for k in (*ends, last) if k > 0}
    begins = {k: len(prompt) for k, prompt in prompts.items()}
    if 0 in (*ends, last) and (first := _first_begin(write, messages, whole)) is not None:
        begins[0] = first
    if last > 0:
        begins[last] = _last_begin(write, messages, whole, prompts[last])
    elif not begins:
        raise InputError("the chat template writes no reply without a turn before it; put a user's turn there")
    spans = [(begins[k], ends.get(k, len(whole))) for k in sorted({*ends, last} & begins.keys())]
    return spans, not all(whole.startswith(prompt) for k, prompt in prompts.items() if k != last)


def _first_begin(write: Write, messages: Messages, whole: str) -> int | None:
    """Return the place where a reply that opens the conversation begins; None if nothing tells it."""
    header, found, _ = _text(write, [_with_place(messages[0])]).partition(PLACE)
    return len(header) if found and whole.startswith(header) else None


def _last_begin(write: Write, messages: Messages, whole: str, prompt: str) -> int:
    """Return the place where the last reply begins: after its prompt, or after the part of it that
    comes before a written reply.

    (The prompts of reasoning models end with <think>, which the text of a reply without reasoning
    lacks.)
    """
    common = common_prefix(whole, prompt)
    if common < len(prompt) and common < len(_text(write, messages[:-1])):
        raise InputError(
            "the chat template does not write the conversation as a prompt with a reply after it; drop the line"
        )
    return common


def _as_served(write: Write, messages: Messages, template: str) -> tuple[str, str] | None:
    """Return the prompt of the last reply, and the reply as the model generated it; None where
    nothing tells how that was written.
    """
    *before, reply = messages
    if not before:
        return None
    prompt = write(before)[0]
    header, found, end = _text(write, [*before, _with_place(reply)]).rpartition(PLACE)
    reasoning = _reasoning(reply).strip()
    calls_stay = not reply.get("tool_calls") or ("tool_calls" in template and prompt.startswith(header))
    if not found or not calls_stay or (reasoning and "</think>" not in template):
        return None
    said = f"<think>\n{reasoning}\n</think>\n\n{reply['content']}" if reasoning else reply["content"]
    tag = LAST_TAG.search(prompt)
    if tag and said.lstrip().startswith(tag[1]):  # the prompt has opened the reasoning already
        said = said.lstrip().removeprefix(tag[1])
        said = said.lstrip() if prompt != prompt.rstrip() else said
    return prompt, said + end


def _text(write: Write, messages: Messages) -> str:
    return write(messages, add_generation_prompt=False)[0]


def _with_place(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in reply.items() if key not in REASONING}, "content": PLACE}


def _reasoning(message: Mapping[str, Any]) -> str:
    return next((value for name in REASONING if isinstance(value := message.get(name), str)), "")


def _holds(text: str, message: Mapping[str, Any], template: str) -> bool:
    """Return whether a template's text holds the words of a message, with any spaces between them, and its calls."""
    if message.get("tool_calls") and "tool_calls" not in template:
        return False
    squeezed = "".join(text.split())
    return all("".join(words.split()) in squeezed for words in (message["content"], _reasoning(message)))
