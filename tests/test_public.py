"""The public pages are true: their code runs, their links and names exist."""

import ast
import importlib
import inspect
import random
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import eyas
import zoo
from eyas import drafters, tiny
from eyas.api import LOAD_KEYWORDS
from eyas.arguments import SYNONYMS
from eyas.cli._app import parse
from eyas.core.engine import Decoder, Request
from eyas.core.options import option_defaults
from eyas.core.sampling import Sampling
from eyas.core.target import Target
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_pages(page: Path) -> None:
    """Bug: a page shows an option that the command does not have, or lacks an argument that it needs."""
    for arguments in commands_of(page):
        try:
            parse(arguments)
        except Exception as error:  # all of them are the page's fault
            pytest.fail(f"{page.name}: eyas {shlex.join(arguments)}: {error}")


def faults_of(line: str) -> Iterator[str]:
    """What a line of a shell names that the repository does not have: targets of make, scripts, extras, folders."""
    words = shlex.split(line)
    if words[:1] == ["make"] and not re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
        yield f"make has no target {words[1]}"
    if words[:1] == ["python"] and words[1].endswith(".py"):
        script = ROOT / words[1]
        options = [word for word in words[2:] if word.startswith("--")]
        source = script.read_text() if script.exists() else ""
        yield from (
            f"{words[1]} has no {option}" for option in ["", *options] if option[2:] not in source or not source
        )
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words[2:]:
            folder, _, named = word.rstrip("]").partition("[")
            if folder.startswith(".") and not (ROOT / folder / "pyproject.toml").exists():
                yield f"there is no package {folder}"
            yield from (f"there is no extra {name}" for name in named.split(",") if name and name not in extras)


def test_other_commands_of_the_pages() -> None:
    """Bug: a page shows a target of make, a script, an option, an extra or a folder that is not there."""
    lines = [(page.name, line) for page in PAGES for line in shell_lines(page)]
    known = [(name, part) for name, line in lines for part in line.split(" && ") if re.match("make|python|pip", part)]
    assert len(known) > 10
    assert [(name, line, fault) for name, line in known for fault in faults_of(line)] == []
    wrong = (
        "make nothing",
        "python runs/no.py",
        "python runs/gpu.py --nothing-like-it",
        "pip install '.[no]'",
        "pip install ./no",
    )
    assert all([*faults_of(line)] for line in wrong)


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


@pytest.mark.slow
@needs_weights
def test_the_embedded_model_is_small_and_intact() -> None:
    """Guards the repository's size (heads in int8), the packing, and that positions up to 4,096 exist."""
    size = sum(f.stat().st_size for f in tiny.FOLDER.rglob("*") if f.is_file())
    assert size < 80_000_000
    model = tiny.model()
    target = Target(model)
    assert target.head_is_exact
    assert target.context == 4096
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(28.3e6, rel=0.01)
