"""English in the pages and help texts, counted by pattern; `tests/test_prose.py` holds it to a table.

python tests/prose.py            counts of each group beside the table
python tests/prose.py --places   also every sentence that is counted
python tests/prose.py --write    write the table, tests/prose.toml, where counts fell

README.md and the pages in STRICT have none of these; every other group has a table whose counts only fall. The records in
docs/lab are left out. A pattern is a guess: where it is wrong, write the sentence differently.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("prose.toml")
MAX_WORDS = 30
PATTERNS = {
    "that_of": r"\b(that|those) (of|from)\b",
    "what_as_noun": r"\b(what|whatever|whoever)\b(?! to\b)(?![^?]*\?)",
    "is_no": r"(?<!there )\b(is|are) no (?!more\b)\w",
    "beside_behind": r"\b(beside|behind)\b",
    "before_today": r"\b(as|than|of|was) before\b|\bbefore[.;)]|\btoday\b|\bno longer\b",
}
SMALL_NAMES = r"(?:eyas|llama|torch|transformers|vLLM|z-lab)\b"  # that may begin a sentence
KINDS = ("long", "semicolons", *PATTERNS)
STRICT = (
    "README.md", "docs/start/*.md", "docs/guide/*.md", "docs/reference/*.md",
)  # fmt: skip
GROUPS = {
    "design": ("docs/design/*.md", "CONTRIBUTING.md"),
    "help": ("src/eyas/cli/*.py", "packages/*/src/*/commands/*.py"),
}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of its paragraphs, items, headings and cells, without code blocks."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^    \S.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\"[^\"\n]*\"", "`code`", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)|\|", text):
        whole = " ".join(part.split()).strip("#-*| ")
        yield from (s for s in re.split(rf"(?<=[.?!])[)*\"]* +(?=[A-Z`*(\"]|{SMALL_NAMES})", whole) if re.search(r"[a-z]", s))


def help_texts(file: Path) -> str:
    """Return the help in a module of the command line: the strings below the fields of classes, `help=...`, and
    the docstrings of commands, each a paragraph."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found += [body.value for body in node.body[1:] if isinstance(body, ast.Expr)]
        if isinstance(node, ast.keyword) and node.arg == "help":
            found.append(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == "command" and isinstance(node.body[0], ast.Expr):
            found.append(node.body[0].value)
    return "\n\n".join(e.value for e in found if isinstance(e, ast.Constant) and isinstance(e.value, str))


def oddities(sentence: str) -> Iterator[str]:
    """Yield the kind of each oddity of a sentence."""
    if len(sentence.split()) > MAX_WORDS:
        yield "long"
    if sentence.count(";") > 1:
        yield "semicolons"
    for kind, pattern in PATTERNS.items():
        yield from [kind] * len(re.findall(pattern, sentence, re.IGNORECASE))


def files_of(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of some patterns."""
    return sorted(file for pattern in patterns for file in ROOT.glob(pattern))


def places(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (kind, file and sentence) for each oddity."""
    for file in files:
        text = help_texts(file) if file.suffix == ".py" else file.read_text(encoding="utf-8")
        for sentence in sentences(text):
            yield from ((kind, f"{file.relative_to(ROOT)}: {sentence}") for kind in oddities(sentence))


def measured() -> dict[str, dict[str, int]]:
    """Count the oddities of each group, without the strict pages."""
    strict = set(files_of(STRICT))
    counts = {}
    for group, patterns in GROUPS.items():
        kinds = [kind for kind, _ in places([file for file in files_of(patterns) if file not in strict])]
        counts[group] = {kind: kinds.count(kind) for kind in KINDS}
    return counts


def table() -> dict[str, dict[str, int]]:
    """Return the table: how many of each kind a group may have."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def main() -> None:
    """Print the counts; with --places the sentences, with --write write the table."""
    now, allowed = measured(), table() if TABLE.exists() else {}
    if "--places" in sys.argv:
        for group in (STRICT, *GROUPS.values()):
            print("\n".join(f"{kind:14} {place}" for kind, place in places(files_of(group))))
    risen = [f"{g}.{k}" for g, kinds in now.items() for k, n in kinds.items() if n > allowed.get(g, {}).get(k, n)]
    if "--write" in sys.argv:
        if risen:
            raise SystemExit(f"tests/prose.toml is not written, as these only fall: {', '.join(risen)}")
        parts = ["# Oddities of English by group: counts that only fall. Written by tests/prose.py."]
        for group, kinds in now.items():
            parts += ["", f"[{group}]", *(f"{kind} = {count}" for kind, count in kinds.items())]
        TABLE.write_text("\n".join(parts) + "\n", encoding="utf-8")
    print(f"{'':12}" + "".join(f"{kind:>15}" for kind in KINDS))
    for group, kinds in now.items():
        print(f"{group:12}" + "".join(f"{count:15}" for count in kinds.values()))
    for kind, place in places(files_of(STRICT)):
        print(f"{kind}: {place}")


if __name__ == "__main__":
    main()
