"""The packages keep their layers.

A package here is a module or a package directly under src/eyas. It imports only from lower layers;
packages of one layer do not import each other; nothing is imported in a circle. Imports are read from
the source, so one inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import processes

EYAS = Path(__file__).resolve().parents[1] / "src" / "eyas"
# A new package gets its layer here, and its line in the table of CONTRIBUTING.md.
LAYERS = {
    "errors": -3,  # the lowest: every package may refuse what it cannot serve
    **dict.fromkeys(["elsewhere", "files", "formats"], -2),
    **dict.fromkeys(["hardware", "kernels", "locks", "threads", "timing", "train"], -1),
    "core": 0,
    **dict.fromkeys(["features", "nn", "option_texts", "passes", "targets", "text", "tiny"], 1),
    "checkpoints": 2,
    **dict.fromkeys(["drafters", "grammar", "named"], 3),
    **dict.fromkeys(["blocks", "pard", "runners"], 4),
    **dict.fromkeys(["adaptive", "arguments"], 5),
    "api": 6,
    **dict.fromkeys(["hooks", "recall", "serve"], 7),
    **dict.fromkeys(["cli", "__init__"], 8),
    "__main__": 9,  # `python -m eyas` is the command line
}
# What a package may not import although it lies lower, or outside of eyas: the core is the algorithm,
# and knows neither kernels nor clocks; draft nets are plain torch.
UNKNOWN_TO = {"core": frozenset({"kernels", "time"}), "nn": frozenset({"kernels"})}
# A wing is what the rings do without. Wings import rings and never each other; what one asks of another goes through
# a socket (core/sockets.py) or through api.
WINGS = {
    "adaptive": {"adaptive"},
    "blocks": {"blocks"},
    "features": {"features"},
    "grammar": {"grammar"},
    "hooks": {"hooks"},
    "named": {"named"},
    "pard": {"pard"},
    "recall": {"recall"},
    "serve": {"serve"},
    "speed": {"runners", "kernels"},  # runners choose these kernels
}
# The command line puts wings together, so it may import all.
COMMAND_LINE = {"cli", "__main__", "__init__"}


@dataclass(frozen=True)
class Rules:
    """Which package may import which."""

    layers: Mapping[str, int]
    unknown_to: Mapping[str, frozenset[str]] = field(default_factory=dict)


class Import(NamedTuple):
    """One import by a module of the package; dotted names, the package's own included."""

    importer: str
    imported: str
    where: str  # "eyas/core/tree.py:31"


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module under `package`; a package is named without its __init__."""
    named = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports_of(package: Path, rules: Rules, others: Collection[str] = ()) -> list[Import]:
    """Every import, wherever it stands in a file. others: modules of other packages."""
    modules, imports = modules_of(package), []
    known = {*modules, *(f"{package.name}.{name}" for name in rules.layers), *others}
    for importer, file in modules.items():
        for node in _importing(file.read_text(encoding="utf-8")):
            for imported in _imported_by(node, importer, file, known):
                if imported != importer:
                    where = f"{file.relative_to(package.parent).as_posix()}:{node.lineno}"
                    imports.append(Import(importer, imported, where))
    return imports


@cache
def _importing(source: str) -> tuple[ast.stmt | ast.expr, ...]:
    """Return what may import: statements, and calls. Several tests read the same files."""
    nodes = ast.walk(ast.parse(source))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


def _imported_by(node: ast.stmt | ast.expr, importer: str, file: Path, modules: set[str]) -> Iterator[str]:
    """The modules that one syntax node imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = importer.split(".") if file.name == "__init__.py" else importer.split(".")[:-1]
        above = home[: len(home) + 1 - node.level] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            # a constant that stands before every other import
            if (base, alias.name) != (importer.split(".")[0], "__version__"):
                yield inner if inner in modules else base
    elif isinstance(node, ast.Call) and node.args and isinstance(name := getattr(node.args[0], "value", None), str):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__"):
            yield name


def package_of(module: str, root: Path = EYAS) -> str:
    """eyas.core.tree -> core; eyas itself -> __init__; torch.nn -> torch."""
    outer, *inner = module.split(".")
    return [*inner, "__init__"][0] if outer == root.name else outer


def violations(root: Path, rules: Rules) -> list[str]:
    """Every broken rule as one sentence that names the import; empty when all is well."""
    imports = imports_of(root, rules)
    inside = [i for i in imports if package_of(i.imported, root) != i.imported.split(".")[0]]
    missing = sorted({package_of(module) for module in modules_of(root)} - rules.layers.keys())
    return [
        *(f"package {package!r} has no layer: add it to LAYERS in tests/test_architecture.py" for package in missing),
        *(f"{i.where} imports {i.imported}: {reason}" for i in inside if (reason := _layer_fault(i, rules))),
        *(_unknown_faults(imports, root, rules)),
        *_drafter_faults(inside),
        *(f"import cycle: {' -> '.join(cycle)}" for cycle in _cycles(inside)),
    ]


