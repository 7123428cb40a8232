"""The marks by which a model tells reasoning, calls and content apart: a grammar, made once from the chat
template and the request.

The chat template names the marks of its family. Where it names none, the tokenizer's response template does, or the one
that transformers has for the model's type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from eyas.api import LLM
from eyas.serve.errors import bad_request
from eyas.serve.tools import Tools
from eyas.text import REASONING as REASONING_FIELDS

Template = Mapping[str, Any]  # of responses, as tokenizers have it, or a field of one
Table = dict[str, tuple[str, ...]]  # marks that open a region, each with those that close it
UNREADABLE = "how this model writes calls is not known: tool_choice may be required, none, or a function"
REASONING: Table = {
    "<think>": ("</think>",),
    "<|channel>thought\n": ("<channel|>",),  # Gemma 4
    "[THINK]": ("[/THINK]",),  # Mistral
}
CALLS: Table = {  # a call without a closing mark ends where the next one begins, or with the answer
    "<tool_call>": ("</tool_call>",),
    "<function=": ("</function>",),
    "<|tool_call>": ("<tool_call|>",),  # Gemma 4
    "<start_function_call>": ("<end_function_call>",),  # FunctionGemma
    "[TOOL_CALLS]": (),  # Mistral
    "<|python_tag|>": (),  # Llama 3
    "{": (),  # Llama 3, where a call is the whole answer
    "[": (),  # Llama 4, likewise, in Python's form
    "<|python_start|>": ("<|python_end|>",),  # Llama 4
    "<|tool_call_start|>": ("<|tool_call_end|>",),  # LFM2
    "<function_calls>": ("</function_calls>",),  # Olmo 3
    "<｜tool▁call▁begin｜>": ("<｜tool▁call▁end｜>",),  # DeepSeek
    "<｜DSML｜function_calls>": ("</｜DSML｜function_calls>",),  # DeepSeek V3.2
    "<|tool_call_begin|>": ("<|tool_call_end|>",),  # Kimi
    "<minimax:tool_call>": ("</minimax:tool_call>",),
}
SIGNS: Mapping[str, tuple[str, ...]] = {
    "<think>": ("think>",),
    "<|channel>thought\n": ("<channel|>",),
    "{": ('{"name": function name, "parameters"',),
    "[": ("[func_name1(params_name1=params_value1", "<|python_start|>"),
    "<|tool_call_start|>": ("<|tool_list_start|>",),
}  # of marks, in templates; others are their own
AROUND_CALLS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
)  # fmt: skip
WHOLE = ("{", "[")  # marks of calls that are the whole answer
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"  # gpt-oss
CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|call|>")
WITHIN = (  # within calls and heads of channels
    "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[CALL_ID]", "[ARGS]", '<|"|>', "<escape>", "<|constrain|>", MESSAGE,
)  # fmt: skip
LITERAL = re.compile(r"(?:\\\W|[^\\\[\](){}.*+?^$|\s])+(?![*+?{])")  # a run of plain characters in a regular expression


class Marks(dict[str, Any]):
    """Marks that are looked for together, each with the region that it opens."""

    def find(self, text: str, begin: int, final: bool) -> tuple[str, int]:
        """Return the first mark and its place; without one "" and the place from which a later text may make one."""
        hold = len(text)
        if not final:
            first = max(begin, hold + 1 - max(map(len, self), default=0))
            hold = next((place for place in range(first, hold) if self._begins_with(text[place:])), hold)
        found = self._pattern.search(text, begin)
        return (found[0], found.start()) if found and found.start() < hold else ("", hold)

    def _begins_with(self, text: str) -> bool:
        return any(mark.startswith(text) and mark != text for mark in self)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self, key=len, reverse=True))) or "(?!)")


class Region(NamedTuple):
    """A part of an answer between two marks."""

    kind: str  # "content", "reasoning", "call", "head" (of a channel), or "" for a mark that is left out
    closing: Marks = Marks()
    endless: bool = False  # no mark closes it, and `closing` opens the next call
    prefix: str = ""  # its opening mark, where it belongs to the text of the call


@dataclass(frozen=True)
class Grammar:
    """The marks that are read in the answers to one request."""

    llm: LLM
    tools: Tools
    first: Marks  # that count at the beginning of the answer, and after a region
    later: Marks  # that count after text
    special: Mapping[int, str]  # special tokens that belong to a mark, by their spelling in the read text
    calls: bool  # whether calls are read
    channels: bool  # whether messages have heads, as gpt-oss writes them
    structured: bool  # the answer has a structure, so that a region without an end is text

    @cached_property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of each function's parameters, by the function's name."""
        functions = [tool["function"] for tool in self.tools.listed]
        given = {one["name"]: (one.get("parameters") or {}).get("properties") for one in functions}
        return {name: schemas if isinstance(schemas, Mapping) else {} for name, schemas in given.items()}


