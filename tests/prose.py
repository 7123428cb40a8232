"""Foreign English in pages, help texts, docstrings and errors, found by pattern; `tests/test_prose.py` fails at the
first one. It also checks the subjects of a branch's commits, and that public names have docstrings.

python tests/prose.py            prints each place; exit status 1 if there is one

The records in docs/lab are left out. A pattern is a guess: where it is wrong, write the sentence differently.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
SOURCES = ("src/eyas/**/*.py", "packages/*/src/**/*.py")  # of docstrings and errors
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):\n((?: {4}.*(?:\n|\Z)|\n(?= {4}))+)", re.MULTILINE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SUBJECT = re.compile(r"(?!(?:The|An?|\w*[^s]s)\b)[A-Z][^;]{0,70}[^;.]")  # of a commit: imperative, one line


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
    """Return the help in a module of the command line: the strings below the fields of classes, `help=...`, the
    docstrings of commands, the comments of EXAMPLES and the NOTES, each a paragraph."""
    found = list[ast.AST]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found += [body.value for body in node.body[1:] if isinstance(body, ast.Expr)]
        if isinstance(node, ast.keyword) and node.arg == "help":
            found.append(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == "command" and isinstance(node.body[0], ast.Expr):
            found.append(node.body[0].value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NOTES":
            found += ast.walk(node.value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXAMPLES":
            found += map(ast.Constant, re.findall("  # (.*)", ast.literal_eval(node.value)))
    return "\n\n".join(e.value for e in found if isinstance(e, ast.Constant) and isinstance(e.value, str))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module and of its classes and functions. Each entry of a section becomes a paragraph;
    drawings and tables, which are indented, are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = SECTION.sub(_entries, ast.get_docstring(node) or "")
            yield re.sub(r"^ {4}.*$|^\S.*\S {2,}\S.*$", "", text, flags=re.MULTILINE)


def _entries(section: re.Match[str]) -> str:
    entries = re.split(r"\n(?=\S)", textwrap.dedent(section[1]))
    return "\n" + "\n\n".join(" ".join(entry.split()) for entry in entries) + "\n"


def errors(tree: ast.Module) -> Iterator[str]:
    """Yield the messages of exceptions that are raised, with `code` in place of values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                texts = [part.value if isinstance(part, ast.Constant) else "`code`" for part in parts]
                yield "".join(text for text in texts if isinstance(text, str))


def undocumented(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yield each public class, method and function without a docstring. A docstring in a base class is enough, and so
    is a decorator that takes a text. Modules and folders with an underscore are private."""
    bases, documented = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases[node.name] |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        documented[node.name] |= {n.name for n in node.body if isinstance(n, DEFINITIONS) and ast.get_docstring(n)}

    def inherited(name: str, passed: frozenset[str] = frozenset()) -> set[str]:
        above = bases[name] - passed
        return set[str]().union(*(documented[base] | inherited(base, passed | {base}) for base in above))

    def missing(body: Sequence[ast.stmt], known: set[str]) -> Iterator[str]:
        for node in body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                described = any(re.search(r"^overload$|\.setter$|\([\"']", d) for d in decorators)
                if not (described or ast.get_docstring(node) or node.name in known):
                    yield node.name
                if isinstance(node, ast.ClassDef):
                    yield from (f"{node.name}.{name}" for name in missing(node.body, inherited(node.name)))

    for file, tree in trees.items():
        if not any(re.match("_(?!_init__)", part) for part in file.parts):
            yield from (f"no docstring: {file}: {name}" for name in missing(tree.body, set()))


def subjects() -> list[str]:
    """Return the subjects of the commits since main; none where git or main is missing."""
    command = ["git", "log", "--no-merges", "--format=%s", "main..HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def oddities(sentence: str) -> Iterator[str]:
    """Yield the kind of each oddity of a sentence."""
    if len(sentence.split()) > MAX_WORDS and not sentence.startswith(("Letters", "Shapes")):  # a legend
        yield "long"
    if sentence.count(";") > 1:
        yield "semicolons"
    for kind, pattern in PATTERNS.items():
        yield from [kind] * len(re.findall(pattern, sentence, re.IGNORECASE))


def texts() -> Iterator[tuple[Path, str]]:
    """Yield each text that is checked, with its file."""
    for file in sorted(file for pattern in PAGES for file in ROOT.glob(pattern)):
        yield file, help_texts(file) if file.suffix == ".py" else file.read_text(encoding="utf-8")
    for file in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from ((file, text) for text in (*docstrings(tree), *errors(tree)))


def places() -> Iterator[str]:
    """Yield kind, file and sentence of each oddity, and each subject of a commit that breaks the rules."""
    for file, text in texts():
        for sentence in sentences(text):
            yield from (f"{kind}: {file.relative_to(ROOT)}: {sentence}" for kind in oddities(sentence))
    yield from (f"subject: {subject}" for subject in subjects() if not SUBJECT.fullmatch(subject))
    sources = (file for pattern in SOURCES for file in sorted(ROOT.glob(pattern)))
    yield from undocumented({f.relative_to(ROOT): ast.parse(f.read_text(encoding="utf-8")) for f in sources})


if __name__ == "__main__":
    found = list(places())
    print("\n".join(found))
    sys.exit(bool(found))
