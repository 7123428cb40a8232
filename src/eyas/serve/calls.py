"""From the text between the marks of a call to functions. A model writes them in one of these forms:

{"name": "f", "arguments": {"a": "x"}}, or a list of these        Hermes, Qwen, Llama, Mistral, Phi, Granite, Command
f{"a": "x"}, with a mark between name and arguments                 Mistral, DeepSeek, Kimi, gpt-oss
call:f{a:<|"|>x<|"|>}                                             Gemma
<function=f><parameter=a>x</parameter></function>                 Qwen3-Coder, Qwen3.5, Seed-OSS, Nemotron
<invoke name="f"><parameter name="a">x</parameter></invoke>       MiniMax, DeepSeek V3.2
f<arg_key>a</arg_key><arg_value>x</arg_value>                     GLM
[f(a="x")], or calls of Python one a line                         Llama 4, LFM2, Olmo 3
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from eyas.serve.errors import JsonObject

Schemas = Mapping[str, Any]
Function = dict[str, str]  # "name", and "arguments" as JSON
DECODER = json.JSONDecoder(strict=False)  # models write line breaks inside of strings
BETWEEN = re.compile(r"[\s;,`]*")  # after a JSON value
NAMED = re.compile(
    r'(call:|functions\.|function<｜tool▁sep｜>)?([^\s{}<\[\]"`]+?)'
    r"(?:(?::\d+)?<\|tool_call_argument_begin\|>|<｜tool▁sep｜>|\[CALL_ID\]\w*|\[ARGS\]|```json|\s)*(?={)"
)
QUOTES = ('<|"|>', "<escape>")
BARE = re.compile(  # a string of JSON, a key without quotation marks, a string of Gemma
    r"""("(?:[^"\\]|\\.)*")|([^\s"{}\[\]:,<][^"{}\[\]:,<]*?)\s*:|(<\|"\|>|<escape>)(.*?)\3""", re.DOTALL
)
TAGGED = re.compile(
    r'\s*(?:<(?:｜DSML｜)?(?:function=([^>\n]+)|invoke name="([^"\n]+)"[^>\n]*)>|([^\s<{]+)(?=\s*<arg_key>))'
)
TAGS_END = re.compile(r"\s*</(?:｜DSML｜)?(?:function|invoke)>\s*")
KEY = re.compile(
    r"\s*<(?:｜DSML｜)?(?:parameter(=)([^>\n]+)>|parameter name=\"([^\"\n]+)\"[^>\n]*>|arg_key>(.*?)</arg_key>\s*<arg_value>)"
)
NEXT_KEY = r"<(?:｜DSML｜)?(?:parameter[= ]|arg_key>)"
VALUE_END = re.compile(  # with group 1 where a call goes on after it; or a key inside of a value
    rf"</(?:｜DSML｜)?(?:parameter|arg_value)>(?=(\s*(?:{NEXT_KEY}|</(?:｜DSML｜)?(?:function|invoke)>|\Z))?)|{NEXT_KEY}"
)
TYPES: Schemas = {
    "integer": int, "number": int | float, "null": type(None), "object": dict, "array": list,
}  # fmt: skip
WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, as models write them
PYTHON = re.compile(r"\s*([^\s\[\](){}<>\"'`,=:]+)\(")  # the beginning of a call in Python
ARGUMENT = re.compile(r"[\s,]*([^\s(){}<>\"'`,=][^(){}<>\"'`,=]*?)\s*=")
CLOSE = re.compile(r"[\s,]*\)[\s,;]*")
PARTS = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([\[{(])|([\]})])|(,)|(["'])|[^\[\]{}(),"']+""", re.DOTALL)


class UnfinishedError(ValueError):
    """The text ends inside of an argument: a mark that follows is a part of it."""


def read_calls(text: str, tools: Schemas, last: bool = False) -> list[Function]:
    """Return the functions that a text calls; [] for JSON that is not a call. Raise ValueError if the text is not a
    call. `tools`: schemas of arguments, which say which texts are numbers. `last`: nothing follows, so a final mark
    may lack."""
    text = text.strip()
    if PYTHON.match(text.removeprefix("[")):
        return functions_of(_calls_of_python(text))
    try:
        return functions_of(_values(text))
    except ValueError:
        if not text or text[0] in '{["':
            raise
    if text in tools and not last:  # GLM's call without arguments
        return functions_of([{"name": text}])
    if named := NAMED.match(text):
        return functions_of([{"name": named[2], "arguments": _named_arguments(text[named.end() :], bool(named[1]))}])
    return functions_of(_tagged(text, tools, last))


def functions_of(calls: Iterable[Any]) -> list[Function]:
    """Return calls that are read, each a mapping or a list of them, as functions; [] if one is not a call."""
    made = [_function(one) for call in calls for one in (call if isinstance(call, list) else [call])]
    return [one for one in made if one] if all(made) else []


def _function(given: Any) -> Function | None:
    """Return the name and the arguments of a call; None where it is not one. A call without arguments has none."""
    call = given.get("function", given) if isinstance(given, Mapping) else None
    name = call.get("name", call.get("tool_name")) if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    given = call.get("arguments", call.get("parameters"))  # type: ignore[union-attr]  # Llama writes parameters
    arguments = {} if given is None else given
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999, which is not a number of JSON once it is read
        return None
    return {"name": name, "arguments": text.encode("utf-8", "replace").decode()}


