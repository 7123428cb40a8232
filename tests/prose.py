"""Foreign English in the pages and help texts, found by pattern; `tests/test_prose.py` fails at the first one.

python tests/prose.py            prints each sentence

The records in docs/lab are left out. A pattern is a guess: where it is wrong, write the sentence differently.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 30
PATTERNS = {
    "that_of": r"\b(that|those) (of|from)\b",
    "what_as_noun": r"\b(what|whatever|whoever)\b(?! to\b)(?![^?]*\?)",
    "is_no": r"(?<!there )\b(is|are) no (?!more\b)\w",
    "beside_behind": r"\b(beside|behind)\b",
    "before_today": r"\b(as|than|of|was) before\b|\bbefore[.;)]|\btoday\b|\bno longer\b",
}
SMALL_NAMES = r"(?:eyas|llama|torch|transformers|vLLM|z-lab)\b"  # that may begin a sentence
PAGES = (
    "*.md", "docs/start/*.md", "docs/guide/*.md", "docs/reference/*.md", "docs/design/*.md", "packages/*/README.md", "tiny/README.md",
    "src/eyas/cli/*.py", "packages/*/src/*/commands/*.py",
)  # fmt: skip


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of its paragraphs, items, headings and cells, without code blocks."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^    \S.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\"[^\"\n]*\"", "`code`", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)|\|", text):
        whole = " ".join(part.split()).strip("#-*| ")
        yield from (
            s for s in re.split(rf"(?<=[.?!])[)*\"]* +(?=[A-Z`*(\"]|{SMALL_NAMES})", whole) if re.search(r"[a-z]", s)
        )


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


def places() -> Iterator[str]:
    """Yield kind, file and sentence of each oddity in PAGES."""
    for file in sorted(file for pattern in PAGES for file in ROOT.glob(pattern)):
        text = help_texts(file) if file.suffix == ".py" else file.read_text(encoding="utf-8")
        for sentence in sentences(text):
            yield from (f"{kind}: {file.relative_to(ROOT)}: {sentence}" for kind in oddities(sentence))


if __name__ == "__main__":
    print("\n".join(places()))
