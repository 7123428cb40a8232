"""The interface of drafting methods: `Drafter` and `DraftSession`, and the records that they read and return.

A `Drafter` is a method with its weights and options, for one target; it does not change during
decoding. `Drafter.open(rows)` makes a `DraftSession`, which holds the state of the rows (caches,
features not yet read). The engine calls it in this order:

    truncate(row, length) -> begin(row, ...) -> prefill(row, chunk, ...)*         a request enters a row
    [ draft(cycle_input) -> commit(draft, verdict, output) -> observe(steps) ]*   cycles, all active rows together
    end(row), or clear(row)                                                       the request has ended, or failed

`truncate` is called only if the row's last text begins like the prompt; `copy(source, row, length)` is called
instead if another row's does. A Decoder with `reuse` does not call `end` before the next `begin`: the row's
text stays for later prompts. Cycles of other rows may come between the chunks of a prompt. The row is not
active in them (`CycleInput.active_B`), and `draft` and `commit` leave its state as it is.

This module knows no method, no tree policy and no training: a method that is found by name, loaded and trained
is a `drafters.DraftMethod`. Letters: B rows, T tokens of a chunk, F feature width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from eyas.core.adjustments import Adjustments
from eyas.core.cache import KVCache
from eyas.core.features import RowFeature, TextEnd
from eyas.core.options import build_options  # methods have options, so callers find both here
from eyas.core.requests import Step
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, TargetOutput, Verdict

if TYPE_CHECKING:
    from eyas.core.target import Target

__all__ = [
    "Capturable", "CycleInput", "DraftSession", "Drafter", "NoOptions", "NodeChooser", "TreeSize", "build_options",
    "method_name",
]  # fmt: skip


class TreeSize(NamedTuple):
    """The size of a dynamic tree (EAGLE-2)."""

    nodes: int  # nodes verified per cycle, the root included
    depth: int  # draft tokens on the longest path
    branch: int  # nodes expanded per level, and children drafted for each

    def within(self, limit: TreeSize) -> TreeSize:
        """Return the size with each number cut to the limit's."""
        return TreeSize(*map(min, self, limit))


class NodeChooser(Protocol):
    """Decides which nodes that could be drafted are worth the time that they take in the target's pass."""

    padded: bool  # whether every row takes the time of the largest tree's nodes
    least: float  # nodes with a smaller chance to be accepted are not worth their time

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many nodes of each row to verify, all rows weighed together.

        Args:
            chances: for each row, the estimated chances that its nodes are accepted, in descending order.
        """
        ...


@dataclass(frozen=True)
class CycleInput:
    """The state of all rows when a cycle begins. Tensors are on the device, everything else is known to the host."""

    tokens_B: Tensor  # int64; the roots: each row's newest token, emitted and not yet in any cache; 0 in empty rows
    position_B: Tensor  # int64; the roots' absolute positions = numbers of committed tokens
    active_B: Tensor  # bool; False: the row is empty, and its results are ignored
    sampling: tuple[Sampling, ...]  # the Sampling of each row; an empty row has the Sampling of an active one
    noise: GumbelNoise
    max_position: int  # upper bound of `position_B`, known to the host
    # [B, ...], adjustments by the texts up to the roots; None if no row's distribution depends on them
    adjustments: Adjustments | None = None
    active_rows: tuple[int, ...] = ()  # indices of the rows that are not empty
    # prompt and emitted tokens of each row, root last (before the last cycle, if this one runs
    # ahead); these lists grow after the cycle
    row_tokens: tuple[Sequence[int], ...] = ()
    features: tuple[tuple[RowFeature, ...], ...] = ()  # the features of each row; () if no row has any
    ends: tuple[TextEnd, ...] = ()  # what ends the text of each row (before the last cycle, if this one runs ahead)
    # most acceptable nodes below each row's root; None: no limit; () if no row has one
    draft_limits: tuple[int | None, ...] = ()
    top_tokens: int | None = None  # most probable tokens whose log-probabilities are wanted; None: no log-probabilities
    # the target's keys and values; slot s < `position_B` of a row belongs to its token s
    target_cache: KVCache | None = None
    tree_size: TreeSize | None = None  # size of a dynamic tree in this cycle; None: the drafter's options decide
    chooser: NodeChooser | None = None  # for a method that `chooses_nodes`; None: all nodes are verified


@dataclass(frozen=True)
class Capturable:
    """A session whose cycles can be recorded as a CUDA graph and replayed.

    It drafts and commits without reading any value on the host. The operations are the same for all inputs with the
    same Sampling of each row (seeds may differ), the same `tree_size` and the same `max_position`.
    """

    session: DraftSession
    state: Mapping[str, tuple[int, ...]]
    """Names of the session's tensors that a cycle reads and replaces by new ones, with their full
    shapes; a new one may be shorter."""
    addresses: tuple[int, ...] = ()
    """Data pointers of the session's caches: a recording is valid for these only."""
    inplace_state: tuple[Tensor, ...] = ()
    """Tensors that a cycle both reads and overwrites in place."""
    tree_size: TreeSize | None = None
    """The size of tree that the session drafts, if an adaptive drafter has decided on one."""
    runs_ahead: bool = True
    """Whether the next cycle of the same rows is made in the same way, whatever this one's result
    is."""


