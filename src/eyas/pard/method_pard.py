"""pard: PARD (arXiv 2504.18583): a small language model that was trained on masks drafts all levels of
the tree in one pass.

    unread tokens, root, mask, mask, ...   --the model, causal-->   q of the tokens 1, 2, 3, ... after the root

A mask stands for a token not known yet, so all nodes of a level have the same q, as with DFlash and P-EAGLE.
The tree is EAGLE-2's and deterministic; it grows from these distributions without a further pass. The model
reads the text alone, so one serves every target of its family, fine-tunes too. A model of PARD-2 (arXiv
2605.08632) may also read features of the target that it was trained for: see `FeatureInput`.

    slots      0 ... P-1: the tokens of the last cycle, padded; P, P+1, ...: the masks, which see no padding
    commit     the unread tokens of each row stay in the cache; the masks' slots are free again

Letters: B rows, P nodes on the longest path, S levels, N = P + S - 1 inputs of the pass, T tokens, F
features, D hidden of the draft model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from eyas.checkpoints import Weights
from eyas.checkpoints.causal_lm import FEATURE_FILE, FeatureConfig, feature_config, mask_token_of, read_projection
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import small_model
from eyas.drafters.small_model import LanguageModelSession, NetShape, small_llama
from eyas.drafters.tools import DraftNetSteps, DynamicTree, grow_dynamic, mask_token
from eyas.errors import CheckpointError, OptionError, first_line

__all__ = ["FeatureInput", "FeatureSession", "Method", "Options", "Session"]

CHAIN = small_model.Options(depth=1)  # small_model's own tree, which is not used here


@dataclass(frozen=True)
class Options:
    """Options of pard."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    features: bool = True
    """Let a model of PARD-2 read the target's features, if it was trained for this target's; false: the
    text alone."""
    net: NetShape = field(default_factory=NetShape)

    def __post_init__(self) -> None:
        if not isinstance(self.features, bool):
            raise OptionError(f"features must be true or false, got {self.features!r}")


class Method(small_model.Method):
    """PARD with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "PARD: a small model with a mask token drafts all levels in one pass, for a whole family"
    head_format = "pard"
    trainable = False
    dynamic: DynamicTree

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        super().__init__(target, CHAIN, draft)
        self.options = options or Options()
        self.dynamic = self.options.tree
        token = mask_token_of(draft.model.config.to_dict())
        if token is None:
            raise CheckpointError(
                f"{draft.name or 'the draft model'} was not trained on masks (its config.json has no pard_token): "
                "it drafts with the method small_model"
            )
        if not 0 <= token < draft.num_embeddings:
            raise CheckpointError(
                f"{draft.name} has the mask token {token}, but there are {draft.num_embeddings} embeddings"
            )
        if draft.family.has_states:
            raise CheckpointError(f"{draft.name} keeps a recurrent state, into which masks cannot go")
        self.mask_token: int = token
        self.feature_input = FeatureInput.of_model(draft, target) if self.options.features else None
        if self.feature_input is not None:
            self.draft_model = draft  # kernels know no added features
            self.feature_layers = self.feature_input.layers

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        """Return a small LLaMA of the target's vocabulary with random weights."""
        options = options or cls.Options()
        model = small_llama(target, options.net, seed)
        model.config.pard_token = mask_token(None, target, None)
        return cls(target, options, Target(model))

    def weights(self) -> Weights:
        """Return the model in Hugging Face's own layout, without the part of PARD-2."""
        return replace(super().weights(), method=self.head_format)

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows) if self.feature_input is None else FeatureSession(self, rows, self.feature_input)

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        return grow_dynamic(net_steps, cycle_input, self.dynamic)

    def chain(self, depth: int) -> Self:
        options = replace(self.options, tree=replace(self.dynamic, nodes=depth + 1, depth=depth, branch=1))
        return type(self)(self.target, options, self.draft_model)

    def describe(self) -> dict[str, Any]:
        reads = {} if self.feature_input is None else {"features": list(self.feature_layers)}
        return {**self.dynamic.describe(), **reads}


class Session(LanguageModelSession):
    """Rows of the draft model's own keys and values."""

    drafter: Any  # method_pard.Method

    def net_steps(self, cycle_input: CycleInput) -> DraftNetSteps:
        """Return the functions that grow the tree of this cycle from the distributions of its levels."""
        levels = self.drafter.dynamic.depth
        if cycle_input.tree_size is not None:
            levels = min(levels, cycle_input.tree_size.depth)
        return DraftNetSteps.of_levels(self._read_levels(cycle_input, max(1, levels)))

    def _read_levels(self, cycle_input: CycleInput, levels: int) -> Tensor:
        """Read the unread tokens and the masks; return the logits [B, S, V] after the root and each mask."""
        P, masks, device = self.pending_BP.shape[1], levels - 1, cycle_input.tokens_B.device
        last_B1 = (self.pending_B - 1).clamp(min=0)[:, None]
        unread_BP = self._known_ids(self.pending_BP.scatter(1, last_B1, cycle_input.tokens_B[:, None]))
        mask_BM = torch.full((self.rows, masks), self.drafter.mask_token, device=device)
        order_N = torch.arange(P + masks, device=device)
        depth_BN = torch.cat([order_N[:P].expand(self.rows, P), last_B1 + 1 + order_N[:masks]], dim=1)
        no_padding_BN = (order_N <= last_B1) | (order_N >= P)
        # an unread token sees those before it; a mask sees the unread ones and the masks before it
        causal_NN = order_N[:, None] >= order_N
        visible_BNN = causal_NN & (no_padding_BN[:, None] | (order_N < P)[:, None])
        logits_BNV = self._extend(torch.cat([unread_BP, mask_BM], dim=1), depth_BN, visible_BNN, last_B1, cycle_input)
        read_B = self.pending_B * cycle_input.active_B
        self.model.advance(read_B, [min(n + P, cycle_input.max_position + 1) for n in self.model.lengths])
        self.pending_B = self.pending_B - read_B
        root_B1V = logits_BNV.gather(1, last_B1[..., None].expand(-1, -1, logits_BNV.shape[-1]))
        return self._target_logits(torch.cat([root_B1V, logits_BNV[:, P:]], dim=1))

    def _extend(
        self, ids_BN: Tensor, depth_BN: Tensor, visible_BNN: Tensor, last_B1: Tensor, cycle_input: CycleInput
    ) -> Tensor:
        """Run the model once, and return the logits [B, N, V]. `last_B1`: the place of the root among the unread
        tokens."""
        return self.model.extend(ids_BN, depth_BN, visible_BNN, cycle_input.active_rows).logits_BNV


