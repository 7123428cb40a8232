"""A draft's dynamic tree (EAGLE-2, section 4), all levels in one call. The reference in torch is
drafters/_grow.py."""

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
from eyas.kernels._records import address, flags, floats, longs

__all__ = ["Grown", "Net", "Pending", "TreeOptions", "grow"]


@dataclass(frozen=True)
class Net:
    """An EAGLE net without its layers. Norms in float32."""

    head: Matrix
    embeddings_VD: Tensor
    fuse: Matrix | None = None
    """Target features -> hidden state (EAGLE-3); None: the features are the hidden state."""
    fc: Matrix | None = None
    """Maps [embedding, hidden] to the layer's input (EAGLE-1; MTP: of the norms of both); None: the
    layer reads [norm of embedding, norm of hidden] (EAGLE-3)."""
    embed_norm_D: Tensor | None = None
    hidden_norm_D: Tensor | None = None
    input_norm_D: Tensor | None = None
    """Norm of what fc returns, for attention; the residual stream begins without it (MTP)."""
    norm_D: Tensor | None = None
    """Norm before the head."""
    ids_v: Tensor | None = None
    """The target's ids of the draft vocabulary."""
    residual_normed: bool = False
    """The residual stream begins at the normed hidden state."""
    norm_output: bool = False
    """The next hidden state is the normed output."""

    @cached_property
    def record(self) -> _records.Net:
        norms = (self.embed_norm_D, self.hidden_norm_D, self.input_norm_D, self.norm_D)
        return _records.Net(
            *(self.fc is None, self.residual_normed, self.norm_output),
            *(_records.Matrix() if m is None else m.record for m in (self.fuse, self.fc, self.head)),
            *map(address, (self.embeddings_VD, *norms)),
            address(self.ids_v, torch.long),
            self.head.outputs,
        )


@dataclass(frozen=True)
class TreeOptions:
    """A dynamic tree's shape and rule, as in `drafters._grow.DynamicTree`."""

    depth: int
    branch: int
    nodes: int
    by_confidence: bool
    rerank: bool
    log_stop: float
    inverse_temperature: float
    """The factor of log q in the confidences."""
    temperature_R: Tensor
    """float32, of the target's sampling; 0: greedy."""
    noise_RLv: Tensor | None
    """float32: the Gumbel noise of the target's draws."""

    @property
    def record(self) -> _records.TreeOptions:
        return _records.TreeOptions(
            *(self.depth, self.branch, self.nodes, self.by_confidence, self.rerank),
            *(self.log_stop, self.inverse_temperature),
            *map(address, (self.noise_RLv, self.temperature_R)),
        )


@dataclass(frozen=True)
class Grown:
    """A tree of N nodes, the root first; and everything that was drafted, X nodes with the root."""

    tokens_BN: Tensor  # int64, as parents and depths
    parents_BN: Tensor
    depth_BN: Tensor
    log_q_BN: Tensor  # float32: log q
    value_BN: Tensor  # float32: the sum of log confidences from the root on
    acceptable_BN: Tensor  # bool
    mask_BNN: Tensor  # bool
    drafted_parents_BX: Tensor
    drafted_value_BX: Tensor

    @classmethod
    def empty(cls, rows: int, nodes: int, drafted: int) -> Grown:
        """Return trees to be filled. `drafted`: number of nodes that are drafted, without the root."""
        return cls(
            tokens_BN=longs(rows, nodes),
            parents_BN=longs(rows, nodes),
            depth_BN=longs(rows, nodes),
            log_q_BN=floats(rows, nodes),
            value_BN=floats(rows, nodes),
            acceptable_BN=flags(rows, nodes),
            mask_BNN=flags(rows, nodes, nodes),
            drafted_parents_BX=longs(rows, 1 + drafted),
            drafted_value_BX=floats(rows, 1 + drafted),
        )

    def spread(self, row_R: Tensor, root_tokens_B: Tensor) -> Grown:
        """Return the trees of B rows: these R ones, and in the other rows the root alone."""
        roots = Grown.empty(len(root_tokens_B), self.tokens_BN.shape[1], self.drafted_value_BX.shape[1] - 1)
        spread = {field.name: getattr(roots, field.name).zero_() for field in fields(self)}
        roots.tokens_BN[:] = root_tokens_B[:, None]
        roots.parents_BN[:, 0] = roots.drafted_parents_BX[:, 0] = -1
        roots.acceptable_BN[:, 0] = True
        roots.mask_BNN.diagonal(dim1=1, dim2=2).fill_(True)
        return Grown(**{name: value.index_copy_(0, row_R, getattr(self, name)) for name, value in spread.items()})


@dataclass(frozen=True)
class Pending:
    """Tokens that the net has not read yet, and the target's features at them: each row's first
    `count`, before the root."""

    features_RPF: Tensor  # float32; the hidden state where the net does not fuse
    tokens_RP: Tensor  # int64
    count_R: Tensor  # int64


def grow(
    net: Net, layers: Layers, tree_options: TreeOptions, forward: Pass, pending: Pending, root_tokens_R: Tensor
) -> Grown:
    """Draft EAGLE-2's tree with a net, which first reads pending tokens.

    Args:
        forward: of the rows before that; its positions and masks are not read.
        root_tokens_R: int64, the roots' tokens.
    """
    R, P = pending.tokens_RP.shape
    K = min(tree_options.branch, net.head.outputs)
    drafted = K + (tree_options.depth - 1) * K * K
    N = 1 + min(tree_options.nodes - 1, drafted if tree_options.rerank else tree_options.depth * K)
    grown = Grown.empty(R, N, drafted)
    every = [getattr(grown, field.name) for field in fields(grown)]
    out = _records.Grown(*(address(x, x.dtype) for x in every))
    with layers.lock:
        largest = replace(forward, position_RQ=forward.position_RQ.expand(R, max(P, K)))
        record, cache, kept = layers._prepare(largest)
        library().eyas_grow(
            byref(net.record),
            layers._records,
            c_int64(len(layers.layers)),
            *map(byref, (layers._shape, record, cache, tree_options.record)),
            c_void_p(address(pending.features_RPF)),
            c_void_p(address(pending.tokens_RP, torch.long)),
            c_int64(P),
            c_void_p(address(pending.count_R, torch.long)),
            c_void_p(address(root_tokens_R, torch.long)),
            byref(out),
        )
        del kept
    return grown
