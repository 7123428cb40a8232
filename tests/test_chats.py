"""Chats as clients and data files write them: one form for every template, and errors that name the message."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.errors import InputError
from eyas.text import check_messages, has_place_for_tools, template_keywords, write_chat

USER = {"role": "user", "content": "Hi."}
# As strict as Llama 3.1's and Qwen 3.5's: roles by name, the system's turn first, one call at a time, arguments as objects.
STRICT = """{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}
{{ raise_exception('unexpected role ' + m.role) }}{% endif %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}
{%- if 'tool_calls' in m and m.tool_calls|length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k, v in c.function.arguments.items() %}
 {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
# As Qwen 2.5's and Hermes': arguments as they come, where they are text.
LENIENT = """{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}
<{{ c.function.name }} {{ a if a is string else a | tojson }}>{% endfor %}{% endfor %}"""


def with_template(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with this chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def calling(arguments: Any, **outer: Any) -> dict[str, Any]:
    """An assistant's message that calls f with these arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **outer}


def written(template: str, *messages: Any, **keywords: Any) -> str:
    return write_chat(with_template(template), messages, **{"add_generation_prompt": False, **keywords})[0]


@pytest.mark.parametrize("template", [STRICT, LENIENT])
@pytest.mark.parametrize("arguments", ["", "  \n", None, "null", "{}", {}])
def test_no_arguments_are_an_empty_object(template: str, arguments: Any) -> None:
    """Bug: "not JSON", or "None" in the prompt, for what clients send for a function without parameters."""
    assert written(template, USER, calling(arguments)) == written(template, USER, calling({}))


@pytest.mark.parametrize("template", [STRICT, LENIENT])
@pytest.mark.parametrize("encode", [lambda a: a, json.dumps, lambda a: json.dumps(json.dumps(a))])
def test_arguments_are_an_object_however_they_are_encoded(template: str, encode: Any) -> None:
    """Bug: JSON inside of JSON, which a model imitates; errors of templates that walk over items()."""
    given = {"city": "Oslo", "days": 2}
    text = written(template, calling(encode(given)))
    assert text == written(template, calling(given))
    assert "\\" not in text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"city": "Os', '<f {"city": "Os>'), ("5", "<f 5>"), ('["a"]', '<f ["a"]>'), ("not JSON", "<f not JSON>")],
)
def test_arguments_that_are_no_object(arguments: str, shown: str) -> None:
    """Guards a conversation with a call cut at its length: text for templates of text, an empty object for others."""
    assert shown in written(LENIENT, USER, calling(arguments), USER).replace("\n", "")
    assert written(STRICT, USER, calling(arguments), USER) == written(STRICT, USER, calling({}), USER)


def test_keys_that_are_none_are_left_out() -> None:
    """Guards templates that ask `'tool_calls' in message`: clients set such keys to null in every message."""
    said = {"role": "assistant", "content": "Hello."}
    for calls in ([], None):
        assert written(STRICT, USER, {**said, "tool_calls": calls}) == written(STRICT, USER, said)
    assert check_messages([{**USER, "name": None, "tool_call_id": None, "function_call": None}]) == [USER]
    assert check_messages([{**USER, "name": "Ann"}]) == [{**USER, "name": "Ann"}]


@pytest.mark.parametrize(("message", "says"), [
    (calling("{}", tool_calls={"a": 1}), '"tool_calls" of message 2 must be a list'),
    (calling("{}", tool_calls=["f"]), "call 1 of message 2 must be"),
    (calling("{}", tool_calls=[{"type": "custom", "custom": {"name": "f"}}]), "call 1 of message 2 must be"),
    (calling("{}", tool_calls=[{"function": {"arguments": "{}"}}]), "call 1 of message 2 must be"),
    (calling("{}", content="\ud800"), "content of message 2 is not valid Unicode"),
    (calling("{}", tool_calls=calling("{}")["tool_calls"] * 2), r"one call at a time \(message 2\)"),
])  # fmt: skip
def test_errors_name_the_message(message: dict[str, Any], says: str) -> None:
    """Guards against errors that leave a client with a history of fifty messages to guess."""
    with pytest.raises(InputError, match=says) as caught:
        written(STRICT, USER, message, USER, USER)
    assert "\n" not in str(caught.value)


def test_developer_is_system_where_the_template_does_not_name_it() -> None:
    """Bug: a refusal, or a role that the model has never seen; a second system's turn joins the first."""
    brief, kind = {"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    assert written(STRICT, brief, USER).startswith("[system] Be brief.[user]")
    assert written(LENIENT, brief, USER).startswith("[system] Be brief.[user]")
    both = {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert written(STRICT, kind, brief, USER) == written(STRICT, both, USER)
    naming = LENIENT.replace("[{{ m.role }}]", "{% if m.role == 'developer' %}# {% endif %}[{{ m.role }}]")
    assert written(naming, kind, brief, USER).startswith("[system] Be kind.# [developer] Be brief.")


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_messages_without_content(role: str) -> None:
    """Bug: null content is refused, or "None" in the prompt; a user's message without content is a mistake."""
    for content in ({"content": None}, {}, {"content": []}, {"content": ""}):
        assert check_messages([{"role": role, **content}]) == [{"role": role, "content": ""}]
        if content != {"content": ""}:
            with pytest.raises(InputError, match="message 1"):
                check_messages([{"role": "user", **content}])


def test_a_template_that_asks_for_none() -> None:
    """Bug: DeepSeek's first templates write calls only where content is none; they got "", and left calls out."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}<{{ m['tool_calls'][0]['function']['name'] }}>"
        "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    assert written(template, USER, calling("{}"), {"role": "assistant", "content": None}) == "[Hi.]<f>[]"


SYSTEM = {"role": "system", "content": "Be kind."}
LATE = {"role": "system", "content": " Be brief. "}
DEVELOPER = {**LATE, "role": "developer"}
SAID = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "content": "7"}


@pytest.mark.parametrize(("chat", "text"), [
    ([SYSTEM, LATE, USER], "[system] Be kind.\n\n Be brief. [user] Hi."),
    ([USER, LATE], "[user] Hi.\n\n Be brief. "),
    ([SYSTEM, USER, LATE, USER], "[system] Be kind.[user] Hi.\n\n Be brief. \n\nHi."),
    ([USER, SAID, LATE, USER], "[user] Hi.[assistant] Yes.[user]  Be brief. \n\nHi."),
    ([USER, SAID, LATE, SAID], "[user] Hi.[assistant] Yes.[user]  Be brief. [assistant] Yes."),
    ([USER, calling("{}"), RESULT, LATE, SAID], "[user] Hi.[assistant] <f>[tool] 7\n\n Be brief. [assistant] Yes."),
    ([USER, calling("{}"), RESULT, LATE, USER], "[user] Hi.[assistant] <f>[tool] 7\n\n Be brief. [user] Hi."),
    ([USER, DEVELOPER, SAID, LATE, USER], "[user] Hi.\n\n Be brief. [assistant] Yes.[user]  Be brief. \n\nHi."),
])  # fmt: skip
def test_texts_of_the_system_after_the_first_turn(chat: list[dict[str, Any]], text: str) -> None:
    """Bug: every request of Claude Code and Codex was refused: texts stay in place, and turns alternate."""
    assert written(STRICT, *chat) == text


QUIET = """{% for m in messages %}{% if m.role == 'system' and loop.first %}<{{ m.content | trim }}>{% elif m.role != 'system' %}
[{{ m.role }}] {{ m.content | trim }}{% endif %}{% endfor %}"""
NONE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
[{{ m.role }}] {{ m.content }}{% endfor %}"""


def test_templates_that_leave_the_systems_texts_out() -> None:
    """Bug: templates that skip a system's later texts, or know no system, lost words without a word."""
    assert written(LENIENT, USER, LATE, USER, SYSTEM) == "[user] Hi.[system]  Be brief. [user] Hi.[system] Be kind."
    assert written(QUIET, SYSTEM, USER, LATE, USER) == "<Be kind.>[user] Hi.\n\n Be brief. \n\nHi."
    assert written(QUIET.replace("<{{ m.content | trim }}>", ""), SYSTEM, USER, LATE) == "[user] Hi.\n\n Be brief."
    assert written(QUIET, SYSTEM, LATE, USER) == "<Be kind.\n\n Be brief.>[user] Hi."
    text = "[user] Be kind.\n\nHi.[assistant] Yes.[user]  Be brief. \n\nHi."
    assert written(NONE, SYSTEM, USER, SAID, LATE, USER) == text
    assert written(NONE, SYSTEM, SAID) == "[user] Be kind.[assistant] Yes."
    hidden = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content | length }}{% endif %}{% endfor %}"
    assert written(hidden, SYSTEM, USER) == "3"
    assert written(hidden, USER, LATE) == "3"  # no form shows it: the template's own text stays
    with pytest.raises(InputError, match=r"roles must alternate \(message 1\)"):
        written(NONE, SAID)


IDS = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}
{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}({{ c.id }}){% endfor %}
{%- if m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"""


def test_ids_of_calls_that_a_template_refuses() -> None:
    """Guards Mistral's templates, which take ids of nine letters and digits alone: a result still belongs to its call."""

    def calls(*ids: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}"}
        return {"role": "assistant", "tool_calls": [{**({"id": i} if i else {}), "function": function} for i in ids]}

    def results(*ids: Any) -> list[dict[str, Any]]:
        return [{**RESULT, **({"tool_call_id": i} if i else {})} for i in ids]

    for ids in (("call_1", "toolu_2"), (None, None), ("abcdefghi", "call_1"), ("\ud800x", 5)):
        said = results(*ids)
        text = written(IDS, USER, calls(*ids), *(said[::-1] if ids[0] else said))
        one, two, *found = [part.strip("()[]") for part in text.replace(")", " ").replace("]", " ").split()]
        assert found == ([two, one] if ids[0] else [one, two])
        assert one != two
        assert all(len(name) == 9 and name.isalnum() for name in (one, two))
    assert written(IDS, calls("abcdefghi"), *results("abcdefghi")) == "(abcdefghi)[abcdefghi]"
    both = written(STRICT.replace("[{{ m.role }}]", "[{{ m.role }}]" + IDS[IDS.index("{% for c") : IDS.index("{%- if m.role")]),
                   USER, calls("call_1"), *results("call_1"), LATE, USER)  # fmt: skip
    assert "Be brief." in both


def test_the_tools_beside_messages() -> None:
    """Every form in which files hold tools is one list; what is none is refused."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    for record in ({"tools": tools}, {"tools": json.dumps(tools)}, {"functions": [function]}, {"tools": [function]}):
        assert template_keywords(record) == {"tools": tools}
    for record in ({}, {"tools": []}, {"tools": None}, {"tools": ""}, {"chat_template_kwargs": {}}):
        assert template_keywords(record) == {}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert template_keywords(thinking) == thinking
    for record in ({"tools": "f"}, {"tools": {"a": 1}}, {"tools": ["f"]}, {"chat_template_kwargs": [1]}):
        with pytest.raises(InputError):
            template_keywords(record)
    # a template that leaves tools out says so
    assert not has_place_for_tools(with_template(LENIENT), tools)
    assert has_place_for_tools(with_template("{{ tools | tojson }}" + LENIENT), tools)


# Idefics 3's and SmolVLM's; Llava's; a mixture, whose system message is a string; and one that asks, as Gemma 3's does.
IDEFICS = """{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}
{%- for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}
{%- endfor %}<end>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
LLAVA = """{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': '}}{% endif %}
{%- for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}
{%- if m['role'] != 'assistant' %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' '}}{% endfor %}
{%- else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ c['text'] + ' '}}{% endgeneration %}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
SYSTEM, REPLY = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Hello!"}


def in_parts(message: dict[str, Any], *more: str) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": text} for text in (message["content"], *more)]}


@pytest.mark.parametrize("template", [IDEFICS, LLAVA])
@pytest.mark.parametrize("continued", [False, True])
def test_templates_that_read_parts(template: str, continued: bool) -> None:
    """Bug: such a template loops over a string's letters. Strings and parts give transformers' text for parts."""
    chat = [SYSTEM, USER, REPLY, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Well, "}]
    chat = chat if continued else chat[:-1]
    keywords: dict[str, Any] = {"add_generation_prompt": not continued, "continue_final_message": continued}
    tokenizer = with_template(template)
    expected = tokenizer.apply_chat_template([in_parts(m) for m in chat], tokenize=False, **keywords)
    assert "And?" in expected
    assert written(template, *chat, **keywords) == expected
    assert written(template, *map(in_parts, chat), **keywords) == expected
    two = tokenizer.apply_chat_template([in_parts(USER, "Two.")], tokenize=False)
    assert written(template, in_parts(USER, "Two.")) == two


def test_turns_that_do_not_alternate() -> None:
    """Bug: templates that want turns to alternate refuse clients that send two messages at once."""
    assert written(NONE, USER, SYSTEM, USER, SAID, SAID) == "[user] Hi.\n\nBe kind.\n\nHi.[assistant] Yes.\n\nYes."
    assert written(LENIENT, USER, USER) == "[user] Hi.[user] Hi."
