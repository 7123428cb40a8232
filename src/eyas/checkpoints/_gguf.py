"""Files in GGUF format, as llama.cpp writes heads into them: settings, and tensors under llama.cpp's names.

This module knows how a file is read, and no kind of head: `gguf` turns the content into a form in which heads are
published in folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.checkpoints._files import check_finite, check_sum
from eyas.errors import CheckpointError, first_line

__all__ = ["ARCHITECTURE", "File"]

ARCHITECTURE = "general.architecture"
INTEGERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}


class File:
    """One file. Tensors are computed when they are asked for, also from quantised ones, as float32."""

    def __init__(self, path: Path) -> None:
        """Raise CheckpointError for a file that is damaged, or one of several parts; raise OptionError where the
        package that reads such files is missing."""
        from eyas.targets.gguf_files import check_gguf_packages

        check_gguf_packages()
        import gguf

        check_sum(path)
        self.name = path.name
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"{path.name} is corrupt or truncated: {first_line(error, 200)}") from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self._unused = set(self._tensors)
        self.architecture = str(self.get(ARCHITECTURE, ""))
        if int(self.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{path.name} is one of {self.get('split.count')} parts: join them with llama-gguf-split --merge"
            )

    # --- settings

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; ARCH in it stands for the architecture. Floats, which the file holds
        in 32 bits, are rounded to the 7 digits that those have."""
        field = self.reader.get_field(key.replace("ARCH", getattr(self, "architecture", "")))
        if field is None:
            return default
        value = field.contents()
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Return what `get` returns; raise CheckpointError where the file has no such key."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.name} has no {key.replace('ARCH', self.architecture)}")
        return value

    def vocab_size(self) -> int:
        """Return the number of tokens that the file names."""
        stated = self.get("ARCH.vocab_size")
        if stated is not None:
            return int(stated)
        field = self.reader.get_field("tokenizer.ggml.tokens")
        if field is None:
            raise CheckpointError(f"{self.name} has neither {self.architecture}.vocab_size nor tokens")
        return len(field.data)

    # --- tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, in torch's order: int64 where the file holds whole numbers, else float32, all of it finite.
        Raise CheckpointError where the file has no such tensor."""
        import gguf

        if name not in self._tensors:
            raise CheckpointError(f"{self.name} has no tensor {name}")
        stored = self._tensors[name]
        shape = tuple(int(size) for size in reversed(stored.shape))
        self._unused.discard(name)
        if stored.tensor_type.name in INTEGERS:
            return torch.from_numpy(np.array(stored.data, dtype=np.int64)).reshape(shape)
        try:
            values = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.name}: tensor {name} is stored as {stored.tensor_type.name}, which is not read"
            ) from error
        check_finite(self.name, name, values)
        return values.reshape(shape)

    def unused(self, prefix: str = "") -> list[str]:
        """Return the names, with this prefix, of tensors that were not asked for."""
        return sorted(name for name in self._unused if name.startswith(prefix))

    def expect_no_more(self) -> None:
        """Raise CheckpointError for tensors that were not asked for."""
        if left := self.unused():
            some = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
            raise CheckpointError(f"{self.name} holds tensors that a head of this kind does not have: {some}")
