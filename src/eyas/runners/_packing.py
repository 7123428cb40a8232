"""Packs a target's matrices for the CPU kernels, into memory or into a file that is mapped at the next load.

    ~/.cache/eyas/packed/KEY.bin    matrices one after the other, each at a page of its own. KEY hashes the checkpoint's
                                    files, its configuration, the format of weights, the compiled kernels and the code
                                    that orders matrices and rows

EYAS_SHARE_WEIGHTS=1 maps the file, and processes share its pages. Otherwise it is read into memory of its own, in huge
pages, which made decoding 12 % faster, unless that takes more than half of the free memory. Files that were used least
recently are removed once all of them take more than EYAS_PACKED_CACHE_GB (40); 0 keeps none.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from eyas import kernels
from eyas.core.cache import KVCache
from eyas.core.target import Target
from eyas.errors import FitError
from eyas.files import sync_folder, user_cache
from eyas.kernels import Matrix, Memory, Rows, WeightFormat
from eyas.runners.stored import Checkpoint, StoredExperts, StoredLinear, stored_in
from eyas.targets.kept import limit_bytes, remove_unused

__all__ = ["Packing", "check_fit", "packing_of", "weights_that_fit"]

log = logging.getLogger(__name__)  # the command line shows its messages

PAGE = 4096  # bytes; a matrix begins at a multiple
PIECE = 1 << 26  # bytes that a thread reads at a time
# modules that say what lies where in a packed file
ORDER = [Path(__file__), *map(Path(__file__).with_name, ("_decoders.py", "stored.py"))]
COPIED_SHARE = 0.5  # of the free memory, up to which weights are copied
RESERVE = 1 << 30  # bytes that a process takes besides weights, keys and values
TOKENS = 4096  # whose keys and values are counted with the weights
SMALLER = ("exact", "int8", "int4")  # formats of weights, in the order in which "auto" tries them


class PackedFile:
    """Memory for matrices in a file, which one process writes and all read from then on."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_filled = path, path.is_file()
        self._end, self._number = 0, -1
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        if self.is_filled:
            os.utime(path)
            self._bytes = self._read()
        else:
            self._number = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def _read(self) -> Tensor:
        """Return the file's bytes: mapped, where copies would take much of the memory or processes are to share them; else
        in huge pages, from which a pass reads them faster."""
        size = self.path.stat().st_size
        asked = os.environ.get("EYAS_SHARE_WEIGHTS") == "1"
        with open(self.path, "rb") as stream:
            if asked or size > COPIED_SHARE * psutil.virtual_memory().available:
                mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable, as tensors want it
                return torch.from_numpy(np.frombuffer(mapped, np.uint8))
            return _copied(stream.fileno(), size)

    def __call__(self, size: int) -> Tensor:
        """Return memory for the next matrix: in the file, as long as the disk has room."""
        begin, self._end = self._end, self._end + size + -size % PAGE
        if self.is_filled:
            return self._bytes[begin : begin + size]
        try:
            if self._number < 0:
                return kernels.huge_pages(size)
            if hasattr(os, "posix_fallocate"):  # a write to a mapped page of a full disk would end the process
                os.posix_fallocate(self._number, begin, self._end - begin)
            os.ftruncate(self._number, self._end)
            return torch.from_numpy(np.frombuffer(mmap.mmap(self._number, size, offset=begin), np.uint8))
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
            self.close()
            return kernels.huge_pages(size)

    def keep(self) -> None:
        """Give the file its name, when all matrices are written."""
        if self._number >= 0:
            os.fsync(self._number)
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Remove a file that was not kept."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1
        self._temporary.unlink(missing_ok=True)


