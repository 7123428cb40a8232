"""Compiles, checks and loads the C++ kernels of `cpu/`.

They are compiled with the machine's own C++ compiler when they are first needed (some seconds) and
kept in the user's cache:

    ~/.cache/eyas/kernels/     private (mode 0700): a folder that other users own or can write to is not used
        cpu-KEY.so             the library; KEY hashes the sources, flags, compiler and processor
        build.lock             held by the one process that compiles

Without kernels eyas computes the same by torch, slower; one logged line says why.
EYAS_KERNELS=off turns the kernels off, CXX names another compiler, and EYAS_KERNELS_ISA compiles for
a smaller instruction set than the machine's own (`ISAS`), for tests and for measurements.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from eyas.errors import OptionError, near, one_line
from eyas.files import user_cache, write_atomically

__all__ = ["ISAS", "UnavailableError", "library", "outcome", "runnable_isas"]

log = logging.getLogger(__name__)  # the command line prints these messages

SOURCES = Path(__file__).with_name("cpu")
MAIN = SOURCES / "kernels.cpp"
# -fno-schedule-insns: for ARM, GCC would load all inputs of a tile first, and keep its sums in memory.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-schedule-insns", "-w")
OPENMP = "-fopenmp"
NATIVE = "native"
NATIVE_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# The compiler's flags for each instruction set, and what /proc/cpuinfo calls what it needs.
ISAS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    NATIVE: ((NATIVE_FLAG,), frozenset()),
    "x86-64-v2": (("-march=x86-64-v2",), frozenset({"sse4_2", "ssse3", "popcnt"})),
    "x86-64-v3": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi2", "f16c"})),
    "x86-64-v3+vnni": (("-march=x86-64-v3", "-mavxvnni"), frozenset({"avx2", "fma", "bmi2", "avx_vnni"})),
    "x86-64-v4": (("-march=x86-64-v4",), frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    "x86-64-v4+vnni": (("-march=x86-64-v4", "-mavx512vnni"), frozenset({"avx512bw", "avx512vl", "avx512_vnni"})),
    "armv8-a": (("-march=armv8-a",), frozenset({"asimd"})),
    "armv8.2-a+dotprod": (("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
}
COMPILE_TIMEOUT_S = 300


class UnavailableError(Exception):
    """The reason why there are no kernels on this machine, as one line."""


def library() -> ctypes.CDLL:
    """Return the loaded kernels. Raises UnavailableError, with the reason, where they cannot be
    built or loaded."""
    result = outcome()
    if isinstance(result, str):
        raise UnavailableError(result)
    return result


@cache
def outcome() -> ctypes.CDLL | str:
    """Return the loaded kernels, or the reason why there are none. Decided once per process."""
    wanted = os.environ.get("EYAS_KERNELS", "").strip().lower()
    if wanted in ("off", "0", "no", "false"):
        return "EYAS_KERNELS is off"
    if wanted not in ("", "on", "1", "yes", "true", "auto"):
        raise OptionError(f"EYAS_KERNELS must be on or off; it is {wanted!r}")
    if os.name != "posix":
        return "the kernels need Linux or macOS"
    try:
        target_flags = _target_flags(os.environ.get("EYAS_KERNELS_ISA") or NATIVE)
        folder = _private_folder()
        found = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
        return _load(folder, os.environ.get("CXX") or next(iter(found), ""), target_flags)
    except (UnavailableError, OSError) as error:
        log.warning("eyas runs slower, without its compiled kernels: %s", error)
        return one_line(error)


def runnable_isas() -> list[str]:
    """Return the instruction sets of `ISAS` that this processor has, `NATIVE` first."""
    features = _features()
    return [name for name, (_, needed) in ISAS.items() if needed <= features]


def _target_flags(isa: str) -> tuple[str, ...]:
    """Return the compiler's flags for an instruction set. Raise UnavailableError if this processor lacks it."""
    if isa not in ISAS:
        raise UnavailableError(f"EYAS_KERNELS_ISA is {isa!r}; {near(isa, list(ISAS))}")
    flags, needed = ISAS[isa]
    features = _features()
    if needed and not features:
        raise UnavailableError(f"EYAS_KERNELS_ISA is {isa}, but this system does not list its processor's features")
    if missing := needed - features:
        raise UnavailableError(f"EYAS_KERNELS_ISA is {isa}, but this processor lacks {', '.join(sorted(missing))}")
    return flags


