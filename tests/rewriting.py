"""Mistakes put into modules while they are imported: a piece of a function is rewritten in its
syntax tree, or a function is replaced.

    rewrite("core.verify:_verify_by_rejection", "NOISE.accepts(CHANCE, POSITION, SIBLING)", "NOISE.accepts(CHANCE, POSITION, 0)")
    patch("core.verify:_without", lambda without: lambda q_BV, token_B: q_BV)

Code is named by "module:function", the module below `eyas` and methods as "Class.method". A pattern
is Python in which names in capitals stand for any expression (the same name for equal ones) and
`...` for anything, at the end of a call also for all other arguments. Neither the formatting of the
code nor the names of its variables matter. A change that no longer applies raises
`DoesNotApplyError`.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Change", "DoesNotApplyError", "Patch", "Rewrite", "install", "patch", "rewrite", "rewritten"]

PACKAGE = "eyas"
Bindings = dict[str, ast.AST]


class DoesNotApplyError(Exception):
    """The code is not what a change was written for: mend the change."""


@dataclass(frozen=True)
class Rewrite:
    """The one piece of a function that looks like `pattern` becomes `replacement`.

    `known`: patterns that say beforehand, by where they first occur in the function, what names stand for.
    """

    where: str
    pattern: str
    replacement: str
    known: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """`wrap` gets the function and returns another one in its place."""

    where: str
    wrap: Callable[[Any], Any]


Change = Rewrite | Patch


def rewrite(where: str, pattern: str, replacement: str, *known: str) -> Rewrite:
    return Rewrite(where, pattern, replacement, known)


def patch(where: str, wrap: Callable[[Any], Any]) -> Patch:
    return Patch(where, wrap)


def module_of(change: Change) -> str:
    """Dotted name of the module that it changes."""
    return f"{PACKAGE}.{change.where.split(':')[0]}"


def rewritten(source: str, change: Rewrite) -> str:
    """The module's source with the change; comments are lost."""
    module = ast.parse(source)
    function = _function(module, change)
    bindings: Bindings = {}
    for pattern in change.known:
        known = next(_matches(function, _parsed(pattern), bindings), None)
        if known is None:
            raise DoesNotApplyError(f"{change.where} has nothing like {pattern}")
        bindings = known[1]
    matches = list(_matches(function, _parsed(change.pattern), bindings))
    if len(matches) != 1:
        raise DoesNotApplyError(f"{change.where} has {len(matches)} pieces like {change.pattern}, and one is meant")
    old, bindings = matches[0]
    replaced = _Replaced(old, _substituted(change.replacement, bindings, isinstance(old, ast.stmt)))
    # Back to text and read again: a name that was assigned to may now be read.
    return ast.unparse(ast.fix_missing_locations(replaced.visit(module)))


def _function(module: ast.Module, change: Change) -> ast.FunctionDef:
    """The function of that name, inside classes of those names."""
    inside: ast.AST = module
    for name in change.where.split(":")[1].split("."):
        here = [
            n for n in ast.iter_child_nodes(inside) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name
        ]
        if len(here) != 1:
            raise DoesNotApplyError(f"{change.where}: there is no {name}")
        inside = here[0]
    if not isinstance(inside, ast.FunctionDef):
        raise DoesNotApplyError(f"{change.where} is no function")
    return inside


def _parsed(pattern: str) -> ast.AST:
    """An expression, or one statement."""
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _matches(function: ast.FunctionDef, pattern: ast.AST, known: Bindings) -> Iterator[tuple[ast.AST, Bindings]]:
    """Every piece that looks like the pattern, with what its names stand for."""
    for node in ast.walk(function):
        bindings = dict(known)
        if _match(pattern, node, bindings):
            yield node, bindings


def _is_any(pattern: object) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _variable(node: object) -> str | None:
    return node.id if isinstance(node, ast.Name) and node.id.isupper() else None


def _match(pattern: object, node: object, bindings: Bindings) -> bool:
    """Whether the node looks like the pattern; binds the pattern's variables."""
    if _is_any(pattern):
        return True
    if (name := _variable(pattern)) is not None:
        return isinstance(node, ast.expr) and ast.unparse(bindings.setdefault(name, node)) == ast.unparse(node)
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and pattern.args and _is_any(pattern.args[-1]):
            fixed = len(pattern.args) - 1
            return _match(pattern.func, node.func, bindings) and _match(
                pattern.args[:fixed], node.args[:fixed], bindings
            )
        fields = [f for f in pattern._fields if f not in ("ctx", "type_comment", "kind")]
        return all(_match(getattr(pattern, f), getattr(node, f), bindings) for f in fields)
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_match(p, n, bindings) for p, n in zip(pattern, node, strict=True))
        )
    return pattern == node


def _substituted(replacement: str, bindings: Bindings, statements: bool) -> list[ast.AST]:
    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            name = _variable(node)
            return node if name is None else bindings[name]

    body = [Fill().visit(statement) for statement in ast.parse(replacement).body]
    return body if statements else [statement.value for statement in body]


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: Sequence[ast.AST]) -> None:
        self.old, self.new = old, list(new)

    def visit(self, node: ast.AST) -> Any:
        if node is not self.old:
            return self.generic_visit(node)
        return self.new if isinstance(node, ast.stmt) else self.new[0]


def install(changes: Sequence[Change]) -> None:
    """From now on the modules of these changes are imported with them; none may have been imported yet."""
    imported = sorted({module_of(change) for change in changes} & sys.modules.keys())
    assert not imported, f"{imported} imported already"
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(MetaPathFinder):
    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        own = [change for change in self.changes if module_of(change) == name]
        spec = PathFinder.find_spec(name, path, target) if own else None
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_Loader(name, spec.origin, own))


class _Loader(SourceFileLoader):
    """Compiles the module with its rewrites, then patches it, before any other module has seen it."""

    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self.changes = changes

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for change in self.changes:
            if isinstance(change, Rewrite):
                source = rewritten(source, change)
        return compile(source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for change in self.changes:
            if isinstance(change, Patch):
                _patch(module, change)


def _patch(module: ModuleType, change: Patch) -> None:
    *classes, name = change.where.split(":")[1].split(".")
    holder: Any = module
    for inner in classes:
        holder = getattr(holder, inner)
    if name not in vars(holder):
        raise DoesNotApplyError(f"{change.where}: there is no {name}")
    setattr(holder, name, change.wrap(vars(holder)[name]))
