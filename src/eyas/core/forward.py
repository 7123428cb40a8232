"""One forward of the target: its input, the interface of runners, and the runner that calls the model's own forward.

`ModelRunner` gives the model a 4-D mask, position_ids and our cache as past_key_values. Other runners: `eyas.runners`.

Letters: R rows of the forward, T tokens or uncommitted nodes, Q new nodes, the last of these T, D hidden, V vocabulary, W width of the
cache in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from eyas.core import families
from eyas.core.cache import KVCache, slot_mask, slot_positions
from eyas.core.ops import REFERENCE, Ops
from eyas.core.tree import TargetOutput
from eyas.formats import EXACT, WeightFormat
from eyas.nn import Backend

if TYPE_CHECKING:
    from eyas.core.target import Target

__all__ = ["ForwardInput", "ModelRunner", "Runner"]


@dataclass(frozen=True)
class ForwardInput:
    """The input of one forward: Q new nodes in each of R rows, in the slots behind the committed tokens and T - Q earlier nodes."""

    target: Target
    tokens_RQ: Tensor  # int64
    position_RQ: Tensor  # int64
    length_R: Tensor  # int64; number of committed tokens
    depth_RT: Tensor  # int64; depth of all T nodes behind them
    visible_RQT: Tensor  # bool; which of the T nodes each new node attends to
    cache: KVCache  # `KVCache.at` has been called for this forward
    rows: Sequence[int]  # which rows of the cache the R rows are: a range, unless rows are left out
    width: int  # upper bound of the slots in use
    feature_layers: tuple[int, ...]  # hidden states to return (`Target.tap`)
    last_only: bool  # only the logits of the last node are needed
    prompt: bool = False  # the nodes are a chunk of a prompt, of any length: not worth a recording


class Runner(Protocol):
    """A way to run the forwards of a target, and the operations around them.

    Attributes:
        name: "model": the model's own code; "kernels": C++ kernels; "graphs", "compiled graphs": the model's code as CUDA graphs.
        form: weight format of the linear layers. A target with rounded weights is another target than the model.
        ops: implementation of the operations of a cycle.
        records_cycles: whether whole cycles are recorded, so that their stages cannot be timed one by one.
        skips_rows: whether a forward of some rows leaves out the others, wherever they are in the cache.
    """

    name: str
    form: WeightFormat
    ops: Ops
    records_cycles: bool
    skips_rows: bool

    def __call__(self, work: ForwardInput) -> TargetOutput:
        """Run one forward; the keys and values of the new nodes are stored in `work.cache`."""
        ...

    @property
    def threads(self) -> int | None:
        """Number of threads that a forward uses; None: torch's number."""
        ...

    @property
    def backend(self) -> Backend | None:
        """The backend of torch.compile for layers of the model and of draft nets; None: nothing is compiled."""
        ...

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        """A draft model with a runner of this kind; unchanged if it does not suit the model."""
        ...

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        """Final-norm features [..., D] -> logits [..., V]."""
        ...

    def wrap_cycle(self, cycle: Any) -> Any:
        """The runner of a decoder's cycles (a `core.cycle.CycleRunner`): `cycle` itself, or one that replays recordings of them."""
        ...


class ModelRunner:
    """Runs the model's own forward, with a 4-D mask and our cache."""

    name, form = "model", EXACT
    threads: int | None = None
    backend = None
    records_cycles, skips_rows = False, True

    def __init__(self, ops: Ops = REFERENCE) -> None:
        self.ops = ops

    def __call__(self, work: ForwardInput) -> TargetOutput:
        target = work.target
        extra: dict[str, Any] = {}
        # given a number, layers that share keys (Gemma 4) leave out the other tokens' features; a tensor must lie on the LM head's device
        if work.last_only and target._keeps_logits and not (target.family.shares_keys and target.has_several_devices):
            last = work.tokens_RQ.shape[1] - 1
            extra["logits_to_keep"] = torch.tensor([last], device=target.device) if target.family.shares_keys else 1
        with target.tap(work.feature_layers) as features:
            if target.family.has_attention:
                extra |= {"attention_mask": _masks(work), "position_ids": work.position_RQ}
            extra[target.family.cache_argument] = work.cache
            logits_RQV = target.model(input_ids=work.tokens_RQ, use_cache=True, **extra).logits
            features_RQF = features() if work.feature_layers else logits_RQV[..., :0]
        return TargetOutput(logits_RQV, features_RQF)

    def wrap_draft_model(self, other: Target, draft_weights: str) -> Target:
        return other

    def wrap_cycle(self, cycle: Any) -> Any:
        return cycle

    def head(self, target: Target, hidden: Tensor) -> Tensor:
        return families.head(target.family, hidden)


def _masks(work: ForwardInput) -> Tensor | dict[str, Tensor]:
    """Additive float masks, which all attention backends that support a 4-D mask accept. Sliding windows count positions, not slots."""
    family, length_R, visible_RQT, width = work.target.family, work.length_R, work.visible_RQT, work.width
    allowed_RQW = slot_mask(length_R, visible_RQT, width)

    def additive(allowed: Tensor) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=work.target.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(work.target.dtype).min)[:, None]

    def near(apart: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        new_RQ1 = (length_R[:, None] + work.depth_RT[:, -visible_RQT.shape[1] :])[..., None]
        return additive(allowed_RQW & apart(new_RQ1, slot_positions(length_R, work.depth_RT, width)[:, None]))

    def of_kind(kind: str) -> Tensor:
        if kind == families.SLIDING and (window := family.window) is not None:
            return near(lambda query, key: query - key < window)
        if kind == families.CHUNKED and (chunk := family.chunk) is not None:
            return near(lambda query, key: query // chunk == key // chunk)
        return additive(allowed_RQW)

    if not family.mask_kinds:
        return of_kind(families.SLIDING)
    none: dict[str, Any] = dict.fromkeys(families.STATE_KINDS) if family.has_states else {}  # such layers see no padding here
    return {**none, **{kind: of_kind(kind) for kind in family.mask_kinds}}
