"""Kernels for CPUs: linear layers and whole decoder layers in C++ (cpu.cpp), which says how they compute; here is how they are called.

    matrix = pack(weight_ON)            weights as they are stored, without loss, in the narrowest form
    y_MO = linear(matrix, x_MI)         float32

A linear layer's result for a row is the same to the last bit whatever other rows there are, and with any number of threads.
Letters as everywhere: M tokens, I inputs, O outputs, R rows, Q new nodes, T nodes in slots. This module knows no model and no method.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from eyas.kernels._build import UnavailableError, library

__all__ = [
    "HEAD_DIMS",
    "Layers",
    "Matrix",
    "Net",
    "Pass",
    "Pending",
    "Plan",
    "Shape",
    "Team",
    "UnavailableError",
    "available",
    "commit",
    "follow",
    "grow",
    "gumbel",
    "head",
    "linear",
    "pack",
    "pack_gated",
    "rms_norm",
    "why_not",
]

PANEL, LANES, PAIRS, FEW = 32, 16, 24, 32  # as in cpu.cpp
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # what attention is compiled for
EXACT = 3e-7  # of a weight: rounding of its scale
Storage = Literal["exact", "int8"]
Team = int | Callable[[], int] | None  # threads: a number, who knows it at the moment, or torch's


def why_not() -> str | None:
    """Why there are no kernels here; None: there are."""
    try:
        library()
    except UnavailableError as error:
        return str(error)
    return None


def available() -> bool:
    return why_not() is None


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("kind", c_int64), ("inputs", c_int64), ("outputs", c_int64),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", c_int64),
    )


class _Shape(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner")), ("eps", c_float), ("scale", c_float))


class _Slots(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), *((name, c_int64) for name in ("layer", "row", "head", "slot")))


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "queries", "nodes")),
        *((name, c_void_p) for name in ("length", "position", "visible", "near", "cosine", "sine")),
        ("most", c_int64),
        *((name, c_void_p) for name in ("normed", "qkv", "context", "inner", "scores")),
        ("threads", c_int64),
    )


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# ---------------------------------------------------------------------------------------------------------------- linear layers


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights, in panels of 32 outputs [O / 32, I, 32]; outputs are filled up with zeros."""

    data: Tensor  # float32, bfloat16 or int8
    scale_O: Tensor | None
    bias_O: Tensor | None
    outputs: int  # without the filling

    @property
    def inputs(self) -> int:
        return self.data.shape[1]

    @property
    def padded(self) -> int:
        return self.data.shape[0] * PANEL

    @property
    def bytes(self) -> int:
        """What a pass reads."""
        return self.data.numel() * self.data.element_size()

    @property
    def record(self) -> _Matrix:
        kind = (torch.float32, torch.bfloat16, torch.int8).index(self.data.dtype)
        return _Matrix(_at(self.data), _at(self.scale_O), _at(self.bias_O), kind, self.inputs, self.padded)


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, storage: Storage = "exact") -> Matrix:
    """A matrix in the narrowest form that holds it.

    Args:
        storage: exact: int8 with a scale a row where the weights are such multiples, bfloat16 where they are such numbers, else float32;
            int8: rounded to the first of these.
    """
    outputs = weight_OI.shape[0]
    fill = -outputs % PANEL
    weight_OI = torch.nn.functional.pad(weight_OI.detach().float(), (0, 0, 0, fill))
    bias_O = None if bias_O is None else torch.nn.functional.pad(bias_O.detach().float(), (0, fill)).contiguous()
    scale_O = weight_OI.abs().amax(1).clamp(min=1e-30) / 127
    whole_OI = (weight_OI / scale_O[:, None]).round()
    if storage == "int8" or bool(((whole_OI * scale_O[:, None] - weight_OI).abs() <= EXACT * weight_OI.abs()).all()):
        return Matrix(_panels(whole_OI.to(torch.int8)), scale_O.contiguous(), bias_O, outputs)
    half_OI = weight_OI.bfloat16()
    narrow_OI = half_OI if torch.equal(half_OI.float(), weight_OI) else weight_OI
    return Matrix(_panels(narrow_OI), None, bias_O, outputs)


