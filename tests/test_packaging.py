"""The distributions that pyproject.toml describes: every file is in its wheel, and the names of extras are true."""

import ast
import importlib
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import eyas
from eyas import elsewhere, tiny
from eyas.errors import ModelError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TINY = tomllib.loads((ROOT / "tiny" / "pyproject.toml").read_text())
OTHERS = sorted((ROOT / "packages").glob("*/pyproject.toml"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
SOURCES = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("packages/*/src/**/*.py")]
NOT_EVERYWHERE = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "winreg", "msvcrt"}


@pytest.mark.parametrize(("settings", "folder"), [
    (PROJECT, ROOT / "src"),
    (TINY, ROOT / "tiny"),
    *((tomllib.loads(file.read_text()), file.parent / "src") for file in OTHERS),
], ids=["eyas", "eyas-tiny", *(file.parent.name for file in OTHERS)])  # fmt: skip
def test_every_file_is_packaged(settings: dict, folder: Path) -> None:
    """Guards a new page, kernel or prompt that runs in a clone and is missing after pip install."""
    for package, patterns in settings["tool"]["setuptools"]["package-data"].items():
        packaged = {path for pattern in patterns for path in (folder / package).glob(pattern)}
        tracked = subprocess.run(["git", "ls-files", package], cwd=folder, capture_output=True, text=True)
        data = {folder / name for name in tracked.stdout.split() if not name.endswith(".py")}
        if not data:
            pytest.skip("this is no clone, so nothing says which files belong to it")
        assert data <= packaged


@pytest.mark.parametrize(
    "file", [file for file in OTHERS if file.parent.name.startswith("eyas-")], ids=lambda file: file.parent.name
)
def test_a_distribution_is_described(file: Path) -> None:
    """Guards names in two places: extras, versions, and the entry points that `eyas.elsewhere` promises."""
    project = tomllib.loads(file.read_text())["project"]
    extra = project["name"].removeprefix("eyas-")
    module = importlib.import_module(f"eyas_{extra}")
    (needed,) = [Requirement(line) for line in EXTRAS[extra]]
    assert (needed.name, file.parent.name) == (project["name"], project["name"])
    assert needed.specifier.contains(module.__version__)
    assert "eyas>=0.1,<0.2" in project["dependencies"]
    assert eyas.__version__ == module.__version__
    brought = {group.removeprefix("eyas."): tuple(points) for group, points in project["entry-points"].items()}
    promised = {kind: names for kind, names in elsewhere.DISTRIBUTIONS[extra].items() if kind not in ("heads", "saves")}
    assert {kind: sorted(names) for kind, names in promised.items()} == {
        kind: sorted(names) for kind, names in brought.items() if kind != "formats"
    }
    for points in project["entry-points"].values():
        assert all(importlib.util.find_spec(module) for module in points.values())


def imports(body: list[ast.stmt]) -> set[str]:
    """The top-level packages that a list of statements imports when it is run."""
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_no_module_needs_a_system() -> None:
    """Bug: `eyas bench` imported `resource`, which Windows does not have, before it knew whether it needs it."""
    asked = {path: imports(ast.parse(path.read_text()).body) & NOT_EVERYWHERE for path in SOURCES}
    assert {path.name: names for path, names in asked.items() if names} == {}


def test_without_the_embedded_model(tmp_path: Path) -> None:
    """Guards the one line that names the command, where a missing file used to name a path."""
    for load in (tiny.model, tiny.tokenizer):
        said = r"^the embedded model is not installed: pip install \./tiny in a clone of eyas[^\n]*$"
        with pytest.raises(ModelError, match=said):
            load(tmp_path / "nowhere")


def test_what_the_dockerfile_copies() -> None:
    """Guards an image that cannot be built: the .dockerignore lacks a file."""
    lines = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    copied = [name for line in lines for name in line.split()]
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    read = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert read <= kept


def test_every_page_is_in_the_site() -> None:
    """Guards `make docs`, which refuses a page of docs/ that mkdocs.yml does not name."""
    named = set(re.findall(r"\b\w+/\w+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("lab/")} <= named