class FeatureSession(Session):
    """A session whose model reads, with each token, the target's features of the token before it
    (PARD-2). A mask gets the features of the token that precedes the root."""

    def __init__(self, drafter: Any, rows: int, feature_input: FeatureInput) -> None:
        super().__init__(drafter, rows)
        self.feature_input, target = feature_input, drafter.target
        width = target.hidden_size * len(drafter.feature_layers)
        shape = rows, self.pending_BP.shape[1], width
        # features of the tokens before the unread ones
        self.before_BPF = torch.zeros(shape, dtype=target.dtype, device=target.device)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        unread = int(self.pending_B[row])
        # the first token of a text has none before it; after a part that was kept from another request they are not known
        first = self.before_BPF[row, :unread] if unread else torch.zeros_like(features_TF[:1])
        before_NF = torch.cat([first, features_TF[:-1]])
        with self.feature_input.added(before_NF[None]):
            super().prefill(row, tokens_T, features_TF, position)
        self.before_BPF[row, 0] = features_TF[-1]

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        super().commit(draft, verdict, output)
        of_prompt_BF = self.before_BPF[:, 0]  # for a row whose prompt is being read
        self.before_BPF = output.features_at(verdict.path_BP)
        self.before_BPF[:, 0] = torch.where(self.active_B[:, None], self.before_BPF[:, 0], of_prompt_BF)

    def clear(self, row: int) -> None:
        self.end(row)
        self.model.clear(row)
        self.before_BPF[row] = 0

    def _extend(
        self, ids_BN: Tensor, depth_BN: Tensor, visible_BNN: Tensor, last_B1: Tensor, cycle_input: CycleInput
    ) -> Tensor:
        masks = ids_BN.shape[1] - self.before_BPF.shape[1]
        newest_B1F = self.before_BPF.gather(1, last_B1[..., None].expand(-1, -1, self.before_BPF.shape[-1]))
        before_BNF = torch.cat([self.before_BPF, newest_B1F.expand(-1, masks, -1)], dim=1)
        with self.feature_input.added(before_BNF):
            return self.model.extend(ids_BN, depth_BN, visible_BNN).logits_BNV  # all rows: the features are theirs


class FeatureInput:
    """Adds the projected features to the output of a PARD-2 model's embedding table.

    input of a token   =   embedding of the token   +   scale * target_proj(features of the preceding token)

    The matrix is in its own file, warp_model.bin, in the folder of a plain language model, which also drafts
    without it. Letters: R rows of a forward, Q tokens.
    """

    def __init__(self, table: nn.Module, projection: nn.Linear, config: FeatureConfig) -> None:
        self.projection, self.scale, self.layers = projection, config.scale, config.layers
        self.waiting_RQD: Tensor | None = None  # for the next tokens
        table.register_forward_hook(self._add)

    @classmethod
    def of_model(cls, draft: Target, target: Target) -> FeatureInput | None:
        """Return the part of a PARD-2 model; None for one of PARD, and for a target of other sizes
        than the one that it was trained for."""
        config = feature_config(draft.model.config.to_dict())
        if config is None:
            return None
        fits = config.width == len(config.layers) * target.hidden_size and max(config.layers) <= target.num_layers
        place = draft.model.name_or_path
        if not fits or not place:
            return None
        weight, bias = read_projection(_file(place), (draft.hidden_size, config.width))
        with torch.device(draft.device):
            projection = nn.Linear(config.width, draft.hidden_size, bias=bias is not None, dtype=draft.dtype)
        projection.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        return cls(draft.family.embedding, projection.requires_grad_(False), config)

    @contextmanager
    def added(self, features_RQF: Tensor) -> Iterator[None]:
        """Let the model read these features within this context: of the first Q tokens in its first forward, then of
        those that follow."""
        features_RQF = features_RQF.to(self.projection.weight.dtype)
        self.waiting_RQD = self.projection(features_RQF) * self.scale
        try:
            yield
        finally:
            self.waiting_RQD = None

    def _add(self, table: nn.Module, args: Any, embeddings_RQD: Tensor) -> Tensor | None:
        """Add the features; called after each forward of the embedding table."""
        if self.waiting_RQD is None:
            return None
        tokens = embeddings_RQD.shape[1]
        now_RQD, self.waiting_RQD = self.waiting_RQD[:, :tokens], self.waiting_RQD[:, tokens:]
        return embeddings_RQD + now_RQD


def _file(place: str) -> Path:
    """Return the path of the matrix's file, fetched from the hub if necessary."""
    local = Path(place).expanduser() / FEATURE_FILE
    if local.parent.is_dir():
        return local
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(place, FEATURE_FILE))
    except Exception as error:  # the hub's client raises errors of several libraries
        raise CheckpointError(
            f"{place}: its {FEATURE_FILE} cannot be fetched ({first_line(error, 200)}); without it the model drafts "
            "from the text alone: --features false"
        ) from error
