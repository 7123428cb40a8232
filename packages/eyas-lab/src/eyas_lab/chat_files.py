"""Files of conversations in OpenAI's or ShareGPT's form: one a line or as one JSON array, plain or .gz, or the
rows of a Parquet file. Each may be on this machine or at a URL.

Training, benches and regeneration read them. This module knows no tokenizer and no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from eyas.errors import InputError
from eyas.files import parse_json
from eyas.text import check_messages
from eyas.text.sources import File, is_parquet, open_file, parquet_rows

__all__ = ["chat_lines", "decode_line", "is_chat_file", "messages_of", "parse_chat_line"]

LONGEST_LINE = 2**20  # bytes of a line that are read to see what it is
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
}


def is_chat_file(file: File) -> bool:
    """Return whether a file holds conversations, by its name, or because it begins with lines that are JSON objects or
    with an array of them; otherwise it is plain text. Raise InputError when it cannot be read."""
    name = file.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")) or is_parquet(file):
        return True
    with open_file(file) as stream:
        lines = (line for line in iter(partial(stream.readline, LONGEST_LINE), b"") if line.strip())
        first, second = [line.removeprefix(BYTE_ORDER_MARK).strip() for line in (next(lines, b""), next(lines, b""))]
    is_array = first.startswith(b"[") and (first + second)[1:].lstrip().startswith(b"{")
    return is_array or (_is_object(first) and (not second or _is_object(second)))


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and (len(line) >= LONGEST_LINE or isinstance(parse_json(line), dict))
    except InputError:
        return False


def chat_lines(file: File) -> Iterator[tuple[str, bytes]]:
    """Yield (where, JSON of one conversation) of each line, array item or row; blank lines are left out. Raise
    InputError when the file is unreadable."""
    if is_parquet(file):
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(parquet_rows(file), start=1))
        return
    with open_file(file) as stream:
        if stream.peek(64).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":  # type: ignore[attr-defined]
            yield from _array_items(file, stream.read())
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{file}:{number}", line.strip()


def _array_items(file: File, content: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        items = parse_json(content)
    except InputError as error:
        raise InputError(
            f"{file}: a JSON array with an error ({error}); repair it, or write one conversation a line"
        ) from error
    for number, item in enumerate(items, start=1):
        yield f"{file}, item {number}", json.dumps(item).encode()


def decode_line(raw: bytes) -> str:
    """Return a line as text. Raise InputError for bytes that are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}; save the file as UTF-8 or drop the line") from error


def parse_chat_line(raw: bytes) -> Any:
    """Return the JSON value of one line; raise InputError when it is none."""
    content = decode_line(raw)
    try:
        return parse_json(content)
    except InputError as error:
        raise InputError(f"{error}; repair or drop the line") from error


def messages_of(record: Any) -> list[dict[str, Any]]:
    """Return the messages of a line in OpenAI's or ShareGPT's form, as `text.check_messages` returns them; several parts of
    text stay parts, which the template joins, but for a reply's. Raise InputError when it has neither form."""
    if not isinstance(record, Mapping):
        raise InputError('not a JSON object; write {"messages": [...]}')
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list):
        raise InputError(
            'no list "messages" or "conversations"; write {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    messages = [_in_openai_form(turn, number) for number, turn in enumerate(turns, start=1)]
    system = record.get("system")
    if isinstance(system, str) and system.strip() and not _is_system(messages[:1]):
        messages = [{"role": "system", "content": system}, *messages]
    return [_joined(message) for message in check_messages(messages, ("text",))] if turns else []


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    texts = [part["text"] for part in message["content"]]
    return message if len(texts) > 1 and message["role"] != "assistant" else {**message, "content": "\n".join(texts)}


def _is_system(messages: Sequence[Any]) -> bool:
    return any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages)


def _in_openai_form(turn: Any, number: int) -> Any:
    """Return a turn with OpenAI's keys and roles. ShareGPT's turn "function_call" holds a call, or a list of them, as
    JSON."""
    if not isinstance(turn, Mapping):
        return turn
    if turn.get("from") == "function_call":
        try:
            calls = parse_json(str(turn.get("value")))
        except InputError as error:
            raise InputError(f"the call of message {number} is {error}; repair or drop the line") from error
        turn = {"from": "gpt", "tool_calls": calls if isinstance(calls, list) else [calls]}
    renamed = {"role": turn.get("from"), "content": turn.get("value")}
    message = {**{name: value for name, value in renamed.items() if value is not None}, **turn}
    if isinstance(name := message.get("role"), str):
        message["role"] = SHAREGPT_ROLES.get(name, name)
    return {key: value for key, value in message.items() if key not in ("from", "value")}
