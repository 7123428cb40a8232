"""Prompts and chats to token ids. One function writes chats by a chat template, for the server, for
every command and for training: what a head learns is what it is asked later.

This module knows one Hugging Face tokenizer.
"""

from __future__ import annotations

import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eyas.errors import InputError, first_line
from eyas.text._messages import check_messages, check_unicode, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Span", "encode", "encode_part", "for_template", "has_place_for_tools", "render", "write_chat"]

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # first and past the last character or token
DEVELOPER = re.compile(r"""['"]developer['"]""")
ASKS_FOR_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
RESERVED = ("conversations", "messages", "self")  # names that transformers and the template's language need themselves
QUESTION = [{"role": "user", "content": "?"}]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokenize a raw prompt, with the special tokens that the tokenizer itself adds (a leading <s>, or
    none). It adds none that the text, such as a rendered chat, begins with.

    Raises:
        InputError: the prompt is not a string, is empty, is not valid Unicode, or gives no token.
    """
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
    """Tokenize a part of a text, without special tokens; `name` is used in error messages."""
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
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    marks: bool = False,
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

    Raises:
        InputError: a message is malformed, the tokenizer has no chat template, or the template
            refuses the chat (a role that it does not know, turns that do not alternate); the
            error then holds the template's own reason, and the message's number where it has one.
    """
    chat = check_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this tokenizer has no chat template: pass a plain prompt or token ids instead of messages")
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
        named: Any = for_template(chat, template)
        found: Any = render_jinja_template([named], listed, chat_template=template, **names)
        return found[0][0], [(begin, end) for begin, end in found[1][0]] if marks else []

    return _written(write, chat)


def _written(write: Callable[[Messages], tuple[str, list[Span]]], chat: Messages) -> tuple[str, list[Span]]:
    """Return what the template writes. The arguments of calls are objects; templates that refuse them get an empty
    object for what is none (text that was cut, say: clients repeat their whole history, so a conversation could never
    go on after one such call), or JSON, which some put between other text."""
    forms: list[Messages] = [chat]
    for changed in (_as_object, _as_text):
        form: Messages = [_with_arguments(message, changed) for message in chat]
        forms += [] if form in forms else [form]
    refusals = []
    for form in forms:
        try:
            return write(form)
        except Exception as error:  # a template is a program that comes with the model; it may raise anything
            refusals.append(error)
    reason = first_line(refusals[0], 200)
    place = _refused_message(write, chat, reason)
    raise InputError(f"the chat template refuses these messages: {reason}{place}") from refusals[0]


def _with_arguments(message: Mapping[str, Any], changed: Callable[[Any], Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    changed_ones = [{**function, "arguments": changed(function["arguments"])} for function in functions]
    calls = [{**call, "function": f} for call, f in zip(message["tool_calls"], changed_ones, strict=True)]
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    return arguments if isinstance(arguments, Mapping) else {}


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _refused_message(write: Callable[[Messages], Any], chat: Messages, reason: str) -> str:
    """Return the number of the message with which the template's refusal begins, as a part of its error;
    "" where the template refuses any chat."""

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


def for_template(chat: Messages, template: str) -> list[Mapping[str, Any]]:
    """Return the checked messages as this template knows them.

    Where it does not name the role "developer", such a message is "system", as llama.cpp and vLLM
    have it, and one with the system's message before it: many templates allow only one. Where it
    asks whether content is none, a message with nothing but calls has None.
    """
    if ASKS_FOR_NONE.search(template):
        chat = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in chat]
    if DEVELOPER.search(template):
        return list(chat)
    named: list[Mapping[str, Any]] = []
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


def has_place_for_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the chat template writes the tools that the model may call into the prompt."""
    return write_chat(tokenizer, QUESTION, tools=tools) != write_chat(tokenizer, QUESTION)