def _copied(number: int, size: int) -> Tensor:
    """Return the bytes of an open file in huge pages. Threads share the work: one alone waits for new pages of memory."""
    memory = kernels.huge_pages(size)
    into = memory.numpy().data

    def read(begin: int) -> None:
        end = min(begin + PIECE, size)
        while begin < end:
            count = os.preadv(number, [into[begin:end]], begin)
            if not count:
                raise OSError(f"the file of packed weights ends at byte {begin:,} of {size:,}")
            begin += count

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(read, range(0, size, PIECE)))
    return memory


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

    def gated(self, gate: Rows, up: Rows, biases: tuple[Tensor | None, Tensor | None] = (None, None)) -> Matrix:
        """Pack both matrices of a gated MLP as one."""
        if gate.type != up.type:
            gate, up = Rows.of(gate.read()), Rows.of(up.read())
        bias = None if biases[0] is None or biases[1] is None else (biases[0], biases[1])
        return self._packed(kernels.pack_gated(gate, up, bias, self.weight_format, self._memory))

    def _packed(self, matrix: Matrix) -> Matrix:
        if self.checkpoint is not None:
            self.checkpoint.release()
        return matrix


@contextmanager
def packing_of(target: Target, weight_format: WeightFormat) -> Iterator[Packing]:
    """Yield the packing of a target's matrices: into a file that is kept, if it is a whole model whose weights stay in
    files. A second process waits, and finds the file."""
    from filelock import FileLock

    checkpoint, file, limit = stored_in(target.model), None, limit_bytes("EYAS_PACKED_CACHE_GB", 40)
    with ExitStack() as stack:
        if checkpoint is not None and checkpoint.config.num_hidden_layers == target.num_layers and limit:
            config = checkpoint.config.to_json_string()
            packed = weight_format.weights, weight_format.activations
            order = [hashlib.sha256(path.read_bytes()).hexdigest() for path in ORDER]
            parts = checkpoint.digests, config, packed, kernels.build_name(), order
            path = user_cache() / "packed" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.bin"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file():
                    stack.enter_context(FileLock(path.with_name(f".{path.name}.lock")))
                    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by a killed process: the lock is ours
                        left.unlink()
                file = PackedFile(path)
                stack.callback(file.close)
            except OSError as error:
                log.warning("packed weights are not kept: %s", error)
        yield Packing(weight_format, checkpoint, file)
        if file is not None:
            file.keep()
            remove_unused(file.path.parent.glob("*.bin"), file.path, limit)


def check_fit(target: Target, weight_format: WeightFormat) -> None:
    """Log the memory that a target with weights in files needs, before they are read. Raise FitError if it is not free."""
    needed = _bytes(target, weight_format)
    cache = _cache_bytes(target, weight_format.kv)
    free = psutil.virtual_memory().available
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
        f"but {free / 1e9:.1f} GB are free{smaller}"
    )


def weights_that_fit(target: Target, kv: str = "exact") -> str:
    """Return the format of weights that fits into the memory and loses least; "exact" for a model that holds its weights."""
    if stored_in(target.model) is None:
        return "exact"
    free = psutil.virtual_memory().available - _cache_bytes(target, kv) - RESERVE
    fitting = (name for name in SMALLER if _bytes(target, WeightFormat(name)) <= free)  # type: ignore[arg-type]
    return next(fitting, SMALLER[-1])


def _bytes(target: Target, weight_format: WeightFormat) -> int:
    """Return how much the packed weights take."""
    linears = [module for module in target.model.modules() if isinstance(module, StoredLinear)]
    experts = [module for module in target.model.modules() if isinstance(module, StoredExperts)]
    rows = [module.stored_rows for module in linears]
    rows += [one for module in experts for part in (module.gates, module.ups, module.downs) for one in part]
    return sum(kernels.packed_bytes(one, weight_format) for one in rows)


def _cache_bytes(target: Target, kv: str = "exact") -> int:
    """Return how much TOKENS keys and values take in this format."""
    dtype = getattr(torch, kv, torch.float32)  # of "exact" there is none
    return KVCache(target.layout, 1, dtype, torch.device("cpu")).bytes_for(TOKENS)
