"""The base of all EAGLE methods: a small net over pairs, and the session that runs it in every cycle.

Pair t is (feature of token t, token t+1). With it the net predicts token t+2.

    prefill   the net stores keys and values of the prompt's pairs. Its last layer, mostly the only one, needs no attention for that. The
              last feature waits ("pending"): its pair needs the first new token, which is not drawn yet
    draft     the net reads the pending pairs, with the target's features; its output at the newest one predicts the tokens after
              the root. Then the tree is grown: at its nodes the net reads its own output in place of features
    commit    features and tokens of the accepted path become pending; the keys and values of tree nodes are overwritten later

With a window (SEAGLE) the cache keeps the first `sink` and the last `size` pairs, rotated by their
index in the cache.

Letters: B rows, R rows of a forward, P nodes on the longest path, Q nodes of a level, N pairs (of
the target's output: nodes), T tokens or slots, D hidden, F feature width, V vocabulary, v draft
vocabulary, h frequencies of RoPE.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from eyas.core.drafter import Capturable, CycleInput, DraftSession, TreeSize
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters._grow import DraftNetSteps, DynamicTree, FusedTreeBuilder, grow_dynamic
from eyas.drafters._method import DraftMethod
from eyas.drafters._nets import MARGIN
from eyas.drafters._options import check_choice, check_whole
from eyas.errors import OptionError
from eyas.nn import Compiled, DraftKVCache, LayerShape, rope_frequencies

__all__ = ["DynamicEagle", "EagleMethod", "EagleNet", "EagleSession", "Window"]


@dataclass(frozen=True)
class Window:
    """Options of the draft's window: the part of a long text that its cache keeps (SEAGLE, section 3)."""

    size: int | None = None
    """Last pairs that the draft sees, without the sinks; none: all (seagle: as many as the head was
    trained on)."""
    sink: int = 4
    """First pairs, which the draft always sees (attention sinks)."""
    crop: Literal["halves", "last", "none"] = "halves"
    """The part that the draft reads of a prompt longer than the window: first and last half, last
    part, or all."""

    def __post_init__(self) -> None:
        if self.size is not None:
            check_whole("window", 1, size=self.size)
        check_whole("window", 0, sink=self.sink)
        check_choice("window.crop", self.crop, ("halves", "last", "none"))


class EagleNet(Protocol):
    """The interface of EAGLE nets. In the tree each step reads the `hidden` of the step before:
    EAGLE-1's predicted feature, EAGLE-3's hidden state."""

    def fuse(self, features: Tensor) -> Tensor:
        """Return the hidden [..., D] of the target's features [..., F]."""
        ...

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> None:
        """Store the keys and values of pairs in the cache, without computing an output. The cache's
        mask shows each pair itself and those before it."""
        ...

    def __call__(self, hidden: Tensor, embeddings: Tensor, position_RN: Tensor, cache: DraftKVCache) -> Tensor:
        """Return the net's output [R, N, D] at pairs, whose keys and values are stored in the cache too."""
        ...