def _layer_fault(edge: Import, rules: Rules) -> str:
    layers, lower, upper = rules.layers, package_of(edge.imported), package_of(edge.importer)
    # modules of one package may know each other; a missing layer is reported once
    if lower == upper or upper not in layers:
        return ""
    if lower not in layers:
        return f"there is no package {lower!r}"
    if layers[lower] == layers[upper]:
        return (
            f"{lower} and {upper} are both in layer {layers[upper]}, and packages of one layer do not import each other"
        )
    if layers[lower] > layers[upper]:
        return f"{upper} (layer {layers[upper]}) may import only from lower layers, and {lower} is in layer {layers[lower]}"
    return ""


def _unknown_faults(imports: list[Import], root: Path, rules: Rules) -> Iterator[str]:
    for i in imports:
        name, importer = package_of(i.imported, root), package_of(i.importer, root)
        if name in rules.unknown_to.get(importer, ()):
            yield f"{i.where} imports {i.imported}: {importer} does not know {name}"


def _drafter_faults(imports: list[Import]) -> list[str]:
    """A method may import one base method; what all methods share (`__init__`, `_grow`, ...) imports no method."""

    def method(module: str) -> str:
        parts = module.split(".")
        return parts[2] if len(parts) > 2 and parts[1] == "drafters" and not parts[2].startswith("_") else ""

    faults: list[str] = []
    bases: dict[str, str] = {}
    for i in imports:
        base, user = method(i.imported), method(i.importer)
        if not base or base == user or package_of(i.importer) != "drafters":
            continue
        if not user:
            faults.append(f"{i.where} imports {i.imported}: what all methods share may not import a method")
        elif bases.setdefault(user, base) != base:
            taken = f"method {user} already imports {bases[user]}, and one base method is the most"
            faults.append(f"{i.where} imports {i.imported}: {taken}")
    return faults


def _cycles(imports: list[Import]) -> list[list[str]]:
    """One cycle, closed, for every import that leads back to a module still being followed."""
    graph: dict[str, list[str]] = {}
    for i in imports:
        graph.setdefault(i.importer, []).append(i.imported)
    cycles: list[list[str]] = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
        elif module not in done:
            for imported in dict.fromkeys(graph.get(module, [])):
                follow(imported, [*path, module])
            done.add(module)

    for module in graph:
        follow(module, [])
    return cycles


@pytest.mark.slow
def test_packages_keep_their_layers() -> None:
    """Guards against imports that turn the layers into a knot. No false alarms: the source is read, nothing is run."""
    assert modules_of(EYAS), f"no modules under {EYAS}"
    broken = violations(EYAS, Rules(LAYERS, UNKNOWN_TO))
    assert not broken, "\n".join(["imports that break the rules of CONTRIBUTING.md:", *dict.fromkeys(broken)])


@pytest.mark.slow
def test_wings_import_rings_only() -> None:
    """Guards what makes a wing optional: no module but the command line's comes to another wing, by any way."""
    wing_of = {package: wing for wing, packages in WINGS.items() for package in packages}
    graph: dict[str, list[str]] = {}
    for i in imports_of(EYAS, Rules(LAYERS)):
        if i.imported.split(".")[0] == EYAS.name:
            graph.setdefault(i.importer, []).append(i.imported)
    starts = [module for module in graph if package_of(module) not in COMMAND_LINE]
    faults = [" -> ".join(way) for start in starts for way in _ways_to_wings(start, graph, wing_of)]
    assert not faults, "\n".join(["what plugs in is asked through core/sockets.py, or through api:", *faults])