def pack_gated(gate_OI: Tensor, up_OI: Tensor, bias_O: tuple[Tensor, Tensor] | None = None, storage: Storage = "exact") -> Matrix:
    """Both matrices of a gated unit in one: every panel holds 16 gates, then the 16 ups beside them. O: a multiple of 16."""

    def mixed(gate: Tensor, up: Tensor) -> Tensor:
        parts = [part.reshape(-1, LANES, *part.shape[1:]) for part in (gate, up)]
        return torch.stack(parts, 1).flatten(0, 2)

    return pack(mixed(gate_OI, up_OI), None if bias_O is None else mixed(*bias_O), storage)


def _panels(weight_OI: Tensor) -> Tensor:
    return weight_OI.view(-1, PANEL, weight_OI.shape[1]).transpose(1, 2).contiguous()


def linear(matrix: Matrix, x: Tensor, threads: Team = None) -> Tensor:
    """x [..., I] -> [..., O], float32. threads: torch's number by default, as everywhere here."""
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    y_MO = torch.empty(x_MI.shape[0], matrix.padded)
    library().eyas_linear(byref(matrix.record), c_void_p(x_MI.data_ptr()), c_int64(len(x_MI)), c_void_p(y_MO.data_ptr()), _threads(threads))
    return y_MO[:, : matrix.outputs].view(*x.shape[:-1], matrix.outputs)


def _threads(asked: Team) -> c_int64:
    return c_int64(_count(asked))


def _count(asked: Team) -> int:
    return asked() if callable(asked) else asked or torch.get_num_threads()


# ---------------------------------------------------------------------------------------------------------------- decoder layers


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
    def record(self) -> _Shape:
        return _Shape(self.hidden, self.heads, self.kv_heads, self.head_dim, self.inner, self.eps, self.scale)


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
    def record(self) -> _Layer:
        matrices = (m.record for m in (self.qkv, self.o, self.gate_up, self.down))
        return _Layer(*matrices, *map(_at, (self.norm, self.mlp_norm, self.q_norm, self.k_norm)), self.window)


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

    def __init__(self, shape: Shape, layers: Sequence[Layer], threads: Team = None) -> None:
        self.shape, self.layers, self.threads = shape, tuple(layers), threads
        self._shape = shape.record
        self._records = (_Layer * len(layers))(*(layer.record for layer in layers))
        self._room: dict[str, Tensor] = {}
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
                names, c_int64(len(tapped)), c_void_p(_at(taps_MF)), c_int64(0 if taps_MF is None else taps_MF.stride(0)),
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

    def _prepare(self, where: Pass) -> tuple[_Pass, _Slots, tuple[Tensor, ...]]:
        """The records, and what must live as long as they do."""
        (R, Q), T, store = where.position_RQ.shape, where.visible_RQT.shape[-1], where.store
        size, threads, M = self.shape, _count(self.threads), R * Q
        most = -(-store.shape[3] // LANES) * LANES + 2 * LANES
        heads = size.heads + 2 * size.kv_heads
        room = tuple(
            self._space(name, count)
            for name, count in (
                ("normed", max(M, threads * min(M, FEW)) * size.hidden), ("qkv", M * heads * size.head_dim),
                ("context", M * size.heads * size.head_dim),
                ("inner", M * size.inner), ("scores", threads * PAIRS * most),
            )
        )  # fmt: skip
        given = (where.length_R, where.position_RQ, where.visible_RQT, where.near_RQT, where.cosine, where.sine)
        record = _Pass(R, Q, T, *map(_at, given), most, *map(_at, room), threads)
        entry, row, head, slot, _ = store.stride()
        begin = store.data_ptr() + 4 * where.row * row
        return record, _Slots(begin, begin + 4 * entry, 2 * entry, row, head, slot), given

    def _space(self, name: str, count: int) -> Tensor:
        found = self._room.get(name)
        if found is None or found.numel() < count:
            found = self._room[name] = torch.empty(count)
        return found


def head(
    x_MD: Tensor, norm_D: Tensor, eps: float, matrix: Matrix | None, normed_MD: Tensor, threads: Team = None
) -> Tensor | None:  # fmt: skip
    """The RMS norm of x, into `normed` (its rows may stand apart); and the logits [M, O] of it, if there is a matrix."""
    logits_MO = None if matrix is None else torch.empty(len(x_MD), matrix.padded)
    library().eyas_head(
        c_void_p(x_MD.data_ptr()), c_int64(len(x_MD)), c_int64(x_MD.shape[1]), c_void_p(norm_D.data_ptr()), c_float(eps),
        c_void_p(normed_MD.data_ptr()), c_int64(normed_MD.stride(0)), None if matrix is None else byref(matrix.record),
        c_void_p(_at(logits_MO)), _threads(threads),
    )  # fmt: skip
    return None if matrix is None or logits_MO is None else logits_MO[:, : matrix.outputs]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, threads: Team = 1) -> Tensor:
    """The RMS norm of x [..., D]; D: a multiple of 16."""
    x_MD = x.reshape(-1, x.shape[-1]).contiguous()
    y_MD = torch.empty_like(x_MD)
    head(x_MD, weight_D, eps, None, y_MD, threads)
    return y_MD.view(x.shape)


