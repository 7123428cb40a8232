"""The house keeps its floors.

A room is a module or package directly under src/eyas. It imports only from lower floors; rooms of one floor do not know each other;
nothing is imported in a circle. Imports are read from the source, so one inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

EYAS = Path(__file__).resolve().parents[1] / "src" / "eyas"

# A new room gets its floor here, and its line in the table of CONTRIBUTING.md.
FLOORS = {
    "errors": -3,  # the lowest: every package may refuse what it cannot serve
    "files": -2,
    **dict.fromkeys(["hardware", "kernels"], -1),
    **dict.fromkeys(["nn", "losses", "text", "tiny", "datastore"], 0),
    "checkpoints": 1,
    "core": 2,
    **dict.fromkeys(["drafters", "metrics"], 3),
    **dict.fromkeys(["runners", "train"], 4),
    "adaptive": 5,
    "api": 6,
    "bench": 7,
    **dict.fromkeys(["cli", "__init__"], 8),
    "__main__": 9,  # the door: `python -m eyas` is the command line
}


class Import(NamedTuple):
    """One import of one module of the package by another; dotted names, the package's own included."""

    importer: str
    imported: str
    where: str  # "eyas/tree.py:31"


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module under `package`; a package is named without its __init__."""
    named = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports_of(package: Path) -> list[Import]:
    """Every import of the package's own modules, wherever it stands in a file."""
    modules, found = modules_of(package), []
    for importer, file in modules.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)):
            for imported in _targets(node, importer, file, modules):
                if imported != importer and (imported + ".").startswith(package.name + "."):
                    found.append(Import(importer, imported, f"{file.relative_to(package.parent).as_posix()}:{node.lineno}"))
    return found


