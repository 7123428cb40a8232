"""Compiles, checks and loads the C++ kernels of `cpu/`.

They are compiled with the machine's own C++ compiler when they are first needed (some seconds) and
kept in the user's cache:

    ~/.cache/eyas/kernels/     private (mode 0700); a folder that other users can write to is not used
        cpu-KEY.so             the library; KEY hashes the sources, flags, compiler and processor
        cpu-KEY.json           its size and SHA-256, compared before it is loaded: mapping a truncated library kills the process
        failure.json           why the last attempt failed; for a day it is not repeated
        build.lock, build-*/   only one process compiles; the folders of killed compilations are removed by the next one

Without kernels eyas computes the same by torch, slower; one logged line says why.
EYAS_KERNELS=off turns the kernels off, CXX names another compiler, and EYAS_KERNELS_ISA compiles for
a smaller instruction set than the machine's own (`ISAS`), for tests and for measurements.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from eyas.errors import near, one_line
from eyas.files import remove_leftovers, sha256_of_file, user_cache, write_atomically

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
CHECK_TIMEOUT_S = 60
RETRY_AFTER_S = 24 * 3600
CHECK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(library, name)
"""


class UnavailableError(Exception):
    """The reason why there are no kernels on this machine, as one line."""


def library() -> ctypes.CDLL:
    """The loaded kernels. Raises UnavailableError, with the reason, where they cannot be built or loaded."""
    result = outcome()
    if isinstance(result, str):
        raise UnavailableError(result)
    return result


@cache
def outcome() -> ctypes.CDLL | str:
    """The loaded kernels, or the reason why there are none. Decided once per process."""
    if os.environ.get("EYAS_KERNELS", "").lower() in ("off", "0"):
        return "EYAS_KERNELS is off"
    if os.name != "posix":
        return "the kernels need Linux or macOS"
    try:
        target_flags = _target_flags(os.environ.get("EYAS_KERNELS_ISA") or NATIVE)
        folder = _private_folder()
        return _load(folder, os.environ.get("CXX") or _default_compiler(), target_flags)
    except _KnownFailureError as error:
        return str(error)
    except (UnavailableError, OSError) as error:
        log.warning("eyas runs slower, without its compiled kernels: %s", error)
        return one_line(error)


class _KnownFailureError(UnavailableError):
    """An earlier attempt of this day failed, and that was logged then."""


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
        raise UnavailableError(f"EYAS_KERNELS_ISA is {isa}, and this system does not say what its processor has")
    if missing := needed - features:
        raise UnavailableError(f"EYAS_KERNELS_ISA is {isa}, and this processor lacks {', '.join(sorted(missing))}")
    return flags