def _features() -> frozenset[str]:
    """Return the features of the first processor, as Linux names them; none on other systems."""
    lines = [line for line in _processor() if line.startswith(("flags", "Features"))]
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def _load(folder: Path, compiler: str, target_flags: tuple[str, ...]) -> ctypes.CDLL:
    """Return the library from the cache; compile it first if it is not there."""
    path = folder / f"cpu-{_key(compiler, target_flags)}.so"
    if not path.exists():
        with _build_lock(folder):
            if not path.exists():  # another process may have compiled it meanwhile
                _build(compiler, target_flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error


# --- the cache ---------------------------------------------------------------------------------------


def _private_folder() -> Path:
    """Return the cache folder. Raise UnavailableError if somebody else could plant a library in it."""
    folder = user_cache() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {folder} cannot be used: {(error.strerror or str(error)).lower()}"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnavailableError(f"the cache folder {folder} is not this user's alone: remove it, or set XDG_CACHE_HOME")
    return folder


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the process that compiles; others wait."""
    from filelock import FileLock, Timeout  # only who compiles pays for the import

    path = folder / "build.lock"
    try:
        with FileLock(path, timeout=2 * COMPILE_TIMEOUT_S):
            yield
    except Timeout as error:
        raise UnavailableError(f"another process has been compiling them for a long time; it holds {path}") from error


# --- compiling ---------------------------------------------------------------------------------------


def _key(compiler: str, target_flags: tuple[str, ...]) -> str:
    """Return a hash of everything that the library depends on. No program is run for it: it is needed at every
    start."""
    programs = [path for word in compiler.split() if (path := shutil.which(word))]
    identities = [(os.path.realpath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in programs]
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))
    sources = [(path.name, path.read_text(encoding="utf-8")) for path in files]
    parts = (sources, FLAGS, target_flags, OPENMP, compiler, identities, platform.machine(), _processor())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Return the first processor's model and features, as Linux lists them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(("model name", "CPU part", "flags", "Features"))]


def _build(compiler: str, target_flags: tuple[str, ...], path: Path) -> None:
    """Compile the library with threads, or without where the compiler has no OpenMP; move it to its path."""
    command = _parse(compiler)
    log.info("the CPU kernels are compiled for this machine, once: some seconds (EYAS_KERNELS=off goes without)")
    problems = []
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        for number, flags in enumerate(((*FLAGS, OPENMP), FLAGS)):
            built = Path(folder) / f"{number}-{path.name}"  # the system knows a library that it has loaded by its name
            problem = _compile([*command, *target_flags, *flags, str(MAIN), "-o", str(built)]) or _fault_of(built)
            if not problem:
                with write_atomically(path) as stream:
                    stream.write(built.read_bytes())
                return
            problems.append(problem)
    raise UnavailableError(f"{command[0]} could not build them: {problems[0]}")


def _parse(compiler: str) -> list[str]:
    try:
        command = shlex.split(compiler)
    except ValueError as error:
        raise UnavailableError(f"CXX is {compiler!r}, which is not a command line: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise UnavailableError("there is no C++ compiler here (g++, clang++, or the one that CXX names)")
    return command


def _compile(command: list[str]) -> str:
    """Run the compiler. Return its complaint, or an empty string."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} did not end within {COMPILE_TIMEOUT_S} s") from error
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.decode(errors="replace").split())[:200] or f"exit status {done.returncode}"


def _fault_of(built: Path) -> str:
    """Return the fault of the library that the compiler wrote, or an empty string."""
    names = re.findall(r"^\w+ (eyas_\w+)\(", MAIN.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        library = ctypes.CDLL(str(built))
        for name in names:
            getattr(library, name)
    except (OSError, AttributeError) as error:
        return f"what it built cannot be loaded: {str(error)[:200]}"
    return ""
