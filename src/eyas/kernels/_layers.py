"""Whole decoder layers over a KV cache."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from itertools import count as numbers_from
from typing import Any

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._linear import Matrix, ThreadCount, count, lanes
from eyas.kernels._records import KINDS, address, floats

__all__ = [
    "ACTIVATIONS", "HEAD_DIMS", "Experts", "Layer", "LayerSizes", "Layers", "Pass", "StateLayer", "States", "TokenInput",
]  # fmt: skip

MAX_PAIRS, SMALL_BATCH = 24, 32  # as in cpu/vectors.h
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)  # the head sizes that attention is compiled for
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
        gated: the output of attention is multiplied by the sigmoids of gates, which follow the queries in `qkv`.
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
    gated: bool = False

    @property
    def projected(self) -> int:
        """Outputs of the projections of attention for a token: whole panels."""
        width = (self.heads * (2 if self.gated else 1) + 2 * self.kv_heads) * self.head_dim
        return width + -width % (2 * lanes())

    @property
    def record(self) -> _records.LayerSizes:
        return _records.LayerSizes(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.eps, self.scale, self.softcap,
            self.residual, self.rotary or self.head_dim, ACTIVATIONS[self.activation], self.centred, self.parallel,
            HEAD_NORMS.index(self.head_norm), self.query_table, self.gated, self.projected,
        )  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """The experts of an MLP.

    Attributes:
        gate_up: of each expert, as in `Layer`.
        top: experts of a token.
        normed: a token's weights sum to 1; otherwise they are probabilities among all experts.
        norms: weights, where a layer has a dense MLP too: of the norms of the experts' inputs, of the router's, and of the
            outputs of experts and MLP.
        factor_E: of each expert's weight.
        bias_E: the weights are sigmoids of the scores, and those with this bias choose the experts.
    """

    router: Matrix
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    top: int
    normed: bool
    norms: tuple[Tensor, ...] = ()
    factor_E: Tensor | None = None
    bias_E: Tensor | None = None

    @cached_property
    def record(self) -> _records.Experts:
        arrays = [(_records.Matrix * len(one))(*(m.record for m in one)) for one in (self.gate_up, self.down)]
        made = _records.Experts(self.router.record, *map(addressof, arrays), len(self.gate_up), self.top, self.normed)
        if self.norms:
            made.norm, made.router_norm, made.output_norm, made.dense_norm = map(address, self.norms)
        made.factors, made.bias = address(self.factor_E), address(self.bias_E)
        made.arrays = arrays  # they live as long as the record
        return made


@dataclass(frozen=True)
class StateLayer:
    """A gated delta net between its projections, whose outputs are [q, k, v, z, b, a]. With `value_heads` 0 a short
    convolution alone, of [B, C, x].

    Attributes:
        conv_tC: weights of the convolution, the oldest input first.
        rate_H: of each value head; the decay is exp(rate * softplus(a + step_bias)).
        norm_v: weight of the norm of outputs.
        tiled: `o` reads the first value heads of all key heads first, then the second ones.
    """

    conv_tC: Tensor
    conv_bias_C: Tensor | None = None
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    rate_H: Tensor | None = None
    step_bias_H: Tensor | None = None
    norm_v: Tensor | None = None
    tiled: bool = False

    @property
    def state_size(self) -> int:
        """Numbers of a state: the inputs that the convolution reads again, and a matrix for each value head."""
        taps, channels = self.conv_tC.shape
        return (taps - 1) * channels + self.value_heads * self.key_dim * self.value_dim

    @property
    def node_size(self) -> int:
        """Numbers of an uncommitted node's record."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * (self.value_dim + 1)
        return int(self.conv_tC.shape[1]) + keys + values

    @property
    def record(self) -> _records.StateLayer:
        taps, channels = self.conv_tC.shape
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, channels, taps
        tensors = self.conv_tC, self.conv_bias_C, self.rate_H, self.step_bias_H, self.norm_v
        return _records.StateLayer(*sizes, *map(address, tensors), self.tiled)


@dataclass(frozen=True)
class TokenInput:
    """How a layer reads the numbers that each token has for it, from number `begin` on (`Pass.inputs_MX`). They are
    multiplied by gates, gelu(gate * x). The norm of their projection is added to x."""

    gate: Matrix
    projection: Matrix
    norm: Tensor
    begin: int

    @property
    def record(self) -> _records.TokenInput:
        return _records.TokenInput(self.gate.record, self.projection.record, address(self.norm), self.begin)