def _features() -> frozenset[str]:
    """Return the features of the first processor, as Linux names them; none on other systems."""
    lines = [line for line in _processor() if line.startswith(("flags", "Features"))]
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def _load(folder: Path, compiler: str, target_flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library from the cache; compiled now if it is not there or not as it was written."""
    key = _key(compiler, target_flags)
    path = folder / f"cpu-{key}.so"
    if not _is_intact(path):
        with _build_lock(folder):
            if not _is_intact(path):  # another process may have compiled it meanwhile
                _refuse_known_failure(folder, key)
                try:
                    _build(compiler, target_flags, path)
                except UnavailableError as error:
                    _remember_failure(folder, key, str(error))
                    raise
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error


# --- the cache ---------------------------------------------------------------------------------------


def _private_folder() -> Path:
    """The cache folder: this user's own and writable by nobody else, so that nobody can plant a
    library in it."""
    folder = user_cache() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not _is_private(status):
            for planted in folder.glob("cpu-*"):
                planted.unlink()
            folder.chmod(0o700)
            status = folder.stat()
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {folder} cannot be used: {(error.strerror or str(error)).lower()}"
        ) from error
    if not _is_private(status):
        raise UnavailableError(f"the cache folder {folder} is not this user's alone: remove it, or set XDG_CACHE_HOME")
    return folder


def _is_private(status: os.stat_result) -> bool:
    """Owned by this user, and writable by nobody else."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_intact(path: Path) -> bool:
    """Whether the library is private and has the size and hash that its manifest names."""
    try:
        manifest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        status = path.stat()
        return _is_private(status) and status.st_size == manifest["size"] and sha256_of_file(path) == manifest["sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _install(built: Path, path: Path) -> None:
    """Move a library into the cache, on the disk before it gets its name, then write its manifest."""
    content = built.read_bytes()
    with write_atomically(path) as stream:
        stream.write(content)
    manifest = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with write_atomically(path.with_suffix(".json")) as stream:
        stream.write(json.dumps(manifest).encode())


def _refuse_known_failure(folder: Path, key: str) -> None:
    """Raises the reason of a failure of the same key in the last day."""
    path = folder / "failure.json"
    try:
        failure = json.loads(path.read_text(encoding="utf-8"))
        reason, age_s = str(failure["reason"]), time.time() - float(failure["time"])
        recent = failure["key"] == key and 0 <= age_s < RETRY_AFTER_S
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return
    if recent:
        raise _KnownFailureError(
            f"{reason} (tried {age_s / 3600:.0f} h ago; to try again before a day has passed, delete {path})"
        )


def _remember_failure(folder: Path, key: str, reason: str) -> None:
    with suppress(OSError), write_atomically(folder / "failure.json") as stream:
        stream.write(json.dumps({"key": key, "reason": reason, "time": time.time()}).encode())


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Held by the one process that compiles."""
    from filelock import FileLock, Timeout  # only who compiles pays for the import

    path = folder / "build.lock"
    try:
        with FileLock(path, timeout=2 * COMPILE_TIMEOUT_S):
            yield
    except Timeout as error:
        raise UnavailableError(f"another process has been compiling them for a long time; it holds {path}") from error


# --- compiling ---------------------------------------------------------------------------------------


def _default_compiler() -> str:
    """The first C++ compiler on the PATH; empty if there is none."""
    return next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "")


def _key(compiler: str, target_flags: tuple[str, ...]) -> str:
    """A hash of everything that the library depends on. No program is run for it: it is needed at
    every start."""
    programs = [path for word in compiler.split() if (path := shutil.which(word))]
    identities = [(os.path.realpath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in programs]
    sources = [(path.name, path.read_text(encoding="utf-8")) for path in _source_files()]
    parts = (sources, FLAGS, target_flags, OPENMP, compiler, identities, platform.machine(), _processor())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def _processor() -> list[str]:
    """The first processor's model and features, as Linux lists them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(("model name", "CPU part", "flags", "Features"))]


def _build(compiler: str, target_flags: tuple[str, ...], path: Path) -> None:
    """Compile the library with threads, or without where the compiler has no OpenMP; check it; move
    it to its path."""
    command = _parse(compiler)
    log.info("the CPU kernels are compiled for this machine, once: some seconds (EYAS_KERNELS=off goes without)")
    remove_leftovers(path.parent)
    for killed in path.parent.glob("build-*"):  # folders of dead processes: whoever compiles holds the lock
        shutil.rmtree(killed, ignore_errors=True)
    problems = []
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        built = Path(folder) / path.name
        for flags in ((*FLAGS, OPENMP), FLAGS):
            problem = _compile([*command, *target_flags, *flags, str(MAIN), "-o", str(built)], Path(folder)) or _check(
                built
            )
            if not problem:
                return _install(built, path)
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


def _compile(command: list[str], folder: Path) -> str:
    """Run the compiler; its complaint, or an empty string. One that does not end is killed, with
    its children."""
    complaints = folder / "stderr"
    with complaints.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,  # a process group of its own, to be killed as one
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            status = process.wait(COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{command[0]} did not end within {COMPILE_TIMEOUT_S} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return ""
    return " ".join(complaints.read_text(errors="replace").split())[:200] or f"exit status {status}"


def _check(built: Path) -> str:
    """Load the library in another process, which a broken one may kill; the fault, or an empty string."""
    names = re.findall(r"^\w+ (eyas_\w+)\(", MAIN.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CHECK, str(built), *names],
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "what it built hangs when it is loaded"
    if done.returncode == 0:
        return ""
    reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"signal {-done.returncode}"]
    return f"what it built cannot be loaded: {reason[0][:200]}"
