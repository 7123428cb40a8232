"""Whole decoder layers over a cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._linear import LANES, Matrix, ThreadCount, count

__all__ = ["HEAD_DIMS", "Layer", "Layers", "Pass", "Shape"]

PAIRS, FEW = 24, 32  # as in cpu/vectors.h
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # what attention is compiled for


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder layer. eps: of the norms; scale: of the scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    scale: float

    @property
    def record(self) -> _records.Shape:
        return _records.Shape(self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.eps, self.scale)


@dataclass(frozen=True)
class Layer:
    """A decoder layer's weights; norms in float32, None where there is none. window: positions that it sees, 0: all."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    norm: Tensor | None
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0

    @property
    def record(self) -> _records.Layer:
        matrices = (m.record for m in (self.qkv, self.o, self.gate_up, self.down))
        return _records.Layer(*matrices, *map(_records.at, (self.norm, self.mlp_norm, self.q_norm, self.k_norm)), self.window)


@dataclass(frozen=True)
class Pass:
    """Where the new nodes stand; all tensors contiguous.

    length_R: int64, committed slots, all visible. position_RQ: int64. visible_RQT: bool, which of the T nodes behind the committed slots;
    the new nodes are the last Q of them; near: the same for layers with a window. cosine, sine: float32 [positions, h].
    store: float32 [layers x {key, value}, B, K, slots, h], the cache; row: its first row that this pass concerns.
    """

    length_R: Tensor
    position_RQ: Tensor
    visible_RQT: Tensor
    near_RQT: Tensor
    cosine: Tensor
    sine: Tensor
    store: Tensor
    row: int


class Layers:
    """Decoder layers, one after the other; and the room that a pass works in."""

    def __init__(self, shape: Shape, layers: Sequence[Layer], threads: ThreadCount = None) -> None:
        self.shape, self.layers, self.threads = shape, tuple(layers), threads
        self._shape = shape.record
        self._records = (_records.Layer * len(layers))(*(layer.record for layer in layers))
        self._room: dict[str, Tensor] = {}
        self._known: dict[tuple[int, int, int], tuple[int, ...]] = {}  # tokens, threads, slots -> addresses
        self.lock = threading.Lock()  # of the room: a call lets other Python threads run

    @property
    def bytes(self) -> int:
        """Of weights that a pass reads."""
        return sum(m.bytes for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down))

    def __call__(self, x_MD: Tensor, where: Pass, tapped: Sequence[int] = (), taps_MF: Tensor | None = None) -> None:
        """x through all layers, in place. taps: the inputs of the layers in `tapped`, side by side, are written to its first columns."""
        with self.lock:
            record, slots, kept = self._prepare(where)
            names = (c_int64 * max(1, len(tapped)))(*tapped)
            library().eyas_layers(
                self._records, c_int64(len(self.layers)), byref(self._shape), byref(record), byref(slots), c_void_p(x_MD.data_ptr()),
                names, c_int64(len(tapped)), c_void_p(_records.at(taps_MF)), c_int64(0 if taps_MF is None else taps_MF.stride(0)),
            )  # fmt: skip
            del kept

    def draft(self, input_MI: Tensor, x_MD: Tensor, where: Pass) -> None:
        """The only layer of a draft net: attention reads `input`, x is the residual stream, in place."""
        with self.lock:
            record, slots, kept = self._prepare(where)
            library().eyas_draft_layer(
                self._records, byref(self._shape), byref(record), byref(slots), c_void_p(input_MI.data_ptr()), c_void_p(x_MD.data_ptr())
            )
            del kept

    def _prepare(self, where: Pass) -> tuple[_records.Pass, _records.Slots, tuple[Tensor, ...]]:
        """The records, and what must live as long as they do."""
        (R, Q), T, store = where.position_RQ.shape, where.visible_RQT.shape[-1], where.store
        threads = count(self.threads)
        most = -(-store.shape[3] // LANES) * LANES + 2 * LANES
        given = (where.length_R, where.position_RQ, where.visible_RQT, where.near_RQT, where.cosine, where.sine)
        record = _records.Pass(R, Q, T, *(x.data_ptr() for x in given), most, *self._rooms(R * Q, threads, most), threads)
        entry, row, head, slot, _ = store.stride()
        begin = store.data_ptr() + 4 * where.row * row
        return record, _records.Slots(begin, begin + 4 * entry, 2 * entry, row, head, slot), given

    def _rooms(self, M: int, threads: int, most: int) -> tuple[int, ...]:
        """Where a pass over M tokens works."""
        if (M, threads, most) not in self._known:
            size = self.shape
            counts = {
                "normed": max(M, threads * min(M, FEW)) * size.hidden, "qkv": M * (size.heads + 2 * size.kv_heads) * size.head_dim,
                "context": M * size.heads * size.head_dim, "inner": M * size.inner, "scores": threads * PAIRS * most,
            }  # fmt: skip
            for name, wanted in counts.items():
                if name not in self._room or self._room[name].numel() < wanted:
                    self._room[name] = torch.empty(wanted)
                    self._known.clear()
            self._known[M, threads, most] = tuple(self._room[name].data_ptr() for name in counts)
        return self._known[M, threads, most]