@dataclass(frozen=True)
class Layer:
    """A decoder layer's weights.

    Attributes:
        gate_up: both matrices of a gated MLP (`pack_gated`), or the first one of an MLP without gates.
        norm: weight of the norm before attention; None: no norm. The others are as optional.
        window: visible positions; 0: all.
        k: keys, and `v` values, if they are not in `qkv`; of a state's projections those that are not there.
        attention_norm: of attention's output, before it is added to x; `output_norm` of the MLP's.
        rope: the pass's table of angles for this layer; -1: queries and keys are not rotated.
        experts: instead of `gate_up` and `down`; with these, too, if they have norms.
        sinks: [heads]; each adds a score to the sum of its head's softmax, and no value.
        state: instead of attention; `qkv` and `o` are then its projections.
        shared: the two matrices of an expert that all tokens go through, as in `gate_up` and `down`.
        shared_gate_D: its output is multiplied by the sigmoid of the product with the layer's input.
        sizes: of a layer whose heads differ from the others'; None: it has the common sizes.
        store: which of the pass's caches has its keys and values.
        lender: number of the earlier layer whose keys and values it reads; `qkv` then holds queries alone.
        v_norm: weight of the norm of values.
        factor: of the layer's output.
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
    state: StateLayer | None = None
    shared: tuple[Matrix, Matrix] | None = None
    shared_gate_D: Tensor | None = None
    sizes: LayerSizes | None = None
    store: int = 0
    lender: int | None = None
    v_norm: Tensor | None = None
    input: TokenInput | None = None
    factor: float = 1.0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them, without experts that tokens choose."""
        own = (self.qkv, self.k, self.v, self.o, self.gate_up, self.down)
        of_input = () if self.input is None else (self.input.gate, self.input.projection)
        return tuple(m for m in (*own, *(self.shared or ()), *of_input) if m is not None)

    @property
    def record(self) -> _records.Layer:
        matrices = (self.qkv, self.o, self.gate_up, self.down, self.k, self.v)
        norms = map(address, (self.norm, self.mlp_norm, self.q_norm, self.k_norm))
        records = (_records.Matrix() if m is None else m.record for m in matrices)
        more = map(address, (self.norm_bias, self.mlp_norm_bias, self.attention_norm, self.output_norm))
        experts = None if self.experts is None else addressof(self.experts.record)
        state = _records.StateLayer() if self.state is None else self.state.record
        made = _records.Layer(
            _records.LayerSizes(), *records, *norms, self.window, *more, self.rope, experts, address(self.sinks), state
        )
        made.store, made.borrows, made.v_norm = self.store, self.lender is not None, address(self.v_norm)
        made.factor = self.factor
        if self.input is not None:
            made.input = self.input.record
        if self.shared is not None:
            made.shared_gate_up, made.shared_down = (matrix.record for matrix in self.shared)
            made.shared_gate = address(self.shared_gate_D)
        return made


@dataclass(frozen=True)
class States:
    """The states of a session's rows in the layers that have them, as cpu/states.h describes them. The state of a row is
    the one after its committed tokens, but for those on its path that are pending."""

    state_BLS: Tensor
    node_BLTX: Tensor
    """Records of uncommitted nodes."""
    path_BP: Tensor
    """int64: nodes that were accepted."""
    pending_B: Tensor
    """int64: how many of these the state lacks; the next pass adds them, and sets 0."""

    def record(self, rows: Tensor, commits: bool) -> _records.States:
        strides = (*self.state_BLS.stride()[:2], *self.node_BLTX.stride()[:3], self.path_BP.shape[1])
        integers = (self.path_BP, self.pending_B, rows)
        numbers = (address(x, torch.long) for x in integers)
        return _records.States(address(self.state_BLS), address(self.node_BLTX), *numbers, *strides, commits)


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
    """The cache [layers x {key, value}, B, K, slots, h], float32 or bfloat16; or int8, a slot with its scale, h + 4 bytes."""
    rows: Sequence[int]
    """The R rows of the cache that this pass reads and writes."""
    counts: Sequence[int] = ()
    """How many of its Q new nodes each row has; x holds these alone, row after row. (): all."""
    states: States | None = None
    """The states of the cache's rows; None: no layer has a state."""
    prompt: bool = False
    """The new nodes are a chunk of a prompt; layers with states commit them."""
    other_stores: Sequence[Tensor] = ()
    """Caches like `store` for layers with other heads, by `Layer.store` from 1 on."""
    inputs_MX: Tensor | None = None
    """float32: the numbers that tokens have for layers (`TokenInput`)."""