class EagleMethod(DraftMethod):
    """The base of EAGLE methods: a small net over pairs, for one target."""

    needs_weights = True
    trainable = True
    shape: LayerShape
    net: nn.Module
    layers: int = 1  # decoder layers of the net
    draft_ids_v: Tensor | None = None  # the target's ids of a draft vocabulary that is smaller than the target's
    embed_tokens: Tensor | None = None  # the head's embedding table where it differs from the target's
    default_window: ClassVar[bool] = False  # whether the method has a window without `window.size`
    trained_window: int | None = None  # size of the window that the net was trained with; None: without a window

    @classmethod
    def new_head_layers(cls, target: Target, options: Any) -> tuple[int, ...]:
        """Return the `train_feature_layers` of a new head with these options; no head is made."""
        return (target.num_layers,)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    @property
    @abstractmethod
    def longest_path(self) -> int:
        """Nodes on the longest path, the root included."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V or v] of the net's output [..., D]."""

    @abstractmethod
    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        """Grow the draft tree of one cycle."""

    @cached_property
    def fused_tree_builder(self) -> FusedTreeBuilder | None:
        """Grows a whole dynamic tree in one call; None if the target's runner cannot, as with a window."""
        if self.window():
            return None
        make: Callable[..., FusedTreeBuilder | None] = self.target.runner.ops.fused_tree_builder
        return make(self.target, self.decoding_net, self.embed_tokens, self.draft_ids_v)

    @cached_property
    def compiled(self) -> Callable[..., Tensor] | None:
        """The net's forward (net, hidden, embeddings, positions, cache) by torch.compile; None if the runner
        compiles nothing, if kernels compute the layer, or if there are several layers."""
        backend = self.target.runner.backend
        by_kernels = any(getattr(module, "fused", None) is not None for module in self.decoding_net.modules())
        if backend is None or by_kernels or self.layers > 1:
            return None
        return Compiled(type(self.decoding_net).forward, backend, "the draft's layer")

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens[ids]

    @classmethod
    def check_window(cls, window: Window, trained: int | None = None) -> None:
        """Raise OptionError for window options that have no effect, because neither `window.size` nor the
        method nor the head gives a window.

        Args:
            trained: size of the window with which the head was trained.
        """
        default = Window()
        has_window = bool(trained) or cls.default_window
        idle = ["window.sink"] if window.sink != default.sink and (trained or not has_window) else []
        idle += ["window.crop"] if window.crop != default.crop and not has_window else []
        if window.size is None and idle:
            with_trained = f"this head was trained with a window of {trained}, without sinks"
            why, them = with_trained if trained else "this draft has no window", "them" if idle[1:] else "it"
            raise OptionError(f"{' and '.join(idle)}: {why}; give --window.size too, or leave {them} out")

    def window(self) -> tuple[int, int] | None:
        """Return (sink, size) of the draft's window; None without a window."""
        window: Window = self.options.window
        if window.size is not None:
            return window.sink, window.size
        if self.trained_window:
            return 0, self.trained_window
        if not self.default_window:
            return None
        trained = self.trained_length or self.target.context
        size = trained - window.sink - self.longest_path
        if size < 1:
            raise OptionError(
                f"the head was trained on {trained} tokens, too few for {window.sink} sinks and a tree of depth "
                f"{self.longest_path - 1}: give --window.size, or a shallower tree"
            )
        return window.sink, size

    def open(self, rows: int) -> DraftSession:
        return EagleSession(self, rows)

    def describe(self) -> dict[str, Any]:
        window = self.window()
        if window is None:
            return {}
        return {"window": {"sink": window[0], "size": window[1], "crop": self.options.window.crop}}


class DynamicEagle(EagleMethod):
    """An EAGLE method whose option `tree` is a dynamic tree."""

    @property
    def longest_path(self) -> int:
        return 1 + int(self.options.tree.depth)

    @property
    def max_tree(self) -> TreeSize | None:
        tree: DynamicTree = self.options.tree
        return tree.size

    @property
    def samples_children(self) -> bool:
        return False

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        return grow_dynamic(net_steps, cycle_input, self.options.tree)

    def chain(self, depth: int) -> Self:
        chain = copy(self)
        chain.options = replace(self.options, tree=DynamicTree(nodes=depth + 1, depth=depth, branch=1))
        return chain

    def describe(self) -> dict[str, Any]:
        return {**self.options.tree.describe(), **EagleMethod.describe(self)}


