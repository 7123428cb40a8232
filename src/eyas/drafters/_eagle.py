"""What every EAGLE has in common: pairs of (feature of token t, token t+1) in a one-layer net's cache, and how a session feeds them.

After the prompt and after each cycle the net reads all newly committed pairs, with the target's true features; beyond them, in the tree,
it reads its own output. Tree slots never stay in its cache. As the net has one layer, a pair that is only remembered costs its key and
value and nothing else: a prompt is read without any attention.

With a window (SEAGLE) the cache keeps the first `sink` and the last `size` pairs, rotated by their index there.

Letters: B rows, P nodes on the longest path, Q nodes of a level, T tokens or slots, D hidden, F feature width, C slots of a full window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.cache import WindowCache
from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters._grow import DynamicTree, Growth
from eyas.drafters._grow_kernels import Grower, grower_of
from eyas.errors import CheckpointError, OptionError, near
from eyas.kernels import Pending
from eyas.nn import Compiled, LayerShape, rope_frequencies

__all__ = ["EagleMethod", "EagleNet", "EagleSession", "Window", "check_sizes", "head_of", "own_table", "shape_like", "shape_of"]

CROPS = ("halves", "last", "none")
ROOM = 256  # slots behind the committed ones that most trees do with


@dataclass(frozen=True)
class Window:
    """What the draft's cache keeps of a long text (SEAGLE, section 3)."""

    size: int | None = None
    """Last pairs that the draft sees, without the sinks; none: all (seagle: what the head was
    trained on)."""
    sink: int = 4
    """First pairs that it always sees."""
    crop: Literal["halves", "last", "none"] = "halves"
    """Of a longer prompt it reads: first and last half of the window, the last part, all."""

    def __post_init__(self) -> None:
        for name, value, least in (("size", self.size, 1), ("sink", self.sink, 0)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise OptionError(f"window.{name} must be a whole number, {least} or more, got {value!r}")
        if self.crop not in CROPS:
            raise OptionError(f"unknown window.crop {self.crop!r}; {near(self.crop, CROPS)}")


class EagleNet(Protocol):
    """What a session asks of a net. `hidden` is what one step hands to the next: EAGLE-1's predicted feature, EAGLE-3's state."""

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., F] -> hidden [..., D]."""
        ...

    def remember(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: WindowCache) -> None:
        """Keys and values of these pairs into the cache, nothing else."""
        ...

    def __call__(self, hidden: Tensor, embeddings: Tensor, position_RN: Tensor, cache: WindowCache) -> Tensor:
        """The net's output [R, N, D] at these pairs, which are remembered too."""
        ...


class EagleMethod(Drafter):
    """A one-layer net over pairs, on one target."""

    needs_weights = True
    trainable = True
    shape: LayerShape
    draft_ids_v: Tensor | None = None  # the target's ids of the draft vocabulary, where it is a smaller one
    embed_tokens: Tensor | None = None  # the head's own table, only where it differs from the target's
    default_window: ClassVar[bool] = False
    trained_window: int | None = None  # pairs that its layer saw in training, where that was not everything

    @classmethod
    @abstractmethod
    def layers_studied(cls, target: Target, options: Any) -> tuple[int, ...]:
        """What `train_feature_layers` of a new head says; it takes no net to tell."""

    @property
    def dtype(self) -> torch.dtype:
        return self.shape_weight.dtype

    @property
    @abstractmethod
    def shape_weight(self) -> Tensor:
        """Some weight of the net."""

    @property
    @abstractmethod
    def longest_path(self) -> int:
        """Nodes on the longest path, the root included."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """The net's output [..., D] -> logits [..., V or v]."""

    @abstractmethod
    def grow(self, growth: Growth, roots: CycleInput) -> Draft:
        """The tree."""

    @cached_property
    def grower(self) -> Grower | None:
        """What grows its dynamic trees all levels at once, where kernels know the net."""
        return None if self.window() else grower_of(self.target, self.decoding, self.embed_tokens, self.draft_ids_v)

    @cached_property
    def compiled(self) -> Callable[..., Tensor] | None:
        """The net's step (net, hidden, embeddings, positions, cache), where layers are compiled."""
        backend = self.target.run.backend
        return None if backend is None else Compiled(type(self.decoding).forward, backend, "the draft's layer")

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens[ids]

    @classmethod
    def check_window(cls, window: Window, trained: int | None = None) -> None:
        """OptionError when flags would say nothing: they need a window, and only some methods and heads bring one (`trained`)."""
        plain, brought = Window(), bool(trained) or cls.default_window
        idle = ["window.sink"] if window.sink != plain.sink and (trained or not brought) else []
        idle += ["window.crop"] if window.crop != plain.crop and not brought else []
        if window.size is None and idle:
            why = f"this head was trained with a window of {trained}, without sinks" if trained else "this draft sees everything"
            raise OptionError(f"{' and '.join(idle)}: {why}; give --window.size too, or leave {'them' if idle[1:] else 'it'} out")

    def window(self) -> tuple[int, int] | None:
        """(sink, size) of the draft's window, or None."""
        window: Window = self.options.window
        if window.size is not None:
            return window.sink, window.size
        if self.trained_window:
            return 0, self.trained_window
        if not self.default_window:
            return None
        size = (self.trained_length or self.target.context) - window.sink - self.longest_path
        if size < 1:
            raise OptionError(
                f"the head was trained on {self.trained_length or self.target.context} tokens, too few for {window.sink} sinks and a tree "
                f"of depth {self.longest_path - 1}: give --window.size, or a shallower tree"
            )
        return window.sink, size

    def open(self, rows: int) -> DraftSession:
        return EagleSession(self, rows)

    def describe(self) -> dict[str, Any]:
        window = self.window()
        return {} if window is None else {"window": {"sink": window[0], "size": window[1], "crop": self.options.window.crop}}