class Layers:
    """Decoder layers in sequence, with the work space of their passes."""

    def __init__(self, shape: LayerSizes, layers: Sequence[Layer], threads: ThreadCount = None) -> None:
        self.shape = shape
        self.layers = tuple(layers)
        self.threads = threads
        self._shape = shape.record
        every = [layer.sizes or shape for layer in layers]
        self._shape.stride = max(
            max(sizes.projected, sum(m.padded for m in (layer.qkv, layer.k, layer.v) if m is not None))
            for sizes, layer in zip(every, layers, strict=True)
        )
        self._records = (_records.Layer * len(layers))(*(layer.record for layer in layers))
        self.states = [layer.state for layer in layers if layer.state is not None]
        places = defaultdict[tuple[bool, int], Iterator[int]](numbers_from)
        for record, layer, sizes in zip(self._records, layers, every, strict=True):
            record.shape = sizes.record
            record.shape.stride = self._shape.stride
            if layer.lender is None:
                record.place = next(places[layer.state is not None, layer.store])
            else:
                record.place = self._records[layer.lender].place
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
            rows, states = _integers(list(forward.rows)), forward.states
            library().eyas_layers(
                self._records,
                c_int64(len(self.layers)),
                *map(byref, (self._shape, record, cache)),
                None if states is None else byref(states.record(rows, forward.prompt)),
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
            library().eyas_draft_layer(self._records, *map(byref, (record, cache)), *pointers)
            del kept

    def _prepare(self, forward: Pass) -> tuple[_records.Pass, Any, tuple[Tensor | None, ...]]:
        """Return the records of a pass and of its caches, and the tensors that must live as long as they do."""
        R, Q = forward.position_RQ.shape
        T, store = forward.visible_RQT.shape[-1], forward.store
        threads = count(self.threads)
        score_stride = -(-store.shape[3] // lanes()) * lanes() + 2 * lanes()
        masks = (forward.visible_RQT, forward.visible_in_window_RQT)
        begin = _integers([0, *accumulate(forward.counts)]) if forward.counts else None
        integers, angles = (begin, forward.length_R, forward.position_RQ), (forward.cosine, forward.sine)
        buffers = self._work_space(sum(forward.counts) or R * Q, threads, score_stride)
        pointers = [address(x, torch.long) for x in integers] + [address(x, torch.bool) for x in masks]
        table = forward.cosine[0].numel() if forward.cosine.ndim == 3 else 0
        inputs, width = forward.inputs_MX, 0 if forward.inputs_MX is None else forward.inputs_MX.shape[1]
        record = _records.Pass(
            R, Q, T, *pointers, *map(address, angles), table, forward.cosine.shape[-1], address(inputs), width, score_stride,
            *buffers, threads,
        )  # fmt: skip
        stores = (store, *forward.other_stores)
        begins = [_integers([b * one.stride(1) * one.element_size() for b in forward.rows]) for one in stores]
        caches = (_records.KVCache * len(stores))(*map(_cache, stores, begins))
        return record, caches, (*integers, *masks, *angles, inputs, *begins)

    def _work_space(self, M: int, threads: int, score_stride: int) -> tuple[int, ...]:
        """Return the addresses of the buffers for a pass over M tokens, which grow as needed."""
        if (M, threads, score_stride) not in self._addresses:
            size = self.shape
            counts = {
                "normed": max(M, threads * min(M, SMALL_BATCH)) * size.hidden,
                "qkv": M * self._shape.stride,
                "context": M * max(layer.o.inputs for layer in self.layers),
                "inner": M * size.inner,
                "scores": threads * MAX_PAIRS * score_stride,
                "branch": M * size.hidden,
                "routed": max((M * (3 * size.hidden + e.top + e.router.padded) for e in self._experts), default=0),
                # as int64, which takes two of them
                "routes": max((4 * M * e.top + 2 * len(e.down) + 2 for e in self._experts), default=0),
            }
            for name, needed in counts.items():
                if name not in self._buffers or self._buffers[name].numel() < needed:
                    self._buffers[name] = floats(needed)
                    self._addresses.clear()
            self._addresses[M, threads, score_stride] = tuple(self._buffers[name].data_ptr() for name in counts)
        return self._addresses[M, threads, score_stride]


def _cache(store: Tensor, begin_R: Tensor) -> _records.KVCache:
    size = store.element_size()
    entry, _, head, slot, _ = (stride * size for stride in store.stride())
    keys, kind = address(store, store.dtype) or 0, KINDS.index(str(store.dtype).removeprefix("torch."))
    return _records.KVCache(keys, keys + entry, address(begin_R, torch.long), 2 * entry, head, slot, kind)


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device="cpu")
