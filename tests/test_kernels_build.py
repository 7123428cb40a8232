"""Building and loading the CPU kernels: broken compilers and caches, and other people's files, end in one line.
Compilers are shell scripts here; the one that works copies this session's library."""

import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas import kernels
from eyas.kernels import _build

Compiler = Callable[[str], Path]
needs = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """An empty cache, and a process that has not asked for kernels yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _build.outcome.cache_clear()
    yield
    _build.outcome.cache_clear()


@pytest.fixture(scope="session")
def library() -> Path:
    """The library of this session."""
    return Path(kernels.library()._name)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """Makes CXX a shell script; "$out" is the file that it is to write. It counts its runs in `runs`."""

    def write(script: str) -> Path:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nfor out; do :; done\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return program

    return write


def runs(tmp_path: Path) -> int:
    path = tmp_path / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "eyas" / "kernels"


def reason() -> str:
    """Why a process that starts now has no kernels; empty if it has them."""
    _build.outcome.cache_clear()
    line = kernels.why_not() or ""
    assert "\n" not in line
    return line


@needs
def test_a_private_cache_and_one_compilation(library: Path, compiler: Compiler, tmp_path: Path) -> None:
    """Guards the usual way: compiled once, found again, nothing left beside it, nobody else may write there."""
    compiler(f'cp {library} "$out"')
    assert not reason()
    assert not reason()
    assert runs(tmp_path) == 1
    names = sorted(path.name for path in folder(tmp_path).iterdir())
    assert [name.split("-")[0] for name in names] == ["build.lock", "cpu"]
    assert folder(tmp_path).stat().st_mode & 0o777 == 0o700


WRONG = {
    "lacks the symbols": ('cp "{other}" "$out"', "undefined symbol"),
    "writes no library": ('echo hello > "$out"', "cannot be loaded"),
    "writes nothing": ("exit 0", "cannot be loaded"),
    "fails": ("echo 'kernels.cpp:1: error: no' >&2; exit 1", "kernels.cpp:1: error: no"),
    "fails silently": ("exit 3", "exit status 3"),
    "crashes": ("kill -SEGV $$", "exit status -11"),
}


@pytest.mark.quick("crashes")
@needs
@pytest.mark.parametrize("kind", WRONG)
def test_a_compiler_that_does_not_work(
    kind: str, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a library without the functions was a traceback at the first call. Nothing is left in the cache."""
    from numpy.random import _pcg64  # any library that loads and has none of the functions

    script, says = WRONG[kind]
    compiler(script.format(other=_pcg64.__file__))
    with caplog.at_level(logging.WARNING, "eyas"):
        assert says in reason()
    assert runs(tmp_path) == 2, "with threads and without"
    assert [record.message.startswith("eyas runs slower") for record in caplog.records] == [True]
    assert sorted(path.name for path in folder(tmp_path).iterdir()) == ["build.lock"]


@pytest.mark.parametrize(("environment", "says"), [
    ({"CXX": 'g++ "'}, "not a command line: No closing quotation"),
    ({"CXX": "a-compiler-that-is-not-there"}, "there is no C\\+\\+ compiler here"),
    ({"PATH": "/nowhere"}, "there is no C\\+\\+ compiler here"),
    ({"EYAS_KERNELS": "off"}, "^EYAS_KERNELS is off$"),
    ({"EYAS_KERNELS": "False"}, "^EYAS_KERNELS is off$"),
    ({"XDG_CACHE_HOME": "/dev/null/cache"}, "folder /dev/null/cache/eyas/kernels cannot be used: not a directory"),
    ({"XDG_CACHE_HOME": "/proc/cache"}, "the cache folder /proc/cache/eyas/kernels cannot be used"),
])  # fmt: skip
def test_environments_without_kernels(environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a quotation mark in CXX was a traceback. Every reason is one line."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.search(says, reason())


@needs
def test_a_cache_that_others_can_write_to(
    library: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: a library in a folder that other users own or can write to was loaded, whoever had put it there."""
    compiler(f'cp {library} "$out"')
    assert not reason()
    folder(tmp_path).chmod(0o777)
    assert "is not this user's alone" in reason()
    folder(tmp_path).chmod(0o700)
    assert not reason()
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert "is not this user's alone" in reason()


@needs
def test_each_instruction_set_has_a_library_of_its_own(
    library: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the cache: a smaller set is compiled with its flags, and found when it is asked for again."""
    program = compiler(f'echo "$@" >> {tmp_path}/arguments; cp {library} "$out"')
    names = _build.runnable_isas()
    for name in (*names, *names):
        monkeypatch.setenv("EYAS_KERNELS_ISA", name)
        assert not reason()
    assert runs(tmp_path) == len(names), program
    arguments = (tmp_path / "arguments").read_text().splitlines()
    for name, line in zip(names, arguments, strict=True):
        assert set(_build.ISAS[name][0]) <= set(line.split())


@pytest.mark.parametrize(("lines", "sets"), [
    (["Features\t: fp asimd aes", "CPU part\t: 0xd08"], ["native", "armv8-a"]),
    (["Features\t: fp asimd asimddp i8mm", "CPU part\t: 0xd40"], ["native", "armv8-a", "armv8.2-a+dotprod"]),
    ([], ["native"]),
], ids=["armv8-a", "dotprod", "nothing known"])  # fmt: skip
def test_what_an_arm_processor_has(lines: list[str], sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Linux's words for ARM, and systems without them (macOS)."""
    monkeypatch.setattr(_build, "_processor", lambda: lines)
    assert _build.runnable_isas() == sets
    monkeypatch.setenv("EYAS_KERNELS_ISA", "x86-64-v3")
    assert ("this processor lacks avx2" if lines else "does not list its processor's features") in reason()


@needs
@pytest.mark.parametrize("isa", [name for name in _build.ISAS if name.startswith(platform.machine().partition("_")[0])])
def test_each_instruction_set_compiles(isa: str) -> None:
    """Guards sets that this machine does not run. The plainest one has NEON's types, and stopped compiling with them once."""
    flags = (*_build.ISAS[isa][0], *_build.FLAGS, _build.OPENMP, "-O1", "-fsyntax-only")
    compiler = shutil.which("c++") or shutil.which("g++") or "clang++"
    done = subprocess.run([compiler, *flags, str(_build.MAIN)], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
