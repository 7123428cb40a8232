"""The public pages are true: their code runs, their links and names exist."""

import ast
import importlib
import inspect
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import eyas
import zoo
from eyas import drafters
from eyas.api import LOAD_KEYWORDS
from eyas.arguments import SYNONYMS
from eyas.core.engine import Decoder, Request
from eyas.core.options import option_defaults
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.hooks import refusals
from golden import needs_weights
from reference import plain_decode, run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    *(page for folder in ("start", "guide") for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.slow
@needs_weights
def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first thing a newcomer copies."""
    code, client = blocks("README.md")
    assert "OpenAI" in client, "the other block is run by tests/serve/test_docs.py"
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()[-1]
    assert f"`{printed}`" in README, "the page says what the program prints"
    assert float(printed.split()[0]) > 1, "drafts must have been accepted"


def shell_lines(page: Path) -> list[str]:
    """The lines of a page's blocks that a shell reads, without comments; a continued line is one."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    shell = "\n".join(text for kind, text in blocks if kind in ("", "sh", "bash")).replace("\\\n", " ")
    services = re.findall(r"^ExecStart=(.*)", "\n".join(text for kind, text in blocks if kind == "ini"), re.MULTILINE)
    lines, begun = [], ""
    for line in [*shell.splitlines(), *services]:
        begun += re.sub(r"\s+#.*|^#.*", "", line)
        if begun.count("'") % 2 == 0:  # else a quoted body goes on in the next line
            lines.append(begun)
            begun = ""
    return [line for line in lines if line.strip()]


def commands_of(page: Path) -> list[list[str]]:
    """The calls of eyas in the blocks of a page, as arguments."""
    calls = (re.match(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?eyas (?=[a-z])(.*)", line) for line in shell_lines(page))
    return [shlex.split(call[1]) for call in calls if call and "..." not in call[1]]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_names_in_the_code_of_the_pages(page: Path) -> None:
    """Bug: code on a page imports a name or passes a keyword that eyas does not have."""
    options = {
        name.partition(".")[0] for name in drafters.names() for name in option_defaults(drafters.find(name).Options)
    }
    keywords = {
        "load": {*LOAD_KEYWORDS, *options},
        "generate": {*inspect.signature(eyas.LLM.generate).parameters, *SYNONYMS},
    }
    for code in blocks(str(page.relative_to(ROOT))):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "eyas":
                exec(ast.unparse(node), {})
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if called in ("eyas.load", "llm.generate"):
                    assert {keyword.arg for keyword in node.keywords} <= keywords[node.func.attr], called


@pytest.mark.slow
@needs_weights
def test_structured_output_runs() -> None:
    """Guards the calls of docs/guide/structured_output.md, each in one of its forms."""
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    (code,) = blocks("docs/guide/structured_output.md")
    schema = {"enum": ["table", "movie"]}
    exec(compile(code, "structured_output.md", "exec"), {"llm": eyas.load(), "schema": schema, "Person": Person})


def test_variables_of_the_environment() -> None:
    """Bug: the code reads a variable that the page of the environment does not list."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = [file.read_text() for folder in ("src", "packages") for file in (ROOT / folder).rglob("src/*/**/*.py")]
    sources += [file.read_text() for file in (ROOT / "src").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\"(EYAS_[A-Z_0-9]+)\"", text)}
    assert {"EYAS_KERNELS", "EYAS_SMOLLM2"} <= named
    assert {name for name in named if f"`{name}`" not in page} == set()


@pytest.mark.slow
def test_a_method_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extension point: the example of docs/design/add_a_method.md, unchanged, is lossless in a
    batch and accepts something."""
    (code,) = blocks("docs/design/add_a_method.md")
    assert len(code.splitlines()) < 65
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "bigram.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    method = drafters.find("package_of_mine.bigram")
    target, dice = Target(zoo.FAMILIES["llama"]()), random.Random(0)
    prompts = [tuple(dice.randrange(100) for _ in range(5 + i)) for i in range(3)]
    requests = [Request(prompt, 30, Sampling(0.5 * i, seed=i)) for i, prompt in enumerate(prompts)]
    tokens, steps = run(Decoder(target, method(target), 2), requests)
    assert tokens == [plain_decode(target.model, r) for r in requests]
    assert all(step.draft is None or step.draft.tree.nodes == 5 for step in steps)


def test_links_and_files_of_the_pages() -> None:
    """Guards links between pages."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_names_of_the_pages() -> None:
    """Guards files that pages name, and the glossary's last column: `path.py` `name` is a name in that file."""
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text().splitlines()
    cells = [line.rstrip("| ").rpartition("|")[2] for line in glossary if line[:1] == "|"]
    named = [match for cell in cells for match in re.finditer(r"`([\w/.]+(?:/|\.py))`((?:[ ,]+`[A-Za-z_]+`)*)", cell)]
    assert len(named) > 30
    for page in (
        "README.md",
        "docs/design/how_it_works.md",
        "docs/design/losslessness.md",
        "docs/design/architecture.md",
    ):
        named += re.finditer(r"`?\b([\w/]+\.py)\b()", (ROOT / page).read_text())
    bases = [ROOT / "src" / "eyas", ROOT, *ROOT.glob("packages/*/src")]
    for match in named:
        paths = [base / match[1] for base in bases if (base / match[1]).exists()]
        assert paths, match[0]
        for name in re.findall(r"`(\w+)`", match[2]):
            assert re.search(rf"\b{name}\b", paths[0].read_text()), match[0]


NOTEBOOK = Path(__file__).parents[1] / "docs" / "start" / "tutorial.ipynb"


@pytest.mark.exhaustive
@needs_weights
def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first page that a newcomer tries: every cell runs, and prints where the page shows that it prints."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    assert len(cells) >= 6
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"tutorial.ipynb, code cell {i + 1}", "exec"), names)
        assert bool(capsys.readouterr().out.strip()) == bool(cell["outputs"]), f"code cell {i + 1}"
    assert names["result"].stats.tau > 1
    assert len(names["longest"].path) > 1


TRANSFORMERS = (Path(__file__).parents[1] / "docs" / "guide" / "transformers.md").read_text()


@pytest.mark.exhaustive
@needs_weights
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_of_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer copies it from top to bottom."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TRANSFORMERS, re.DOTALL):
        exec(compile(block, "docs/guide/transformers.md", "exec"), names)
    told = capsys.readouterr().out
    streamed, _, answer = told.partition("tokens per forward")
    assert float(streamed.split()[-1]) >= 1, "how much is drafted depends on the machine"
    assert len(answer.strip()) > 5
    assert "generate" not in names["model"].__dict__


def test_the_page_of_transformers_names_each_refusal() -> None:
    """Guards the page's list of refused settings, which is the code's."""
    for name in refusals.SETTINGS:
        assert name.replace("_", " ") in TRANSFORMERS.replace("_", " "), name
