"""The compiled kernels: built with the machine's own C++ compiler at first use (seconds), kept in the user's cache folder.

The file's name holds a hash of the source, the flags, the compiler and the processor, so that nothing stale or foreign is loaded.
EYAS_KERNELS=off turns them off, CXX names another compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["UnavailableError", "library", "outcome"]

log = logging.getLogger(__name__)  # the command line shows what it says

FOLDER = Path(__file__).with_name("cpu")
SOURCE = FOLDER / "kernels.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-w")
THREADS = "-fopenmp"
SECONDS = 120


class UnavailableError(Exception):
    """Why there are no kernels on this machine: one line."""


def library() -> ctypes.CDLL:
    """The kernels. UnavailableError, with the reason, where they cannot be built or loaded; that is tried once in a process."""
    found = outcome()
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


@cache
def outcome() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    try:
        return _loaded()
    except UnavailableError as error:
        return str(error)


def _loaded() -> ctypes.CDLL:
    if os.environ.get("EYAS_KERNELS", "").lower() in ("off", "0"):
        raise UnavailableError("EYAS_KERNELS is off")
    compiler = _compiler()
    path = _folder() / f"cpu-{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    command = shlex.split(named) if named else [name for name in ("g++", "clang++", "c++") if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        raise UnavailableError("no C++ compiler was found (g++, clang++, or what CXX names)")
    return command


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas" / "kernels"


def _key(compiler: list[str]) -> str:
    """What the compiled file depends on."""
    told = Path("/proc/cpuinfo")
    flags = next((line for line in told.read_text().splitlines() if line.startswith(("flags", "Features"))), "") if told.is_file() else ""
    version = _said([*compiler, "--version"]) or ""
    parts = [
        *(file.read_text() for file in sorted(FOLDER.iterdir())),
        *FLAGS,
        *compiler,
        version,
        platform.machine(),
        platform.processor(),
        flags,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: list[str], path: Path) -> None:
    """With threads, or without where the compiler has no OpenMP; the file appears whole or not at all."""
    log.info("kernels are compiled for this machine, once: some seconds (EYAS_KERNELS=off goes without)")
    problem = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            for flags in ((*FLAGS, THREADS), FLAGS):
                done = subprocess.run(
                    [*compiler, *flags, str(SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=SECONDS, check=False
                )
                if done.returncode == 0:
                    made.replace(path)
                    return
                problem = problem or " ".join(done.stderr.split())[:200]
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    raise UnavailableError(f"{compiler[0]} could not build them: {problem}")


def _said(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