class DraftSession(ABC):
    """The drafter's state of B rows. Rows begin and end between cycles."""

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        """Return how to record the cycle that begins with this input; None if drafting or verifying it reads
        values on the host."""
        return None

    def truncate(self, row: int, length: int) -> int:
        """Cut the row back to its first `length` tokens or fewer. Returns how many are kept:
        `prefill` continues after these.

        Called before `begin`, when a new prompt shares its first tokens with the row's last text.
        """
        return 0

    def copy(self, source: int, row: int, length: int) -> int:
        """Replace an empty row's state by the state after the first `length` tokens, or fewer, of another row's text.

        The other row may be in flight. Called before `begin`, when a new prompt shares its first
        tokens with the other row's text.

        Returns:
            how many tokens were copied: `prefill` continues after these. 0: the prompt is read from
            its beginning.
        """
        return 0

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        """Prepare the row for a request that enters it.

        Args:
            cached_tokens: tokens of the prompt that the session has read already: the number that
                `truncate` or `copy` returned, or 0.
            total: tokens of the prompt.
        """

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """Read the next chunk of the row's prompt.

        Also called with text that was decoded while this session did not draft (`core.dormant`).
        The chunk then begins with the root that followed the last `commit`.

        Args:
            features_TF: the target's features of these tokens.
            position: absolute position of the first token.
        """

    @abstractmethod
    def draft(self, cycle_input: CycleInput) -> Draft:
        """Propose a tree for every row. In a session that is `capturable`, shapes must not depend on values."""

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        """Read the accepted path; drop the state of all other nodes. `output` has the target's
        features at every node of the draft."""

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from the Steps of a cycle, one for each active row; for adaptive drafters."""

    def observe_prompt(self, row: int, tokens: int, seconds: float) -> None:
        """Learn from the time that a chunk of a prompt took; for adaptive drafters.

        Args:
            tokens: number of tokens of the chunk.
            seconds: the time that `prefill` took.
        """

    def end(self, row: int) -> None:
        """Empty the row: its request has ended."""

    def clear(self, row: int) -> None:
        """Empty the row, whose request has failed: as `end`, but its tensors may hold NaN, so they
        must not be read again."""
        self.end(row)


@dataclass(frozen=True)
class NoOptions:
    """A method without options."""


class Drafter(ABC):
    """A method with its weights and options, for one target.

    Attributes:
        Options: frozen dataclass whose fields are the command line's flags. A field may be a frozen
            dataclass itself: `--tree.nodes`.
        feature_layers: hidden states of the target that the method reads: k = Hugging Face's
            hidden_states[k], the input of layer k; L (the number of layers) = after the final norm.
        net: the draft net as it was loaded; None for methods without one.
        model_free: whether the method drafts from the text alone, without a net.
        chooses_nodes: whether `CycleInput.chooser` decides how many of its nodes are verified.
        parts: the two methods of a merged drafter, or the wrapped method of an adaptive one; else empty.
    """

    Options: ClassVar[type] = NoOptions
    feature_layers: tuple[int, ...] = ()
    net: nn.Module | None = None
    model_free: bool = False
    chooses_nodes: bool = False
    parts: tuple[Drafter, ...] = ()

    @property
    def max_tree(self) -> TreeSize | None:
        """The largest dynamic tree that `CycleInput.tree_size` may ask for; None: the method has no dynamic trees."""
        return None

    @property
    def samples_children(self) -> bool:
        """Whether children are drawn from q in rows that sample (`Draft.q_BNV`); the tokens of a
        seed then depend on the trees."""
        return False

    @cached_property
    def decoding_net(self) -> Any:
        """The net for decoding: `net` itself, or a version that the target's runner makes of it,
        which may be faster, or rounded on request."""
        return None if self.net is None else self.target.runner.ops.draft_net(self.net, self.target.draft_weights)

    def __init__(self, target: Target, options: Any = None) -> None:
        self.target, self.options = target, self.Options() if options is None else options

    def for_target(self, target: Target) -> Drafter:
        """Return the same method and weights for another view of its target (`Target.with_adapter`)."""
        if target is self.target:
            return self
        other = copy(self)
        other.target = target
        return other

    @abstractmethod
    def open(self, rows: int) -> DraftSession:
        """Make a session with `rows` empty rows."""

    def describe(self) -> dict[str, Any]:
        """Return the options of the tree, for `--json`."""
        return {}


def method_name(drafter: Drafter) -> str:
    """Return the method's name for `--method`; `eagle2+suffix` for two merged methods."""
    parts = drafter.parts
    if parts:
        return "+".join(method_name(part) for part in parts)
    return type(drafter).__module__.removeprefix("eyas.drafters.").rpartition(".method_")[2]
