"""Whole decoder layers over a KV cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._linear import Matrix, ThreadCount, count, lanes
from eyas.kernels._records import KINDS, address, floats

__all__ = ["ACTIVATIONS", "HEAD_DIMS", "Experts", "Layer", "LayerSizes", "Layers", "Pass"]

MAX_PAIRS, SMALL_BATCH = 24, 32  # as in cpu/vectors.h
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # the head sizes that attention is compiled for
# of MLPs, as in cpu/tiles.h; gelu by tanh
ACTIVATIONS = {"silu_gated": 2, "gelu_gated": 3, "gelu": 4, "relu2": 5, "clamped_gated": 6}
HEAD_NORMS = ("before", "after", "whole")  # RoPE, or of all heads as one; as in cpu/records.h


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a decoder layer, and how it differs from LLaMA's.

    Attributes:
        eps: of the norms.
        scale: of the attention scores.
        rotary: leading numbers of a head that RoPE rotates; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: they stay.
        residual: factor of the outputs of attention and MLP.
        activation: of the MLP, one of ACTIVATIONS.
        centred: norms subtract the mean (LayerNorm).
        parallel: attention and MLP read the same input.
        head_norm: where queries and keys are normed, one of HEAD_NORMS.
        query_table: queries have a table of angles of their own, after the layer's.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    scale: float
    rotary: int = 0
    softcap: float = 0.0
    residual: float = 1.0
    activation: str = "silu_gated"
    centred: bool = False
    parallel: bool = False
    head_norm: str = "before"
    query_table: bool = False

    @property
    def record(self) -> _records.LayerSizes:
        return _records.LayerSizes(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.eps, self.scale, self.softcap,
            self.residual, self.rotary or self.head_dim, ACTIVATIONS[self.activation], self.centred, self.parallel,
            HEAD_NORMS.index(self.head_norm), self.query_table,
        )  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """The experts of an MLP.

    Attributes:
        gate_up: of each expert, as in `Layer`.
        top: experts of a token.
        normed: a token's weights sum to 1; otherwise they are probabilities among all experts.
    """

    router: Matrix
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    top: int
    normed: bool

    @cached_property
    def record(self) -> _records.Experts:
        arrays = [(_records.Matrix * len(one))(*(m.record for m in one)) for one in (self.gate_up, self.down)]
        made = _records.Experts(self.router.record, *map(addressof, arrays), len(self.gate_up), self.top, self.normed)
        made.arrays = arrays  # they live as long as the record
        return made


@dataclass(frozen=True)
class Layer:
    """A decoder layer's weights.

    Attributes:
        gate_up: both matrices of a gated MLP (`pack_gated`), or the first one of an MLP without gates.
        norm: weight of the norm before attention; None: no norm. The others are as optional.
        window: visible positions; 0: all.
        k: keys, and `v` values, if they are not in `qkv`.
        attention_norm: of attention's output, before it is added to x; `output_norm` of the MLP's.
        rope: the pass's table of angles for this layer; -1: queries and keys are not rotated.
        experts: instead of `gate_up` and `down`.
        sinks: [heads]; each adds a score to the sum of its head's softmax, and no value.
    """

    qkv: Matrix
    o: Matrix
    gate_up: Matrix | None
    down: Matrix | None
    norm: Tensor | None
    mlp_norm: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0
    k: Matrix | None = None
    v: Matrix | None = None
    norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    attention_norm: Tensor | None = None
    output_norm: Tensor | None = None
    rope: int = 0
    experts: Experts | None = None
    sinks: Tensor | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them, without experts."""
        return tuple(m for m in (self.qkv, self.k, self.v, self.o, self.gate_up, self.down) if m is not None)

    @property
    def record(self) -> _records.Layer:
        matrices = (self.qkv, self.o, self.gate_up, self.down, self.k, self.v)
        norms = map(address, (self.norm, self.mlp_norm, self.q_norm, self.k_norm))
        records = (_records.Matrix() if m is None else m.record for m in matrices)
        more = map(address, (self.norm_bias, self.mlp_norm_bias, self.attention_norm, self.output_norm))
        experts = None if self.experts is None else addressof(self.experts.record)
        return _records.Layer(*records, *norms, self.window, *more, self.rope, experts, address(self.sinks))


@dataclass(frozen=True)
class Pass:
    """Positions, masks and cache of a forward pass over new nodes. All tensors are contiguous."""

    length_R: Tensor
    """int64: committed slots, all visible."""
    position_RQ: Tensor
    """int64."""
    visible_RQT: Tensor
    """bool: the visible ones of the T nodes after the committed slots; the new nodes are the last
    Q of them."""
    visible_in_window_RQT: Tensor
    """The same for layers with a window."""
    cosine: Tensor
    """float32 [positions, h], or [tables, positions, h] where layers have several; h: the numbers that are rotated."""
    sine: Tensor
    store: Tensor
    """The cache, float32 or bfloat16 [layers x {key, value}, B, K, slots, h]."""
    rows: Sequence[int]
    """The R rows of the cache that this pass reads and writes."""
    counts: Sequence[int] = ()
    """How many of its Q new nodes each row has; x holds these alone, row after row. (): all."""


