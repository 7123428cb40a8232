"""From the text of one sequence to the parts of a message: content, reasoning_content and tool_calls.

Reasoning and calls are found by transformers' parser of response templates: the tokenizer's own
template, or the one that transformers has for the model's type. Without a template all text is
content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from eyas.api import LLM
from eyas.serve.errors import ApiError
from eyas.serve.records import Delta, Totals
from eyas.serve.tools import Tools

__all__ = ["MessageReader", "check_readable", "message_of", "reader_for"]

REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field in response templates
UNREADABLE = "how this model writes calls is not known: tool_choice may be required, none, or a function"


class MessageReader(Protocol):
    """Reads one sequence; every part is the beginning of OpenAI's `delta`."""

    called: bool  # whether a call was made: the reason of the end is then "tool_calls"

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the parts that a Delta adds."""
        ...


def reader_for(llm: LLM, tools: Tools, prompt: Sequence[int], stops: bool) -> MessageReader:
    """Return the reader of a sequence after this prompt.

    Args:
        stops: the request has stop strings, which `Delta.text` is cut at.
    """
    if tools.forced:
        return CallReader()
    template = response_template(llm)
    if template is None or llm.tokenizer is None:
        return PlainReader()
    from transformers.utils.chat_parsing import ResponseParser

    prefix = str(llm.tokenizer.decode(list(prompt)))
    parser = ResponseParser(template, prefix=prefix, tools=[dict(tool) for tool in tools.listed])
    return ParsedReader(parser, None if stops else llm.tokenizer, tools.parallel)


def check_readable(llm: LLM, tools: Tools) -> None:
    """Raise ApiError if the model may call functions, and nothing tells how it writes calls."""
    if tools.listed and not tools.forced and response_template(llm) is None:
        raise ApiError(400, UNREADABLE, param="tools")


def message_of(reader: MessageReader, index: int, totals: Totals) -> dict[str, Any]:
    """Return OpenAI's message of a whole sequence."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    whole = Delta(
        index, totals.text, tuple(totals.token_ids), finish=totals.finish or "length", stop_reason=totals.stop_reason
    )
    for part in reader.read(whole):
        for name, value in part.items():
            if name == "tool_calls":
                message.setdefault(name, []).extend({k: v for k, v in call.items() if k != "index"} for call in value)
            else:
                message[name] = (message.get(name) or "") + value
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message


def response_template(llm: LLM) -> dict[str, Any] | None:
    """Return the response template of the tokenizer, or the one that transformers has for the model's type."""
    own = getattr(llm.tokenizer, "response_template", None)
    if own is not None or llm.tokenizer is None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # an older transformers, or one without what its own server needs
        return None
    found: dict[str, Any] | None = get_response_template(llm.tokenizer, llm.target.model)
    return found


class PlainReader:
    """All text is content."""

    called = False

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """See `MessageReader.read`."""
        return [{"content": delta.text}] if delta.text else []


class CallReader:
    """Reads an answer that a grammar made one call. A call that was broken off is content."""

    def __init__(self) -> None:
        self.called = False
        self._text = ""

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """See `MessageReader.read`."""
        self._text += delta.text
        if delta.finish is None:
            return []
        call = _function(_parsed(self._text))
        if call is None:
            return [{"content": self._text}] if self._text else []
        self.called = True
        return [_call(0, call)]


class ParsedReader:
    """Reads by transformers' parser of a response template.

    Args:
        tokenizer: decodes tokens with the special ones, by which templates know regions; None: the
            parser reads `Delta.text`.
    """

    def __init__(self, parser: Any, tokenizer: Any, parallel: bool) -> None:
        self.called = False
        self._parser = parser
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._parallel = parallel
        self._calls = 0
        self._broken = False
        self._unread = ""  # text of the region that is being read, which is content if the parser fails
        self._region = ""  # text of the call that is being read, which is content if it is none

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """See `MessageReader.read`."""
        text = delta.text if self._tokenizer is None else self._decode(delta.token_ids)
        if self._broken:
            return [{"content": text}] if text else []
        self._unread += text
        try:
            events = self._parser.feed(text)
            if delta.finish is not None:
                events += self._parser.finalize()[1]
        except (ValueError, RecursionError):  # the model wrote a call that is not JSON
            self._broken = True
            return [{"content": self._unread}]
        return list(self._parts(events))

    def _decode(self, token_ids: Iterable[int]) -> str:
        backend = self._tokenizer.backend_tokenizer
        return "".join(self._stream.step(backend, token) or "" for token in token_ids)

    def _called(self, value: Any) -> Iterator[dict[str, Any]]:
        """Yield a call; what the model wrote in its place, where it is none, as content."""
        function = _function(value.get("function") if isinstance(value, Mapping) else None)
        if function is None:
            yield {"content": self._region}
        elif self._parallel or not self._calls:
            self.called, number = True, self._calls
            self._calls += 1
            yield _call(number, function)

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            field = event.get("field")
            if event["type"] == "region_open":
                self._region = ""
            elif event["type"] == "region_close":
                self._unread = ""
                if field == "tool_calls":
                    yield from self._called(event["value"])
            elif field == "tool_calls":
                self._region += event.get("text") or ""
            elif event["type"] == "region_chunk" and not event.get("dirty") and event["text"]:
                self._unread = ""
                if field == "content":
                    yield {"content": event["text"]}
                elif field in REASONING:
                    yield {"reasoning_content": event["text"]}


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _function(call: Any) -> dict[str, str] | None:
    """Return the name and the arguments of a call that the model wrote, the arguments as text; None where it is
    no call. A call without arguments has none."""
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    given = call.get("arguments", call.get("parameters"))  # Llama writes parameters
    arguments = {} if given is None else given
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999, which is not a number of JSON once it is read
        return None
    return {"name": name, "arguments": text.encode("utf-8", "replace").decode()}


def _call(number: int, function: Mapping[str, str]) -> dict[str, Any]:
    """Return a whole call, as a part of a delta."""
    call = {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": dict(function)}
    return {"tool_calls": [call]}
