"""One conversation to token ids, with a mark on every token that the assistant would have
generated.

The chat is written by the function that serves it too (`text.write_chat`). A reply ends with its end-of-turn token; text
that the template writes after it is not the assistant's. This module knows no file, no split and no model.

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
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from eyas.core.cache import common_prefix
from eyas.errors import InputError, first_line
from eyas.text import REASONING, Span, has_place_for_tools, template_keywords, write_chat
from eyas_lab.chat_files import messages_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
LAST_TAG = re.compile(r"(<[^<>]*>|\[[^\[\]]*\])\s*$")  # an opening may end with one that begins the reasoning: <think>
PLACE = "@reply@"  # stands for a reply, to see what the template writes around it
DATE = datetime(2026, 1, 1, 12)  # for templates that write today's: the same data gives the same examples on every day
FIRST_COUNTABLE = 2  # the first input of a head, the feature of token 0 and token 1, predicts token 2


@dataclass(frozen=True)
class TokenizedChat:
    """One conversation, not yet cut to a length. It ends with the assistant's last reply."""

    ids: list[int]
    counted: list[bool]
    last_only: bool  # the template rewrites earlier turns
    left_out: bool  # words of a reply that are not in the text, so that they do not count
    unused_tools: bool  # the template has no place for the line's tools


def messages_to_learn(record: Any) -> list[dict[str, Any]]:
    """Return the messages of a line up to the assistant's last reply that counts, after which nothing does. Raise
    InputError when there is none."""
    messages = messages_of(record)
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise InputError("no assistant's turn to train on: delete this line")
    counting = [k for k in replies if is_trained(messages[k], k + 1)]
    if not counting:
        raise InputError("no assistant token to train on: delete this line")
    return messages[: counting[-1] + 1]


class ChatReader:
    """Turns conversations into token ids by a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
        self._takes_tools: bool | None = None  # whether the template has a place for them

    def read(self, record: Any) -> TokenizedChat:
        """Return the conversation of one line of data. InputError, without the line's place, when
        it cannot be used.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template; give the target folder one, or train on plain text")
        messages, keywords = messages_to_learn(record), template_keywords(record)
        try:
            template = self.tokenizer.get_chat_template(tools=keywords.get("tools"))
        except ValueError as error:  # several templates, and none of them is the default
            raise InputError(f"the tokenizer has no chat template for this line: {first_line(error, 200)}") from error
        found = find_replies(partial(write_chat, self.tokenizer, now=DATE, **keywords), messages, template)
        ids, offsets = self._tokenize(found.whole)
        counted = [False] * len(ids)
        for span in found.spans:
            first, end = self._tokens_of(span, ids, offsets, found.whole)
            counted[first:end] = [True] * (end - first)
        if not any(counted[FIRST_COUNTABLE:]):
            raise InputError("no assistant token to train on: delete this line")
        return TokenizedChat(ids, counted, found.last_only, found.left_out, self._has_unused(keywords.get("tools")))

    def _has_unused(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        if tools and self._takes_tools is None:
            self._takes_tools = has_place_for_tools(self.tokenizer, tools)
        return bool(tools) and not self._takes_tools

    def _tokenize(self, whole: str) -> tuple[list[int], list[Span]]:
        """Return the ids of the text, and the characters of each."""
        try:
            whole.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                "the conversation is not valid Unicode (half a surrogate pair); repair or drop the line"
            ) from error
        try:
            out = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except NotImplementedError as error:
            raise InputError(
                "the tokenizer does not say where tokens are in a text; give the target folder a tokenizer.json"
            ) from error
        return list(out["input_ids"]), [(int(begin), int(end)) for begin, end in out["offset_mapping"]]

    def _tokens_of(self, span: Span, ids: Sequence[int], offsets: Sequence[Span], whole: str) -> Span:
        """Return the tokens of a reply, from its characters: all that overlap them, up to and
        including the end-of-turn token.
        """
        first = bisect_right(offsets, span[0], key=lambda at: at[1])
        past = max(first, bisect_left(offsets, span[1], key=lambda at: at[0]))
        stops = [t for t in range(first, past) if ids[t] in self.special]
        if stops and not whole[offsets[stops[-1]][1] : span[1]].strip():
            return first, stops[-1] + 1
        follows = (
            past < len(ids) and past > first and ids[past] in self.special
        )  # marks around the content alone leave out the end of turn
        return first, past + follows


# --- the replies in the text


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