class EagleSession(DraftSession):
    """Rows of the draft's cache. Without a window slot t holds pair t: (feature of token t, token t+1).

    `pending` are committed tokens and their features that the net has not read yet; the last one's next token is the coming root. `draft`
    reads them first, then grows the tree.
    """

    def __init__(self, drafter: EagleMethod, rows: int) -> None:
        self.drafter, self.rows, self.window, self.crop = drafter, rows, drafter.window(), drafter.options.window.crop
        target, shape, longest_path = drafter.target, drafter.shape, drafter.longest_path
        self.net: EagleNet = drafter.decoding
        self.cache = WindowCache(shape.num_kv_heads, shape.head_dim, rows, drafter.dtype, target.device, self.window)
        self.frequency_h = rope_frequencies(shape, target.device)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=target.device)  # slots in use
        self.pairs_B = torch.zeros_like(self.length_B)  # pairs read, forgotten ones included
        self.bound = [0] * rows  # with a window: at most that many slots in use, known to the host
        self.wanted: list[tuple[int, int]] = [(0, 0)] * rows  # of the prompt, pairs before the first and from the second on are read
        width = target.hidden_size * len(drafter.feature_layers)
        self.pending_BPF = torch.zeros(rows, longest_path, width, dtype=target.dtype, device=target.device)
        self.pending_tokens_BP = torch.zeros(rows, longest_path, dtype=torch.long, device=target.device)
        self.pending_B = torch.zeros_like(self.length_B)
        state = ("length_B", "pairs_B", "pending_BPF", "pending_tokens_BP", "pending_B")
        self.state = {name: tuple(getattr(self, name).shape) for name in state}

    def capturable(self, roots: CycleInput) -> Capturable | None:
        if self.drafter.samples_children and not roots.noise.all_greedy:  # the host judges what was drawn
            return None
        largest, held = self.drafter.max_tree, roots.max_position
        if self.window:
            if max(self.bound) > sum(self.window):  # a prompt that was read whole
                return None
            held = min(held, sum(self.window))
            self.bound = [held] * self.rows  # as if a text of that length filled it: each cycle trims it, or none does
        self.cache.reserve(held + max(ROOM, self.drafter.longest_path + (largest.depth * largest.branch if largest else 0)))
        return Capturable(self, self.state, self.cache.addresses, self.cache.stores if self.window else ())

    def keep(self, row: int, length: int) -> int:
        """Pair m-1 needs token m to be unchanged, so of `length` equal tokens the pairs before the last stay, if nothing cut is needed."""
        slots, pairs = int(self.length_B[row]), int(self.pairs_B[row])
        kept = max(0, min(pairs, length - 1))
        left = slots - (pairs - kept)
        if slots < pairs and left <= (self.window or (0, 0))[0]:  # what would be left of the window was forgotten
            return 0
        self.length_B[row], self.pairs_B[row] = left, kept
        return kept

    def begin(self, row: int, kept: int, total: int) -> None:
        """Which pairs of the prompt will be read: with a window that they overflow, the first and last of them, or the last."""
        self.end(row, kept)
        self.wanted[row] = (total, total)
        slots = int(self.length_B[row])
        if self.window is not None:
            self.bound[row] = slots
            full = sum(self.window)
            if self.crop != "none" and slots + total - kept > full:
                half = full // 2
                self.wanted[row] = (0, total - full) if self.crop == "last" else (kept + max(0, half - slots), total - half)

    def end(self, row: int, kept: int = 0) -> None:
        if not kept:
            self.length_B[row] = self.pairs_B[row] = self.bound[row] = 0
        self.pending_B[row] = 0

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """Remember the pending pairs and the chunk's; its last feature waits for the next chunk's first token, or the root."""
        late, first, ids_T, features = int(self.pending_B[row]), position, tokens_T[1:], features_TF[:-1]
        if late:
            first, ids_T = position - late, torch.cat([self.pending_tokens_BP[row, 1:late], tokens_T])
            features = torch.cat([self.pending_BPF[row, :late], features])
        for begin, end in self._segments(row, first, first + len(ids_T)):
            part, T, length_1 = slice(begin - first, end - first), end - begin, self.length_B[row : row + 1]
            slot_1T = length_1[:, None] + torch.arange(T, device=ids_T.device)
            held = self.bound[row] if self.window else begin
            self.cache.at(slice(row, row + 1), _always(slot_1T), held + T)
            hidden, embeddings = self._inputs(ids_T[None, part], self.net.fuse(self._cast(features[None, part])))
            self.net.remember(hidden, embeddings, slot_1T, self.cache)
            self.length_B[row] += T
            self.bound[row] += T
        self.pairs_B[row] += len(ids_T)
        if self.window and self.crop != "none":
            self._trim()
        self.pending_BPF[row, 0] = features_TF[-1]
        self.pending_B[row] = 1

    def _segments(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Of the pairs first .. end-1 those that are read, as stretches."""
        head_end, tail_begin = self.wanted[row]
        for begin, stop in ((first, min(end, head_end)), (max(first, tail_begin, head_end), end)):
            if begin < stop:
                yield begin, stop

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.drafter.dtype)

    def _inputs(self, ids_RN: Tensor, hidden_RND: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_RND, self._cast(self.drafter.embed(ids_RN))

    def _trim(self) -> None:
        """Forget what has left the window."""
        assert self.window is not None
        full = sum(self.window)
        if max(self.bound) > full:
            self.length_B = self.cache.trim(self.length_B, self.frequency_h)
            self.bound = [min(bound, full) for bound in self.bound]

    def _read(self, ids_BN: Tensor, hidden_BND: Tensor, offset_BN: Tensor, visible_BNT: Tensor, slot_BN: Tensor, width: int) -> Tensor:
        """One forward: positions, slots and visible slots are given relative to the rows' lengths."""
        begin_B1 = self.length_B[:, None]
        self.cache.at(slice(0, self.rows), lambda: begin_B1 + slot_BN, width)
        self.cache.see(self.length_B, visible_BNT)
        inputs = *self._inputs(ids_BN, hidden_BND), begin_B1 + offset_BN
        if self.drafter.compiled is None:
            return self.net(*inputs, self.cache)
        return self.drafter.compiled(self.net, *inputs, self.cache.now())

    def _catch_up(self, roots: CycleInput) -> Tensor:
        """Read the pending pairs, padded to the longest path so that shapes stay fixed; the net's output [B, D] at the newest."""
        P = self.pending_BPF.shape[1]
        order_P = torch.arange(P, device=roots.tokens_B.device)
        next_BP, last_B1 = self._next(roots)
        order_BP, causal_BPP = order_P.expand(self.rows, P), (order_P[:, None] >= order_P).expand(self.rows, P, P)
        fused_BPD = self.net.fuse(self._cast(self.pending_BPF))
        hidden_BPD = self._read(next_BP, fused_BPD, order_BP, causal_BPP, order_BP, self._reach(roots) + P)
        self._have_read(self.pending_B * roots.active_B)
        if self.window:
            self.bound = [min(bound + P, roots.max_position) for bound in self.bound]
            self._trim()
        return hidden_BPD.gather(1, last_B1[..., None].expand(-1, -1, hidden_BPD.shape[-1]))[:, 0]

    def _next(self, roots: CycleInput) -> tuple[Tensor, Tensor]:
        """The tokens after the pending features [B, P], the roots after the last of them; and which one that is [B, 1]."""
        last_B1 = (self.pending_B - 1).clamp(min=0)[:, None]
        return self.pending_tokens_BP.roll(-1, dims=1).scatter(1, last_B1, roots.tokens_B[:, None]), last_B1

    def _have_read(self, count_B: Tensor) -> None:
        self.length_B, self.pairs_B = self.length_B + count_B, self.pairs_B + count_B
        self.pending_B = torch.zeros_like(self.pending_B)

    def _at_once(self, roots: CycleInput, shape: DynamicTree) -> Draft | None:
        """Read what is pending and grow a dynamic tree in one call, where the kernels know how."""
        grower, P = self.drafter.grower, self.pending_BPF.shape[1]
        if grower is None or not grower.suits(roots):
            return None
        count_B = self.pending_B * roots.active_B
        features = self._cast(self.pending_BPF)
        features = features if grower.net.fuse is not None else self.net.fuse(features)
        pending = Pending(features.contiguous(), self.pending_tokens_BP, count_B)
        draft = grower(pending, roots, shape, self.cache, self.length_B, roots.max_position + P + shape.depth * shape.branch)
        self._have_read(count_B)
        return draft

    def _reach(self, roots: CycleInput) -> int:
        """At most that many slots are in use in any row."""
        return min(max(self.bound), roots.max_position) if self.window else roots.max_position

    def growth(self, roots: CycleInput) -> Growth:
        """Reads what is pending, when asked to; then the levels of the tree can be expanded, in slots behind the committed ones."""

        def expand(tokens_BQ: Tensor, hidden_BQD: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            B, Q, T = visible_BQT.shape
            slot_BQ = torch.arange(T - Q, T, device=tokens_BQ.device).expand(B, Q)
            offset_BQ = torch.full_like(tokens_BQ, level)
            return self._read(tokens_BQ, hidden_BQD, offset_BQ, visible_BQT, slot_BQ, self._reach(roots) + T)

        return Growth(
            lambda: self._catch_up(roots), self.drafter.head, expand, self.drafter.draft_ids_v, lambda shape: self._at_once(roots, shape)
        )  # fmt: skip

    def draft(self, roots: CycleInput) -> Draft:
        return self.drafter.grow(self.growth(roots), roots)

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        path_BP = verdict.path_BP.clamp(min=0)
        self.pending_BPF = seen.features_BNF.gather(1, path_BP[..., None].expand(-1, -1, seen.features_BNF.shape[-1]))
        self.pending_tokens_BP = verdict.tokens_BP
        self.pending_B = verdict.length_B.clone()


def _always(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


# --- what heads share when they are loaded or begun ------------------------------------------------------------------------------------


def head_of(weights: Weights | None, method: str, said: str) -> Weights:
    """CheckpointError when there is no head, or one of another method; `said` is ours in words."""
    if weights is None:
        raise CheckpointError("this method needs a trained head: name its folder or hub id with --draft")
    if weights.method != method:
        raise CheckpointError(f"{weights.source} holds a head of {weights.method}, not of {said}")
    return weights


def check_sizes(weights: Weights, sizes: dict[str, tuple[str, int]]) -> None:
    """CheckpointError when a number of the head's config is not the target's: key -> what it is called, the target's."""
    for key, (name, mine) in sizes.items():
        if weights.config[key] != mine:
            raise CheckpointError(
                f"{weights.source}: the head's {name} is {weights.config[key]}, the target's {mine}: it was made for another model"
            )


def own_table(table: Tensor | None, target: Target) -> Tensor | None:
    """The head's embedding table, unless it is the target's own up to the rounding of storage."""
    if table is None:
        return None
    table = table.to(device=target.device, dtype=target.dtype)
    if table.shape[1] != target.hidden_size:
        return table
    every = torch.arange(target.vocab_size, device=target.device)
    return None if torch.allclose(table, target.embed(every), rtol=1e-2, atol=1e-3) else table


SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_eps", "rope_theta", "rope_scaling", "qkv_bias"
)  # fmt: skip


def shape_of(config: dict[str, Any]) -> LayerShape:
    """The layer that a checkpoint's config describes."""
    return LayerShape(**{name: config[name] for name in SHAPE_KEYS if name in config})


def shape_like(target: Target, **given: Any) -> LayerShape:
    """A layer of the target's own sizes, unless given otherwise."""
    config = target.model.config
    heads = getattr(config, "num_attention_heads", None) or max(1, target.hidden_size // 64)
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    like = {
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim + head_dim % 2,
        "rms_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10_000.0),
    }
    return LayerShape(**{**like, **given})
