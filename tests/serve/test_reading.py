"""Reading answers: content, reasoning and calls, by the marks of each family of templates."""

import asyncio
import json
import random
import re
from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import eyas
from eyas.api import TextReader
from eyas.serve.chat import Chat, ChatBody, prepare
from eyas.serve.errors import ApiError
from eyas.serve.marks import grammar_of
from eyas.serve.reading import Reader
from eyas.serve.records import Delta
from eyas.serve.service import Service
from eyas.serve.settings import Settings
from eyas.serve.tools import Tools
from serving import TOOL_RESPONSE, TOOL_TEMPLATE, tooled_llm

ARGUMENTS = {"type": "object", "properties": {"t": {"type": "string"}, "n": {"type": "integer"}, "file-name": {}}}
TOOLS = Tools(tuple({"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("f", "g-h")))
# Marks in a chat template, special tokens, and calls of f as its family writes them; {} is the text of argument t.
FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "hermes": ("<think></think><tool_call>", [], '<tool_call>\n{"name": "f", "arguments": {"t": %j}}\n</tool_call>'),
    "qwen": (
        "<think></think><tool_call><function=", [],
        "<tool_call>\n<function=f>\n<parameter=t>\n%s\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "<think></think><tool_call>", [],
        "<tool_call>f\n<arg_key>t</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    ),
    "gemma": (
        "<channel|><|tool_call>", ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        '<|tool_call>call:f{t:<|"|>%s<|"|>}<tool_call|>',
    ),
    "functiongemma": (
        "<start_function_call>", ["<start_function_call>", "<end_function_call>", "<escape>"],
        "<start_function_call>call:f{t:<escape>%s<escape>}<end_function_call>",
    ),
    "mistral": (
        "[THINK][TOOL_CALLS]", ["[TOOL_CALLS]", "[THINK]", "[/THINK]", "[ARGS]"],
        '[TOOL_CALLS][{"name": "f", "arguments": {"t": %j}}]',
    ),
    "mistral11": ("[TOOL_CALLS]", ["[TOOL_CALLS]", "[ARGS]"], '[TOOL_CALLS]f[ARGS]{"t": %j}'),
    "llama": (
        '<|python_tag|> Respond in the format {"name": function name, "parameters": dictionary}', ["<|python_tag|>"],
        '<|python_tag|>{"name": "f", "parameters": {"t": %j}}',
    ),
    "deepseek": (
        "<think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁calls▁end｜>",
        [*("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"t": %j}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek31": (
        "<think></think><｜tool▁call▁begin｜>", ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"t": %j}<｜tool▁call▁end｜>',
    ),
    "deepseek32": (
        "<think></think><｜DSML｜function_calls>", [],
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="t" string="true">%s'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_calls_section_end|>",
        [*("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
         "<|tool_call_argument_begin|>"],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"t": %j}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "llama4": (
        "<|python_start|>", ["<|python_start|>", "<|python_end|>"], "<|python_start|>[f(t=%j)]<|python_end|>",
    ),
    "lfm2": (
        "<|tool_list_start|>", ["<|tool_call_start|>", "<|tool_call_end|>"],
        "<|tool_call_start|>[f(t=%j)]<|tool_call_end|>",
    ),
    "olmo3": ("<function_calls>", [], "<function_calls>f(t=%j)</function_calls>"),
    "minimax": (
        "<think></think><minimax:tool_call>", [],
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="t">%s</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "harmony": (
        "<|start|><|channel|><|message|>",
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"],
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"t": %j}<|call|>',
    ),
}  # fmt: skip


def model(template: str, special: Sequence[str] = (), kind: str = "nothing", response: Any = None) -> Any:
    """As much of an LLM as tells how it writes; a token is a byte."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eot|>", chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in special]})
    if response is not None:
        tokenizer.response_template = response
    target = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(model_type=kind)))
    return SimpleNamespace(tokenizer=tokenizer, eos=frozenset({tokenizer.eos_token_id}), target=target)


@cache
def family(name: str) -> Any:
    template, special, _ = FAMILIES[name]
    return model(template, special)


def regions(name: str) -> list[Any]:
    """The regions that a family's marks begin."""
    return [*grammar_of(family(name), TOOLS).first.values()]


def shown(marks: Iterable[str]) -> list[str]:
    """Marks as they are in texts: without what stands for a special token."""
    return [mark.translate({0xD800: None, 0xDFFF: None}) for mark in marks]


def written(name: str, text: str) -> str:
    """A call of f with this argument t."""
    return FAMILIES[name][2].replace("%j", json.dumps(text)).replace("%s", text)


def deltas(
    llm: Any, text: str, stops: Sequence[str] = (), finish: str = "stop", cuts: Iterable[int] = ()
) -> list[Delta]:
    """The Deltas of an answer, of as many tokens each as `cuts` says, then one for each token."""
    reader, ids, made = TextReader(llm.tokenizer, stops), llm.tokenizer(text)["input_ids"], []
    ids = [*ids, llm.tokenizer.eos_token_id] if finish == "stop" else ids
    sizes = iter(cuts)
    while ids:
        count = next(sizes, 1)
        taken, ids = ids[:count], ids[count:]
        fed = next((n for n, token in enumerate(taken, 1) if reader.feed(token)), None)
        end = fed is not None or not ids
        made.append(Delta(0, reader.take(final=end), tuple(taken[:fed]), finish if end else None, reader.stop_string))
        if end:
            break
    return made


def read(reader: Reader, pieces: Iterable[Delta]) -> dict[str, Any]:
    """The parts of an answer, added up, in the order in which they begin."""
    made: dict[str, Any] = {}
    for part in (part for delta in pieces for part in reader.read(delta)):
        for key, value in part.items():
            if key == "tool_calls":
                made.setdefault(key, []).extend(
                    (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in value
                )
            else:
                made[key] = made.get(key, "") + value
    return made


def answer(
    llm: Any, text: str, tools: Tools = TOOLS, structure: str = "", opening: str = "", prefill: str = "", **how: Any
) -> Any:
    """What is read of an answer, which is the same in one piece and token by token."""
    reader = Reader(grammar_of(llm, tools, structure), opening, prefill)
    pieces = deltas(llm, text, **how)
    whole = Delta(0, "".join(d.text for d in pieces), tuple(t for d in pieces for t in d.token_ids), pieces[-1].finish)
    streamed, at_once = reader.new(), reader.new()
    made = read(streamed, pieces)
    assert made == read(at_once, [whole])
    assert streamed.reasoning_tokens == at_once.reasoning_tokens
    return made


TEXTS = 40  # for each family
WORDS = ["Hi", " there", "\n", "  ", "{", "}", '"', "\\", ":", ",", "[", "]", '{"name": "f", "arguments": {"t": "', '"}}', "f", "é",
         "to=functions.f", "analysis"]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pieces_do_not_matter(name: str) -> None:
    """Guards streams that differ from whole answers: random texts of marks, halves of marks, calls and words, cut
    anywhere, with and without stop strings, give the same content, reasoning, calls and count of tokens."""
    llm, noise = family(name), random.Random(name)
    grammar = grammar_of(llm, TOOLS)
    closing = [end for region in regions(name) for end in region.closing]
    marks = [
        *shown([*grammar.first, *grammar.special.values(), *closing]),
        "<parameter=t>",
        "</parameter>",
        "<|message|>",
    ]

    def part() -> str:
        mark = noise.choice(marks)
        half, word, call = (
            mark[: noise.randrange(len(mark)) + 1],
            noise.choice(WORDS),
            written(name, noise.choice(WORDS)),
        )
        return noise.choice((mark, half, word, call))

    for number in range(TEXTS):
        text = "".join(part() for _ in range(noise.randrange(1, 14)))
        grammar = grammar_of(llm, TOOLS, noise.choice(["", "", "choice", "response_format"]))
        opening = noise.choice(["", "", "<think>\n", "<|start|>assistant"])
        reader = Reader(grammar, opening, noise.choice(["", "", "a <"]))
        how = {"stops": noise.choice([(), ("</", "X"), ('"}',)]), "finish": noise.choice(["stop", "length"])}
        whole = deltas(llm, text, **how, cuts=[10**6])
        expected = read(at_once := reader.new(), whole)
        for _ in range(3):
            cut = deltas(llm, text, **how, cuts=[noise.choice([1, 1, 2, 5, 40]) for _ in text])
            streamed = reader.new()
            assert read(streamed, cut) == expected, (number, text, how)
            assert (streamed.called, streamed.reasoning_tokens) == (at_once.called, at_once.reasoning_tokens)
        if not opening and not any(mark in text for mark in marks):
            assert expected.get("content", "") == "".join(d.text for d in whole)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "text", ["x", "    return x", "\treturn x\n", "\na\n\n", "  ", "", 'a "b" \\ {c}', "é <b> </i>"]
)
def test_arguments_of_text(name: str, text: str) -> None:
    """Guards agents' edits: blanks and empty lines at both ends of an argument are part of it."""
    made = answer(family(name), "Look. " + written(name, text))
    assert made == {"content": "Look.", "tool_calls": [("f", {"t": text})]}


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_in_arguments(name: str) -> None:
    """Guards calls whose argument holds the mark that ends calls, or a whole call, as those of agents that write
    about calls do: they were cut there without a word."""
    llm = family(name)
    ends = shown(end for region in regions(name) if region.kind == "call" for end in region.closing)
    texts = [f"ends with {end} here" for end in (*ends, "</parameter> x", "</function>", "</invoke> y")
             if not name.startswith("mistral") and not (name == "deepseek32" and end.startswith("</invoke"))]  # fmt: skip
    for text in texts:
        assert answer(llm, written(name, text))["tool_calls"] == [("f", {"t": text})], text
    if name in ("hermes", "qwen", "minimax", "deepseek32"):
        text = f"Calls look so:\n{written(name, 'x')}\nand so on."
        assert answer(llm, written(name, text) * 2)["tool_calls"] == [("f", {"t": text})] * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut(name: str) -> None:
    """Guards against calls that lack what max_tokens cut: an agent would run them. What was written is content."""
    llm, call = family(name), written(name, "abc")
    ids = llm.tokenizer(call)["input_ids"]
    ends = ("}", "]", "</function>\n", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
    for count in range(1, len(ids)):
        text = llm.tokenizer.decode(ids[:count])
        made = answer(llm, "Look. " + text, finish="length")
        if "tool_calls" in made:
            assert made["tool_calls"] == [("f", {"t": "abc"})], text
            assert text.rstrip("`\n").endswith(ends), text
        elif "abc" in text:
            assert made["content"].endswith("abc" + text.partition("abc")[2]), text


@pytest.mark.parametrize(("name", "end"), [
    ("qwen", "</function>"), ("glm", "</tool_call>"), ("minimax", "</invoke>"), ("deepseek32", "</｜DSML｜invoke>"),
])  # fmt: skip
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_call_that_is_cut_between_arguments(name: str, end: str, finish: str) -> None:
    """Guards calls between tags that end after one of two arguments, by their length, a stop string or the model."""
    call, argument = written(name, "abc"), re.compile("<[^<]*(parameter|arg_key)")
    begin = argument.search(call)
    assert begin is not None
    two = call.partition(end)[0] + call[begin.start() :]
    assert len(answer(family(name), two.replace("abc", "5"))["tool_calls"]) == 1
    for cut in range(begin.start(), two.rindex("abc") + 4, 3):
        assert "tool_calls" not in answer(family(name), two[:cut], finish=finish), two[:cut]


@pytest.mark.parametrize("name", ["hermes", "qwen", "minimax"])
def test_a_call_that_is_cut_within_examples(name: str) -> None:
    """Guards against a call that is an example in the argument of a call that max_tokens cut."""
    text = written(name, f"So:\n{written(name, 'x')}\nor </parameter>\n{written(name, 'y')}\n")
    for cut in range(1, len(text), 7):
        assert "tool_calls" not in answer(family(name), text[:cut], finish="length"), text[:cut]


@pytest.mark.parametrize("name", FAMILIES)
def test_good_calls_and_broken_ones(name: str) -> None:
    """Guards a good call beside a broken one: the good one is a call, in both forms; the broken one is text."""
    llm, good = family(name), written(name, "x")
    broken = good
    for old, new in (
        ('"t"', "t"),
        ("{t:", "{:"),
        ("<parameter=", "<param="),
        ("arg_key", "key"),
        ("parameter name", "param name"),
        ("(t=", "(="),
    ):
        broken = broken.replace(old, new)
    assert answer(llm, good + good)["tool_calls"] == [("f", {"t": "x"})] * 2
    for text in (good + broken, broken + good):
        made = answer(llm, text)
        assert made["tool_calls"] == [("f", {"t": "x"})]
        assert "x" in made["content"]
    assert answer(llm, good + good, Tools(TOOLS.listed, parallel=False))["tool_calls"] == [("f", {"t": "x"})]


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_strings_and_calls(name: str) -> None:
    """Guards calls while the request has stop strings: marks that are special tokens were not seen. Clients also stop at
    the mark that ends a call, which is then not in the text."""
    llm, call = family(name), written(name, "x")
    assert answer(llm, "Look. " + call, stops=["Observation:"])["tool_calls"] == [("f", {"t": "x"})]
    made = answer(llm, call + "\nObservation: y", stops=["Observation:"])
    assert (made["tool_calls"], "content" in made) == ([("f", {"t": "x"})], False)
    if name in ("hermes", "qwen", "minimax"):
        last = "</minimax:tool_call>" if name == "minimax" else "</tool_call>"
        assert answer(llm, call, stops=[last]) == {"tool_calls": [("f", {"t": "x"})]}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_nobody_asked_for(name: str) -> None:
    """Guards requests without tools, or with tool_choice none: the text of a call is content."""
    text = f"So: {written(name, 'x')}"
    expected = text
    for token in FAMILIES[name][1]:
        expected = expected.replace(token, "")
    made = answer(family(name), text, Tools())
    assert made == {"content": 'So: {"t": "x"}' if name == "harmony" else expected}


CHAIN = '[1, {"a b": true}]'
NAMED = f'{{"file-name": "x", "Basic LLM Chain": {CHAIN}}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma", '<|tool_call>call:g-h{file-name:<|"|>x<|"|>,Basic LLM Chain:[1,{a b:true}]}<tool_call|>'),
        ("qwen", f"<tool_call><function=g-h><parameter=file-name>x</parameter><parameter=Basic LLM Chain>{CHAIN}</parameter>"
                 "</function></tool_call>"),
        ("glm", "<tool_call>g-h<arg_key>file-name</arg_key><arg_value>x</arg_value><arg_key>Basic LLM Chain</arg_key>\n"
                f"<arg_value>{CHAIN}</arg_value></tool_call>"),
        ("kimi", f"<|tool_call_begin|>functions.g-h:12<|tool_call_argument_begin|>{NAMED}<|tool_call_end|>"),
        ("lfm2", f'<|tool_call_start|>[g-h(file-name="x", Basic LLM Chain={CHAIN})]<|tool_call_end|>'),
        ("harmony", f"<|start|>assistant to=functions.g-h<|channel|>commentary json<|message|>{NAMED}<|call|>"),
    ],
)  # fmt: skip
def test_names(name: str, text: str) -> None:
    """Guards names of functions and of arguments that are not identifiers, as many MCP servers have them."""
    typed = {**ARGUMENTS["properties"], "Basic LLM Chain": {"type": "array"}}  # type: ignore[dict-item]
    tool = {"type": "function", "function": {"name": "g-h", "parameters": {"properties": typed}}}
    made = answer(family(name), text, Tools((tool,)))
    assert made == {"tool_calls": [("g-h", {"file-name": "x", "Basic LLM Chain": [1, {"a b": True}]})]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5), ({"type": "integer"}, "5.0", 5), ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "true", "true"), ({"type": "number"}, "0.5", 0.5), ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "1", "1"), ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[1]", [1]), ({"type": "array"}, '{"a": 1}', '{"a": 1}'), ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None), ({"type": "string", "nullable": True}, "5", "5"), ({}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None), ({"type": [{}, 5]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7), ({"anyOf": 5, "oneOf": ["x"]}, "5", "5"), (5, "5", "5"),
    ],
)  # fmt: skip
def test_types_of_arguments(schema: Any, text: str, value: Any) -> None:
    """Guards arguments between tags: they are texts, and become values of the schema's type where they are some."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"t": schema}}}}
    for name in ("qwen", "glm", "minimax"):
        assert answer(family(name), written(name, text), Tools((tool,))) == {"tool_calls": [("f", {"t": value})]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s \"so\", (no)'", "it's \"so\", (no)"), ("true", True), ("None", None), ("-1.5", -1.5), ('"\\ud83d\\ude00"', "\U0001f600"),
        ("{'a': [1, 'b)']}", {"a": [1, "b)"]}), ("('a', 2)", ["a", 2]), ("'a\nb'", "a\nb"), (r"'\d'", r"\d"),
        *((wrong, None) for wrong in ("b'x'", "open('x')", "1 +", "{1: {2}}", "1e999", "x", "'", "[", ")", "**x", "[" * 999)),
    ],
)  # fmt: skip
def test_arguments_in_python(text: str, value: Any) -> None:
    """Guards Llama 4 and LFM2, which write calls in Python: literals become values; what is none is content."""
    for name, call in (
        ("lfm2", f"<|tool_call_start|>[f(t={text}), f()]<|tool_call_end|>"),
        ("llama4", f"[f(t={text}), f()]"),
    ):
        made = answer(family(name), call)
        if value is None and text != "None":
            assert "tool_calls" not in made
        else:
            assert made == {"tool_calls": [("f", {"t": value}), ("f", {})]}


FUNCTION = "<function=f>\n<parameter=t>\nx\n</parameter>\n</function>"
OBJECT = '{"name": "f", "parameters": {"t": "x"}}'
INVOKED = written("minimax", "x").replace("</invoke>", '</invoke>\n<invoke name="g-h">\n</invoke>')
UNKNOWN = "<tool_call>unknown</tool_call>"
OTHERS = ('{"name": "unknown", "parameters": {}}', '{"foo": 1}', f"So: {OBJECT}", '{"name": "f", "par')  # of llama
CALLS = [("f", {"t": "x"})]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen", f"Look.\n{FUNCTION}", {"content": "Look.", "tool_calls": CALLS}),
        ("qwen", f"<tool_call>\n{FUNCTION.removesuffix('</function>')}</tool_call>", {"tool_calls": CALLS}),
        ("qwen", "<tool_call>\n<function=f>\n</function>\n</tool_call>", {"tool_calls": [("f", {})]}),
        ("qwen", written("hermes", "x"), {"tool_calls": CALLS}),
        ("qwen", '<function=f>{"t": "x"}</function>', {"tool_calls": CALLS}),
        ("hermes", written("hermes", "x").removesuffix("\n</tool_call>"), {"tool_calls": CALLS}),
        (
            "hermes",
            "<tool_call>{no JSON}</tool_call> and more!",
            {"content": "<tool_call>{no JSON}</tool_call> and more!"},
        ),
        ("glm", f"<tool_call>f</tool_call>{UNKNOWN}", {"tool_calls": [("f", {})], "content": UNKNOWN}),
        ("minimax", INVOKED, {"tool_calls": [*CALLS, ("g-h", {})]}),
        ("llama", OBJECT, {"tool_calls": CALLS}),
        ("llama", f"{OBJECT}; {OBJECT}", {"tool_calls": CALLS * 2}),
        *(("llama", text, {"content": text}) for text in OTHERS),
        *(("llama4", text, {"content": text}) for text in ("[1] A note.", "[x](y)", "[other(t=1)]", "[f(1)]", "[]")),
        (
            "olmo3",
            "Look.\n<function_calls>\nf(t=1)\nf(t=2,\n  n=3)\n</function_calls>",
            {"content": "Look.", "tool_calls": [("f", {"t": 1}), ("f", {"t": 2, "n": 3})]},
        ),
    ],
)
def test_other_forms_of_calls(name: str, text: str, expected: dict[str, Any]) -> None:
    """Guards what models write beside the usual form: without the outer mark, without the last one, several at once; what
    a weak model writes that is not a call is text, and so is what follows it."""
    assert answer(family(name), text) == expected
    assert name != "llama" or answer(family(name), text, Tools()) == {"content": text}


def test_forced_calls() -> None:
    """Guards an answer that a grammar made one call, and one that the length cut off."""
    forced = Tools(TOOLS.listed, ("f",))
    call = '{"name": "f", "arguments": {"t": "</tool_call>"}}'
    for name in FAMILIES:
        assert answer(family(name), call, forced, opening="<think>") == {"tool_calls": [("f", {"t": "</tool_call>"})]}
        assert answer(family(name), call[:-3], forced, finish="length") == {"content": call[:-3]}


@pytest.mark.parametrize("step", [1, 7, 1000], ids=["characters", "pieces", "whole"])
@pytest.mark.parametrize(
    ("written", "call"),
    [
        ('{"foo": 1}', None), ("[1]", None), ("5", None), ("null", None), ('"f"', None), ('{"name": 5, "arguments": {}}', None),
        ('{"name": "f", "arguments": {"a": 1e999}}', None), ('{"name": "f", "arguments": {"a": NaN}}', None),
        ('{"name": "f"}', ("f", "{}")), ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": "{}"}', ("f", "{}")), ('{"name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        (r'{"name": "f", "arguments": {"a": "\ud800"}}', ("f", '{"a": "?"}')),
    ],
)  # fmt: skip
def test_json_that_is_no_call(written: str, call: tuple[str, str] | None, step: int) -> None:
    """Guards requests that failed with status 500 at what a weak model writes between the marks of a call: JSON
    that is no call is content; a call without arguments is one."""
    reader = Reader(grammar_of(model("", response=TOOL_RESPONSE), TOOLS))
    text = f"Before <tool_call>{written}</tool_call> and more"
    pieces = [Delta(0, text[begin : begin + step]) for begin in range(0, len(text), step)]
    parts = [part for piece in (*pieces, Delta(0, "", finish="stop")) for part in reader.read(piece)]
    functions = [one["function"] for part in parts for one in part.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    assert "".join(part.get("content", "") for part in parts) == f"Before{'' if call else written} and more"
    assert (calls, reader.called) == ([call] if call else [], call is not None)
    json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()  # what a response can hold


THOUGHTS = {
    "hermes": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]"), "gemma": ("<|channel>thought\n", "<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning(name: str) -> None:
    """Guards reasoning, before a text and a call, that the model or the template begins; only its own tokens count."""
    llm, (begin, end) = family(name), THOUGHTS[name]
    made = {"reasoning_content": "Hm,\n no.", "content": "    Yes."}
    assert answer(llm, f"{begin}\nHm,\n no.\n{end}" + ("\n\n" if name != "harmony" else "") + "    Yes.") == made
    begun = answer(llm, f"\nHm,\n no.\n{end}Yes.", opening=f"<|im_start|>assistant\n{begin}")
    assert begun == {**made, "content": "Yes."}
    assert answer(llm, f"{begin}Hm", finish="length") == {"reasoning_content": "Hm"}
    called = answer(llm, f"{begin}Hm.{end.partition('<|start|>')[0]}\n{written(name, 'x')}")
    assert called == {"reasoning_content": "Hm.", "tool_calls": [("f", {"t": "x"})]}
    assert answer(llm, f"{begin}{end}Yes.") == {"content": "Yes."}
    reader = Reader(grammar_of(llm, Tools()))
    read(reader, deltas(llm, f"{begin}Hm é.{end}Yes."))
    assert reader.reasoning_tokens == len(llm.tokenizer("Hm é.")["input_ids"])


def test_marks_that_are_text() -> None:
    """Guards the marks of reasoning in a text, in JSON, in a choice, and in the user's own words."""
    llm = family("hermes")
    for text in ("Use <think> and </think>.", "a </think> b", '{"a": "<think>x</think>"}', " <thin", "<", "\n\nHi\n"):
        assert answer(llm, text) == {"content": text}
        assert answer(llm, text, structure="choice") == {"content": text}
    call = written("hermes", "x")
    assert answer(llm, json.dumps({"a": call}), structure="response_format") == {"content": json.dumps({"a": call})}
    assert answer(llm, call, structure="response_format") == {"tool_calls": [("f", {"t": "x"})]}
    assert answer(llm, "<think>", structure="choice") == {"content": "<think>"}
    assert answer(llm, "<think>a</think>b", structure="choice") == {"reasoning_content": "a", "content": "b"}
    assert answer(family("gemma"), "Hm.<|channel>thought\na<channel|>b")["reasoning_content"] == "a"  # a token, no text


def test_the_end_of_the_prompt() -> None:
    """Guards against a prompt's end in the content: blanks after reasoning that it closes, and half a mark."""
    llm = family("hermes")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert answer(llm, "yes", opening=closed) == {"content": "yes"}
    assert answer(llm, "think>yes", prefill="if a <") == {"content": "think>yes"}
    assert answer(llm, " yes", opening="<|im_start|>assistant\n", prefill="The answer is") == {"content": " yes"}
    assert answer(llm, "<think>x</think>", prefill="The mark is ") == {"content": "<think>x</think>"}
    assert answer(llm, "x</think>y", prefill="<think>\nHm, ") == {"reasoning_content": "x", "content": "y"}
    assert answer(llm, '"}}</tool_call>', prefill=written("hermes", "ab")[:-16])["tool_calls"] == [("f", {"t": "ab"})]


@pytest.mark.parametrize(("name", "opening", "added"), [
    ("hermes", "<think>\n", "\n</think>\n\n"), ("hermes", "", ""), ("gemma", "<|channel>thought\n", "\n<channel|>\n\n"),
    ("hermes", "<think>\n\n</think>\n\n", ""), ("harmony", "<|start|>assistant", "<|channel|>final<|message|>"),
    ("harmony", "<|start|>assistant<|channel|>final<|message|>", ""),
])  # fmt: skip
@pytest.mark.parametrize("structure", ["response_format", "regex", "forced"])
def test_a_structure_behind_reasoning(name: str, opening: str, added: str, structure: str) -> None:
    """Guards structures of templates that begin with reasoning: the JSON was reasoning, and no content was left."""
    llm, tools = family(name), Tools(TOOLS.listed, ("f",)) if structure == "forced" else Tools()
    reader = Reader(grammar_of(llm, tools, "" if structure == "forced" else structure), opening)
    assert reader.added == added
    made = read(reader, deltas(llm, '{"name": "f"}'))
    assert made == ({"tool_calls": [("f", {})]} if structure == "forced" else {"content": '{"name": "f"}'})


def test_channels() -> None:
    """Guards gpt-oss: the analysis is reasoning, a commentary for the user is content, one for a function a call."""
    llm = family("harmony")
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"t": "x"}<|call|>'
    )
    read_all = {"reasoning_content": "Hm.", "content": "I look.", "tool_calls": CALLS}
    assert answer(llm, text, opening="<|start|>assistant") == read_all
    addressed = text.replace("<|channel|>commentary to=functions.f ", " to=functions.f<|channel|>commentary ")
    assert answer(llm, addressed)["tool_calls"] == CALLS
    assert answer(llm, addressed.rpartition("assistant")[2], opening="<|start|>assistant") == {"tool_calls": CALLS}
    in_analysis = text.rpartition("assistant")[2].replace("commentary", "analysis")
    assert answer(llm, in_analysis) == {"tool_calls": CALLS}
    assert answer(llm, "<|channel|>final<|message|>to=5") == {"content": "to=5"}
    assert answer(llm, "to=5 Hi", opening="<|start|>assistant") == {"content": "to=5 Hi"}
    assert answer(llm, "<|channel|>anal", finish="length") == {}
    assert answer(llm, text[: text.index("}")], finish="length")["content"].startswith("I look.<|start|>assistant")


