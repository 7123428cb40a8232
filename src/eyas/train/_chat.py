"""One conversation to token ids, with a mark on every token that the assistant would have
generated.

The chat template is a foreign program that renders messages to one text. The assistant's replies in
this text are found by

    marks       where the template has {% generation %}, it marks them itself
    prefixes    otherwise: reply k is the text between two prefixes of the whole text: the messages before the reply, with
                the opening of an assistant's turn, and the messages up to the reply:

                    <|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>Ciao!<|end|>
                    |-- before 1, opening --------|
                    |-- up to 1 ---------------------------|
                                                  ^^^^^^^^^^ reply 1

Some templates rewrite earlier turns (they drop the reasoning of old replies): the whole text then
does not contain what the model once generated. This is noticed per conversation, by an "up to k"
that is no prefix; then only the last reply counts.

A reply ends with its end-of-turn token; what the template writes after that is not the assistant's.
This module knows no file, no split and no model.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from eyas.errors import InputError, near, one_line
from eyas.text import ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["FIRST_COUNTABLE", "ChatReader", "TokenizedChat", "messages_of", "messages_to_learn"]

FIRST_COUNTABLE = 2  # the first input of a head, the feature of token 0 and token 1, predicts token 2
Span = tuple[int, int]  # first and past the last character or token

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class TokenizedChat:
    """One conversation, not yet cut to a length. It ends with the assistant's last reply."""

    ids: list[int]
    counted: list[bool]
    last_only: bool  # the template rewrites earlier turns


def messages_to_learn(record: Any) -> list[dict[str, Any]]:
    """The messages of a line up to the assistant's last reply, after which nothing counts.
    InputError when there is no reply.
    """
    messages = messages_of(record)
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise InputError("no assistant's turn, so nothing to learn; drop the line")
    return messages[: replies[-1] + 1]


def messages_of(record: Any) -> list[dict[str, Any]]:
    """The messages of a line in OpenAI's or ShareGPT's form, as dicts with role and content;
    InputError when it has neither.
    """
    if not isinstance(record, Mapping):
        raise InputError('not a JSON object; write {"messages": [...]}')
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list):
        raise InputError(
            'no list "messages" or "conversations"; write {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    return [_message(number, turn) for number, turn in enumerate(turns, start=1)]


def _message(number: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise InputError(f'turn {number} is not an object with "role" and "content"')
    name = turn.get("role", turn.get("from"))
    role = SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name
    if role not in ROLES:
        raise InputError(
            f"turn {number} has the unknown role {repr(name)[:100]}; {near(str(name)[:100], [*ROLES, *SHAREGPT_ROLES])}"
        )
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and role == "assistant" and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InputError(f"the content of turn {number} is not text; drop the line")
    extra = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    return {**extra, "role": role, "content": content}


class ChatReader:
    """Turns conversations into token ids by a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else ""
        self.template: str = template
        self.has_marks = bool(GENERATION_TAG.search(template))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}

    def read(self, record: Any) -> TokenizedChat:
        """The conversation of one line of data. InputError, without the line's place, when it
        cannot be used.
        """
        if not self.template:
            raise InputError("the tokenizer has no chat template; give the target folder one, or train on plain text")
        messages = messages_to_learn(record)
        whole, marks = self._render(messages, marks=self.has_marks)
        replies, last_only = self._replies(messages, whole, marks)
        ids, offsets = self._tokenize(whole)
        counted = [False] * len(ids)
        for span in replies:
            first, end = self._tokens_of(span, ids, offsets, whole)
            counted[first:end] = [True] * (end - first)
        if not any(counted[FIRST_COUNTABLE:]):
            raise InputError("the assistant says nothing; drop the line")
        return TokenizedChat(ids, counted, last_only)

    def _render(
        self, messages: Sequence[dict[str, Any]], *, opening: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of the messages, and the characters between {% generation %} marks."""
        names: dict[str, Any] = {**self.tokenizer.special_tokens_map, "add_generation_prompt": opening}
        try:
            out: Any = render_jinja_template(
                [list(messages)], chat_template=self.template, return_assistant_tokens_mask=marks, **names
            )
        except Exception as error:  # a template may raise anything
            reason = one_line(error) or type(error).__name__
            raise InputError(
                f"the chat template refuses the conversation ({reason[:200]}); repair or drop the line"
            ) from error
        return out[0][0], [(begin, end) for begin, end in out[1][0]] if marks else []

    def _replies(self, messages: Sequence[dict[str, Any]], whole: str, marks: list[Span]) -> tuple[list[Span], bool]:
        """The characters of the replies that count, and whether only the last one does.

        Without marks, a reply at the start of the conversation does not count, as there is no
        prompt before it.
        """
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        ends = {k: self._render(messages[: k + 1])[0] for k in turns[:-1]}
        rewritten = not all(whole.startswith(text) for text in ends.values())
        if marks:
            return (marks[-1:] if rewritten else marks), rewritten
        openings = {k: self._render(messages[:k], opening=True)[0] for k in turns if k > 0}
        rewritten = rewritten or not all(whole.startswith(text) for k, text in openings.items() if k != turns[-1])
        if turns[-1] not in openings:
            raise InputError("the conversation is a reply to nothing; put a user's turn before it or drop the line")
        last = (self._last_begin(messages, whole, openings[turns[-1]]), len(whole))
        return (
            [last] if rewritten else [*((len(openings[k]), len(ends[k])) for k in turns[:-1] if k > 0), last]
        ), rewritten

    def _last_begin(self, messages: Sequence[dict[str, Any]], whole: str, opening: str) -> int:
        """The place where the last reply begins: after the opening, or after the part of it that
        comes before a written reply.

        (The openings of reasoning models end with <think>, which the text of a reply without
        reasoning lacks.)
        """
        common = next(
            (i for i, (a, b) in enumerate(zip(whole, opening, strict=False)) if a != b), min(len(whole), len(opening))
        )
        if common < len(opening) and common < len(self._render(messages[:-1])[0]):
            raise InputError(
                "the chat template does not write the conversation as a prompt with a reply after it; drop the line"
            )
        return common

    def _tokenize(self, whole: str) -> tuple[list[int], list[Span]]:
        """The ids of the text, and the characters of each."""
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
        """The tokens of a reply, from its characters: all that overlap them, up to and including
        the end-of-turn token.
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
