"""The kernels of ARM processors on any machine: cross-compiled, and run by qemu in a process of its
own.

    with emulated_arm.kernels("armv8.2-a+dotprod"):
        ...                        what eyas.kernels calls now is ARM code

`EmulatedLibrary` stands in for the loaded library. For each call it copies what the arguments point
to into a file that both processes map, and back when the call has ended. A pointer says where
memory begins, not where it ends; so every tensor whose address is asked for is remembered.
"""

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from eyas.kernels import _build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SYSTEM = "/usr/aarch64-linux-gnu"  # the C library of ARM programs, as Debian's cross-compiler installs it
ISAS = tuple(name for name in _build.ISAS if name.startswith("arm"))
DRIVER = Path(__file__).with_suffix(".cpp")
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tests" / "arm"
ROWS = {"eyas_read_rows": 1, "eyas_pack": 2}  # the argument that is an array of addresses
FILE_BYTES = 1 << 30  # nearly all of it stays a hole
ALIGNMENT = 64

missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
needs = pytest.mark.skipif(
    bool(missing), reason=f"ARM code is neither compiled nor run here: no {' and no '.join(missing)}"
)


@contextmanager
def kernels(isa: str) -> Iterator[None]:
    """Let the kernels run ARM code, compiled for an instruction set of `ISAS`."""
    with pytest.MonkeyPatch.context() as patch, _started(_library(isa)) as library:
        data_ptr = torch.Tensor.data_ptr

        def remembered(tensor: torch.Tensor) -> int:
            library.remember(tensor.untyped_storage())
            return data_ptr(tensor)

        patch.setattr(torch.Tensor, "data_ptr", remembered)
        patch.setattr(_build, "outcome", lambda: library)
        yield


class EmulatedLibrary:
    """What `ctypes.CDLL` is for a library of this machine: attributes are its functions."""

    def __init__(self, process: subprocess.Popen[bytes], memory: mmap.mmap) -> None:
        self.process = process
        self.memory = memory
        self.known: list[tuple[int, int]] = []  # where tensors' memory begins and ends, ascending
        self.placed: dict[tuple[int, int], int] = {}  # place in the file of such memory
        self.used = 0
        self.begin = self._answer()

    def remember(self, storage: torch.UntypedStorage) -> None:
        """Note where a tensor's memory begins and ends. What overlaps it was freed."""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if begin < end:
            first = bisect_right(self.known, begin, key=lambda extent: extent[1])
            last = bisect_left(self.known, end, key=lambda extent: extent[0])
            self.known[first:last] = [(begin, end)]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.placed.clear()
        self.used = 0
        numbers = [x.value for x in arguments if isinstance(x, ctypes.c_float)]
        words = [self._word(x) for x in arguments if not isinstance(x, ctypes.c_float)]
        if name in ROWS:
            words[ROWS[name]] = self._addresses(arguments[ROWS[name]].value)
        words += [0] * (16 - len(words))
        with suppress(BrokenPipeError):  # said when no answer comes
            self.process.stdin.write(struct.pack("40s16qf4x", name.encode(), *words, *numbers or [0.0]))
            self.process.stdin.flush()
        result = self._answer()
        for (begin, end), place in self.placed.items():
            ctypes.memmove(begin, self._here(place), end - begin)
        return result

    def _answer(self) -> int:
        answer = self.process.stdout.read(8)
        assert len(answer) == 8, f"the emulator ended with status {self.process.wait()}"
        return int.from_bytes(answer, "little", signed=True)

    def _word(self, argument: Any) -> int:
        """Return what the other process takes for an argument of a ctypes function."""
        if argument is None:
            return 0
        if isinstance(argument, ctypes.c_int64):
            return argument.value
        if isinstance(argument, ctypes.c_void_p):
            return self._pointer(argument.value)
        record = getattr(argument, "_obj", argument)  # by reference
        if not any(hasattr(kind, "_fields_") for kind in (record, getattr(record, "_type_", None))):  # numbers to write
            begin, size = ctypes.addressof(record), ctypes.sizeof(record)
            self.placed[begin, begin + size] = self._put(begin, size)
            return self.begin + self.placed[begin, begin + size]
        copy = type(record).from_buffer_copy(record)
        self._translate(copy)
        return self.begin + self._put(ctypes.addressof(copy), ctypes.sizeof(copy))

    def _translate(self, record: Any) -> None:
        """Replace the pointers in a structure, or in an array of them, by the other process'."""
        if isinstance(record, ctypes.Array):
            for item in record:
                self._translate(item)
        for name, kind in getattr(record, "_fields_", ()):
            value = getattr(record, name)
            if kind is ctypes.c_void_p:
                setattr(record, name, self._pointer(value))
            else:
                self._translate(value)

    def _addresses(self, address: int) -> int:
        """Return where the other process finds the addresses that a tensor holds from here on."""
        _, end = self._extent(address)
        here = (ctypes.c_int64 * ((end - address) // 8)).from_address(address)
        there = type(here)(*map(self._pointer, here))
        return self.begin + self._put(ctypes.addressof(there), ctypes.sizeof(there))

    def _extent(self, address: int) -> tuple[int, int]:
        begin, end = self.known[bisect_right(self.known, address, key=lambda extent: extent[0]) - 1]
        assert begin <= address <= end, "a pointer into memory that no tensor owns"
        return begin, end

    def _pointer(self, address: int | None) -> int:
        """Return an address there for an address in a tensor's memory here, which is copied."""
        if not address:
            return 0
        begin, end = self._extent(address)
        if (begin, end) not in self.placed:
            self.placed[begin, end] = self._put(begin, end - begin)
        return self.begin + self.placed[begin, end] + address - begin

    def _put(self, address: int, size: int) -> int:
        place = self.used
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        assert self.used <= FILE_BYTES
        ctypes.memmove(self._here(place), address, size)
        return place

    def _here(self, place: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory, place))


@contextmanager
def _started(library: Path) -> Iterator[EmulatedLibrary]:
    """Run the driver with a library until the end of the block."""
    with tempfile.NamedTemporaryFile(prefix="eyas-arm-") as file:
        file.truncate(FILE_BYTES)
        command = [EMULATOR, "-cpu", "max", "-L", SYSTEM, str(_compiled(DRIVER, ())), str(library), file.name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            yield EmulatedLibrary(process, mmap.mmap(file.fileno(), FILE_BYTES))
        finally:
            process.kill()
            process.communicate()


def _library(isa: str) -> Path:
    return _compiled(_build.MAIN, (*_build.ISAS[isa][0], *_build.FLAGS, _build.OPENMP))


def _compiled(source: Path, flags: tuple[str, ...]) -> Path:
    """Return what the cross-compiler makes of a source, compiled once for all sessions."""
    key = _build._key(COMPILER, (source.read_text(), *flags))
    path = CACHE / f"{source.stem}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        if not path.exists():
            part = path.with_suffix(".part")
            subprocess.run([COMPILER, *flags, str(source), "-o", str(part)], check=True)
            os.replace(part, path)
    return path