class Layers:
    """Decoder layers in sequence, with the work space of their passes."""

    def __init__(self, shape: LayerSizes, layers: Sequence[Layer], threads: ThreadCount = None) -> None:
        self.shape = shape
        self.layers = tuple(layers)
        self.threads = threads
        self._shape = shape.record
        self._records = (_records.Layer * len(layers))(*(layer.record for layer in layers))
        self._experts = [layer.experts for layer in layers if layer.experts is not None]
        self._buffers: dict[str, Tensor] = {}
        self._addresses: dict[tuple[int, int, int], tuple[int, ...]] = {}  # by tokens, threads, score stride
        self.lock = threading.Lock()  # lock of the buffers, as other Python threads run during a call

    @property
    def bytes(self) -> int:
        """Bytes of weights that a pass over a token reads."""
        dense = sum(m.bytes for layer in self.layers for m in layer.matrices)
        return dense + sum(e.router.bytes + e.top * (e.gate_up[0].bytes + e.down[0].bytes) for e in self._experts)

    def __call__(self, x_MD: Tensor, forward: Pass, tapped: Sequence[int] = (), taps_MF: Tensor | None = None) -> None:
        """Run x [M, D] through all layers, in place.

        Args:
            tapped: layers, ascending, whose inputs are written side by side to the first columns of
                `taps`.
        """
        with self.lock:
            record, cache, kept = self._prepare(forward)
            library().eyas_layers(
                self._records,
                c_int64(len(self.layers)),
                *map(byref, (self._shape, record, cache)),
                c_void_p(address(x_MD)),
                (c_int64 * max(1, len(tapped)))(*tapped),
                c_int64(len(tapped)),
                c_void_p(address(taps_MF)),
                c_int64(0 if taps_MF is None else taps_MF.stride(0)),
            )
            del kept

    def draft(self, input_MI: Tensor, x_MD: Tensor, forward: Pass) -> None:
        """Run the only layer of a draft net: attention reads `input`; x is the residual stream, in place."""
        with self.lock:
            record, cache, kept = self._prepare(forward)
            pointers = (c_void_p(address(input_MI)), c_void_p(address(x_MD)))
            library().eyas_draft_layer(self._records, *map(byref, (self._shape, record, cache)), *pointers)
            del kept

    def _prepare(self, forward: Pass) -> tuple[_records.Pass, _records.KVCache, tuple[Tensor | None, ...]]:
        """Return the records of a pass, and the tensors that must live as long as they do."""
        R, Q = forward.position_RQ.shape
        T, store = forward.visible_RQT.shape[-1], forward.store
        size = store.element_size()
        entry, row, head, slot, _ = (stride * size for stride in store.stride())
        threads = count(self.threads)
        score_stride = -(-store.shape[3] // lanes()) * lanes() + 2 * lanes()
        masks = (forward.visible_RQT, forward.visible_in_window_RQT)
        begin = _integers([0, *accumulate(forward.counts)]) if forward.counts else None
        integers, angles = (begin, forward.length_R, forward.position_RQ), (forward.cosine, forward.sine)
        begin_R = _integers([b * row for b in forward.rows])
        buffers = self._work_space(sum(forward.counts) or R * Q, threads, score_stride)
        pointers = [address(x, torch.long) for x in integers] + [address(x, torch.bool) for x in masks]
        table = forward.cosine[0].numel() if forward.cosine.ndim == 3 else 0
        record = _records.Pass(R, Q, T, *pointers, *map(address, angles), table, score_stride, *buffers, threads)
        keys = address(store, store.dtype) or 0
        kind = KINDS.index(str(store.dtype).removeprefix("torch."))
        cache = _records.KVCache(keys, keys + entry, address(begin_R, torch.long), 2 * entry, head, slot, kind)
        return record, cache, (*integers, *masks, *angles, begin_R)

    def _work_space(self, M: int, threads: int, score_stride: int) -> tuple[int, ...]:
        """Return the addresses of the buffers for a pass over M tokens, which grow as needed."""
        if (M, threads, score_stride) not in self._addresses:
            size = self.shape
            width = (size.heads + 2 * size.kv_heads) * size.head_dim
            counts = {
                "normed": max(M, threads * min(M, SMALL_BATCH)) * size.hidden,
                "qkv": M * (width + -width % (2 * lanes())),
                "context": M * size.heads * size.head_dim,
                "inner": M * size.inner,
                "scores": threads * MAX_PAIRS * score_stride,
                "branch": M * size.hidden,
                "routed": max((M * (2 * size.hidden + e.top + e.router.padded) for e in self._experts), default=0),
                # as int64, which takes two of them
                "routes": max((4 * M * e.top + 2 * len(e.down) + 2 for e in self._experts), default=0),
            }
            for name, needed in counts.items():
                if name not in self._buffers or self._buffers[name].numel() < needed:
                    self._buffers[name] = floats(needed)
                    self._addresses.clear()
            self._addresses[M, threads, score_stride] = tuple(self._buffers[name].data_ptr() for name in counts)
        return self._addresses[M, threads, score_stride]


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device="cpu")