def test_tokens_that_end_an_answer() -> None:
    """Guards fine-tunes with an end of their own: it is not shown, be it a special token or not."""
    llm = model("<think></think><tool_call>", ["<|im_end|>", "<|mine|>"])
    assert answer(llm, "Hello!<|mine|><|im_end|>") == {"content": "Hello!"}
    llm.tokenizer.add_tokens([AddedToken("<end>", special=False)])
    llm.eos = frozenset({llm.tokenizer.convert_tokens_to_ids("<end>")})
    ids = llm.tokenizer("Hello <end> you<end>")["input_ids"]
    reader = Reader(grammar_of(llm, TOOLS))
    assert read(reader.new(), [Delta(0, "Hello <end> you<end>", tuple(ids), "stop")]) == {"content": "Hello <end> you"}
    assert read(reader.new(), [Delta(0, "Hello<end>", tuple(ids[-1:]), "length")]) == {"content": "Hello<end>"}


def test_text_goes_out_at_once() -> None:
    """Guards the latency of streams: a text waits only while it may be the beginning of a mark, or blanks before one."""
    llm = family("hermes")
    for tools, held in ((TOOLS, [" "]), (Tools(), [])):
        reader = Reader(grammar_of(llm, tools))
        for delta in deltas(llm, "One two<b>"):
            made = "".join(part["content"] for part in reader.read(delta))
            expected = "" if delta.text in held else delta.text
            assert made.strip() == expected.strip() or delta.text == "<" or made == "<b"
    reader = Reader(grammar_of(llm, Tools()), "<think>")
    for delta in deltas(llm, "One,two"):
        assert reader.read(delta) == ([{"reasoning_content": delta.text}] if delta.text else [])