def _ways_to_wings(start: str, graph: Mapping[str, list[str]], wing_of: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the shortest chain of imports from a module to each module of a wing that is not its own."""
    own, seen, todo = wing_of.get(package_of(start)), {start}, [[start]]
    while todo:
        way = todo.pop(0)
        for imported in graph.get(way[-1], []):
            if imported in seen:
                continue
            seen.add(imported)
            if wing_of.get(package_of(imported), own) != own:
                yield [*way, imported]
            else:
                todo.append([*way, imported])


def test_private_modules_stay_in_their_package() -> None:
    """Guards the walls: what others use of a package is in its public modules, such as `drafters/tools.py`."""
    private = private_imports(imports_of_all())
    assert not private, "\n".join(["modules of other packages whose names begin with an underscore:", *private])


# A distribution -> the distributions of this repository that its modules import.
DISTRIBUTIONS = {
    "draft_vectors": {"eyas"},  # one module, its class for eyas
    "eyas": set(),
    "eyas_gpu": {"eyas"},
    "eyas_lab": {"eyas"},
    "eyas_ray": {"eyas"},
    "eyas_train": {"eyas", "eyas_lab"},
}
ROOTS = {"eyas": EYAS} | {f.parent.name: f.parent for f in sorted(EYAS.parents[1].glob("packages/*/src/*/__init__.py"))}


def imports_of_all() -> list[Import]:
    """Return the imports of every distribution."""
    modules = {module for root in ROOTS.values() for module in modules_of(root)}
    return [i for root in ROOTS.values() for i in imports_of(root, Rules({}), modules)]


@pytest.mark.parametrize("name", ROOTS)
def test_distributions_import_what_they_depend_on(name: str) -> None:
    """Guards the order of the distributions: eyas imports no other, and finds what others bring by entry points."""
    imports = imports_of(ROOTS[name], Rules({}))
    foreign = {i.imported.split(".")[0] for i in imports} & DISTRIBUTIONS.keys() - {name}
    assert foreign <= DISTRIBUTIONS[name]
    cycles = _cycles([i for i in imports if i.imported.split(".")[0] == name])
    assert not cycles, cycles


def private_imports(imports: list[Import]) -> list[str]:
    """Return the imports of modules of other packages whose names begin with an underscore."""
    ours = (i for i in imports if i.imported.startswith("eyas") and package_of(i.importer) != package_of(i.imported))
    private = re.compile(r"\._(?!_)")
    return [f"{i.where} imports {i.imported}" for i in ours if private.search(i.imported)]


def test_every_package_is_a_ring_or_a_wing() -> None:
    """Guards the rule against new folders: what is not named here is a ring, and what plugs in is no ring."""
    plugs = {file.parent.name for file in EYAS.glob("*/plug_*.py")}
    named = {package for packages in WINGS.values() for package in packages} | COMMAND_LINE
    assert named <= LAYERS.keys()
    # targets: where targets come from is a ring, as all that decodes needs one; files in GGUF format can be left out
    assert plugs - named <= {"targets"}


# What importing a module pulls in from eyas: most files, most code lines. The numbers only get smaller.
CLOSURES = {"eyas.core.engine": (27, 3_001), "eyas.api": (47, 5_579)}
CORE = {"__init__", "core", "errors", "formats", "threads", "timing"}
KNOWN = {
    "eyas.core.engine": CORE,
    "eyas.api": {*CORE, "api", "arguments", "checkpoints", "drafters", "files", "targets", "text"},
}


@pytest.mark.parametrize("module", CLOSURES)
def test_the_trunk_only_shrinks(module: str) -> None:
    """Guards what a reader of the default path has to know: all that importing the loop, or the API, pulls in."""
    from house import code_lines  # which imports this module

    files = closure_of(module)
    lines = sum(code_lines(file)[0] for file in files.values())
    max_files, max_lines = CLOSURES[module]
    assert (len(files) <= max_files, lines <= max_lines) == (True, True), f"{len(files)} files, {lines} lines"
    assert {package_of(name) for name in files} <= KNOWN[module]  # anything else plugs into core/sockets.py


def closure_of(module: str) -> dict[str, Path]:
    """The modules that importing `module` imports, and their files; not under TYPE_CHECKING or inside functions."""
    modules, found, todo = modules_of(EYAS), dict[str, Path](), [module]
    while todo:
        parts = todo.pop().split(".")
        for name in (".".join(parts[:i]) for i in range(1, len(parts) + 1)):
            if name in modules and name not in found:
                found[name] = modules[name]
                todo += _imported_when_run(name, modules)
    return found


def _imported_when_run(importer: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that the statements of a module import when it is imported itself."""
    todo: list[ast.AST] = [ast.parse(modules[importer].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported_by(node, importer, modules[importer], set(modules))


def test_contributing_lists_the_layers() -> None:
    """Guards the table for readers: it says what LAYERS says."""
    text = (EYAS.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    numbered = [(int(layer), packages) for layer, packages, *_ in rows if layer.lstrip("-").isdigit()]
    assert {name.strip(" `"): layer for layer, packages in numbered for name in packages.split(",")} == LAYERS


def test_import_eyas_does_not_import_torch() -> None:
    """`eyas --version` and shell completion must not wait seconds for torch; dir() must not load it either."""
    code = "import sys, eyas; dir(eyas); eyas.__version__; print(*sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    done = processes.run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_lazy_names() -> None:
    """A name that is promised in __all__ but cannot be imported would only fail at a user's."""
    import eyas
    import eyas.core.sampling

    assert eyas.Sampling is eyas.core.sampling.Sampling
    assert dir(eyas) == sorted(eyas.__all__)
    assert all(getattr(eyas, name) is not None for name in eyas.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        _ = eyas.Sampler
