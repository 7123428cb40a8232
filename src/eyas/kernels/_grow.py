"""A draft's dynamic tree: EAGLE-2, section 4."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._layers import Layers, Pass
from eyas.kernels._linear import Matrix

__all__ = ["Grown", "Net", "Pending", "Plan", "grow"]


@dataclass(frozen=True)
class Net:
    """What stands around the layer of an EAGLE's net. Norms in float32.

    fuse: of the target's features (EAGLE-3); None: they are the hidden that is read. fc: of [embedding, hidden] (EAGLE-1); None: the layer
    reads [norm of embedding, norm of hidden] (EAGLE-3).
    residual_normed: the residual stream begins at the normed hidden. carries_normed: the normed output is handed on.
    """

    head: Matrix
    embeddings_VD: Tensor
    fuse: Matrix | None = None
    fc: Matrix | None = None
    embed_norm_D: Tensor | None = None
    hidden_norm_D: Tensor | None = None
    norm_D: Tensor | None = None  # before the head
    ids_v: Tensor | None = None  # the target's ids of the draft vocabulary
    residual_normed: bool = False
    carries_normed: bool = False

    @cached_property
    def record(self) -> _records.Net:
        none = _records.Matrix()
        norms = (self.embed_norm_D, self.hidden_norm_D, self.norm_D, self.ids_v)
        return _records.Net(
            self.fc is None, self.residual_normed, self.carries_normed,
            *(none if m is None else m.record for m in (self.fuse, self.fc, self.head)),
            _records.at(self.embeddings_VD), *map(_records.at, norms), self.head.outputs,
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
    """A tree: int64 [B, N] tokens, parents and depths; float32 log q and values of whole paths; bool candidates [B, N], mask [B, N, N]. And
    all that was drafted, the root first: parents and values [B, X].
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    score_BN: Tensor
    value_BN: Tensor
    candidate_BN: Tensor
    mask_BNN: Tensor
    drafted_parents_BX: Tensor
    drafted_value_BX: Tensor


@dataclass(frozen=True)
class Pending:
    """What a net has not read yet: tokens, and what the target saw at them; each row's first `count`, before the root."""

    features_BPF: Tensor  # float32; hidden, where the net does not fuse
    tokens_BP: Tensor  # int64
    count_B: Tensor  # int64; 0 in empty rows


def grow(net: Net, layer: Layers, plan: Plan, where: Pass, pending: Pending, roots_B: Tensor) -> Grown:
    """EAGLE-2's tree from a draft's only layer, which first reads what is pending. `where`: of the rows before that; its positions and
    visible nodes are not read.
    """
    (B, P), K = pending.tokens_BP.shape, min(plan.branch, net.head.outputs)
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
        torch.empty(B, 1 + drafted, dtype=torch.long),
        torch.empty(B, 1 + drafted),
    )
    with layer.lock:
        record, slots, kept = layer._prepare(replace(where, position_RQ=where.position_RQ.expand(B, max(P, K))))
        rule = _records.Plan(
            plan.depth, plan.branch, plan.nodes, plan.by_confidence, plan.rerank, plan.log_stop, plan.sharpness,
            _records.at(plan.noise_BLv), _records.at(plan.temperature_B),
        )  # fmt: skip
        out = _records.Grown(*(_records.at(getattr(grown, field.name)) for field in fields(grown)))
        library().eyas_grow(
            byref(net.record), layer._records, byref(layer._shape), byref(record), byref(slots), byref(rule),
            *(c_void_p(x.data_ptr()) for x in (pending.features_BPF, pending.tokens_BP)), c_int64(P), c_void_p(pending.count_B.data_ptr()),
            c_void_p(roots_B.data_ptr()), byref(out),
        )  # fmt: skip
        del kept
    return grown
