"""eagle1: EAGLE (Li et al. 2024, arXiv 2401.15077): features are easier to predict than tokens,
once the next token is known.

The net reads pairs (feature of token t, token t+1) and predicts the target's feature of token t+1,
after the final norm. The target's lm_head turns the predicted feature into the distribution q of
token t+2:

    slot t:  x = fc[ embedding of token t+1 ; feature of token t ]  ->  one decoder layer  ->  predicted feature of token t+1
                                                                          head of the target  ->  q of token t+2

In the tree the net reads its own predicted features. Siblings are the most probable tokens (greedy
rows), or sampled without replacement. `--head.inputs` selects a net of the paper's ablation
(section 5.3.2), which differs in its input at slot t:

    shifted      [ embedding of token t+1 ; feature of token t ]     EAGLE: the feature, and the token that was sampled after it
    unshifted    [ embedding of token t   ; feature of token t ]     does not know token t+1, so all siblings get the same children
    feature      feature of token t                                  does not know token t+1 either
    token        embedding of token t+1                              a language model of one layer

`_eagle.py` has the session, which runs the net in each cycle, and `_grow.py` grows the tree.

Letters: R rows, N nodes or packed tokens, M of them that count, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from eyas.checkpoints import Weights
from eyas.checkpoints.safeailab import INPUTS
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, TargetOutput, Verdict, chain_choices, check_choices
from eyas.drafters._eagle import EagleMethod, EagleSession, Window
from eyas.drafters._grow import DraftNetSteps, grow_static
from eyas.drafters._nets import (
    check_head,
    layer_config,
    layer_shape,
    load_head,
    random_net,
    saved_head,
    target_layer_shape,
    target_sizes,
)
from eyas.drafters._options import check_choice
from eyas.errors import InputError, OptionError
from eyas.files import parse_json
from eyas.nn import DecoderLayer, DraftCache, LayerShape

__all__ = ["VERIFICATIONS", "HeadOptions", "Method", "Net", "StaticTree"]


class Net(nn.Module):
    """fc over the inputs, then one decoder layer. In the tree a step reads the hidden of the step
    before: its predicted feature.

    The unshifted net reads the token's own embedding too, so its hidden is [embedding ; predicted
    feature], of width 2D.
    """

    def __init__(self, shape: LayerShape, fc_bias: bool = True, inputs: str = "shifted") -> None:
        super().__init__()
        D, joined = shape.hidden_size, inputs in ("shifted", "unshifted")
        self.inputs = inputs
        self.fc = nn.Linear(2 * D, D, bias=fc_bias) if joined else nn.Identity()
        self.layer = DecoderLayer(shape)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features as they are: EAGLE-1 reads one layer."""
        return features

    def join(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the decoder layer [..., D]. `embeddings` belong to tokens t+1."""
        inputs = {"shifted": (embeddings, hidden), "unshifted": (hidden,), "feature": (hidden,), "token": (embeddings,)}
        return self.fc(torch.cat(inputs[self.inputs], dim=-1))  # type: ignore[no-any-return]

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        """Write the keys and values of the layer for these positions into the cache, without attention."""
        self.layer.attention.store(self.join(hidden_RND, embeddings_RND), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """Return the next hidden [R, N, D]."""
        x_RND = self.join(hidden_RND, embeddings_RND)
        feature_RND = self.layer.decode(x_RND, x_RND, position_RN, cache)
        return torch.cat([embeddings_RND, feature_RND], dim=-1) if self.inputs == "unshifted" else feature_RND


# The 25 choices of the EAGLE reference for 7B models, level by level; a digit is a rank among siblings.
_REFERENCE = "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
REFERENCE_TREE: Choices = check_choices(tuple(map(int, path)) for path in _REFERENCE.split())

NOISES = ("sampled", "coupled")
VERIFICATIONS = ("token", "block")


@dataclass(frozen=True)
class StaticTree:
    """A static tree."""

    choices: str | Choices = "reference"
    """"reference" (25 draft tokens), "chain" (5 deep), "chain-N", or a JSON file: a list of lists
    of ranks."""
    noise: str = "sampled"
    """Sampling: siblings are sampled from q (sampled, the paper's), or chosen with the target's
    noise (coupled)."""

    def __post_init__(self) -> None:
        check_choice("tree.noise", self.noise, NOISES)

    def resolve(self) -> Choices:
        """Return the paths of the tree; raise OptionError when the name, the file or the tree is bad."""
        if not isinstance(self.choices, str):
            return check_choices(self.choices)
        name, _, depth = self.choices.partition("-")
        if self.choices == "reference":
            return REFERENCE_TREE
        if name == "chain" and (not depth or (depth.isdecimal() and int(depth) > 0)):
            return chain_choices(int(depth or 5))
        try:
            return check_choices(parse_json(Path(self.choices).read_bytes()))
        except OSError as error:
            raise OptionError(
                f"tree.choices: {self.choices!r} is neither reference, chain, chain-N nor a readable file ({error.strerror})"
            ) from error
        except (InputError, TypeError) as error:
            raise OptionError(
                f"tree.choices: {self.choices} must hold a JSON list of lists of ranks, like [[0], [1], [0, 0]]: {error}"
            ) from error


@dataclass(frozen=True)
class NewHead:
    """The architecture of a head whose training begins. A trained head brings its own."""

    inputs: Annotated[str, NEW_HEADS] = "shifted"
    """Inputs of the net: shifted (EAGLE), or from its ablation: unshifted, feature, token."""

    def __post_init__(self) -> None:
        check_choice("head.inputs", self.inputs, INPUTS)


@dataclass(frozen=True)
class HeadOptions:
    """Options of every method with EAGLE-1's net."""

    window: Window = field(default_factory=Window)
    head: NewHead = field(default_factory=NewHead)
    noise: Annotated[str, TRAINING] = "uniform"
    """Added to the features: uniform U(-0.1, 0.1); reference, the same times 512 / tokens; none."""

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, ("uniform", "reference", "none"))


@dataclass(frozen=True)
class Options(HeadOptions):
    """Options of eagle1."""

    tree: StaticTree = field(default_factory=StaticTree)
    verification: str = "token"
    """Sampling, of a sampled chain: token by token, or as a block (Sun et al. 2024: accepts more)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("verification", self.verification, VERIFICATIONS)


class UnshiftedSession(EagleSession):
    """The session of the `unshifted` net: each feature comes after the embedding of its own
    token."""

    drafter: Method

    def __init__(self, drafter: Method, rows: int) -> None:
        super().__init__(drafter, rows)
        self.pending_BPF = self.pending_BPF.repeat(1, 1, 2)
        self.state["pending_BPF"] = tuple(self.pending_BPF.shape)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        super().prefill(row, tokens_T, self.drafter.net_inputs(tokens_T, features_TF), position)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        inputs_BNF = self.drafter.net_inputs(draft.tokens_BN, output.features_BNF)
        super().commit(draft, verdict, replace(output, features_BNF=inputs_BNF))


class Method(EagleMethod):
    """EAGLE-1 with its static tree."""

    Options: ClassVar[type] = Options
    summary = "EAGLE-1: one decoder layer over features and shifted tokens, static tree"
    head_format = "eagle1"
    net: Net

    def __init__(
        self, target: Target, options: Any, net: Net, shape: LayerShape, embed_tokens: Tensor | None = None
    ) -> None:
        super().__init__(target, options)
        self.net = net
        self.shape = shape
        self.feature_layers = (target.num_layers,)
        self.embed_tokens = embed_tokens
        self.resolve_tree()

    def resolve_tree(self) -> None:
        """Resolve the options of the tree, once; raise OptionError if they are bad."""
        self.choices = self.options.tree.resolve()
        widest = 1 + max(path[-1] for path in self.choices)
        if self.options.verification == "block" and (self.options.tree.noise != "sampled" or widest > 1):
            raise OptionError(
                "verification block is for a chain that is sampled: give --tree.choices chain --tree.noise sampled"
            )
        if widest > self.target.vocab_size:
            raise OptionError(f"tree.choices: more children than the vocabulary of {self.target.vocab_size} has tokens")

    @property
    def longest_path(self) -> int:
        return 1 + max(len(path) for path in self.choices)

    @property
    def samples_children(self) -> bool:
        return bool(self.options.tree.noise == "sampled")

    # --- weights

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Load a head. Raise CheckpointError unless hidden size and vocabulary are the target's, and all tensors and
        no others are there."""
        weights = check_head(weights, cls.head_format, "EAGLE-1/2", target_sizes(target))
        config, options = weights.config, options or cls.Options()
        cls.check_window(options.window)
        shape = layer_shape(config)
        net, embed_tokens = load_head(Net(shape, config["fc_bias"], config["inputs"]), weights, target)
        method = cls(target, options, net, shape, embed_tokens)
        method.trained_length = config.get("max_positions")
        return method

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0, **shape: Any) -> Self:
        """Return a head with a layer of the target's own sizes; `shape` replaces some of them."""
        layer, options = target_layer_shape(target, **shape), options or cls.Options()
        cls.check_window(options.window)
        net = random_net(lambda: Net(layer, inputs=options.head.inputs), target, seed)
        return cls(target, options, net, layer)

    def weights(self) -> Weights:
        config = {
            **layer_config(self.shape),
            "vocab_size": self.target.vocab_size,
            "max_positions": self.trained_length or self.target.context,
            "fc_bias": getattr(self.net.fc, "bias", None) is not None,
            "act": "silu",
            "inputs": self.net.inputs,
        }
        return saved_head(self.head_format, config, self.net, self.target, self.embed_tokens)

    # --- drafting

    def net_inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the net's `hidden` input for tokens [...] whose features [..., D] come from the target."""
        if self.net.inputs != "unshifted":
            return features
        return torch.cat([self.embed(tokens).to(features.dtype), features], dim=-1)

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden[..., -self.target.hidden_size :].to(self.target.dtype))

    def open(self, rows: int) -> DraftSession:
        return UnshiftedSession(self, rows) if self.net.inputs == "unshifted" else super().open(rows)

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        return grow_static(
            net_steps, cycle_input, self.choices, self.options.tree.noise, self.options.verification == "block"
        )

    def chain(self, depth: int) -> Method:
        options = Options(tree=StaticTree(f"chain-{depth}"), window=self.options.window)
        return Method(self.target, options, self.net, self.shape, self.embed_tokens)

    def describe(self) -> dict[str, Any]:
        tree = self.options.tree
        description = {
            "kind": "static",
            "choices": tree.choices,
            "nodes": len(self.choices) + 1,
            "depth": self.longest_path - 1,
            "noise": tree.noise,
        }
        if self.options.verification == "block":
            description["verification"] = "block"
        return {**description, **super().describe()}
