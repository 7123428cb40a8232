"""peagle: P-EAGLE (arXiv 2602.01469): EAGLE-3's net, mostly with several layers, drafts all levels
of the tree in one pass.

    slot 0       [ norm(embedding of the root)   ; norm(fused features of the token before) ]  -> layers -> q of the token after the root
    slot j > 0   [ norm(embedding of the mask)   ; norm(fc(mask_hidden)) ]                     -> layers -> q of the token j further

Slot j has the position of slot 0 plus j and attends to the committed pairs and to the slots before
it. It knows no drafted token, so all nodes of a level have the same q, as with DFlash; the mask's
features are learned. The tree is EAGLE-2's, grown from these distributions without a further pass,
and deterministic. When drafted tokens are accepted, their pairs are read again with the target's
features.

Training (section 3): every slot of the text begins such a row of masks, and each of its slots
learns the target's distribution. The authors leave out a random part of the deeper masks, to save
memory (COD sampling); here all are trained.

`eagle3.py` has the weights and the loss, `_eagle3_net.py` the net.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.drafters import eagle3
from eyas.drafters._eagle import EagleSession, Window
from eyas.drafters._eagle3_net import ParallelNet
from eyas.drafters._grow import DraftNetSteps, DynamicTree
from eyas.drafters._nets import mask_token
from eyas.drafters._options import OBJECTIVES, check_choice, check_decay, check_whole
from eyas.errors import CheckpointError

__all__ = ["Method", "Options", "ParallelNet"]


@dataclass(frozen=True)
class TrainMasks:
    """How the slots are trained."""

    decay: Annotated[float, TRAINING] = 1.0
    """Slot j weighs decay ** j."""
    objective: Annotated[str, TRAINING] = "distribution"
    """distribution: cross-entropy with the target's distribution; acceptance, hybrid: LK losses,
    which train the probability that a drawn token is accepted."""

    def __post_init__(self) -> None:
        check_decay("train.decay", self.decay)
        check_choice("train.objective", self.objective, OBJECTIVES)


@dataclass(frozen=True)
class NewHead(eagle3.NewHead):
    """The architecture of a head whose training begins. A trained head brings its own."""

    depth: Annotated[int, NEW_HEADS] = 4
    """Decoder layers of the net; those after the first read hidden states only."""
    levels: Annotated[int, NEW_HEADS] = 8
    """Slots that are trained: most tokens drafted in a pass."""
    mask_token: Annotated[int | None, NEW_HEADS] = None
    """The token that stands for an unknown one; none: the padding token, or the one that counts
    least in the training data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("head", 1, levels=self.levels)
        if self.mask_token is not None:
            check_whole("head", 0, mask_token=self.mask_token)


@dataclass(frozen=True)
class Options:
    """Options of peagle."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    window: Window = field(default_factory=Window)
    train: TrainMasks = field(default_factory=TrainMasks)
    head: NewHead = field(default_factory=NewHead)


class Method(eagle3.Method):
    """P-EAGLE with EAGLE-2's dynamic tree."""

    Options: ClassVar[type] = Options
    head_format = "peagle"
    label = "P-EAGLE"
    summary = "P-EAGLE: EAGLE-3's net drafts all levels in one pass, dynamic tree"
    net_class = ParallelNet
    net: ParallelNet
    mask_token: int
    levels: int | None  # levels that the head was trained for; None: unknown

    def _with_masks(self, token: int, levels: int | None) -> Self:
        """Set the mask's token and the levels, below which no tree reaches."""
        self.mask_token, self.levels = token, levels
        if levels is not None:
            tree = self.options.tree
            self.options = replace(self.options, tree=replace(tree, depth=min(tree.depth, levels)))
        return self

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        method = super().load(weights, target, options)
        assert weights is not None
        token, table = weights.config["mask_token"], method.embed_tokens
        rows = target.num_embeddings if table is None else len(table)
        if token >= rows:
            raise CheckpointError(f"{weights.source} has the mask token {token}; there are {rows} embeddings")
        return method._with_masks(token, weights.config["levels"])

    @classmethod
    def new(cls, target: Target, options: Any, seed: int, draft_ids_v: Tensor | None, **shape: Any) -> Self:
        """Make a head with random weights and the mask token of its options."""
        token = mask_token(options.head.mask_token, target, None)
        return super().new(target, options, seed, draft_ids_v, **shape)._with_masks(token, options.head.levels)

    def weights(self) -> Weights:
        base = super().weights()
        return replace(base, config={**base.config, "mask_token": self.mask_token, "levels": self.levels})

    def open(self, rows: int) -> DraftSession:
        return ParallelSession(self, rows)

    def chain(self, depth: int) -> Self:
        """Return the method with a chain, at most as deep as the head was trained for."""
        return super().chain(depth)._with_masks(self.mask_token, self.levels)


class ParallelSession(EagleSession):
    """A session whose net reads the pending pairs and the masks in one pass. The masks are in the
    slots after the pending pairs, and are overwritten in the next cycle.

    Letters, in addition to `_eagle`: S levels, N = P + S - 1 inputs of the pass, v draft vocabulary.
    """

    drafter: Method

    def net_steps(self, cycle_input: CycleInput) -> DraftNetSteps:
        """Return the functions that grow the tree of this cycle from the distributions of its levels."""
        levels: int = self.drafter.options.tree.depth
        if cycle_input.tree_size is not None:
            levels = min(levels, cycle_input.tree_size.depth)
        logits_BSv = self.drafter.head(self._read_levels(cycle_input, max(1, levels)))
        return DraftNetSteps.of_levels(logits_BSv, self.drafter.draft_ids_v)

    def _read_levels(self, cycle_input: CycleInput, levels: int) -> Tensor:
        """Read the pending pairs and the masks after them; returns the net's output [B, S, D] at
        the newest pair and at each mask."""
        net: ParallelNet = self.drafter.decoding_net
        P, masks = self.pending_BPF.shape[1], levels - 1
        order_N = torch.arange(P + masks, device=cycle_input.tokens_B.device)
        last_B1, next_BP = self._newest(cycle_input)
        fused_BPD = net.fuse(self._cast(self.pending_BPF))
        mask_BSD = net.fuse(net.mask_hidden[None]).expand(self.rows, masks, -1)
        ids_BN = torch.cat([next_BP, torch.full_like(next_BP[:, :1], self.drafter.mask_token).expand(-1, masks)], dim=1)
        offset_BN = torch.cat([order_N[:P].expand(self.rows, P), last_B1 + 1 + order_N[:masks]], dim=1)
        causal_NN = order_N[:, None] >= order_N
        no_padding_BN = (order_N <= last_B1) | (order_N >= P)
        visible_BNN = causal_NN & (no_padding_BN[:, None] | (order_N < P)[:, None])
        slots = self._max_slots(cycle_input) + P + masks
        hidden_BND = self._read(
            ids_BN, torch.cat([fused_BPD, mask_BSD], dim=1), offset_BN, visible_BNN, order_N.expand(self.rows, -1), slots
        )  # fmt: skip
        newest_B1D = hidden_BND.gather(1, last_B1[..., None].expand(-1, -1, hidden_BND.shape[-1]))
        self._mark_pending_read(cycle_input)
        return torch.cat([newest_B1D, hidden_BND[:, P:]], dim=1)