def _values(text: str) -> list[Any]:
    value, place = _value(text, 0)
    values = [value]
    while place < len(text):
        value, place = _value(text, place)
        values.append(value)
    return values


def _value(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at a place, and the place after it."""
    try:
        value, place = DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise (UnfinishedError if error.msg.startswith("Unterminated string") else ValueError)(error.msg) from None
    return value, BETWEEN.match(text, place).end()  # type: ignore[union-attr]


def _calls_of_python(text: str) -> list[dict[str, Any]]:
    """Return the calls of a text in Python, in a list or one a line: arguments have names, and are literals of Python or
    of JSON."""
    if text.startswith("["):
        text = text.removeprefix("[").removesuffix("]")
    calls, place = list[dict[str, Any]](), 0
    while place < len(text):
        head = PYTHON.match(text, place)
        if head is None:
            raise ValueError("no call")
        place, arguments = head.end(), dict[str, Any]()
        while key := ARGUMENT.match(text, place):
            place = _literal_end(text, key.end())
            arguments[key[1]] = _literal(text[key.end() : place].strip())
        end = CLOSE.match(text, place)
        if end is None:
            raise ValueError("no argument")
        place = end.end()
        calls.append({"name": head[1], "arguments": arguments})
    return calls


def _literal_end(text: str, place: int) -> int:
    """Return the place of the comma or the bracket that ends an argument."""
    depth = 0
    for part in PARTS.finditer(text, place):
        if part[5]:
            raise UnfinishedError("a string is open")
        if depth == 0 and (part[3] or part[4]):
            return part.start()
        depth += bool(part[2]) - bool(part[3])
    raise ValueError("a bracket is open")


def _literal(text: str) -> Any:
    """Return the value of a literal. Raise ValueError where it is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        text = text.replace("\n", "\\n") if text[:1] in ("'", '"') else text
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that Python does not know
            return json.loads(json.dumps(ast.literal_eval(text)))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _named_arguments(text: str, bare: bool) -> Any:
    """Return the arguments after a name. `bare`: keys may lack quotation marks, and strings may have Gemma's."""
    if bare:
        if any(text.count(quote) % 2 for quote in QUOTES):
            raise UnfinishedError("a string is open")
        text = BARE.sub(lambda found: found[1] or (f'"{found[2]}":' if found[2] else json.dumps(found[4])), text)
    first, *others = _values(text)
    if others:
        raise ValueError("more than the arguments")
    return first


def _tagged(text: str, tools: Schemas, last: bool) -> list[JsonObject]:
    """Return the calls of a text whose arguments stand between tags."""
    calls, place = list[JsonObject](), 0
    while place < len(text):
        head = TAGGED.match(text, place)
        if head is None:
            raise ValueError("no name")
        name, place, arguments = head[1] or head[2] or head[3], head.end(), JsonObject()
        while key := KEY.match(text, place):
            value, place = _tagged_value(text, key, last)
            named = key[2] or key[3] or key[4]
            arguments[named] = _typed(value, tools.get(name, {}).get(named))
        end = TAGS_END.match(text, place)
        if not end and text.startswith("{", place):  # Llama's form, with JSON between the tags
            arguments, place = _value(text, place)
            end = TAGS_END.match(text, place)
        if not end and place < len(text):
            raise ValueError("no argument")
        if not end and not head[3] and not last:
            raise UnfinishedError("the function is open")
        place = end.end() if end else place
        calls.append({"name": name, "arguments": arguments})
    return calls


def _tagged_value(text: str, key: re.Match[str], last: bool) -> tuple[str, int]:
    """Return the text of an argument without calls inside of it, and the place after it."""
    begin, depth = key.end(), 0
    in_lines = bool(key[1]) and text.startswith("\n", begin)
    for mark in VALUE_END.finditer(text, begin):
        if not mark[0].startswith("</"):
            depth += 1
        elif depth and not last:
            depth -= 1
        elif mark[1] is not None and (last or not in_lines or text.startswith("\n", mark.start() - 1)):
            value = text[begin : mark.start()]
            return (value[1:].removesuffix("\n") if in_lines else value), mark.end()
    raise UnfinishedError("an argument is open")


def _typed(text: str, schema: Any) -> Any:
    """Return an argument as a value of its schema's type; the text where it has none, or is not of this type."""
    kinds = _kinds(schema)
    word = text.strip()
    if not kinds or ("string" in kinds and word not in ("null", "None")):
        return text
    try:
        value = json.loads(WORDS.get(word, word))
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        value = int(value)
    fits = (kind in TYPES and isinstance(value, TYPES[kind]) for kind in kinds - {"boolean"})
    return value if ("boolean" in kinds if isinstance(value, bool) else any(fits)) else text


def _kinds(schema: Any) -> set[Any]:
    """Return the names of types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    others = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    given = schema.get("type")
    names = [*(given if isinstance(given, list) else [given]), "null" if schema.get("nullable") else None]
    return {name for name in names if isinstance(name, str)}.union(
        *(_kinds(one) for listed in others for one in listed)
    )
