"""One conversation to token ids, with a mark on every token that the assistant would have
generated.

The chat is written by the function that serves it too (`text.write_chat`); `_replies.py` finds the
replies in its text. A reply ends with its end-of-turn token; text that the template writes after it is not the
assistant's. This module knows no file, no split and no model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from eyas.errors import InputError, first_line
from eyas.text import Span, has_place_for_tools, template_keywords, write_chat
from eyas_lab.chat_files import messages_of
from eyas_train._replies import find_replies, is_trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
