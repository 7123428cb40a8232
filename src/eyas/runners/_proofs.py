"""Remembers which models the CPU kernels have computed rightly on this machine, so that the
comparison with the model's own forward is made once and not at every load.

A proof is kept in the user's cache under everything that the comparison depends on. These are the weights (all
of them, by checksums), the configuration, the model's modules, the compiled library, this package's sources,
the processor and the versions of torch and transformers. Failures are not kept.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.core.target import Target
from eyas.files import user_cache, write_atomically
from eyas.hardware import cpu_name, versions
from eyas.runners.stored import stored_in

__all__ = ["Proof"]


class Proof:
    """Whether the kernels are known to give this target's numbers."""

    def __init__(self, target: Target) -> None:
        model = target.model
        parts = {
            "weights": digest_of(model),
            "files": [] if (checkpoint := stored_in(model)) is None else checkpoint.digests,
            "config": model.config.to_json_string(),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "modules": repr(model),
            "attention": getattr(model.config, "_attn_implementation", None),
            "kernels": kernels.build_name(),
            "sources": _sources(),
            "cpu": cpu_name(),
            "versions": versions(),
        }
        name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
        self.path = user_cache() / "proofs" / name

    @property
    def known(self) -> bool:
        return self.path.is_file()

    def keep(self) -> None:
        """Remember that the comparison was made, and that the numbers were the same."""
        with suppress(OSError):  # without a cache folder it is made again the next time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.path):
                pass


def digest_of(model: nn.Module) -> str:
    """Return a hash of the names, shapes, dtypes and checksums of all parameters and buffers, by which changed weights
    are noticed. It reads them once, on all cores."""
    named = [(name, tensor.detach().cpu()) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = pool.map(_checksum, [tensor for _, tensor in named])
        parts = [(name, tuple(x.shape), x.dtype, each) for (name, x), each in zip(named, sums, strict=True)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _sources() -> str:
    """Return a hash of the names, sizes and times of this package's files."""
    folder = Path(__file__).parents[1]
    files = [(path.relative_to(folder).as_posix(), path.stat()) for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in files]).encode()).hexdigest()
