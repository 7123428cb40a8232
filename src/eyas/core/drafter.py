"""The whole extension point: what a method must be able to do.

A `Drafter` is a method with its weights and options, for one target; it never changes while it decodes. `Drafter.open(rows)` makes a
`DraftSession`, which holds the state of the rows (caches, pending features) and is what the loop talks to:

    begin(row, ...) -> prefill(row, ...) per chunk -> [ draft(roots) -> commit(draft, verdict, seen) ]* -> end(row)

This module knows no method, no tree policy and no training loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.inputs import CycleInput, Shape
from eyas.core.requests import PlanLabel, Step
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.errors import OptionError, UnknownOptionError, near
from eyas.nn import Documents

if TYPE_CHECKING:
    from eyas.core.target import Target

__all__ = ["Batch", "CycleInput", "DraftSession", "Drafter", "Loss", "NoOptions", "Shape", "build_options", "method_name"]


@dataclass(frozen=True)
class Batch:
    """What a training step sees: documents packed end to end, without padding, with the frozen target's features."""

    tokens_N: Tensor  # int64
    features_NF: Tensor  # the layers in `Drafter.train_feature_layers`, side by side
    counted_N: Tensor  # bool; True where the token is one whose prediction counts (an assistant's token)
    documents: Documents


@dataclass(frozen=True)
class Loss:
    """What a method says about a batch: sums, so that batches and processes add up; the loop divides by what counted in all of them."""

    total: Tensor  # scalar with gradient, summed over the tokens that count
    count: Tensor  # scalar: how many tokens count
    sums: dict[str, Tensor]  # scalars without gradient, summed likewise: what to log


@dataclass(frozen=True)
class Capturable:
    """A session that drafts and commits by operations of the device alone, the same ones in every cycle from such an input (the same
    rows' Sampling but for seeds, tree shape and `max_position`): so its cycles can be recorded and replayed (CUDA graphs)."""

    session: DraftSession
    state: Mapping[
        str, tuple[int, ...]
    ]  # its tensors that a cycle reads and replaces, with their full shapes; a cycle may leave shorter ones
    addresses: tuple[int, ...] = ()  # of its caches in memory
    inplace_state: tuple[Tensor, ...] = ()  # tensors that a cycle changes where they lie, from what it finds there
    tree_shape: Shape | None = None  # with which it drafts, where that is not the input's


class DraftSession(ABC):
    """The state of B rows. Rows join and leave between cycles."""

    decision: PlanLabel | None = None  # of a drafter that adapts, for the cycle under way

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        """What drafts from this input, where it can be recorded; None: it looks at values on the host."""
        return None

    def keep(self, row: int, length: int) -> int:
        """Cut the row back to at most `length` tokens and say how many it still knows; their features will be offered from there on."""
        return 0

    def begin(self, row: int, kept: int, total: int) -> None:
        """The row starts after the `kept` tokens that `keep` said it still knows (0: empty); its prompt will have `total` tokens."""

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """The next chunk of the row's prompt, with what the target saw; `position` is that of its first token.

        Also what was decoded without this session's drafts: the chunk then begins with the root that the last `commit` led to.
        """

    @abstractmethod
    def draft(self, roots: CycleInput) -> Draft:
        """Propose a tree for every row; shapes may not depend on the values."""

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        """Learn what was accepted; tokens and features of other nodes are forgotten."""

    def observe(self, steps: Sequence[Step]) -> None:
        """Called after every cycle with its Steps, one of each active row: for drafters that adapt."""

    def end(self, row: int) -> None:
        """The row is empty again."""


@dataclass(frozen=True)
class NoOptions:
    """A method without options."""


