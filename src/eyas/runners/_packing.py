"""Packs a target's matrices for the CPU kernels, into memory or into a file that is mapped at the next load.

    ~/.cache/eyas/packed/KEY.bin    matrices one after the other, each at a page of its own; KEY hashes the checkpoint's
                                    files, the format of weights and the layout of panels on this machine

EYAS_SHARE_WEIGHTS=1 maps the file, and processes share its pages. Otherwise it is read into memory of its own, in huge
pages, which made decoding 12 % faster, unless that takes more than half of the free memory. Files that were used least
recently are removed once all of them take more than EYAS_PACKED_CACHE_GB (40); 0 keeps none.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from eyas import kernels
from eyas.core.target import Target
from eyas.errors import FitError, OptionError
from eyas.files import user_cache
from eyas.kernels import Matrix, Memory, Rows, WeightFormat
from eyas.runners.stored import Checkpoint, StoredLinear, stored_in

__all__ = ["Packing", "check_fit", "packing_of", "weights_that_fit"]

log = logging.getLogger(__name__)  # the command line shows its messages

FORMAT = 1  # of packed files
PAGE = 4096  # bytes; a matrix begins at a multiple
DEFAULT_LIMIT_GB = 40.0
COPIED_SHARE = 0.5  # of the free memory, up to which weights are copied
RESERVE = 1 << 30  # bytes that a process takes besides weights, keys and values
TOKENS = 4096  # whose keys and values are counted with the weights
SMALLER = ("exact", "int8", "int4")  # formats of weights, in the order in which "auto" tries them


class PackedFile:
    """Memory for matrices in a file, which is written once and mapped from then on."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        self.is_filled = path.is_file()
        if self.is_filled:
            os.utime(path)
            self._bytes = self._read()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number, self._temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".tmp", dir=path.parent)

    def _read(self) -> Tensor:
        """Return the file's bytes: mapped, where copies would take much of the memory or processes are to share them; else
        in huge pages, from which a pass reads them faster."""
        size, asked = self.path.stat().st_size, os.environ.get("EYAS_SHARE_WEIGHTS") == "1"
        with open(self.path, "rb") as stream:
            if asked or size > COPIED_SHARE * psutil.virtual_memory().available:
                mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable, as tensors want it
                return torch.from_numpy(np.frombuffer(mapped, np.uint8))
            memory = kernels.huge_pages(size)
            stream.readinto(memory.numpy().data)
            return memory

    def __call__(self, size: int) -> Tensor:
        """Return memory for the next matrix."""
        begin, self._end = self._end, self._end + size + -size % PAGE
        if self.is_filled:
            return self._bytes[begin : begin + size]
        os.ftruncate(self._number, self._end)
        part = mmap.mmap(self._number, size, offset=begin)
        return torch.from_numpy(np.frombuffer(part, np.uint8))

    def end(self) -> None:
        """Give the file its name, when all matrices are written."""
        if not self.is_filled:
            os.fsync(self._number)
            os.close(self._number)
            os.replace(self._temporary, self.path)


class Packing:
    """Packs matrices one after the other, and gives back the pages of a mapped checkpoint after each."""

    def __init__(
        self, weight_format: WeightFormat, checkpoint: Checkpoint | None = None, file: PackedFile | None = None
    ) -> None:
        self.weight_format, self.checkpoint, self.file = weight_format, checkpoint, file
        self._memory: Memory = kernels.huge_pages if file is None else file

    def rows(self, module: Any) -> Rows:
        """Return the rows of a linear layer."""
        return module.stored_rows if isinstance(module, StoredLinear) else Rows.of(module.weight)

    def __call__(self, rows: Rows, bias_O: Tensor | None = None, weight_format: WeightFormat | None = None) -> Matrix:
        return self._packed(kernels.pack(rows, bias_O, weight_format or self.weight_format, self._memory))

    def gated(self, gate: Any, up: Any) -> Matrix:
        """Pack both matrices of a gated MLP as one."""
        bias = None if gate.bias is None else (gate.bias, up.bias)
        pair = self.rows(gate), self.rows(up)
        if pair[0].type != pair[1].type:
            pair = Rows.of(pair[0].read()), Rows.of(pair[1].read())
        return self._packed(kernels.pack_gated(*pair, bias, self.weight_format, self._memory))

    def _packed(self, matrix: Matrix) -> Matrix:
        if self.checkpoint is not None:
            self.checkpoint.release()
        return matrix

    def end(self) -> None:
        """Keep the packed matrices."""
        if self.file is not None:
            self.file.end()
            _remove_unused(self.file.path)


