"""Prompts and chats to token ids. One function writes chats by a chat template, for the server, for every
command and for training, so a head meets the form that it learned.

This module knows one Hugging Face tokenizer.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from eyas.errors import InputError, first_line
from eyas.text._messages import Message, check_messages, check_unicode, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Message]
Span = tuple[int, int]  # first and past the last character or token
DEVELOPER = re.compile(r"""['"]developer['"]""")
ASKS_FOR_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
RESERVED = ("conversations", "messages", "self")  # names that transformers and the template's language need themselves
CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|call|return|start)\|>|$)", re.DOTALL)
QUESTION = [{"role": "user", "content": "?"}]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokenize a raw prompt with the tokenizer's own special tokens, but none that the text begins with."""
    if not isinstance(prompt, str):
        raise InputError(f"a prompt must be a string, this one is {kind_of(prompt)}")
    if not prompt:
        raise InputError("the prompt is empty: give it at least one character")
    check_unicode(prompt, "the prompt")
    # verbose=False: a prompt that is too long is reported once, by the engine, which knows the
    # model's context
    ids: list[int] = list(tokenizer(prompt, verbose=False)["input_ids"])
    if not ids:
        raise InputError(f"the tokenizer makes no token of the prompt {prompt[:40]!r}: give it another one")
    added = list(tokenizer("", verbose=False)["input_ids"])  # at the beginning, and after it at the end
    counts = range(len(added), 0, -1)
    return next((ids[k:] for k in counts if ids[:k] == ids[k : 2 * k] == added[:k]), ids)


def encode_part(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> list[int]:
    """Tokenize a part of a text, without special tokens; errors call it `name`."""
    check_unicode(text, name)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **template: Any) -> list[int]:
    """Tokenize a chat by the tokenizer's own chat template. Keywords and errors as in `write_chat`."""
    text, _ = write_chat(tokenizer, messages, **template)
    if ids := encode_part(tokenizer, text, "the chat"):
        return ids
    raise InputError("the chat template makes no token of these messages: pass a plain prompt or token ids")


def write_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Message] | None = None,
    chat_template_kwargs: Message | None = None,
    marks: bool = False,
    now: datetime | None = None,
) -> tuple[str, list[Span]]:
    """Return a chat as text, and the characters between the template's {% generation %} marks.

    Args:
        messages: dicts with "role" (one of ROLES) and "content", in any form that `check_messages`
            reads. The role "developer" is "system" where the template does not name it.
        add_generation_prompt: end with the opening of an assistant turn, so that the model answers.
        continue_final_message: end within the last message, whose text the model continues; no new
            turn is opened then.
        tools: functions that the model may call, in OpenAI's form.
        chat_template_kwargs: variables of the template, such as enable_thinking; none that the tokenizer's own
            function has as a parameter, for one of them is the template itself.
        marks: look for the template's marks.
        now: the time that the template is told; it may write the date.

    Raises:
        InputError: a message is malformed, the tokenizer has no chat template, or the template refuses the chat
            (an unknown role, turns that do not alternate). The error then holds the template's own reason, and
            the message's number where it has one.
    """
    chat = check_messages(messages, ("text",))
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this tokenizer has no chat template: pass a plain prompt or token ids (/v1/completions)")
    own = inspect.signature(tokenizer.apply_chat_template).parameters if chat_template_kwargs else {}
    if reserved := sorted({*own, *RESERVED} & dict(chat_template_kwargs or {}).keys()):
        raise InputError(f"chat_template_kwargs: {reserved[0]} is not a variable of a chat template")
    listed: Any = [dict(tool) for tool in tools] if tools else None
    names: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
        "return_assistant_tokens_mask": marks,
        **tokenizer.special_tokens_map,
        **(chat_template_kwargs or {}),
    }

    def write(chat: Messages) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = tokenizer.get_chat_template(tools=listed)
        template = template if now is None else _at(now, template)
        in_parts = _roles_in_parts(
            template, tuple((k, v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str))
        )
        named: Any = for_template([_as_read(message, message["role"] in in_parts) for message in chat], template)
        found: Any = render_jinja_template([named], listed, chat_template=template, **names)
        return found[0][0], [(begin, end) for begin, end in found[1][0]] if marks else []

    return _written(write, chat)


