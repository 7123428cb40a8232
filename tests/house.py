"""Sizes of the house, and odd English in it: `make lint` prints them, and nothing here is an error.

python tests/house.py            what the trunk needs, lines and density of the packages, a count of each oddness
python tests/house.py --places   also every place that is counted
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from test_architecture import EYAS, closure_of

RINGS = ("core", "drafters", "api")  # what the brake counts
LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})
# Kinds of docstrings and comments that read like a translation.
WORDS = {
    'a docstring begins with "The", not with a verb': r"\AThe ",
    'an error as a sentence: "InputError for ...", not "Raise ..."': r"\A\w*Error (for|if|unless|when|where|with)\b",
    '"that of", "those of": name the thing again': r"\b(that|those) of\b",
    '"is no number", "are no trees": write "is not a"': r"(?<!there )\b(is|are) no (?!longer|more)\w",
    '"; None: ..." at the end of a sentence': r"; None: ",
}
NAMES = {
    '"most" and "longest" as nouns: write max_...': r"_?(most(_.*)?|longest)",
    '"of" as a constructor: write from_...': r"of",
    "a participle alone as a function's name": r"_?(?!embed|feed|need|seed)[a-z]+ed",
}


def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def code_lines(file: Path) -> tuple[int, int]:
    """Return (lines, tokens) of a file without docstrings, comments and blank lines."""
    text = file.read_text(encoding="utf-8")
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    strings = [
        node for node in statements if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    prose = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.string.strip() and token.start[0] not in prose
    ]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)}), len(tokens)


def oddities(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (kind, line) for each odd docstring and name of a file."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            docstring = "" if is_property else ast.get_docstring(node) or ""  # a property may be a noun
            yield from ((kind, node.lineno) for kind, form in WORDS.items() if re.search(form, docstring))
            names = {} if is_property else NAMES  # it may be an adjective, too
            yield from ((kind, node.lineno) for kind, form in names.items() if re.fullmatch(form, node.name))
        elif isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            name, noun = (node.arg if isinstance(node, ast.arg) else node.id), next(iter(NAMES))
            if re.fullmatch(NAMES[noun], name):
                yield noun, node.lineno


def main() -> None:
    """Print sizes and counts; with --places also where."""
    for module in ("eyas.core.engine", "eyas.api"):
        files = closure_of(module)
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files.values())
        print(f"importing {module}: {len(files)} files, {lines:,} lines")
    sizes = {file: code_lines(file) for file in sorted(EYAS.rglob("*.py"))}
    rings = sum(lines for file, (lines, _) in sizes.items() if file.relative_to(EYAS).parts[0] in RINGS)
    everything, tokens = (sum(column) for column in zip(*sizes.values(), strict=True))
    print(
        f"code lines: {rings:,} in {' + '.join(RINGS)}, {everything:,} in all; {tokens / everything:.1f} tokens a line"
    )
    found: dict[str, list[str]] = {kind: [] for kind in (*WORDS, *NAMES)}
    for file in sizes:
        for kind, line in oddities(file):
            found[kind].append(f"{file.relative_to(EYAS.parents[1])}:{line}")
    for kind, places in found.items():
        print(f"{len(places):5}  {kind}")
        if "--places" in sys.argv:
            print("\n".join(f"         {place}" for place in places))


if __name__ == "__main__":
    main()
