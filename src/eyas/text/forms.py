"""Other forms of a chat, for templates that refuse the one it has, or leave words of it out; `_prompts.py` tries them.
Clients repeat their whole history, so a conversation could never go on after one message that the template does not
take.

    systems      texts of the system after the first turn move into the user's turns, where the template wants the
                 system at the beginning; all of them do where it knows no system
    turns        that do not alternate go on in the one before, a tool's too
    ids          of calls become nine letters and digits (Mistral's templates take no others)
    arguments    of calls that are not objects become an empty one; or arguments become JSON, which some templates put
                 between other text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import count, product
from typing import Any

from eyas.text._messages import Message

Chat = list[Message]
SYSTEM = ("system", "developer")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def other_forms(chat: Sequence[Message]) -> Iterator[Chat]:
    """Yield each other form of a checked chat once, those that change least first."""
    seen = [list(chat)]
    changes = product((_same, _alternating), (_same, _system_first, _no_system), (_same, _short_ids), ARGUMENTS)
    for turns, systems, ids, arguments in changes:
        form = arguments(ids(turns(systems(list(chat)))))
        if form not in seen:
            seen.append(form)
            yield form


def _same(chat: Chat) -> Chat:
    return chat


def _system_first(chat: Chat) -> Chat:
    """Return the chat with one system message, at the beginning; later texts join the user's or a tool's turns."""
    head = next((i for i, message in enumerate(chat) if message["role"] not in SYSTEM), len(chat))
    made: Chat = [_joined(chat[:head])] if head else []
    open_turn = False  # whether the last turn holds a text of the system's and may go on
    for message in chat[head:]:
        late = message["role"] in SYSTEM
        if made[-1]["role"] in ("user", "tool") if late else open_turn and message["role"] == "user":
            made[-1] = _joined([made[-1], message])
        else:
            made.append({**message, "role": "user"} if late else message)
        open_turn = made[-1]["role"] == "user" and (late or open_turn)
    return made


def _no_system(chat: Chat) -> Chat:
    """Return the chat with the system's texts in the user's turns."""
    made = _system_first(chat)
    if not made or made[0]["role"] not in SYSTEM:
        return made
    first = {**made[0], "role": "user"}
    return [_joined([first, made[1]]), *made[2:]] if made[1:2] and made[1]["role"] == "user" else [first, *made[1:]]


def _joined(messages: Chat) -> Message:
    """Return messages as one, of the first one's role. Their contents are texts or parts."""
    if len(messages) == 1:
        return messages[0]
    listed = [_parts(message["content"]) for message in messages]
    parts = [part for one in listed for part in one]
    if all(part["type"] == "text" for part in parts):
        texts = ["\n".join(part["text"] for part in one) for one in listed]
        parts = [{"type": "text", "text": "\n\n".join(filter(None, texts))}]
    strings = all(isinstance(message["content"], str) for message in messages)
    return {**messages[0], "content": parts[0]["text"] if strings else parts}


def _parts(content: Any) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _alternating(chat: Chat) -> Chat:
    """Return the chat without two turns of the user's, or two replies, in a row, and without a user's after a tool's."""
    made: Chat = []
    for message in chat:
        role, before = message["role"], made[-1] if made else {}
        if role == "user" and before.get("role") in ("user", "tool"):
            made[-1] = _joined([before, message])
        elif role == "assistant" == before.get("role") and "tool_calls" not in before:
            made[-1] = {**message, **_joined([before, message])}
        else:
            made.append(message)
    return made


def _short_ids(chat: Chat) -> Chat:
    """Return the chat with ids of nine letters and digits; calls and results without an id belong together in order."""
    calls, results = count(), count()

    def short(given: Any, number: int) -> str:
        text = str(number if given is None else given)
        return text if SHORT_ID.fullmatch(text) else sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    made: Chat = []
    for message in chat:
        if message["role"] == "tool":
            made.append({**message, "tool_call_id": short(message.get("tool_call_id"), next(results))})
        elif "tool_calls" in message:
            listed = [{**call, "id": short(call.get("id"), next(calls))} for call in message["tool_calls"]]
            made.append({**message, "tool_calls": listed})
        else:
            made.append(message)
    return made


def _with_arguments(changed: Callable[[Any], Any]) -> Callable[[Chat], Chat]:
    def change(call: Message) -> Message:
        return {**call, "function": {**call["function"], "arguments": changed(call["function"]["arguments"])}}

    return lambda chat: [
        {**m, "tool_calls": [change(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in chat
    ]


ARGUMENTS = (
    _same,
    _with_arguments(lambda given: given if isinstance(given, Mapping) else {}),
    _with_arguments(lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)),
)
