"""Which cases which command runs: `make test-fast`, `make test`, `make test-all`.

A test says by a marker which commands run it: `slow` and `quick` for the fast part, `cover` and `exhaustive` for what `make test`
leaves to `make test-all` (`pytest --all`). `make test` says at its end how many cases it has left out. A test that is
named (`pytest FILE::TEST`) runs in any case. The hooks of this module are those of conftest.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest

from covers import cover, wanted

__all__ = [
    "MATRICES", "Matrix", "pytest_addoption", "pytest_collection_modifyitems", "pytest_sessionfinish",
    "pytest_terminal_summary", "pytest_testnodedown",
]  # fmt: skip

FURTHER = "further cases"  # how many cases a process of xdist has left out


@dataclass(frozen=True)
class Matrix:
    """A test function with its cases, and those that `make test` runs.

    `covered` says whether it has the marker `cover`, with these `shares`.
    """

    cases: Sequence[Mapping[str, str]]
    chosen: frozenset[int]
    covered: bool
    shares: Mapping[str, int]


MATRICES = pytest.StashKey[dict[str, Matrix]]()  # of all tests that were collected
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the exhaustive cases too, as `make test-all` does")
    parser.addoption("--again", action="store_true", help="run a failed test again, alone, as CI does (tests/again.py)")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases, and leave out the exhaustive ones. The longest tests begin first: with several processes, the
    end waits for none of them."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    named = any("::" in argument for argument in config.args)  # members may have been left out
    wrong = [line for test, members in tests.items() if (line := _mark_slow(test, members)) and not named]
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    config.stash[MATRICES] = {test: _mark_exhaustive(test, members, named) for test, members in tests.items()}
    left_out = [] if named or config.option.all else [i for i in items if i.get_closest_marker("exhaustive")]
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _mark_slow(test: str, members: Sequence[pytest.Item]) -> str:
    """Mark the members that `quick` does not name, all of them if `cover` comes alone; return which names are wrong."""
    quick = members[0].get_closest_marker("quick")
    if quick is None and members[0].get_closest_marker("cover") is None:
        return ""
    used, patterns = set[str](), quick.args if quick else ()
    for member in members:
        name = _id(member)
        fitting = {pattern for pattern in patterns if name == pattern or fnmatchcase(name, pattern)}
        used |= fitting
        if not fitting:
            member.add_marker(pytest.mark.slow)
    unused = sorted(set(patterns) - used)
    return f"{test}: quick names {', '.join(unused)}, which it does not have" if unused else ""


def _mark_exhaustive(test: str, members: Sequence[pytest.Item], named: bool) -> Matrix:
    """Mark the members that are not of the cover; what is exhaustive is slow."""
    cases = [_values(member) for member in members]
    marker = members[0].get_closest_marker("cover")
    shares: Mapping[str, int] = marker.kwargs if marker else {}
    if unknown := set(shares) - set(cases[0]):
        raise pytest.UsageError(f"{test}: cover names {', '.join(sorted(unknown))}, which it does not have")
    if marker:
        quick = [i for i, member in enumerate(members) if member.get_closest_marker("slow") is None]
        fixed = quick if len(quick) < len(members) else []  # what `make test-fast` runs, `make test` runs too
        kept_ids = [i for i, member in enumerate(members) if _id(member) in marker.args]
        if len(kept_ids) < len(marker.args) and not named:
            raise pytest.UsageError(f"{test}: it does not have all of {', '.join(marker.args)}, which cover names")
        fixed = sorted({*fixed, *kept_ids})
        chosen = cover(cases, wanted(test, cases, shares), fixed)
        for i in set(range(len(members))) - chosen:
            members[i].add_marker(pytest.mark.exhaustive)
    exhaustive = [member.get_closest_marker("exhaustive") is not None for member in members]
    for member, further in zip(members, exhaustive, strict=True):
        if further:
            member.add_marker(pytest.mark.slow)
    kept = frozenset(i for i, further in enumerate(exhaustive) if not further)
    return Matrix(cases, kept, marker is not None, shares)


def _id(member: pytest.Item) -> str:
    return member.name.partition("[")[2].removesuffix("]")


def _values(item: Any) -> dict[str, str]:
    """Return the value of each axis as text. Tensors have the number of their case: to print thousands takes seconds. torch
    is not imported here, as that takes seconds, too."""
    if not hasattr(item, "callspec"):
        return {}
    params, number = item.callspec.params, item.callspec.indices
    return {axis: f"{number[axis]}" if hasattr(value, "data_ptr") else repr(value) for axis, value in params.items()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that began this one, if there is one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[FURTHER] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a process of xdist has told: each of them has collected everything."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get(FURTHER, 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many cases were left out, so that nobody believes that everything ran."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out:,} further cases: make test-all (pytest --all)", yellow=True)
