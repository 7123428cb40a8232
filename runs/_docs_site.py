"""A hook of mkdocs: pages of the site that are not files of docs/, such as methods, commands and the Python reference.

Links that lead out of docs/ become links to these pages, or plain words where the site has no such page.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = {"README.md": "index.md", "CONTRIBUTING.md": "design/contributing.md", "CHANGELOG.md": "lab/changelog.md"}
REFERENCE = {
    "api": "load, generate, stream, chat",
    "hooks": "inside transformers",
    "core.engine": "requests and cycles",
    "core.sampling": "how tokens are drawn",
    "core.drafter": "the interface of methods",
    "core.tree": "draft trees",
    "core.verify": "which tokens are accepted",
    "drafters.tools": "parts of methods",
    "checkpoints": "heads",
    "tiny": "the embedded model",
    "errors": "what is raised",
}
COMMANDS = ("src/eyas/cli/[a-z]*.py", "packages/*/src/*/commands/[a-z]*.py")
METHODS, PYTHON = "reference/methods/", "reference/python/"  # folders of generated pages
PICTURES = ROOT / "docs" / "pictures" / "methods"  # drawn by runs/draw_tree.py of commit ecd2fed0


def methods() -> dict[str, Path]:
    """Return the file of each method, by the method's name."""
    source = ROOT / "src" / "eyas"
    folders = [source / "drafters", *(file.parent for file in ROOT.glob("packages/*/src/*/methods/__init__.py"))]
    files = {file for folder in folders for file in folder.glob("[a-z]*.py")} | set(source.glob("*/method_*.py"))
    named = {file.stem.removeprefix("method_"): file for file in files if file.stem != "tools"}
    return dict(sorted(named.items()))


def module_of(file: Path) -> str:
    """Return the dotted name of a file below a folder src."""
    parts = file.with_suffix("").parts
    return ".".join(parts[len(parts) - parts[::-1].index("src") :])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the methods and the reference into the navigation."""
    added = {
        "Methods": [{name: f"{METHODS}{name}.md"} for name in methods()],
        "Python": [{f"eyas.{name}": f"{PYTHON}{name}.md"} for name in REFERENCE],
    }

    def extend(sections: list[Any]) -> None:
        for title, pages in (entry for section in sections if isinstance(section, dict) for entry in section.items()):
            if isinstance(pages, list):
                extend(pages)
                pages.extend(added.get(title, []))

    extend(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {f"{METHODS}{name}.md": method_page(name, file) for name, file in methods().items()}
    for here, there in REPOSITORY.items():
        text = (ROOT / here).read_text(encoding="utf-8")
        pages[there] = text.replace("](docs/", "](../" if "/" in there else "](")
    pages["reference/commands.md"] = commands_page()
    pages |= {
        f"{PYTHON}{name}.md": f"# eyas.{name}: {about}\n\n{reference(f'eyas.{name}')}"
        for name, about in REFERENCE.items()
    }
    notebook = ROOT / "docs" / "start" / "tutorial.ipynb"
    pages["start/tutorial.md"] = notebook_page(json.loads(notebook.read_text(encoding="utf-8")))
    pages["wide.css"] = ".md-grid { max-width: 76rem; }\n"  # 100 columns of code
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    return files


def commands_page() -> str:
    """The help of each command, as the environment of `make` prints it."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        return "# Commands\n\nThis site was built without `.venv`: run `eyas --help`, and `eyas COMMAND --help`."
    names = sorted({file.stem for folder in COMMANDS for file in ROOT.glob(folder) if file.stem[0] != "_"} - {"tools"})
    about = """Each command, as `eyas COMMAND --help` shows it. [eyas chat](#eyas-chat) also shows the panel *More*, which all
commands that load a model have. [Methods](methods.md) has the options of each method."""
    parts = ["# Commands", about, f"```text\n{help_of(python)}\n```"]
    for name in names:
        everything = ["--method", "vanilla", "--help-all"] if name == "chat" else []
        parts += [f"## eyas {name}", f"```text\n{help_of(python, name, *everything)}\n```"]
    return "\n\n".join(parts)


def help_of(python: Path, *command: str) -> str:
    """What `eyas COMMAND --help` prints on 100 columns."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    line = [str(python), "-m", "eyas", *command, "--help"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return "\n".join(text.rstrip() for text in done.stdout.strip().splitlines())


def method_page(name: str, file: Path) -> str:
    """The picture of a method where one exists, its row of docs/reference/methods.md, and the reference of its file."""
    lines = (ROOT / "docs" / "reference" / "methods.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines if line.startswith(f"| `{name}` |")]
    cells = [*rows, ["", "", ""]][0]
    facts = [f"- **{title}:** {cell}" for title, cell in zip(("drafts", "source", "needs"), cells, strict=True) if cell]
    parts = [f"# {name}", "\n".join(facts), method_picture(name), reference(module_of(file), members="[]")]
    # else those of its base
    if "class Options" in file.read_text(encoding="utf-8"):
        shown = {"inherited_members": "true", "show_bases": "false", "show_if_no_docstring": "true"}
        parts += ["## Options", reference(f"{module_of(file)}.Options", heading_level="3", **shown)]
    return "\n\n".join([*parts, "## In Python", reference(f"{module_of(file)}.Method", heading_level="3")])


def method_picture(name: str) -> str:
    """A draft tree of the method on the embedded model, where it has one."""
    if not (PICTURES / f"{name}.svg").exists():
        return ""
    about = "One cycle on the embedded model: the accepted path is green, the target's own token blue."
    return f"![A draft tree of {name}](../../pictures/methods/{name}.svg)\n\n{about}"


def reference(name: str, **options: str) -> str:
    """The directive from which mkdocstrings makes the page of a module or a class."""
    chosen = {"show_root_heading": "false", "show_root_toc_entry": "false", **options}
    lines = "".join(f"      {option}: {value}\n" for option, value in chosen.items())
    return f"::: {name}\n    options:\n{lines}"


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its texts, its code, what the code printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join(text for output in cell.get("outputs", []) for text in output.get("text", []))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links that lead out of docs/; link the methods of reference/methods.md to their pages."""
    place = page.file.src_uri
    if place == f"{METHODS.removesuffix('/')}.md":
        markdown = re.sub(r"^\| `(\w+)` \|", r"| [`\1`](methods/\1.md) |", markdown, flags=re.MULTILINE)
    if place.startswith(METHODS):
        markdown = re.sub(r"\]\((?!\.\./\.\./|\w+://)", "](../", markdown)
    folder = posixpath.dirname(place)

    def mended(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        if "://" in target:
            return link[0]
        inside = posixpath.normpath(posixpath.join(folder, target)).replace("tutorial.ipynb", "tutorial.md")
        inside = next((there for here, there in REPOSITORY.items() if inside.removeprefix("../") == here), inside)
        if files.get_file_from_path(inside):
            return f"[{text}]({posixpath.relpath(inside, folder or '.')}{anchor})"
        return link[0] if not (ROOT / "docs" / inside).exists() and not (ROOT / inside).exists() else text

    return re.sub(r"(?<!!)\[([^][]+)\]\(([^)#:]+)(#[^)]*)?\)", mended, markdown)
