"""Packs a target's matrices for the CPU kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas import kernels
from eyas.core.target import Target
from eyas.kernels import Matrix, Rows, WeightFormat
from eyas.runners.stored import Checkpoint, StoredLinear, stored_in

__all__ = ["Packing", "packing_of"]


def packing_of(target: Target, weight_format: WeightFormat) -> Packing:
    """Return what packs a target's matrices."""
    return Packing(weight_format, stored_in(target.model))


class Packing:
    """Packs matrices one after the other; what a mapped file has read for one is given back after it."""

    def __init__(self, weight_format: WeightFormat, checkpoint: Checkpoint | None = None) -> None:
        self.weight_format, self.checkpoint = weight_format, checkpoint

    def rows(self, module: Any) -> Rows:
        """Return the rows of a linear layer."""
        return module.rows if isinstance(module, StoredLinear) else Rows.of(module.weight)

    def __call__(self, rows: Rows, bias_O: Tensor | None = None, weight_format: WeightFormat | None = None) -> Matrix:
        made = kernels.pack(rows, bias_O, weight_format or self.weight_format)
        self.end()
        return made

    def gated(self, gate: Any, up: Any) -> Matrix:
        """Pack both matrices of a gated MLP as one."""
        bias = None if gate.bias is None else (gate.bias, up.bias)
        pair = self.rows(gate), self.rows(up)
        if pair[0].type != pair[1].type:
            pair = Rows.of(pair[0].read()), Rows.of(pair[1].read())
        made = kernels.pack_gated(*pair, bias, self.weight_format)
        self.end()
        return made

    def end(self) -> None:
        """Give back the memory of what was read."""
        if self.checkpoint is not None:
            self.checkpoint.release()
