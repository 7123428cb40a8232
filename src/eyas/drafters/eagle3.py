"""eagle3: EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the net predicts tokens directly from the
features of three layers, and is trained on its own outputs.

    low, mid, high features of token t  --fc-->  hidden of slot t
    slot t:  [ norm(embedding of token t+1) ; norm(hidden of slot t) ] -> attention, MLP -> new hidden -> norm, head -> q of token t+2

In the tree the new hidden takes the place of the fused features. No loss ties it to the target's
features, so more training data keeps paying (section 3). The net has a head of its own, over a
draft vocabulary that may be smaller than the target's. The tree is EAGLE-2's.

This file has options and weights. `_eagle3_net.py` has the net, `_eagle.py` the session,
which runs the net in each cycle, `_grow.py` grows the tree, and `eyas_train.own_outputs` trains it.

Training-time test (section 3.2): step 0 reads the target's features. Step i reads at each slot the hidden of
step i-1 and the true next token. It attends to the step-0 keys of earlier slots and to the later steps' keys of
its own slot.

Letters: R rows, N nodes or packed tokens, M of them that count, K predictions of all steps, U
target positions (tokens that count), I steps, D hidden, F features, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.drafters._eagle import DynamicEagle, Window
from eyas.drafters._eagle3_net import Architecture, Net
from eyas.drafters._grow import DynamicTree
from eyas.drafters._nets import (
    EMBEDDING,
    check_head,
    layer_config,
    layer_numbers,
    layer_shape,
    load_head,
    random_net,
    saved_head,
    target_layer_shape,
)
from eyas.drafters._options import SelfTraining, check_weight, check_whole
from eyas.errors import CheckpointError, FitError, OptionError
from eyas.nn import LayerShape

__all__ = ["Architecture", "Method", "Net", "Options", "TrainingTimeTest"]


MAX_DRAFT_VOCABULARY = 32_000  # the paper's, for new heads unless the options say otherwise
DRAFT_IDS = "draft_ids"  # the draft vocabulary in a checkpoint


@dataclass(frozen=True)
class TrainingTimeTest(SelfTraining):
    """How the net is trained on its own outputs."""

    steps: Annotated[int, TRAINING] = 7
    feature: Annotated[float, TRAINING] = 0.0
    """Weight of a smooth L1 between what the head reads and what the target's head reads (EAGLE-1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight("ttt.feature", self.feature)


@dataclass(frozen=True)
class NewHead:
    """The architecture of a head whose training begins. A trained head brings its own."""

    layers: Annotated[str, NEW_HEADS] = "auto"
    """Layers whose inputs are fused, like 2,8,13 (indices of hidden_states); auto: 2, L/2, L-3."""
    draft_vocab: Annotated[int | None, NEW_HEADS] = None
    """Tokens that the head can draft, the most frequent ones; none: at most 32,000."""
    fc_norm: Annotated[bool, NEW_HEADS] = False
    """Norm each layer's features before fusing them (EAGLE-3.1)."""
    norm_output: Annotated[bool, NEW_HEADS] = False
    """Pass the normed hidden to the next step (EAGLE-3.1)."""
    depth: Annotated[int, NEW_HEADS] = 1
    """Decoder layers of the net; those after the first read hidden states only, and begin as the target's last ones."""
    kv_heads: Annotated[int | None, NEW_HEADS] = None
    """Heads of keys and values of the net's layers; none: as many as the target's layers have."""

    def __post_init__(self) -> None:
        check_whole("head", 1, depth=self.depth, **({} if self.kv_heads is None else {"kv_heads": self.kv_heads}))
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise OptionError(f"head.draft_vocab must be 1 or more, got {self.draft_vocab}")