def _targets(node: ast.stmt | ast.expr, importer: str, file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that one syntax node imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = importer.split(".") if file.name == "__init__.py" else importer.split(".")[:-1]
        above = home[: len(home) + 1 - node.level] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            is_module = inner in modules or ("." not in base and alias.name in FLOORS)  # the latter: a room that is not built yet
            if (base, alias.name) != (importer.split(".")[0], "__version__"):  # a constant that stands before every other import
                yield inner if is_module else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__"):
            yield node.args[0].value


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def violations(package: Path) -> list[str]:
    """Every broken rule as one sentence that names the import; an empty list when the house is in order."""
    imports = imports_of(package)
    said = [
        f"room {room!r} has no floor: add it to FLOORS in tests/test_architecture.py"
        for room in sorted({room_of(module) for module in modules_of(package)} - FLOORS.keys())
    ]
    said += [f"{i.where} imports {i.imported}: {reason}" for i in imports if (reason := _floor_fault(i))]
    said += _drafter_faults(imports)
    said += [f"import cycle: {' -> '.join(cycle)}" for cycle in _cycles(imports)]
    return said


def _floor_fault(edge: Import) -> str:
    lower, upper = room_of(edge.imported), room_of(edge.importer)
    if lower == upper or upper not in FLOORS:  # a package's own modules may know each other; a missing floor is said once
        return ""
    if lower not in FLOORS:
        return f"there is no room {lower!r}"
    if FLOORS[lower] == FLOORS[upper]:
        return f"{lower} and {upper} are both on floor {FLOORS[upper]}, and rooms of one floor do not import each other"
    if FLOORS[lower] > FLOORS[upper]:
        return f"{upper} (floor {FLOORS[upper]}) may import only from lower floors, and {lower} is on floor {FLOORS[lower]}"
    return ""


def _drafter_faults(imports: list[Import]) -> list[str]:
    """A method may import one base method; what all methods share (`__init__`, `_base`, ...) imports no method."""

    def method(module: str) -> str:
        parts = module.split(".")
        return parts[2] if len(parts) > 2 and parts[1] == "drafters" and not parts[2].startswith("_") else ""

    said: list[str] = []
    bases: dict[str, str] = {}
    for i in imports:
        base, user = method(i.imported), method(i.importer)
        if not base or base == user or room_of(i.importer) != "drafters":
            continue
        if not user:
            said.append(f"{i.where} imports {i.imported}: what all methods share may not import a method")
        elif bases.setdefault(user, base) != base:
            said.append(f"{i.where} imports {i.imported}: method {user} already imports {bases[user]}, and one base method is the most")
    return said


def _cycles(imports: list[Import]) -> list[list[str]]:
    """One cycle, closed, for every import that leads back to a module still being followed."""
    graph: dict[str, list[str]] = {}
    for i in imports:
        graph.setdefault(i.importer, []).append(i.imported)
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for imported in dict.fromkeys(graph.get(module, [])):
                follow(imported, [*path, module])
            done.add(module)

    for module in graph:
        follow(module, [])
    return found


def test_the_house_keeps_its_floors() -> None:
    """Guards against imports that turn the layers into a knot. No false alarms: the source is read, nothing is run."""
    assert modules_of(EYAS), f"no modules under {EYAS}"
    broken = violations(EYAS)
    assert not broken, "\n".join(["the floors are broken:", *broken])


def test_import_eyas_does_not_import_torch() -> None:
    """`eyas --version` and shell completion must not wait seconds for torch; dir() must not load it either."""
    code = "import sys, eyas; dir(eyas); eyas.__version__; print(*sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == []


def test_lazy_names() -> None:
    """A name that is promised in __all__ but has no home would only fail at a user's."""
    import eyas
    import eyas.core.sampling

    assert eyas.Sampling is eyas.core.sampling.Sampling
    assert set(eyas.__all__) <= set(dir(eyas))
    assert set(eyas.__all__) == set(eyas._HOME) | {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        _ = eyas.Sampler


# The checker is checked on houses made up for it: file -> source, and a part of the sentence it must say.
BROKEN = {
    "up": (
        {"tree.py": "from eyas.api import LLM", "llm.py": ""},
        "tree (floor 0) may import only from lower floors, and llm is on floor 7",
    ),
    "up, plain import": ({"tree.py": "import eyas.api as x", "llm.py": ""}, "eyas/tree.py:1 imports eyas.api"),
    "up, a name of the package": ({"tree.py": "from eyas import llm", "llm.py": ""}, "eyas/tree.py:1 imports eyas.api"),
    "up, a room not built yet": ({"tree.py": "from eyas import llm"}, "eyas/tree.py:1 imports eyas.api"),
    "up, relative": (
        {"drafters/_base.py": "from ..decode import Decoder", "decode.py": ""},
        "eyas/drafters/_base.py:1 imports eyas.core.engine",
    ),
    "up, relative, a module": ({"drafters/__init__.py": "from .. import decode", "decode.py": ""}, "imports eyas.core.engine"),
    "up, lazily": ({"tree.py": "def f():\n    from eyas.api import LLM"}, "eyas/tree.py:2 imports eyas.api"),
    "up, for types only": (
        {"tree.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from eyas.api import LLM"},
        "eyas/tree.py:3 imports eyas.api",
    ),
    "up, by name": ({"tree.py": "import importlib\nimportlib.import_module('eyas.api')"}, "eyas/tree.py:2 imports eyas.api"),
    "up, to the roof": ({"tree.py": "import eyas"}, "tree (floor 0) may import only from lower floors, and __init__ is on floor 9"),
    "same floor": ({"verify.py": "import eyas.core.cache", "cache.py": ""}, "cache and verify are both on floor 1"),
    "same floor, packages": (
        {"train/loop.py": "from eyas.adaptive.cost import f", "tune/cost.py": ""},
        "tune and train are both on floor 6",
    ),
    "no floor": ({"attic.py": ""}, "room 'attic' has no floor"),
    "no such room": ({"llm.py": "from eyas.cellar import wine"}, "there is no room 'cellar'"),
    "two base methods": (
        {"drafters/c.py": "from eyas.drafters.a import A\nfrom eyas.drafters.b import B", "drafters/a.py": "", "drafters/b.py": ""},
        "eyas/drafters/c.py:2 imports eyas.drafters.b: method c already imports a",
    ),
    "a helper knows a method": ({"drafters/_grow.py": "from .a import A", "drafters/a.py": ""}, "may not import a method"),
    "a list of methods": ({"drafters/__init__.py": "from . import a", "drafters/a.py": ""}, "may not import a method"),
    "cycle": (
        {"checkpoints/__init__.py": "def f():\n    from . import hf", "checkpoints/hf.py": "from eyas.checkpoints import Weights"},
        "import cycle: eyas.checkpoints -> eyas.checkpoints.hf -> eyas.checkpoints",
    ),
    "longer cycle": (
        {"bench/a.py": "from .b import x", "bench/b.py": "from .c import x", "bench/c.py": "from .a import x"},
        "import cycle: eyas.bench.a -> eyas.bench.b -> eyas.bench.c -> eyas.bench.a",
    ),
}

SOUND = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from eyas.api import LLM\n__version__ = '0'",
    "errors.py": "import difflib",
    "tree.py": "import torch\nfrom eyas.errors import OptionError\nfrom eyas_other import x",
    "drafters/__init__.py": "import importlib\nfrom ._base import Drafter\nimportlib.import_module(f'eyas.drafters.{1}')",
    "drafters/_base.py": "from ..tree import Draft",
    "drafters/_grow.py": "from eyas.core.drafter import Draft",
    "drafters/eagle1.py": "from eyas.drafters import _base, _grow",
    "drafters/eagle2.py": "from eyas.drafters.eagle1 import Net\nfrom eyas.drafters.eagle1 import Options\nfrom ._grow import grow",
    "llm.py": "from eyas import __version__, tree\nfrom eyas.drafters import Drafter\nfrom eyas.drafters.eagle2 import x",
}


def build(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, source in {"__init__.py": "", **files}.items():
        file = tmp_path / "eyas" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return tmp_path / "eyas"


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_sees(name: str, tmp_path: Path) -> None:
    """A checker that finds nothing anywhere would pass on every house."""
    files, sentence = BROKEN[name]
    broken = violations(build(tmp_path, files))
    assert any(sentence in fault for fault in broken), broken


def test_the_checker_accepts_a_sound_house(tmp_path: Path) -> None:
    """And one that cries at every house would be switched off."""
    assert violations(build(tmp_path, SOUND)) == []
