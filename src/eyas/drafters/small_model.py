"""small_model: speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023,
arXiv 2302.01318): a smaller model drafts.

Any causal language model with the target's vocabulary will do, as it was published. It reads the same text into
its own cache. It drafts a chain from its own distribution q, sampled as the row samples (section 2.3 of the
first paper: q gets the same temperature and cuts as p). Or it drafts a tree: a static tree whose siblings are
sampled without replacement, or EAGLE-2's dynamic tree.

    committed, read      ... a b c          the target has emitted d (the root) after accepting c
    catch up               [b c d]          one pass over the unread tokens, padded to the longest path
    draft                       [e] [f]     level by level, in the slots after; forgotten when the cycle ends

It can be trained: a small LLaMA of the target's vocabulary learns the target's distribution
(distillation as in DistillSpec, Zhou et al. 2023, with the target's distributions on given text).
Beyond the model's own context positions are clamped to its last one: it drafts worse, and the text
stays the same.

Letters: B rows, P nodes on the longest path, Q nodes of a level of T, N packed tokens, M of them that
count, R documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eyas import checkpoints, tiny
from eyas.checkpoints import Weights
from eyas.core.drafter import CycleInput, Drafter, DraftSession, TreeSize
from eyas.core.params import is_number
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, TargetOutput, Verdict, chain_choices
from eyas.drafters._grow import DraftNetSteps, DynamicTree, grow_dynamic, grow_static
from eyas.drafters._merge import Merged
from eyas.drafters._method import DraftMethod
from eyas.drafters._nets import place_net, seeded
from eyas.drafters._options import check_choice, check_whole
from eyas.drafters.eagle1 import VERIFICATIONS, StaticTree
from eyas.errors import CheckpointError, OptionError
from eyas.targets.fingerprints import fingerprint
from eyas.targets.loading import load_target

__all__ = ["DraftOptions", "LanguageModelSession", "Method", "NetShape", "Options", "check_vocabulary", "small_llama"]

DEPTH = 5  # default of the option
NO_DRAFT_MODEL = "this method needs a smaller language model: pass its folder or hub id with --draft"


@dataclass(frozen=True)
class Chain(StaticTree):
    """A static tree, by default a chain."""

    choices: str | Choices = "chain"
    """"chain" (of --depth tokens), "reference" (25 draft tokens), "chain-N", or a JSON file: a list
    of lists of ranks."""


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree, when `nodes` is given."""

    nodes: int | None = None
    """A dynamic tree of --depth, with this many nodes verified per cycle, the root included; none:
    the static tree."""
    branch: int = 4
    """Nodes of the dynamic tree that are expanded per level, and children of each."""
    noise: str = "coupled"
    """Sampling with the dynamic tree: rank children with the target's own noise (coupled), or by q
    alone (none)."""

    @property
    def is_used(self) -> bool:
        """Whether any field differs from its default."""
        return self != Dynamic()


@dataclass(frozen=True)
class DraftOptions:
    """Options of every method that drafts with a language model."""

    depth: int | None = None
    """Draft tokens of the chain, or most on a path of the dynamic tree; none: 5."""
    confidence: float = 0.0
    """Nothing is drafted after a token to which the draft gives less probability."""
    verification: str = "token"
    """Sampling, of a sampled chain: token by token, or as a block (Sun et al. 2024: accepts more)."""
    tree: Chain = field(default_factory=Chain)
    dynamic: Dynamic = field(default_factory=Dynamic)

    def __post_init__(self) -> None:
        if self.depth is not None:
            check_whole("", 1, depth=self.depth)
        if not is_number(self.confidence) or not 0 <= self.confidence < 1:
            raise OptionError(f"confidence must be from 0 to below 1, got {self.confidence!r}")
        check_choice("verification", self.verification, VERIFICATIONS)
        if self.dynamic.is_used and (self.dynamic.nodes is None or self.tree != Chain()):
            raise OptionError(
                "a dynamic tree needs dynamic.nodes and excludes tree.*: give dynamic.nodes, or leave dynamic.* out"
            )
        if self.depth is not None and self.tree.choices != "chain":
            raise OptionError("tree.choices says how deep its tree is: leave depth out")

    def dynamic_tree(self) -> DynamicTree | None:
        """Return the dynamic tree; None without `dynamic.nodes`. Raise OptionError for bad numbers."""
        dynamic = self.dynamic
        if dynamic.nodes is None:
            return None
        return DynamicTree(dynamic.nodes, self.depth or DEPTH, dynamic.branch, dynamic.noise)

    def choices(self) -> Choices:
        """Return the static tree; raise OptionError when it is bad."""
        return chain_choices(self.depth or DEPTH) if self.tree.choices == "chain" else self.tree.resolve()