# ---------------------------------------------------------------------------------------------------------------- a draft's tree


class _Net(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("paired", "residual_normed", "carries_normed")), ("fc", _Matrix), ("head", _Matrix),
        *((name, c_void_p) for name in ("embeddings", "embed_norm", "hidden_norm", "norm", "ids")), ("vocabulary", c_int64),
    )  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("depth", "branch", "nodes", "by_confidence", "rerank")),
        ("log_stop", c_float), ("sharpness", c_float),
        ("noise", c_void_p), ("temperature", c_void_p),
    )  # fmt: skip


class _Grown(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("tokens", "parents", "depths", "scores", "values", "candidates", "mask"))


@dataclass(frozen=True)
class Net:
    """What stands around the layer of an EAGLE's net. Norms in float32.

    fc: of [embedding, hidden] (EAGLE-1); None: the layer reads [norm of embedding, norm of hidden] (EAGLE-3).
    residual_normed: the residual stream begins at the normed hidden. carries_normed: the normed output is handed on.
    """

    head: Matrix
    embeddings_VD: Tensor
    fc: Matrix | None = None
    embed_norm_D: Tensor | None = None
    hidden_norm_D: Tensor | None = None
    norm_D: Tensor | None = None  # before the head
    ids_v: Tensor | None = None  # the target's ids of the draft vocabulary
    residual_normed: bool = False
    carries_normed: bool = False

    @property
    def record(self) -> _Net:
        none = _Matrix()
        norms = (self.embed_norm_D, self.hidden_norm_D, self.norm_D, self.ids_v)
        return _Net(
            self.fc is None, self.residual_normed, self.carries_normed, none if self.fc is None else self.fc.record, self.head.record,
            _at(self.embeddings_VD), *map(_at, norms), self.head.outputs,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A dynamic tree's shape and rule, as `drafters._grow.DynamicTree` has them. noise_BLv: float32, what the target will draw with."""

    depth: int
    branch: int
    nodes: int
    by_confidence: bool
    rerank: bool
    log_stop: float
    sharpness: float
    temperature_B: Tensor  # float32; 0: greedy
    noise_BLv: Tensor | None


@dataclass(frozen=True)
class Grown:
    """A tree: int64 [B, N] tokens, parents and depths; float32 log q and values of whole paths; bool candidates [B, N], mask [B, N, N]."""

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    score_BN: Tensor
    value_BN: Tensor
    candidate_BN: Tensor
    mask_BNN: Tensor


@dataclass(frozen=True)
class Pending:
    """What a net has not read yet: pairs of hidden and the token after it; each row's first `count` of them."""

    hidden_BPD: Tensor
    next_BP: Tensor  # int64
    count_B: Tensor  # int64; 0 in empty rows


def grow(net: Net, layer: Layers, plan: Plan, where: Pass, pending: Pending, roots_B: Tensor) -> Grown:
    """EAGLE-2's tree from a draft's only layer, which first reads what is pending. `where`: of the rows before that; its positions and
    visible nodes are not read.
    """
    (B, P), K = pending.next_BP.shape, min(plan.branch, net.head.outputs)
    drafted = K + (plan.depth - 1) * K * K
    N = 1 + min(plan.nodes - 1, drafted if plan.rerank else plan.depth * K)
    tokens, parents, depth = (torch.empty(B, N, dtype=torch.long) for _ in range(3))
    grown = Grown(
        tokens,
        parents,
        depth,
        torch.empty(B, N),
        torch.empty(B, N),
        torch.empty(B, N, dtype=torch.bool),
        torch.empty(B, N, N, dtype=torch.bool),
    )
    with layer.lock:
        record, slots, kept = layer._prepare(replace(where, position_RQ=where.position_RQ.expand(B, max(P, K))))
        rule = _Plan(
            plan.depth, plan.branch, plan.nodes, plan.by_confidence, plan.rerank, plan.log_stop, plan.sharpness,
            _at(plan.noise_BLv), _at(plan.temperature_B),
        )  # fmt: skip
        out = _Grown(
            *map(
                _at, (grown.tokens_BN, grown.parents_BN, grown.depth_BN, grown.score_BN, grown.value_BN, grown.candidate_BN, grown.mask_BNN)
            )
        )
        library().eyas_grow(
            byref(net.record), layer._records, byref(layer._shape), byref(record), byref(slots), byref(rule),
            *(c_void_p(x.data_ptr()) for x in (pending.hidden_BPD, pending.next_BP)), c_int64(P), c_void_p(pending.count_B.data_ptr()),
            c_void_p(roots_B.data_ptr()), byref(out),
        )  # fmt: skip
        del kept
    return grown


# ---------------------------------------------------------------------------------------------------------------- the end of a cycle


def follow(
    tokens_BN: Tensor, parents_BN: Tensor, candidate_BN: Tensor, draw_BN: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Path and tokens [B, longest], length and bonus [B] of the path that follows the draws; all int64. Siblings have distinct tokens."""
    B, N = tokens_BN.shape
    given = tuple(x.contiguous() for x in (tokens_BN, parents_BN, candidate_BN, draw_BN))
    path_BP, tokens_BP = torch.empty(2, B, longest, dtype=torch.long)
    length_B, bonus_B = torch.empty(2, B, dtype=torch.long)
    twins = library().eyas_follow(
        *(c_void_p(x.data_ptr()) for x in given), c_int64(B), c_int64(N), c_int64(longest),
        *(c_void_p(x.data_ptr()) for x in (path_BP, tokens_BP, length_B, bonus_B)),
    )  # fmt: skip
    assert not twins, "siblings with the same token; unite them before verification"
    return path_BP, tokens_BP, length_B, bonus_B


def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """Move the nodes of each row's path to the slots behind its committed ones, in a cache [E, B, K, slots, h] of float32."""
    E, B, K, slots, h = store.shape
    length_B, path_BP = length_B.contiguous(), path_BP.contiguous()
    library().eyas_commit(
        c_void_p(store.data_ptr()), *map(c_int64, (E, B, K, slots, h)), c_void_p(length_B.data_ptr()), c_void_p(path_BP.data_ptr()),
        c_int64(path_BP.shape[1]),
    )  # fmt: skip


def gumbel(seed_B: Tensor, greedy_B: Tensor, stream: int, position_BN: Tensor, vocab: int | Tensor) -> Tensor:
    """float32 [B, N, V]: what `sampling.Noise` says of these positions and tokens (how many, or their ids); zero in greedy rows."""
    (B, N), V = position_BN.shape, vocab if isinstance(vocab, int) else len(vocab)
    noise_BNV = torch.empty(B, N, V)
    given = tuple(x.contiguous() for x in (seed_B, greedy_B, position_BN))
    seed, greedy, position = (c_void_p(x.data_ptr()) for x in given)
    ids = None if isinstance(vocab, int) else vocab.contiguous()
    library().eyas_gumbel(
        seed, greedy, c_int64(stream), position, c_int64(B), c_int64(N), c_void_p(_at(ids)), c_int64(V), c_void_p(noise_BNV.data_ptr())
    )  # fmt: skip
    return noise_BNV
