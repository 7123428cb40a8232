"""From the text of one sequence to the parts of a message: content, reasoning_content and tool_calls.

A stream and a whole answer have the same reader: a whole answer is a stream of a single piece. The reader stops
where a later text could change the result, so the pieces do not matter.

    content --<think>--> reasoning --</think>--> content --<tool_call>--> call --</tool_call>--> content
    content --<|channel|>--> head --<|message|>--> content, reasoning or call --<|end|>--> content
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from copy import copy
from typing import Any

from eyas.serve.calls import Function, UnfinishedError, functions_of, read_calls
from eyas.serve.errors import JsonObject
from eyas.serve.marks import CHANNEL, MESSAGE, START, WHOLE, Grammar, Marks, Region, spelled
from eyas.serve.records import Delta, Totals
from eyas.text import Detokeniser

Part = JsonObject  # the beginning of OpenAI's `delta`
SPECIAL = re.compile("\ud800[^\udfff]*\udfff")
HALVES = re.compile("[\ud800\udfff]")
CONTENT = Region("content")
COMPLETE = re.compile(r"(?:[}\])`]|</(?:｜DSML｜)?(?:function|invoke)>)\s*\Z")  # of a call that lacks its closing mark
CLOSES = re.compile(r'["\']|<escape>|</[｜\w]*(?:parameter|arg_value|function|invoke)>')  # closes an argument
RECIPIENT = re.compile("to=functions[.]([^\\s<\ud800]+)")


def message_of(reader: Reader, index: int, totals: Totals) -> JsonObject:
    """Return a finished sequence as a message of a chat: content, reasoning, calls of tools."""
    message: JsonObject = {"role": "assistant", "content": None, "refusal": None}
    for part in reader.read(totals.as_delta(index)):
        for name, value in part.items():
            if name == "tool_calls":
                message.setdefault(name, []).extend({k: v for k, v in call.items() if k != "index"} for call in value)
            else:
                message[name] = (message.get(name) or "") + value
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message


class Source:
    """The text of one sequence, with those special tokens that are part of a mark."""

    def __init__(self, grammar: Grammar) -> None:
        self.length = 0  # of the text so far, without special tokens
        self.ends: deque[int] = deque()  # of tokens in that text
        self._grammar = grammar
        self._detokeniser = Detokeniser(grammar.llm.tokenizer)  # type: ignore[arg-type]  # chats need a tokenizer
        self._written = 0  # length of the tokens' text, some of which a stop string may hold back or cut
        self._special: deque[tuple[int, str]] = deque()  # places in the tokens' text

    def read(self, delta: Delta) -> str:
        """Return the text that a delta adds, and note where special tokens stand in it."""
        last = ""
        for token in delta.token_ids:
            last = self._detokeniser.feed(token)
            self._written += len(last)
            held = "" if last else self._detokeniser.tail()
            if token in self._grammar.special:
                self._special.append((self._written + len(held), self._grammar.special[token]))
            elif last or held:  # a part of a character ends with it
                self.ends.append(self._written + bool(held))
        text, made = delta.text, ""
        if delta.finish == "stop" and delta.token_ids and delta.token_ids[-1] in self._grammar.llm.eos:
            text = text.removesuffix(last)  # the text of an end that is not a special token
        begin, self.length = self.length, self.length + len(text)
        while self._special and self._special[0][0] <= self.length:
            place, special = self._special.popleft()
            cut = max(0, place - begin)
            made, text, begin = made + text[:cut] + special, text[cut:], begin + cut
        return made + text


class Reader:
    """Reads one sequence."""

    def __init__(self, grammar: Grammar, opening: str = "", prefill: str = "") -> None:
        """`opening`: how the template begins the turn. `prefill`: the beginning of the answer that the client gives."""
        self.called = False  # whether a call was made: the reason of the end is then "tool_calls"
        self.reasoning_tokens = 0  # without its marks
        self.added = (
            ""  # text for the end of the prompt: it ends the template's reasoning where the answer has a structure
        )
        self._grammar = grammar
        self._source = Source(grammar)
        self._text = ""  # not read yet
        self._finish: str | None = None
        self._region = CONTENT
        self._mark = ""  # which opened the region, with the blanks before it
        self._name = ""  # of the function, where the head of a channel tells it
        self._first = True  # no text has come since the beginning, or since the last region
        self._after = ""  # kind of the last region
        self._searched = 0  # place before which no closing mark begins
        self._passed = 0  # place of the last closing mark
        self._within: tuple[tuple[str, int], ...] = ()  # closing marks that are a part of an argument, and their places
        self._calls = 0
        self._begin(spelled(opening, grammar.special), spelled(prefill, grammar.special))
        if grammar.structured or grammar.tools.forced:
            self._answer_at_once()

    def _begin(self, opening: str, prefill: str) -> None:
        """Read the prompt's part of the answer. Nothing remains of it but the region that it leaves open."""
        opens, place = Marks({mark: region for mark, region in self._grammar.first.items() if region.kind}), 0
        while self._region is CONTENT and (found := opens.find(opening, place, True))[0]:
            self._text, self._first, place = "", True, found[1] + 1
            self._read_on(opening[found[1] :])
        if self._region.kind == "head" and CHANNEL not in self._mark + self._text:
            self._region, self._first = CONTENT, True
        if self._region is CONTENT:
            self._text, self._after, self._first = "", "", self._first or not self._grammar.channels
        self._read_on(prefill)
        self._text = {"content": "", "reasoning": self._text.strip()}.get(self._region.kind, self._text)
        self.called, self.reasoning_tokens, self._calls = False, 0, 0

    def _answer_at_once(self) -> None:
        """Begin with the content, or with the call that is forced."""
        if self._region.kind == "reasoning":
            end = HALVES.sub("", next(iter(self._region.closing)))
            self.added = f"{end}{START}assistant" if self._grammar.channels else f"\n{end}\n\n"
            self._first = True
        if self._grammar.channels and self._first:
            self.added, self._first = f"{self.added}{CHANNEL}final{MESSAGE}", False
        self._text, self._region = "", Region("call", endless=True) if self._grammar.tools.forced else CONTENT

    def new(self) -> Reader:
        """Return a reader of the same grammar at the beginning of a text."""
        made = copy(self)
        made._source = Source(self._grammar)
        return made

    def read(self, delta: Delta) -> list[Part]:
        """Return the parts of a message that a delta adds."""
        text, self._finish = self._source.read(delta), delta.finish
        return self._read_on(text)

    def _read_on(self, text: str) -> list[Part]:
        self._text += text
        steps = {"content": self._content, "reasoning": self._reasoning, "head": self._head, "call": self._call}
        parts: list[Part] = []
        while (more := steps[self._region.kind]()) is not None:  # None: a later text is needed
            parts += more
        return parts

    def _content(self) -> list[Part] | None:
        text, final, marks = self._text, self._finish is not None, self._marks
        blanks = len(text) - len(text.lstrip()) if self._first else 0
        mark, place = marks.find(text, blanks, final)
        if self._first and not (mark and place == blanks):
            if place == blanks and not final:
                return None
            if self._after == "reasoning":
                self._take(text.rfind("\n", 0, blanks) + 1)
            if self._after and blanks == len(text):
                self._text = ""
            self._first = False
            return []
        cut = place if (final and not mark) or not self._grammar.calls else len(text[:place].rstrip())
        if cut and not self._first:
            return _text_part("content", self._take(cut))
        return self._open(mark, place) if mark else None

    @property
    def _marks(self) -> Marks:
        return self._grammar.first if self._first else self._grammar.later

    def _open(self, mark: str, place: int) -> list[Part]:
        region: Region = self._marks[mark]
        blanks, _ = self._take(place), self._take(len(mark))
        if region.kind:
            self._region, self._mark, self._first = region, blanks + mark, True
            self._name, self._searched, self._passed, self._within = "", 0, 0, ()
        else:
            self._text = blanks + self._text
        return []

    def _leave(self, length: int) -> None:
        self._take(length)
        self._after, self._region, self._first = self._region.kind, CONTENT, True

    def _reasoning(self) -> list[Part] | None:
        text, final = self._text, self._finish is not None
        mark, place = self._region.closing.find(text, 0, final)
        if self._grammar.structured and not mark:
            if not final:
                return None
            self._region, self._first, self._text = CONTENT, False, HALVES.sub("", self._mark) + text
            return []
        begin = len(text) - len(text.lstrip()) if self._first else 0
        end = place if final and not mark else len(text[:place].rstrip())
        if end > begin:
            self._first = False
            return _text_part("reasoning_content", self._counted(end)[begin:])
        if mark:
            self._counted(place)
            self._leave(len(mark))
        return [] if mark else None

    def _counted(self, count: int) -> str:
        begin, taken = self._source.length - len(SPECIAL.sub("", self._text)), self._take(count)
        end, ends = begin + len(SPECIAL.sub("", taken)), self._source.ends
        while ends and ends[0] <= end:
            self.reasoning_tokens += ends.popleft() > begin
        return taken

    def _head(self) -> list[Part] | None:
        """Read which channel a message is of, and which function it is for."""
        head, message, rest = self._text.partition(spelled(MESSAGE, self._grammar.special))
        if message:
            self._mark, self._text = self._mark + head + message, rest
            recipient = RECIPIENT.search(self._mark) if self._grammar.calls else None
            analysis = f"{CHANNEL}analysis" in HALVES.sub("", self._mark)
            kind = "call" if recipient else "reasoning" if analysis else "content"
            self._name = recipient[1] if recipient else ""
            self._region = CONTENT if kind == "content" else Region(kind, self._region.closing)
        elif self._finish and self._mark.endswith("to="):  # of a text
            self._text, self._region = self._mark + self._text, CONTENT
        else:
            return None
        self._first = self._region is not CONTENT
        return []

    def _call(self) -> list[Part] | None:
        region, final = self._region, self._finish is not None
        mark, place = region.closing.find(self._text, self._searched, final)
        if not mark and not final:
            self._searched = place
            return None
        begin, self._passed = self._passed, place
        if mark and self._within and not CLOSES.search(self._text, begin, place):
            self._searched = place + 1
            return []
        closed, ends = bool(mark), [(mark, place)]
        if not closed:  # what was cut is not a call; what lacks its closing mark may be one, or hold it within
            ends = [*self._within, *ends] if region.endless or self._finish == "stop" else []
        found: list[Function] | str | None = self._mark + self._text
        for mark, place in ends:
            found = self._functions(mark, place, last=not closed)
            if isinstance(found, list):
                break
        if found is None:
            self._searched, self._within = place + 1, (*self._within, (mark, place))
            return []
        self._leave(place + (0 if region.endless else len(mark)))
        if isinstance(found, str):
            self._first = False
            return _text_part("content", HALVES.sub("", found))
        made = found if self._grammar.tools.parallel else found[: not self.called]
        self.called, self._calls = self.called or bool(made), self._calls + len(made)
        return [_call(number, function) for number, function in enumerate(made, self._calls - len(made))]

    def _functions(self, mark: str, place: int, last: bool) -> list[Function] | str | None:
        """Return the functions up to a closing mark, the text if none are called, None for a mark in an argument."""
        region, body, schemas = self._region, self._text[:place], self._grammar.schemas
        end = "" if region.endless else mark
        whole = self._mark + body + end
        written = HALVES.sub("", region.prefix + self._name + body + (end if region.prefix else ""))
        if not mark and not region.endless and not COMPLETE.search(written):
            return whole
        try:
            found = read_calls(written, {} if region.endless else schemas, last)
        except UnfinishedError:
            return whole if last else None
        except (ValueError, RecursionError):
            return _by_template(self._grammar, HALVES.sub("", whole)) or whole
        if region.prefix in WHOLE and not all(one["name"] in schemas for one in found):
            return whole
        return found or (whole if region.prefix else body)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


def _by_template(grammar: Grammar, text: str) -> list[Function]:
    """Return the functions that the tokenizer's own response template finds in the text of a call."""
    template = getattr(grammar.llm.tokenizer, "response_template", None)
    if template is None:
        return []
    from transformers.utils.chat_parsing import parse_response

    tools: Any = [dict(tool) for tool in grammar.tools.listed]
    try:
        return functions_of(parse_response(text, template, prefix="", tools=tools).get("tool_calls") or [])
    except (ValueError, RecursionError):
        return []


def _text_part(name: str, text: str) -> list[Part]:
    shown = SPECIAL.sub("", text)
    return [{name: shown}] if shown else []


def _call(number: int, function: Function) -> Part:
    call = {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": dict(function)}
    return {"tool_calls": [call]}