@dataclass(frozen=True)
class Options:
    """Options of eagle3."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    window: Window = field(default_factory=Window)
    ttt: TrainingTimeTest = field(default_factory=TrainingTimeTest)
    head: NewHead = field(default_factory=NewHead)


class Method(DynamicEagle):
    """EAGLE-3 with EAGLE-2's dynamic tree."""

    Options: ClassVar[type] = Options
    head_format = "eagle3"
    label: ClassVar[str] = "EAGLE-3"  # the method's name for people
    net_class: ClassVar[type[Net]] = Net
    gradient_checkpointing = False
    summary = "EAGLE-3: fused features of three layers, trained on its own outputs, dynamic tree"
    net: Net

    def __init__(
        self,
        target: Target,
        options: Any,
        net: Net,
        shape: LayerShape,
        layers: tuple[int, ...],
        draft_ids_v: Tensor | None = None,
        embed_tokens: Tensor | None = None,
    ) -> None:
        super().__init__(target, options)
        self.net = net
        self.shape = shape
        self.layers = net.architecture.layers
        self.feature_layers = layers
        self.draft_ids_v = draft_ids_v
        self.embed_tokens = embed_tokens

    @property
    def train_feature_layers(self) -> tuple[int, ...]:
        """The fused layers, and the target's final norm, which gives its distribution. Raise OptionError for a head
        that cannot be trained."""
        if self.net.head is None:
            raise OptionError(
                "this head uses the target's lm_head and cannot be trained further here; train one with its own"
            )
        return (*self.feature_layers, self.target.num_layers)

    @classmethod
    def new_head_layers(cls, target: Target, options: Any) -> tuple[int, ...]:
        return (*_fused_layers(options.head.layers, target), target.num_layers)

    # --- weights

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Load a head. Raise CheckpointError unless its sizes are the target's, and all tensors and no others are there."""
        sizes = {
            "target_hidden_size": ("target's hidden size", target.hidden_size),
            "vocab_size": ("vocabulary", target.vocab_size),
        }
        if weights is None or EMBEDDING not in weights.tensors:
            sizes["hidden_size"] = ("hidden size", target.hidden_size)
        weights = check_head(weights, cls.head_format, cls.label, sizes)
        config, options = weights.config, options or cls.Options()
        cls.check_window(options.window, config.get("window"))
        if config["head"] == "target" and config["hidden_size"] != target.hidden_size:
            raise CheckpointError(f"{weights.source}: the head uses the target's lm_head but has another hidden size")
        layers = _published_layers(weights, target)
        architecture = Architecture(
            feature_size=target.hidden_size,
            num_features=len(layers),
            draft_vocab_size=config["draft_vocab_size"] if config["head"] == "own" else 0,
            fc_bias=config["fc_bias"],
            fc_norm=config["fc_norm"],
            norm_before_fc=config["norm_before_fc"],
            norm_before_residual=config["norm_before_residual"],
            norm_output=config["carries"] == "normed",
            layers=config["layers"],
        )
        shape, size = layer_shape(config), config["draft_vocab_size"]
        others = {} if size == target.vocab_size else {DRAFT_IDS: (size,)}
        net, embed_tokens = load_head(cls.net_class(shape, architecture), weights, target, others)
        draft_ids_v = weights.tensors[DRAFT_IDS].to(target.device) if others else None
        method = cls(target, options, net, shape, layers, draft_ids_v, embed_tokens)
        method.trained_length = config.get("max_positions")
        method.trained_window = config.get("window")
        return method

    @classmethod
    def random(
        cls, target: Target, options: Any = None, seed: int = 0, draft_ids_v: Tensor | None = None, **shape: Any
    ) -> Self:
        """Return a head with a layer of the target's own sizes; `shape` replaces some of them.

        It drafts as many tokens as published heads do, spread over the vocabulary; `draft_ids_v` or
        the options may say others.
        """
        options = options or cls.Options()
        size = options.head.draft_vocab or MAX_DRAFT_VOCABULARY
        if draft_ids_v is None and size < target.vocab_size:
            draft_ids_v = torch.arange(size) * target.vocab_size // size
        return cls.new(target, options, seed, draft_ids_v, **shape)

    @classmethod
    def new(cls, target: Target, options: Any, seed: int, draft_ids_v: Tensor | None, **shape: Any) -> Self:
        """Return a head with random weights over these tokens; None for the whole vocabulary."""
        layer = target_layer_shape(target, **shape)
        cls.check_window(options.window)
        layers = _fused_layers(options.head.layers, target)
        size = target.vocab_size if draft_ids_v is None else len(draft_ids_v)
        new = options.head
        architecture = Architecture(
            target.hidden_size, len(layers), size, fc_norm=new.fc_norm, norm_output=new.norm_output, layers=new.depth
        )
        net = random_net(lambda: cls.net_class(layer, architecture), target, seed)
        draft_ids_v = None if draft_ids_v is None else draft_ids_v.to(target.device)
        return cls(target, options, net, layer, layers, draft_ids_v)

    def weights(self) -> Weights:
        architecture = self.net.architecture
        default = self.feature_layers == _default_layers(self.target)
        config = {
            **layer_config(self.shape),
            "layers": architecture.layers,
            "vocab_size": self.target.vocab_size,
            "max_positions": self.trained_length or self.target.context,
            "fc_bias": architecture.fc_bias,
            "act": "silu",
            "draft_vocab_size": architecture.draft_vocab_size or self.target.vocab_size,
            "target_hidden_size": architecture.feature_size,
            "num_features": architecture.num_features,
            "feature_layers": None if default else self.feature_layers,
            "layer_ids_as_published": None,
            "norm_before_fc": architecture.norm_before_fc,
            "fc_norm": architecture.fc_norm,
            "norm_before_residual": architecture.norm_before_residual,
            "carries": "normed" if architecture.norm_output else "raw",
            "head": "own" if architecture.draft_vocab_size else "target",
            "window": self.trained_window,
        }
        head = saved_head(self.head_format, config, self.net, self.target, self.embed_tokens)
        if self.draft_ids_v is not None:
            head.tensors[DRAFT_IDS] = self.draft_ids_v
        return head

    # --- drafting

    def head(self, hidden: Tensor) -> Tensor:
        net: Net = self.decoding_net
        normed = net.head_input(hidden)
        return net.head(normed) if net.head is not None else self.target.head(normed.to(self.target.dtype))