@dataclass(frozen=True)
class NetShape:
    """The architecture of a model whose training begins."""

    layers: int = 4
    """Decoder layers of a new model."""
    width: int = 128
    """Hidden size of a new model, a multiple of 32."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width < 32 or self.width % 32:
            raise OptionError(
                f"net: layers must be 1 or more and width a multiple of 32, got {self.layers} and {self.width}"
            )


@dataclass(frozen=True)
class Options(DraftOptions):
    """Options of small_model."""

    net: NetShape = field(default_factory=NetShape)


class Method(DraftMethod):
    """A language model that drafts for another."""

    Options: ClassVar[type] = Options
    summary = "speculative sampling: any smaller model with the same vocabulary drafts a chain or a tree"
    needs_weights = True
    head_format = "small_model"
    trainable = True

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        super().__init__(target, options)
        self.draft_model = target.runner.wrap_draft_model(draft, target.draft_weights)
        self.net = draft.model
        # tokens that both know; the larger vocabulary is padded
        self.vocab_size = min(draft.vocab_size, target.vocab_size)
        self.dynamic: DynamicTree | None = self.options.dynamic_tree()
        self.choices: Choices = () if self.dynamic else self.options.choices()
        self.block_verification = self.options.verification == "block"
        widest = 1 + max((path[-1] for path in self.choices), default=0)
        if widest > self.vocab_size:
            raise OptionError(f"tree.choices: more children than the vocabulary of {self.vocab_size} has tokens")
        sampled_chain = self.dynamic is None and widest == 1 and self.options.tree.noise == "sampled"
        if self.block_verification and (not sampled_chain or self.options.confidence):
            raise OptionError(
                "verification block is for a whole sampled chain: leave tree.choices, tree.noise, dynamic and confidence out"
            )

    @property
    def train_feature_layers(self) -> tuple[int, ...]:
        return self.new_head_layers(self.target, self.options)

    @classmethod
    def new_head_layers(cls, target: Target, options: Any) -> tuple[int, ...]:
        """Return the `train_feature_layers` of a new model, without making it: the target's final features, which give
        its distribution."""
        return (target.num_layers,)

    @property
    def depth(self) -> int:
        """Most draft tokens on a path."""
        return self.dynamic.depth if self.dynamic else max(len(path) for path in self.choices)

    @property
    def max_tree(self) -> TreeSize | None:
        return None if self.dynamic is None else self.dynamic.size

    @property
    def samples_children(self) -> bool:
        return self.dynamic is None and bool(self.options.tree.noise == "sampled")

    # --- weights

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        """Return the model in that folder or hub repository, as it was published, on the target's device
        and in its dtype.

        Several, separated by commas, draft side by side, and their trees are merged (SpecInfer,
        Miao et al. 2023, arXiv 2305.09781).
        """
        if source is None:
            raise CheckpointError(NO_DRAFT_MODEL)
        options = options or cls.Options()
        names = [str(source)] if Path(source).expanduser().exists() else str(source).split(",")
        if len(names) > 1 and not options.dynamic.is_used:  # merged trees are verified as deterministic ones
            if options.verification != "token":
                raise OptionError("verification block is for one draft model: leave it out")
            options = replace(options, tree=replace(options.tree, noise="coupled"))
        opened: list[Drafter] = [cls._open(name.strip(), target, options) for name in names]
        return reduce(Merged, opened)

    @classmethod
    def _open(cls, name: str, target: Target, options: Any) -> DraftMethod:
        folder = Path(name).expanduser()
        dtype = str(target.dtype).removeprefix("torch.")
        draft = load_target(folder if folder.exists() else name, dtype, str(target.device), role="draft model")
        check_vocabulary(draft, target)
        drafter = cls(target, options, draft)
        drafter.target_fingerprint = (getattr(draft.model.config, "eyas", None) or {}).get("target_fingerprint")
        return drafter

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Return the model of a checkpoint that was read already; raise CheckpointError unless all tensors and no
        others are there."""
        if weights is None:
            raise CheckpointError(NO_DRAFT_MODEL)
        if weights.method != cls.head_format:
            raise CheckpointError(f"{weights.source} holds a head of {weights.method}, not a whole language model")
        config = AutoConfig.for_model(**{name: value for name, value in weights.config.items() if name != "eyas"})
        build: Any = AutoModelForCausalLM  # untyped
        model = build.from_config(config, dtype=target.dtype)
        state = model.state_dict()
        saved = {state[name].data_ptr() for name in weights.tensors if name in state}
        tied = {name for name, value in state.items() if value.data_ptr() in saved}
        checkpoints.expect(weights, {name: tuple(value.shape) for name, value in state.items()}, tied)
        model.load_state_dict(weights.tensors, strict=False)
        draft = Target(model.to(target.device).eval(), weights.source)
        check_vocabulary(draft, target)
        return cls(target, options or cls.Options(), draft)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        """Return a small LLaMA of the target's vocabulary with random weights."""
        options = options or cls.Options()
        return cls(target, options, Target(small_llama(target, options.net, seed)))

    def weights(self) -> Weights:
        """Return the model in Hugging Face's own layout; tied weights once."""
        model = self.draft_model.model
        written, tensors = set[int](), {}
        for name, value in model.state_dict().items():
            if value.data_ptr() not in written:
                written.add(value.data_ptr())
                tensors[name] = value.detach().clone()
        made_for = {"eyas": {"target_fingerprint": fingerprint(self.target)}}
        config = {**model.config.to_dict(), "architectures": [type(model).__name__], **made_for}
        return Weights("small_model", config, tensors, "memory")

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return LanguageModelSession(self, rows)

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        if self.dynamic:
            return grow_dynamic(net_steps, cycle_input, self.dynamic)
        return grow_static(net_steps, cycle_input, self.choices, self.options.tree.noise, self.block_verification)

    def chain(self, depth: int) -> Self:
        options = replace(self.options, depth=depth, tree=Chain(noise=self.options.tree.noise), dynamic=Dynamic())
        return type(self)(self.target, options, self.draft_model)

    def describe(self) -> dict[str, Any]:
        tree = self.options.tree
        confidence = {"confidence": self.options.confidence} if self.options.confidence else {}
        if self.dynamic:
            return {**self.dynamic.describe(), **confidence}
        choices = f"chain-{self.depth}" if tree.choices == "chain" else tree.choices
        about = {
            "kind": "static",
            "choices": choices,
            "nodes": len(self.choices) + 1,
            "depth": self.depth,
            "noise": tree.noise,
        }
        return {**about, **({"verification": "block"} if self.block_verification else {}), **confidence}


