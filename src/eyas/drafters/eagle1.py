"""eagle1: EAGLE (Li et al. 2024, arXiv 2401.15077): features are easier to foresee than tokens, once the next token is known.

The net reads pairs and predicts the target's next final-norm feature; the target's own head turns it into the law of the token after:

    slot t:  x = fc[ embedding of token t+1 ; feature of token t ]  ->  one decoder layer  ->  predicted feature of token t+1
                                                                          head of the target  ->  q of token t+2

Beyond what is committed, in the tree, it reads its own predictions. Siblings are chosen (greedy) or drawn without replacement (sampling).
Nets of the ablation, which read less (section 5.3.2), are here too: `--head.inputs`, see `_eagle1_net`.

Letters: R rows, N nodes or packed tokens, M of them that count, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.drafter import Batch, CycleInput, DraftSession, Loss
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, TargetOutput, Verdict, chain_choices, check_choices
from eyas.drafters._eagle import EagleMethod, EagleSession, Window, check_sizes, head_of, own_table, shape_like, shape_of
from eyas.drafters._eagle1_net import INPUTS, Net
from eyas.drafters._grow import Growth, grow_static
from eyas.errors import InputError, OptionError, near
from eyas.files import parse_json
from eyas.losses import smooth_l1, soft_cross_entropy_of
from eyas.nn import LayerShape

__all__ = ["HeadOptions", "Method", "Net", "StaticTree"]

# The 25 choices of the EAGLE reference for 7B models, level by level; a digit is a rank among siblings.
_REFERENCE = "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
REFERENCE_TREE: Choices = check_choices(tuple(map(int, path)) for path in _REFERENCE.split())


SIBLINGS, VERIFICATIONS = ("drawn", "shared"), ("token", "block")


@dataclass(frozen=True)
class StaticTree:
    """Which tree EAGLE-1 drafts."""

    choices: str | Choices = "reference"
    """"reference" (25 nodes), "chain" (5 deep), "chain-N", or a JSON file: a list of lists of
    ranks."""
    noise: str = "drawn"
    """sampling: siblings are drawn from q (drawn, the paper's), or chosen by what this run will
    draw (shared)."""

    def __post_init__(self) -> None:
        if self.noise not in SIBLINGS:
            raise OptionError(f"unknown tree.noise {self.noise!r}; {near(self.noise, SIBLINGS)}")

    def resolve(self) -> Choices:
        """OptionError when the name, the file or the tree is bad."""
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


NOISES = ("uniform", "reference", "none")


@dataclass(frozen=True)
class NewHead:
    """What a head is like whose training begins. A trained head brings its own."""

    inputs: Annotated[str, NEW_HEADS] = "shifted"
    """What is read: shifted (EAGLE), or one of its ablation: unshifted, feature, token."""

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise OptionError(f"unknown head.inputs {self.inputs!r}; {near(self.inputs, INPUTS)}")


@dataclass(frozen=True)
class HeadOptions:
    """Flags of every method with EAGLE-1's net."""

    window: Window = field(default_factory=Window)
    head: NewHead = field(default_factory=NewHead)
    noise: Annotated[str, TRAINING] = "uniform"
    """Added to the features: uniform U(-0.1, 0.1); reference, the same times 512 / tokens; none."""

    def __post_init__(self) -> None:
        if self.noise not in NOISES:
            raise OptionError(f"unknown noise {self.noise!r}; {near(self.noise, NOISES)}")


@dataclass(frozen=True)
class Options(HeadOptions):
    """Flags of eagle1."""

    tree: StaticTree = field(default_factory=StaticTree)
    verification: str = "token"
    """Sampling, of a drawn chain: token by token, or as a block (Sun et al. 2024: accepts more)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verification not in VERIFICATIONS:
            raise OptionError(f"unknown verification {self.verification!r}; {near(self.verification, VERIFICATIONS)}")


class UnshiftedSession(EagleSession):
    """Features come with the embedding of their own token before them, which is what the net then reads."""

    def __init__(self, drafter: Method, rows: int) -> None:
        super().__init__(drafter, rows)
        self.hidden_of = drafter.hidden_of
        self.pending_BPF = self.pending_BPF.repeat(1, 1, 2)
        self.state["pending_BPF"] = tuple(self.pending_BPF.shape)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        super().prefill(row, tokens_T, self.hidden_of(tokens_T, features_TF), position)

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        super().commit(draft, verdict, replace(seen, features_BNF=self.hidden_of(draft.tokens_BN, seen.features_BNF)))


class Method(EagleMethod):
    """EAGLE-1 with its static tree."""

    Options: ClassVar[type] = Options
    summary = "EAGLE-1: one decoder layer over features and shifted tokens, static tree"
    reads = "eagle1"
    net: Net

    def __init__(self, target: Target, options: Any, net: Net, shape: LayerShape, embed_tokens: Tensor | None = None) -> None:
        super().__init__(target, options)
        self.net, self.shape, self.feature_layers = net, shape, (target.num_layers,)
        self.embed_tokens = embed_tokens
        self.plan()

    def plan(self) -> None:
        """Resolve the options once; OptionError when they are bad."""
        self.choices = self.options.tree.resolve()
        if self.options.verification == "block" and (self.options.tree.noise != "drawn" or max(path[-1] for path in self.choices)):
            raise OptionError("verification block is for a chain that is drawn: give --tree.choices chain --tree.noise drawn")
        if max(path[-1] for path in self.choices) >= self.target.vocab_size:
            raise OptionError(f"tree.choices: more children than the vocabulary of {self.target.vocab_size} has tokens")

    @classmethod
    def layers_studied(cls, target: Target, options: Any) -> tuple[int, ...]:
        return (target.num_layers,)

    @property
    def shape_weight(self) -> Tensor:
        return self.net.layer.mlp.gate.weight

    @property
    def longest_path(self) -> int:
        return 1 + max(len(path) for path in self.choices)

    @property
    def samples_children(self) -> bool:
        return bool(self.options.tree.noise == "drawn")

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Strictly: hidden size and vocabulary must be the target's, every tensor must be there and nothing else."""
        weights = head_of(weights, cls.reads, "EAGLE-1/2")
        check_sizes(weights, {"hidden_size": ("hidden size", target.hidden_size), "vocab_size": ("vocabulary", target.vocab_size)})
        config, options = weights.config, options or cls.Options()
        cls.check_window(options.window)
        shape = shape_of(config)
        net = Net(shape, config["fc_bias"], config["inputs"])
        shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        table = "embed.weight"
        checkpoints.expect(weights, {**shapes, table: (target.vocab_size, target.hidden_size)}, {table})
        net.load_state_dict({name: value for name, value in weights.tensors.items() if name != table})
        own = weights.tensors.get(table)
        net = net.to(device=target.device, dtype=target.dtype).eval()
        method = cls(target, options, net, shape, own_table(own, target))
        method.trained_length = config.get("max_positions")
        return method

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0, **shape: Any) -> Self:
        """A head of the target's own layer shape (its width, heads and intermediate size) unless given otherwise."""
        layer, options = shape_like(target, **shape), options or cls.Options()
        cls.check_window(options.window)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Net(layer, inputs=options.head.inputs)
            for name, weight in net.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
                elif name.endswith("bias"):
                    nn.init.zeros_(weight)
        return cls(target, options, net.to(device=target.device, dtype=target.dtype).eval(), layer)

    def hidden_of(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What a step hands to the next, of tokens [...] whose true features [..., D] are known."""
        return torch.cat([self.embed(tokens).to(features.dtype), features], dim=-1) if self.net.inputs == "unshifted" else features

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden[..., -self.target.hidden_size :].to(self.target.dtype))

    def open(self, rows: int) -> DraftSession:
        return UnshiftedSession(self, rows) if self.net.inputs == "unshifted" else super().open(rows)

    def grow(self, growth: Growth, roots: CycleInput) -> Draft:
        return grow_static(growth, roots, self.choices, self.options.tree.noise, self.options.verification == "block")

    def chain(self, depth: int) -> Method:
        options = Options(tree=StaticTree(f"chain-{depth}"), window=self.options.window)
        return Method(self.target, options, self.net, self.shape, self.embed_tokens)

    def describe(self) -> dict[str, Any]:
        how = {"noise": self.options.tree.noise, **({"verification": "block"} if self.options.verification == "block" else {})}
        tree = {
            "kind": "static", "choices": self.options.tree.choices, "nodes": len(self.choices) + 1, "depth": self.longest_path - 1, **how
        }  # fmt: skip
        return {**tree, **super().describe()}

    def weights(self) -> Weights:
        shape = self.shape
        config = {
            "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": self.target.vocab_size, "rms_eps": shape.rms_eps,
            "rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling, "max_positions": self.trained_length or self.target.context,
            "fc_bias": getattr(self.net.fc, "bias", None) is not None, "qkv_bias": shape.qkv_bias, "act": "silu", "inputs": self.net.inputs,
            "eyas": {"target_fingerprint": self.target.fingerprint()},
        }  # fmt: skip
        tensors = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        if self.embed_tokens is not None:
            tensors["embed.weight"] = self.embed_tokens
        return Weights("eagle1", config, tensors, "memory")

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Section 4.2: smooth L1 between features + 0.1 x cross-entropy between the laws that the target's head makes of them.

        Slot t sees feature t (with noise U(-0.1, 0.1)) and token t+1 (or what `head.inputs` says of them); it is compared at feature t+1,
        which predicts token t+2: it counts when that token does.
        """
        tokens_N, features_ND = batch.tokens_N, batch.features_NF.to(self.dtype)
        order_N = torch.arange(len(tokens_N), device=tokens_N.device)
        goal_N = (order_N + 2).clamp(max=len(tokens_N) - 1)
        rows_M = (batch.counted_N[goal_N] & (order_N + 2 < batch.documents.end_N(tokens_N.device))).nonzero()[:, 0]
        embeddings_ND = self.embed(tokens_N.roll(-1)).to(self.dtype)
        hidden_ND = self.hidden_of(tokens_N, features_ND + self._noise(batch, generator))
        predicted_MD = self.net.packed(hidden_ND, embeddings_ND, rows_M, batch.documents)
        true_MD, every_M = batch.features_NF[rows_M + 1], torch.ones_like(rows_M, dtype=torch.bool)
        feature_loss = smooth_l1(predicted_MD, true_MD, every_M, 1.0)
        token_loss, right = soft_cross_entropy_of(self.head, predicted_MD, true_MD, every_M, 1.0, self.target.vocab_size)
        sums = {
            "feature_loss": feature_loss.detach(),
            "token_loss": token_loss.detach(),
            "accuracy": right,  # teacher-forced: the draft's best token is the target's
        }
        return Loss(feature_loss + 0.1 * token_loss, torch.tensor(len(rows_M), device=tokens_N.device), sums)

    def _noise(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """[N, D]; none outside of training."""
        device = batch.features_NF.device
        if self.options.noise == "none" or not self.net.training:
            return torch.zeros((), dtype=self.dtype, device=device)
        noise_ND = (torch.rand(batch.features_NF.shape, generator=generator) - 0.5).to(device=device, dtype=self.dtype) * 0.2
        if self.options.noise == "reference":
            lengths = torch.tensor(batch.documents.lengths, device=device)
            noise_ND = noise_ND * (512 / lengths.repeat_interleave(lengths))[:, None]
        return noise_ND