class EagleSession(DraftSession):
    """The draft's cache of B rows, and the pending pairs. Without a window, slot t of a row holds pair t.

    Pending are the committed tokens, with their features, whose pairs the net has not read yet. The
    second token of the newest pending pair is the root of the next cycle.
    """

    def __init__(self, drafter: EagleMethod, rows: int) -> None:
        target, shape, longest_path = drafter.target, drafter.shape, drafter.longest_path
        self.drafter, self.rows, self.window = drafter, rows, drafter.window()
        self.crop = drafter.options.window.crop
        self.cache = DraftKVCache(
            shape.num_kv_heads, shape.head_dim, rows, drafter.dtype, target.device, self.window, drafter.layers
        )
        self.frequency_h = rope_frequencies(shape, target.device)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=target.device)  # slots in use
        # pairs before the next one to read, including those that the window has lost
        self.pairs_B = torch.zeros_like(self.length_B)
        self.max_slots_by_row = [0] * rows  # with a window: upper bound of `length_B`, known to the host
        # pairs [begin, end) of the prompt that are not read because of the window
        self.unread_range: list[tuple[int, int]] = [(0, 0)] * rows
        width = target.hidden_size * len(drafter.feature_layers)
        self.pending_BPF = torch.zeros(rows, longest_path, width, dtype=target.dtype, device=target.device)
        self.pending_tokens_BP = torch.zeros(rows, longest_path, dtype=torch.long, device=target.device)
        self.pending_B = torch.zeros_like(self.length_B)  # number of pending pairs
        self.active_B = torch.zeros(rows, dtype=torch.bool, device=target.device)  # in the current cycle
        names = ("length_B", "pairs_B", "pending_BPF", "pending_tokens_BP", "pending_B")
        self.state = {name: tuple(getattr(self, name).shape) for name in names}

    @property
    def net(self) -> EagleNet:
        """The drafter's net for decoding, which may be another one in the next cycle."""
        return self.drafter.decoding_net  # type: ignore[no-any-return]

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        # verification of sampled children reads values on the host
        if self.drafter.samples_children and not cycle_input.noise.all_greedy:
            return None
        # the last tree came from another drafter and was deeper than the recording's
        if self.pending_BPF.shape[1] > self.state["pending_BPF"][1]:
            return None
        max_tree, length = self.drafter.max_tree, cycle_input.max_position
        if self.window:
            # a prompt that was read without cropping fills more slots than a window has
            if max(self.max_slots_by_row) > sum(self.window):
                return None
            length = min(length, sum(self.window))
            # a recording serves all rows: either it trims every row in each cycle, or none
            self.max_slots_by_row = [length] * self.rows
        tree_slots = self.drafter.longest_path + (max_tree.depth * max_tree.branch if max_tree else 0)
        self.cache.reserve(length + max(MARGIN, tree_slots))
        return Capturable(self, self.state, self.cache.addresses, self.cache.stores if self.window else ())

    # --- rows come and go

    def truncate(self, row: int, length: int) -> int:
        """Keep the first `length` - 1 pairs, as pair t needs token t+1. Returns how many are kept:
        0 if the cut goes back beyond the window."""
        slots, pairs = int(self.length_B[row]), int(self.pairs_B[row])
        kept = max(0, min(pairs, length - 1))
        kept_slots = slots - (pairs - kept)
        if slots < pairs and kept_slots <= (self.window or (0, 0))[0]:
            return 0
        self.length_B[row] = kept_slots
        self.pairs_B[row] = kept
        return kept

    def copy(self, source: int, row: int, length: int) -> int:
        """Copy all slots of the other row, then keep the pairs of the first `length` tokens, as `truncate` does."""
        slots = int(self.length_B[source])
        self.cache.reserve(slots)
        self.cache.copy(source, row, slots)
        self.length_B[row], self.pairs_B[row] = slots, self.pairs_B[source]
        self.max_slots_by_row[row] = self.max_slots_by_row[source]
        return self.truncate(row, length)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        """Decide which pairs of the prompt are read: all, or with a window that is too short for
        them, as the option `crop` says."""
        self.end(row, cached_tokens)
        self.unread_range[row] = (total, total)
        slots = int(self.length_B[row])
        if self.window is not None:
            self.max_slots_by_row[row] = slots
            full = sum(self.window)
            if self.crop != "none" and slots + total - cached_tokens > full:
                half = full // 2
                self.unread_range[row] = (
                    (0, total - full) if self.crop == "last" else (cached_tokens + max(0, half - slots), total - half)
                )
        else:
            self.cache.reserve(slots + total - cached_tokens)  # once: growing copies what is there

    def end(self, row: int, kept: int = 0) -> None:
        if not kept:
            self.length_B[row] = self.pairs_B[row] = self.max_slots_by_row[row] = 0
        self.pending_B[row] = 0

    def clear(self, row: int) -> None:
        self.end(row)
        self.cache.clear(row)
        self.pending_BPF[row] = 0

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """Store the keys and values of the pending pairs and of the chunk's. The chunk's last
        feature becomes pending."""
        pending = int(self.pending_B[row])
        first, ids_T, features_NF = position, tokens_T[1:], features_TF[:-1]
        if pending:
            first = position - pending
            ids_T = torch.cat([self.pending_tokens_BP[row, 1:pending], tokens_T])
            features_NF = torch.cat([self.pending_BPF[row, :pending], features_NF])
        for begin, end in self._read_ranges(row, first, first + len(ids_T)):
            part, T = slice(begin - first, end - first), end - begin
            slot_1T = self.length_B[row : row + 1, None] + torch.arange(T, device=ids_T.device)
            used = self.max_slots_by_row[row] if self.window else begin
            self.cache.prepare(range(row, row + 1), _always(slot_1T), used + T)
            self.cache.set_mask(
                self.length_B[row : row + 1], torch.ones(1, T, T, dtype=torch.bool, device=ids_T.device).tril()
            )
            hidden, embeddings = self._inputs(ids_T[None, part], self.net.fuse(self._cast(features_NF[None, part])))
            self.net.store_kv(hidden, embeddings, slot_1T, self.cache)
            self.length_B[row] += T
            self.max_slots_by_row[row] += T
        self.pairs_B[row] += len(ids_T)
        if self.window and self.crop != "none":
            self._trim()
        self.pending_BPF[row, 0] = features_TF[-1]
        self.pending_B[row] = 1

    def _read_ranges(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges [begin, end) of pairs to read, of the pairs from `first` to `end` - 1."""
        skip_begin, skip_end = self.unread_range[row]
        for begin, stop in ((first, min(end, skip_begin)), (max(first, skip_end, skip_begin), end)):
            if begin < stop:
                yield begin, stop

    # --- the cycle

    def draft(self, cycle_input: CycleInput) -> Draft:
        self.active_B = cycle_input.active_B
        return self.drafter.grow(self.net_steps(cycle_input), cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        prompt_BF = self.pending_BPF[:, 0]  # the pending feature of a row whose prompt is being read
        self.pending_BPF = output.features_at(verdict.path_BP)
        self.pending_tokens_BP = verdict.tokens_BP
        if self.rows == 1:
            self.pending_B = verdict.length_B.clone()
            return
        self.pending_BPF[:, 0] = torch.where(self.active_B[:, None], self.pending_BPF[:, 0], prompt_BF)
        # a row whose request has ended may still have several pending pairs
        self.pending_B = torch.where(self.active_B, verdict.length_B, self.pending_B.clamp(max=1))

    def net_steps(self, cycle_input: CycleInput) -> DraftNetSteps:
        """Return the functions that grow the tree of this cycle. The nodes of the tree get the slots
        after the committed ones, level by level."""

        def expand(tokens_BQ: Tensor, hidden_BQD: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            B, Q, T = visible_BQT.shape
            slot_BQ = torch.arange(T - Q, T, device=tokens_BQ.device).expand(B, Q)
            offset_BQ = torch.full_like(tokens_BQ, level)
            return self._read(tokens_BQ, hidden_BQD, offset_BQ, visible_BQT, slot_BQ, self._max_slots(cycle_input) + T)

        read = lambda: self._forward_pending(cycle_input)  # noqa: E731
        build_fused = lambda tree: self._build_fused(cycle_input, tree)  # noqa: E731
        return DraftNetSteps(read, self.drafter.head, expand, self.drafter.draft_ids_v, build_fused)

    def _forward_pending(self, cycle_input: CycleInput) -> Tensor:
        """Read the pending pairs; returns the net's output [B, D] at the newest one."""
        P = self.pending_BPF.shape[1]  # padded to the longest path, so that shapes do not depend on values
        order_P = torch.arange(P, device=cycle_input.tokens_B.device)
        last_B1, next_BP = self._newest(cycle_input)
        order_BP = order_P.expand(self.rows, P)
        causal_BPP = (order_P[:, None] >= order_P).expand(self.rows, P, P)
        fused_BPD = self.net.fuse(self._cast(self.pending_BPF))
        hidden_BPD = self._read(next_BP, fused_BPD, order_BP, causal_BPP, order_BP, self._max_slots(cycle_input) + P)
        self._mark_pending_read(cycle_input)
        return hidden_BPD.gather(1, last_B1[..., None].expand(-1, -1, hidden_BPD.shape[-1]))[:, 0]

    def _newest(self, cycle_input: CycleInput) -> tuple[Tensor, Tensor]:
        """Return the index [B, 1] of each row's newest pending pair, and the second tokens [B, P] of all
        pending pairs."""
        last_B1 = (self.pending_B - 1).clamp(min=0)[:, None]
        return last_B1, self.pending_tokens_BP.roll(-1, dims=1).scatter(1, last_B1, cycle_input.tokens_B[:, None])

    def _mark_pending_read(self, cycle_input: CycleInput) -> None:
        """Commit the slots of the pending pairs, which have been read, and forget those that left the window."""
        P = self.pending_BPF.shape[1]
        self._mark_read(self.pending_B * cycle_input.active_B)
        if self.window:
            self.max_slots_by_row = [min(bound + P, cycle_input.max_position) for bound in self.max_slots_by_row]
            self._trim()

    def _build_fused(self, cycle_input: CycleInput, tree: DynamicTree) -> Draft | None:
        """Read the pending pairs and grow a dynamic tree in one call; None if the runner cannot."""
        fused_tree_builder, P = self.drafter.fused_tree_builder, self.pending_BPF.shape[1]
        if fused_tree_builder is None or not fused_tree_builder.suits(cycle_input):
            return None
        count_B = self.pending_B * cycle_input.active_B
        features_BPF = self._cast(self.pending_BPF)
        if not fused_tree_builder.fuses_features:
            features_BPF = self.net.fuse(features_BPF)
        width = cycle_input.max_position + P + tree.depth * tree.branch
        draft = fused_tree_builder(
            features_BPF, self.pending_tokens_BP, count_B, cycle_input, tree, self.cache, self.length_B, width
        )
        self._mark_read(count_B)
        return draft

    def _read(
        self, ids_BN: Tensor, hidden_BND: Tensor, offset_BN: Tensor, visible_BNT: Tensor, slot_BN: Tensor, slots: int
    ) -> Tensor:
        """Run the net once.

        Args:
            offset_BN: positions, relative to `length_B`.
            visible_BNT: which of the T slots after the committed ones each input attends to.
            slot_BN: slots to store keys and values in, relative to `length_B`.
            slots: upper bound of the slots in use afterwards.
        """
        begin_B1 = self.length_B[:, None]
        self.cache.prepare(range(self.rows), lambda: begin_B1 + slot_BN, slots)
        self.cache.set_mask(self.length_B, visible_BNT)
        hidden, embeddings = self._inputs(ids_BN, hidden_BND)
        position_BN = begin_B1 + offset_BN
        if self.drafter.compiled is None:
            return self.run_net(hidden, embeddings, position_BN)
        return self.drafter.compiled(self.net, hidden, embeddings, position_BN, self.cache.compiled_layer_view())

    def run_net(self, hidden: Tensor, embeddings: Tensor, position_BN: Tensor) -> Tensor:
        """Run the net over pairs whose slots and mask the cache knows."""
        return self.net(hidden, embeddings, position_BN, self.cache)

    def _inputs(self, ids_RN: Tensor, hidden_RND: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_RND, self._cast(self.drafter.embed(ids_RN))

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.drafter.dtype)

    def _mark_read(self, count_B: Tensor) -> None:
        self.length_B = self.length_B + count_B
        self.pairs_B = self.pairs_B + count_B
        self.pending_B = self.pending_B - count_B

    def _trim(self) -> None:
        """Forget the pairs that have left the window."""
        assert self.window is not None
        full = sum(self.window)
        if max(self.max_slots_by_row) > full:
            self.length_B = self.cache.trim(self.length_B, self.frequency_h)
            self.max_slots_by_row = [min(bound, full) for bound in self.max_slots_by_row]

    def _max_slots(self, cycle_input: CycleInput) -> int:
        """Return an upper bound of `length_B`, known to the host."""
        return min(max(self.max_slots_by_row), cycle_input.max_position) if self.window else cycle_input.max_position


def _always(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x
