"""Files in GGUF format, as llama.cpp writes heads into them: settings, and tensors under llama.cpp's names.

This module knows how a file is read and written, and no kind of head: `gguf` turns the content into a form in
which heads are published in folders, `_gguf_writing` the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.checkpoints._files import check_finite, check_sum
from eyas.errors import CheckpointError, first_line

__all__ = ["ARCHITECTURE", "FILE_TYPES", "Field", "File", "store"]

ARCHITECTURE = "general.architecture"
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Numbers in which matrices are stored -> general.file_type."""

ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # as llama.cpp's converter has it
INTEGERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}


class Field(NamedTuple):
    """A setting of a file, with its type there, so that it can be copied."""

    value: Any
    kind: Any
    inner: Any
    """The type of an array's elements."""


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
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"{path.name} is corrupt or truncated: {first_line(error, 200)}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
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
        field = self._reader.get_field(key.replace("ARCH", getattr(self, "architecture", "")))
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
        field = self._reader.get_field("tokenizer.ggml.tokens")
        if field is None:
            raise CheckpointError(f"{self.name} has neither {self.architecture}.vocab_size nor tokens")
        return len(field.data)

    def fields(self, prefix: str = "") -> dict[str, Field]:
        """Return the settings with this prefix, for a copy."""
        found = {name: field for name, field in self._reader.fields.items() if name.startswith(prefix)}
        return {
            name: Field(field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
            for name, field in found.items()
            if not name.startswith("GGUF.")  # parts of the header, which the reader shows as settings
        }

    # --- tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, in torch's order; raise CheckpointError where the file has no such tensor."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.name} has no tensor {name}")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: int64 where the file holds whole numbers, else float32, all of it finite."""
        import gguf

        shape, stored = self.shape(name), self._tensors[name]
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

    def stored(self) -> list[Any]:
        """Return the tensors as the gguf package describes them, with their bytes."""
        return list(self._tensors.values())

    def unused(self, prefix: str = "") -> list[str]:
        """Return the names, with this prefix, of tensors that were not asked for."""
        return sorted(name for name in self._unused if name.startswith(prefix))

    def expect_no_more(self) -> None:
        """Raise CheckpointError for tensors that were not asked for."""
        if left := self.unused():
            some = ", ".join(left[:5]) + ", ..." * (len(left) > 5)
            raise CheckpointError(f"{self.name} holds tensors that a head of this kind does not have: {some}")


def store(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str, beside: File | None = None
) -> None:
    """Write a file.

    Args:
        settings: by their whole names; values, or fields of another file.
        dtype: one of FILE_TYPES, for matrices; vectors, norms and routers are float32, as llama.cpp needs them.
        beside: a file whose tensors are copied, except those that `tensors` has.
    """
    import gguf

    writer = gguf.GGUFWriter(path, str(settings[ARCHITECTURE]))
    for name, value in settings.items():
        field = value if isinstance(value, Field) else _field(value)
        if name != ARCHITECTURE:  # the writer has written it
            writer.add_key_value(name, field.value, field.kind, field.inner)
    for tensor in [] if beside is None else beside.stored():
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        data, kind = _stored(name, values, dtype)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _field(value: Any) -> Field:
    """Return a setting with the type that the converter gives to such a value."""
    import gguf

    kinds = {
        bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY,
    }  # fmt: skip
    return Field(value, kinds[type(value)], None)


def _stored(name: str, values: Tensor, dtype: str) -> tuple[Any, Any]:
    """Return a tensor's bytes and their type."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if not values.is_floating_point():
        return values.to(torch.int64).numpy(), kinds.I64
    data = np.ascontiguousarray(values.detach().cpu().float().numpy())
    is_matrix = data.ndim > 1 and name.endswith(".weight") and not name.endswith(ALWAYS_F32)
    kind = kinds[dtype.upper()] if is_matrix else kinds.F32
    try:
        return gguf.quantize(data, kind), kind
    except gguf.QuantError:  # the length of a row is not a multiple of the block's
        return gguf.quantize(data, kinds.F16), kinds.F16