def _at(now: datetime, template: str) -> str:
    """Return a template that is told this time wherever it asks: under another name, as a compiled template is kept."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    dated = template.replace("strftime_now", name := f"strftime_now_{now:%Y%m%d%H%M%S}")
    _compile_jinja_template(dated).globals[name] = now.strftime
    return dated


@lru_cache(64)
def _roles_in_parts(template: str, names: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the roles whose content the template reads as a list of parts, as the templates of Idefics3 and
    Llava do."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found, word = set[str](), "Word4you"
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    called: dict[str, dict[str, Any]] = {
        "assistant": {"tool_calls": [call]},
        "tool": {"tool_call_id": call["id"], "name": "f"},
    }
    turns = {"user": ["user"], "assistant": ["user", "assistant"], "tool": ["user", "assistant", "tool"]}

    def keeps(role: str, parts: bool) -> bool:
        chat: Any = [{"role": one, "content": word if one == role else "x"} for one in turns.get(role, [role, "user"])]
        chat = [{**one, **called.get(one["role"], {})} for one in chat] if role == "tool" else chat
        read = [_as_read(one, parts if one["role"] == role else one["role"] in found) for one in chat]
        try:
            variables: dict[str, Any] = dict(names)
            named: Any = for_template(read, template)
            return word in render_jinja_template([named], chat_template=template, **variables)[0][0]
        except Exception:  # a template is a program that comes with the model; it may raise anything
            return False

    for role in ("user", "assistant", "system", "developer", "tool"):
        found |= {role} if not keeps(role, parts=False) and keeps(role, parts=True) else set()
    return frozenset(found)


def _as_read(message: Message, parts: bool) -> Message:
    """Return a message whose content is a list of parts, or the text of these, joined by line breaks as vLLM does."""
    content = message["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": content if parts else "\n".join(part["text"] for part in content)}


def _written(write: Callable[[Messages], tuple[str, list[Span]]], chat: Messages) -> tuple[str, list[Span]]:
    """Return the template's text. Where it refuses the chat or leaves text out, it gets other forms of it."""
    from eyas.text.forms import SYSTEM, other_forms

    said = [_as_read(message, parts=False)["content"].strip() for message in chat[1:] if message["role"] in SYSTEM]
    refusals, found = [], []
    for form in chain([chat], other_forms(chat)):
        try:
            found.append(write(form))
        except Exception as error:  # a template is a program that comes with the model; it may raise anything
            refusals.append(error)
        else:
            if all(text in found[-1][0] for text in said):
                return found[-1]
    if found:
        return found[0]
    reason = first_line(refusals[0], 200)
    place = _refused_message(write, chat, reason)
    raise InputError(f"the chat template refuses these messages: {reason}{place}") from refusals[0]


def _refused_message(write: Callable[[Messages], Any], chat: Messages, reason: str) -> str:
    """Return the number of the message with which the refusal begins; "" where any chat is refused."""

    def refuses(messages: Messages) -> bool:
        try:
            write(messages)
        except Exception as error:  # as above
            return first_line(error, 200) == reason
        return False

    if refuses(QUESTION):
        return ""
    counts = range(1, len(chat) + 1)
    return f" (message {1 + bisect_left(counts, True, key=lambda count: refuses(chat[:count]))})"


def for_template(chat: Messages, template: str) -> list[Message]:
    """Return the checked messages as this template knows them. They are without a role "developer" that it does not
    name, which joins the system's message before it, and with None for content that it asks about and is empty."""
    if ASKS_FOR_NONE.search(template):
        chat = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in chat]
    if DEVELOPER.search(template):
        return list(chat)
    named: list[Message] = []
    for message in chat:
        if message["role"] != "developer":
            named.append(message)
        elif named and named[-1]["role"] == "system":
            named[-1] = {**named[-1], "content": _join(named[-1]["content"], message["content"])}
        else:
            named.append({**message, "role": "system"})
    return named


def _join(first: Any, second: Any) -> Any:
    return f"{first}\n\n{second}" if isinstance(first, str) else [*first, *second]


def reply_message(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Collection[int]) -> dict[str, str]:
    """Return the assistant's message that these tokens are, as a chat template reads it. Special tokens but the
    `ends` are marks and stay; gpt-oss' channels become the keys that its template reads."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
    inner = [token for token in ids if token not in special or token not in ends]
    plain = special.isdisjoint(inner)
    text = str(tokenizer.decode(inner, skip_special_tokens=plain, clean_up_tokenization_spaces=False))
    said = [] if plain else CHANNEL.findall(text)
    if not said:
        return {"role": "assistant", "content": text}
    thinking, content = ("\n".join(body for name, body in said if (name == "analysis") is own) for own in (True, False))
    return {"role": "assistant", "content": content, **({"thinking": thinking} if thinking else {})}


def has_place_for_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message]) -> bool:
    return write_chat(tokenizer, QUESTION, tools=tools) != write_chat(tokenizer, QUESTION)