class Drafter(ABC):
    """A method with its weights and options, for one target.

    Attributes:
        Options: frozen dataclass (fields may be frozen dataclasses themselves, flags then read `--tree.nodes`); its fields are the flags.
        wants: target features that it reads: k = Hugging Face's hidden_states[k] (input of layer k); L = after the final norm.
        studies: the same for `loss`, which may read more.
        trained_length: tokens of the longest sequence that its net was trained on, as far as is known.
        by_text: whether it drafts from text, without a net.
        made_for: fingerprint of the target that its net was trained for, where `from_pretrained` found one.
        needs_weights: whether it has a net that must be loaded.
        reads: which heads it loads: `Weights.method`.
        trainable: whether `loss` is there.
        recompute: whether `loss` works activations out again in the backward instead of keeping them; None: it has no such choice.
    """

    Options: ClassVar[type] = NoOptions
    summary: ClassVar[str] = ""  # one line for `eyas methods`
    needs_weights: ClassVar[bool] = False
    reads: ClassVar[str] = ""
    trainable: ClassVar[bool] = False
    feature_layers: tuple[int, ...] = ()
    net: nn.Module | None = None
    trained_length: int | None = None
    model_free: bool = False
    target_fingerprint: str | None = None
    gradient_checkpointing: bool | None = None
    parts: tuple[Drafter, ...] = ()

    @property
    def train_feature_layers(self) -> tuple[int, ...]:
        return self.feature_layers

    @property
    def max_tree(self) -> Shape | None:
        """The largest tree that `CycleInput.tree_shape` may ask for; None: the method's trees are as they are."""
        return None

    @property
    def samples_children(self) -> bool:
        """Whether sampled rows' children are drawn (`Draft.q_BNV`): then what a seed gives depends on the trees."""
        return False

    @cached_property
    def decoding(self) -> Any:
        """The net as decoding runs it: faster where the target's runner has something faster, rounded where that was asked for."""
        return None if self.net is None else self.target.run.ops.draft_net(self.net, self.target.draft_weights)

    def __init__(self, target: Target, options: Any = None) -> None:
        self.target, self.options = target, self.Options() if options is None else options

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        """The method with what `--draft` names: by default the folder or hub id of a head; None: nothing was named.

        CheckpointError when there is no such head, or when it does not fit the target.
        """
        weights = None if source is None else checkpoints.load(source)
        drafter = cls.load(weights if cls.needs_weights else None, target, options)
        drafter.target_fingerprint = ((weights.config.get("eyas") or {}) if weights else {}).get("target_fingerprint")
        return drafter

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Drafter:
        """The method with these weights; CheckpointError when they do not fit the target."""
        return cls(target, options)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Drafter:
        """The method with random weights: for tests, and as a deliberately useless head."""
        return cls(target, options)

    @classmethod
    def init_for_training(cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None) -> Drafter:
        """The method as its training begins. `counts_V`: how often each token counts in the training data, for draft vocabularies."""
        return cls.random(target, options, seed)

    @abstractmethod
    def open(self, rows: int) -> DraftSession:
        """State for that many rows."""

    def weights(self) -> Weights:
        """What a checkpoint holds."""
        raise NotImplementedError(f"{type(self).__module__} has no weights to save")

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """The training loss of a batch; `generator` is on the CPU and the only source of randomness."""
        raise NotImplementedError(f"{type(self).__module__} cannot be trained")

    def chain(self, depth: int) -> Drafter:
        """The same net drafting a chain of that depth: what n-alpha is measured with."""
        raise NotImplementedError(f"{type(self).__module__} drafts no chains")

    def describe(self) -> dict[str, Any]:
        """The tree, for `--json`."""
        return {}


def method_name(drafter: Drafter) -> str:
    """The name that `--method` takes; `eagle2+suffix` for two merged methods."""
    parts = drafter.parts
    if parts:
        return "+".join(method_name(part) for part in parts)
    return type(drafter).__module__.removeprefix("eyas.drafters.")


def build_options(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of the options dataclass `kind` from `{"tree.nodes": 60}` or `{"tree": {"nodes": 60}}`.

    Unknown names are an OptionError with the near ones.
    """
    defaults = kind()
    groups: dict[str, dict[str, Any]] = {}
    known = {f.name: f for f in fields(kind)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if head not in known or (rest and not is_dataclass(getattr(defaults, head))):
            raise UnknownOptionError(prefix + name, near(prefix + name, flags(kind, prefix)))
        if is_dataclass(getattr(defaults, head)) and not is_dataclass(value):
            if not rest and not isinstance(value, Mapping):
                raise OptionError(
                    f"option {prefix + name!r} is a group; give {', '.join(flags(type(getattr(defaults, head)), name + '.'))}"
                )
            groups.setdefault(head, {}).update({rest: value} if rest else value)
        else:
            changes[head] = value
    for head, inner in groups.items():
        changes[head] = build_options(type(getattr(defaults, head)), inner, prefix + head + ".")
    return replace(defaults, **changes)


def flags(kind: type, prefix: str = "") -> dict[str, Any]:
    """All dotted option names of a dataclass with their default values."""
    found: dict[str, Any] = {}
    for name, value in ((f.name, getattr(kind(), f.name)) for f in fields(kind)):
        found.update(flags(type(value), f"{prefix}{name}.") if is_dataclass(value) else {prefix + name: value})
    return found