def grammar_of(llm: LLM, tools: Tools, structure: str = "") -> Grammar:
    """Return the grammar of the answers to a request; `structure` is its keyword of structured output, or ""."""
    own, written = getattr(llm.tokenizer, "response_template", None), str(getattr(llm.tokenizer, "chat_template", ""))
    template = _template_of_type(llm) if own is None else own
    named = [_named(json.dumps(template, ensure_ascii=False), template), _named(written, {})]
    sources = named if own else reversed(named)
    named_first: list[Table] = [next(filter(None, tables), {}) for tables in zip(*sources, strict=True)]
    reasoning, calls = named_first
    added: Mapping[int, Any] = getattr(llm.tokenizer, "added_tokens_decoder", {})
    channels = MESSAGE in written and any(CHANNEL in one for one in (written, *map(str, added.values())))
    asked = bool(tools.listed) and not tools.forced
    if asked and not (calls or channels):
        raise bad_request(UNREADABLE, "tools")
    content = _literals(template.get("fields", {}).get("content", {}), "close", -1)
    left_out = [
        *content,
        *(CHANNEL_ENDS if channels else ()),
        *(mark for mark in AROUND_CALLS if asked and mark in written),
    ]
    heads: Table = dict.fromkeys((START, CHANNEL) if channels else (), CHANNEL_ENDS)
    tables: dict[str, Table] = {
        "": dict.fromkeys(left_out, ()),
        "head": heads | dict.fromkeys(("to=",) if channels and asked else (), CHANNEL_ENDS),
        "reasoning": reasoning,
        "call": calls if asked else Table(),
    }
    names = [*WITHIN, *(mark for table in tables.values() for begin, ends in table.items() for mark in (begin, *ends))]
    special = {
        token: f"\ud800{one.content}\udfff"
        for token, one in added.items()
        if one.special and any(one.content in name for name in names)
    }
    first = Marks()
    for kind, table in tables.items():
        for begin, ends in table.items():
            mark, prefix = spelled(begin, special), begin if begin in (*WHOLE, "<function=") else ""
            closing = [spelled(end, special) for end in ends] or [mark] * (begin not in WHOLE)
            first[mark] = Region(kind, Marks(dict.fromkeys(closing)), not ends, prefix)
    later = Marks(first)
    for mark, region in first.items():
        called = region.kind == "call" and structure != "response_format" and mark not in WHOLE
        if not called and mark not in heads and region.kind and "\ud800" not in mark:
            del later[mark]
    return Grammar(llm, tools, first, later, special, asked, channels, bool(structure))


def spelled(text: str, special: Mapping[int, str]) -> str:
    """Return a text with its special tokens between half surrogates, which no text has."""
    names = sorted((re.escape(one[1:-1]) for one in special.values()), key=len, reverse=True)
    return re.sub("|".join(names), "\ud800\\g<0>\udfff", text) if names else text


def _named(text: str, template: Template) -> tuple[Table, Table]:
    """Return the marks of reasoning and of calls in the text of a template, or in the fields of a response template."""
    text = text.replace("\\", "")
    reasoning, calls = (
        {mark: ends for mark, ends in known.items() if any(sign in text for sign in SIGNS.get(mark, (mark,)))}
        for known in (REASONING, CALLS)
    )
    for name, field in template.get("fields", {}).items():
        table = reasoning if name in REASONING_FIELDS else calls if name == "tool_calls" else None
        if table == {}:
            table |= dict.fromkeys(_literals(field, "open", 0), _literals(field, "close", -1))
    return reasoning, calls


def _literals(field: Template, side: str, place: int) -> tuple[str, ...]:
    """Return the marks of one side of a response template's field; of a pattern, its first or last plain text."""
    given = field.get(side) or [found[place] for found in [LITERAL.findall(field.get(f"{side}_pattern", ""))] if found]
    return tuple(re.sub(r"\\(\W)", r"\1", mark) for mark in ([given] if isinstance(given, str) else given))


def _template_of_type(llm: LLM) -> Template:
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # an older transformers, or one without what its own server needs
        return {}
    return get_response_template(llm.tokenizer, llm.target.model) or {}