def test_marks_come_from_the_template() -> None:
    """Guards the choice of the reader: the chat template tells before the model's type, and without both a model
    whose calls cannot be read is refused."""
    for kind, name in (("qwen2", "hermes"), ("qwen3_5_text", "qwen"), ("gemma4", "gemma")):
        assert answer(model("", FAMILIES[name][1], kind), written(name, "x"))["tool_calls"] == [("f", {"t": "x"})]
    other = model(FAMILIES["deepseek"][0], FAMILIES["deepseek"][1], "qwen2")
    assert answer(other, written("deepseek", "x"))["tool_calls"] == [("f", {"t": "x"})]
    assert answer(other, written("hermes", "x")) == {"content": written("hermes", "x")}
    with pytest.raises(ApiError, match="tool_choice"):
        grammar_of(model(""), TOOLS)
    assert answer(model(""), " <think>a</think>\n", Tools()) == {"content": " <think>a</think>\n"}


def test_a_response_template_of_its_own() -> None:
    """Guards tokenizers that come with a response template, in transformers' form, whose marks nobody else has."""
    fields = {
        "thinking": {"open": "((", "close": "))", "content": "text"},
        "content": {"close": ["<stop>"], "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call (?P<name>[\w-]+)>", "close_pattern": r"</call>", "repeats": True, "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    }  # fmt: skip
    llm = model("", response={"start_anchor": "x", "fields": fields})
    made = answer(llm, "((Hm.))Look.\n<call g-h>\nt: x\nn: 5\n</call><stop>")
    assert made == {"reasoning_content": "Hm.", "content": "Look.", "tool_calls": [("g-h", {"t": "x", "n": 5})]}
    assert answer(llm, "<call g-h") == {"content": "<call g-h"}


THINKING = TOOL_TEMPLATE.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>\n{% endif %}")


@pytest.fixture(scope="module")
def thinking() -> eyas.LLM:
    """A model whose template begins with reasoning."""
    llm = tooled_llm()
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = THINKING
    return llm


def prepared(llm: eyas.LLM, *messages: Any, **fields: Any) -> Chat:
    body = ChatBody.model_validate({"model": "tiny", "messages": list(messages), "max_tokens": 9, **fields})
    service = Service(llm, Settings("tiny"))
    try:
        return asyncio.run(prepare(service, body))
    finally:
        service.stop()


def said(chat: Chat, text: str) -> dict[str, Any]:
    """What is read of an answer of this text."""
    return read(chat.new_reader(), [Delta(0, text, finish="stop")])


USER = {"role": "user", "content": "What does <think> mean, and </think>?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi <think>"}, {"type": "text", "text": "there"}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "<think>"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"day": "<think>"}'}}]}  # fmt: skip


@pytest.mark.parametrize(
    "messages", [[USER], [PARTS], [USER, CALLED, RESULT], [USER, {"role": "assistant", "content": "a"}, USER]]
)
def test_the_prompt_says_where_an_answer_begins(
    thinking: eyas.LLM, messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the reader against marks in messages: where the answer begins is said by the template's last words."""
    tokenizer: Any = thinking.tokenizer
    text = {"content": "a </think> b"}
    assert said(prepared(thinking, *messages), "Hm.</think>Yes.") == {"reasoning_content": "Hm.", "content": "Yes."}
    assert said(prepared(thinking, *messages, add_generation_prompt=False), "a </think> b") == text
    monkeypatch.setattr(tokenizer, "chat_template", TOOL_TEMPLATE)
    assert said(prepared(thinking, *messages), "a </think> b") == text


def test_an_answer_that_goes_on(thinking: eyas.LLM) -> None:
    """Guards prefills: they are no part of the content, but a mark in them counts."""
    given = {"add_generation_prompt": False, "continue_final_message": True}
    for text, more, parts in (
        ("The answer is ", "yes", {"content": "yes"}), ("if a <", "think>", {"content": "think>"}),
        ("<think>Hm,", " no.</think>Yes.", {"reasoning_content": " no.", "content": "Yes."}),
        ("<think>Hm.</think>", "Yes.", {"content": "Yes."}), ("Use <think> to", " think", {"content": " think"}),
    ):  # fmt: skip
        message = {"role": "assistant", "content": text}
        assert said(prepared(thinking, USER, message, **given), more) == parts, text
        assert said(prepared(thinking, message, **given), more) == parts, text


def test_the_prompt_of_a_structure(thinking: eyas.LLM) -> None:
    """Guards structured output and forced calls of a template that begins with reasoning: the prompt ends it, and is
    otherwise the same."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    tool = {"type": "function", "function": {"name": "f"}}
    made, free = '{"name": "f", "arguments": {}}', prepared(thinking, USER)
    assert free.job.prompts == prepared(thinking, USER, response_format={"type": "text"}).job.prompts
    fields: dict[str, Any]
    for fields in ({"response_format": {"type": "json_object"}}, {"choice": ["a"]}, {"structured_outputs": {"regex": "a"}},
                   {"tools": [tool], "tool_choice": "required"}):  # fmt: skip
        chat = prepared(thinking, USER, **fields)
        assert thinking.tokenizer is not None
        text = str(thinking.tokenizer.decode(list(chat.job.prompts[0])))
        assert text.endswith("<think>\n\n</think>\n\n")
        assert said(chat, made) == ({"tool_calls": [("f", {})]} if "tools" in fields else {"content": made})