class LanguageModelSession(DraftSession):
    """Rows of the draft model's own keys and values.

    `pending` are the tokens of the last cycle, which the model has not read; the last of them is
    the coming root. `draft` reads them, the root included, then grows the tree.
    """

    def __init__(self, drafter: Method, rows: int) -> None:
        device = drafter.target.device
        self.drafter = drafter
        self.rows = rows
        self.model = drafter.draft_model.open(rows)
        self.num_embeddings: int = drafter.draft_model.num_embeddings
        self.pending_BP = torch.zeros(rows, drafter.depth + 1, dtype=torch.long, device=device)
        self.pending_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.active_B = torch.zeros(rows, dtype=torch.bool, device=device)  # in the current cycle

    def truncate(self, row: int, length: int) -> int:
        return self.model.longest_known_prefix(row, min(length, int(self.model.length_B[row])))

    def copy(self, source: int, row: int, length: int) -> int:
        kept = self.model.longest_known_prefix(source, min(length, int(self.model.length_B[source])))
        self.model.copy(source, row, kept)
        return kept

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        self.model.truncate(row, cached_tokens)
        self.model.reserve(total)
        self.pending_B[row] = 0

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        # without the root, which begins the chunk
        unread_T = self.pending_BP[row, : max(0, int(self.pending_B[row]) - 1)]
        self.model.lengths[row] = int(self.model.length_B[row])  # a bound so far; states are kept by exact lengths
        self.model.prefill(row, self._known_ids(torch.cat([unread_T, tokens_T])).tolist())
        self.pending_B[row] = 1  # the root

    def end(self, row: int) -> None:
        self.begin(row, 0, 0)

    def draft(self, cycle_input: CycleInput) -> Draft:
        self.active_B = cycle_input.active_B
        return self.drafter.grow(self.net_steps(cycle_input), cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        # without the old root; the next `draft` puts the new one after them
        self.pending_BP = verdict.tokens_BP.roll(-1, dims=1)
        # a row whose request has ended may still have several pending tokens
        self.pending_B = torch.where(self.active_B, verdict.length_B, self.pending_B.clamp(max=1))

    def net_steps(self, cycle_input: CycleInput) -> DraftNetSteps:
        """Return the functions that grow the tree. The pending tokens are read at once; then levels can be expanded.
        The hidden of a node are its logits."""
        root_BV, read = self._forward_pending(cycle_input), self.node_reader(cycle_input)

        def expand(tokens_BQ: Tensor, parent_BQV: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            confident_BQ = self._confident(tokens_BQ, parent_BQV)
            if confident_BQ is not None and not confident_BQ.any():
                return torch.full_like(parent_BQV, -torch.inf)
            logits_BQV = read(tokens_BQ, visible_BQT, level)
            return logits_BQV if confident_BQ is None else logits_BQV.masked_fill(~confident_BQ[..., None], -torch.inf)

        return DraftNetSteps(lambda: root_BV, lambda logits: logits, expand)

    def node_reader(self, cycle_input: CycleInput) -> Callable[[Tensor, Tensor, int], Tensor]:
        """Return the function (tokens_BQ, visible_BQT, level) -> logits [B, Q, V] that reads the nodes of a level."""
        depths: list[int] = []

        def read(tokens_BQ: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            depths.extend([level] * tokens_BQ.shape[1])
            depth_BT = torch.tensor(depths, device=tokens_BQ.device).expand(self.rows, -1)
            return self.extend(tokens_BQ, depth_BT, visible_BQT, cycle_input)

        return read

    def extend(self, tokens_BQ: Tensor, depth_BT: Tensor, visible_BQT: Tensor, cycle_input: CycleInput) -> Tensor:
        """Run the model over new nodes (`TargetSession.extend`); returns their logits [B, Q, V]."""
        output = self.model.extend(self._known_ids(tokens_BQ), depth_BT, visible_BQT, cycle_input.active_rows)
        return self._target_logits(output.logits_BNV)

    def _forward_pending(self, cycle_input: CycleInput) -> Tensor:
        """Read the pending tokens, padded to the longest path so that shapes do not depend on
        values; returns the logits [B, V] after the root."""
        P = self.pending_BP.shape[1]
        last_B1 = (self.pending_B - 1).clamp(min=0)[:, None]
        tokens_BP = self._known_ids(self.pending_BP.scatter(1, last_B1, cycle_input.tokens_B[:, None]))
        order_P = torch.arange(P, device=tokens_BP.device)
        causal_BPP = (order_P[:, None] >= order_P).expand(self.rows, P, P)
        logits_BPV = self.model.extend(
            tokens_BP, order_P.expand(self.rows, P), causal_BPP, cycle_input.active_rows
        ).logits_BNV
        read_B = self.pending_B * cycle_input.active_B
        self.model.advance(read_B, [min(n + P, cycle_input.max_position + 1) for n in self.model.lengths])
        self.pending_B = self.pending_B - read_B
        return self._target_logits(logits_BPV.gather(1, last_B1[..., None].expand(-1, -1, logits_BPV.shape[-1]))[:, 0])

    def _confident(self, tokens_BQ: Tensor, parent_BQV: Tensor) -> Tensor | None:
        """Return the nodes after which drafting goes on, bool [B, Q]; None without a threshold. False after a node
        that has stopped (q is NaN)."""
        if not self.drafter.options.confidence:
            return None
        q_BQ1 = parent_BQV.float().softmax(-1).gather(-1, tokens_BQ[..., None])
        return q_BQ1[..., 0] >= float(self.drafter.options.confidence)

    def _known_ids(self, tokens: Tensor) -> Tensor:
        """Return the ids that the model reads: for target tokens beyond its embedding table, its last one."""
        return tokens.clamp(max=self.num_embeddings - 1)

    def _target_logits(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary; a token that only one of the two models has is never drafted."""
        both, whole = self.drafter.vocab_size, self.drafter.target.vocab_size
        if logits.shape[-1] == both == whole:
            return logits
        return F.pad(logits[..., :both], (0, whole - both), value=-torch.inf)


def check_vocabulary(draft: Target, target: Target) -> None:
    """Raise CheckpointError unless both models have the same tokens; their matrices may be padded to
    different sizes."""
    target_tokens, draft_tokens = _vocabulary(target, local=True), _vocabulary(draft, local=False)
    name = draft.name or "the draft model"
    if target_tokens is None or draft_tokens is None:
        if draft.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{name} has a vocabulary of {draft.vocab_size} tokens, but the target has {target.vocab_size}. Without both "
                "tokenizers eyas cannot check whether they agree: use a draft model with the target's vocabulary, or put the "
                "tokenizers into the models' folders"
            )
        return
    both = target_tokens.keys() & draft_tokens.keys()
    other = [i for i in sorted(both) if target_tokens[i] != draft_tokens[i]]
    if other or not both:
        where = ""
        if other:
            i = other[0]
            where = f": token {i} is {draft_tokens[i]!r} there and {target_tokens[i]!r} in the target"
        raise CheckpointError(
            f"{name} has another vocabulary than the target{where}; use a draft model with the target's tokenizer"
        )


def _vocabulary(model: Target, local: bool) -> dict[int, str] | None:
    """Return the tokens of a model's tokenizer by id; None without a tokenizer."""
    try:
        if model.name == "embedded":
            tokenizer = tiny.tokenizer()
        elif place := model.model.name_or_path or model.name:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=local)
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {i: token for token, i in tokenizer.get_vocab().items()} or None


def small_llama(target: Target, shape: NetShape, seed: int) -> PreTrainedModel:
    """Return a new model of the target's vocabulary with random weights."""
    config = target.model.config.get_text_config(decoder=True)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if theta := (getattr(config, "rope_parameters", None) or {}).get("rope_theta"):
        rope["rope_theta"] = float(theta)
    heads = shape.width // 32
    sizes: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": 3 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": target.context,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "initializer_range": 0.6 * shape.width**-0.5,
        **{name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")},
    }
    with seeded(seed, target.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    net: PreTrainedModel = place_net(model, target)
    return net