def packing_of(target: Target, weight_format: WeightFormat) -> Packing:
    """Return the packing of a target's matrices: into a file, if its weights stay in files."""
    checkpoint = stored_in(target.model)
    if checkpoint is None or not _limit_bytes():
        return Packing(weight_format, checkpoint)
    parts = FORMAT, checkpoint.identity, target.num_layers, weight_format, kernels.layout()
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    try:
        return Packing(weight_format, checkpoint, PackedFile(user_cache() / "packed" / f"{name}.bin"))
    except OSError as error:
        log.info("packed weights are not kept: %s", error)
        return Packing(weight_format, checkpoint)


def check_fit(target: Target, weight_format: WeightFormat) -> None:
    """Log the memory that a target with weights in files needs, before they are read. Raise FitError if it is not free."""
    needed, cache, free = _bytes(target, weight_format), _cache_bytes(target), psutil.virtual_memory().available
    log.info(
        "weights %.2f GB, keys and values %.2f GB for %d tokens; %.1f GB are free",
        needed / 1e9,
        cache / 1e9,
        TOKENS,
        free / 1e9,
    )
    if needed + cache + RESERVE <= free:
        return
    others = ((name, _bytes(target, WeightFormat(name))) for name in SMALLER)  # type: ignore[arg-type]
    smaller = next(
        (f": weights {name} need {size / 1e9:.1f} GB" for name, size in others if size + cache + RESERVE <= free), ""
    )
    raise FitError(
        f"the weights of {target.name} need {needed / 1e9:.1f} GB, keys and values {cache / 1e9:.1f} GB for {TOKENS} tokens, "
        f"and {free / 1e9:.1f} GB are free{smaller}"
    )


def weights_that_fit(target: Target) -> str:
    """Return the format of weights that fits into the memory and loses least; "exact" for a model that holds its weights."""
    if stored_in(target.model) is None:
        return "exact"
    free = psutil.virtual_memory().available - _cache_bytes(target) - RESERVE
    fitting = (name for name in SMALLER if _bytes(target, WeightFormat(name)) <= free)  # type: ignore[arg-type]
    return next(fitting, SMALLER[-1])


def _bytes(target: Target, weight_format: WeightFormat) -> int:
    """Return how much the packed weights take."""
    linears = [module for module in target.model.modules() if isinstance(module, StoredLinear)]
    return sum(kernels.packed_bytes(module.stored_rows, weight_format) for module in linears)


def _cache_bytes(target: Target) -> int:
    numbers = sum(heads * (key + value) for heads, key, value in filter(None, target.layout))
    return 4 * TOKENS * numbers


def _limit_bytes() -> float:
    given = os.environ.get("EYAS_PACKED_CACHE_GB") or str(DEFAULT_LIMIT_GB)
    try:
        return max(0.0, float(given)) * 1e9
    except ValueError:
        raise OptionError(
            f"EYAS_PACKED_CACHE_GB must be a number of gigabytes, 0 or more, such as 40; it is {given!r}"
        ) from None


def _remove_unused(newest: Path) -> None:
    """Remove the files that were used least recently, until all fit the limit."""
    room = _limit_bytes()
    with suppress(OSError):  # another process removes them, too
        used = {path: path.stat() for path in newest.parent.glob("*.bin")}
        for path in sorted(used, key=lambda path: -used[path].st_mtime):
            room -= used[path].st_size
            if room < 0 and path != newest:
                path.unlink()