# --- the fused layers


def _default_layers(target: Target) -> tuple[int, ...] | None:
    L = target.num_layers
    return (2, L // 2, L - 3) if L >= 7 else None


def _published_layers(weights: Weights, target: Target) -> tuple[int, ...]:
    """Return the layers that a checkpoint names, or the paper's. Raise CheckpointError or FitError if the target does
    not have them."""
    layers, L = weights.config["feature_layers"], target.num_layers
    if max(layers or (0,)) >= L:
        raise CheckpointError(
            f"{weights.source} reads hidden_states {list(layers)}, the target has 0..{L - 1} before its last norm; "
            'if the ids in config.json are inputs of layers, say so there: "eyas": {"layer_ids": "input"}'
        )
    layers = layers or _default_layers(target)
    if layers is None:
        raise FitError(
            f"{weights.source} names no layers, so it reads the inputs of 2, L/2 and L-3. These are three different layers "
            f"from 7 layers on, but this target has {L}. If the layers of its training are known, write them into its "
            f'config.json, like "eyas": {{"feature_layers": [0, {L // 2}, {L - 1}], "layer_ids": "input"}}'
        )
    return _fused_layers(layers, target)


def _fused_layers(layers: str | tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Return which hidden_states are fused: the paper's three, or those named. Errors say which layers the target
    has."""
    L = target.num_layers
    if layers == "auto":
        if (default := _default_layers(target)) is None:
            raise FitError(
                f"EAGLE-3 fuses the inputs of layers 2, L/2 and L-3, which are three different ones from 7 layers on; this target has {L}: "
                f"pass layers with --head.layers, like --head.layers 0,{L // 2},{L - 1}"
            )
        return default
    return layer_numbers(layers, target)
