"""eagle1: EAGLE (Li et al. 2024, arXiv 2401.15077): features are easier to foresee than tokens, once the next token is known.

The net reads pairs and predicts the target's next final-norm feature; the target's own head turns it into the law of the token after:

    slot t:  x = fc[ embedding of token t+1 ; feature of token t ]  ->  one decoder layer  ->  predicted feature of token t+1
                                                                          head of the target  ->  q of token t+2

After the prompt and after each cycle the net reads all newly committed pairs, with the target's true features; beyond them, in the tree,
it reads its own predictions. Tree slots never stay in its cache. Siblings are chosen (greedy) or drawn without replacement (sampling).

Letters: B rows, P nodes on the longest path, Q nodes of a level, T tokens, D hidden, V vocabulary, R sequences of a batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.cache import KVCache, slot_mask
from eyas.checkpoints import Weights
from eyas.drafters._base import Batch, Drafter, DraftSession, Roots
from eyas.drafters._grow import Growth, grow_static
from eyas.errors import CheckpointError, OptionError, near
from eyas.losses import smooth_l1, soft_cross_entropy_of
from eyas.nn import DecoderLayer, LayerShape
from eyas.target import PREFILL_CHUNK, Target
from eyas.tree import Choices, Draft, Seen, Verdict, chain_choices, check_choices

__all__ = ["EagleSession", "Method", "Net", "StaticTree"]

# The 25 choices of the EAGLE reference for 7B models, level by level; a digit is a rank among siblings.
_REFERENCE = "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
REFERENCE_TREE: Choices = check_choices(tuple(map(int, path)) for path in _REFERENCE.split())


@dataclass(frozen=True)
class StaticTree:
    """Which tree EAGLE-1 drafts."""

    choices: str | Choices = "reference"  # "reference" (25 nodes), "chain" (5 deep), "chain-N", or a JSON file: a list of lists of ranks

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
            found = json.loads(Path(self.choices).read_text())
            return check_choices(found)
        except OSError as error:
            raise OptionError(
                f"tree.choices: {self.choices!r} is neither reference, chain, chain-N nor a readable file ({error.strerror})"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise OptionError(
                f"tree.choices: {self.choices} must hold a JSON list of lists of ranks, like [[0], [1], [0, 0]]: {error}"
            ) from error


NOISES = ("uniform", "reference", "none")


@dataclass(frozen=True)
class HeadOptions:
    """Flags of every method with EAGLE-1's net."""

    noise: str = "uniform"  # training only, added to the features: uniform U(-0.1, 0.1); reference, the same times 512 / tokens; none

    def __post_init__(self) -> None:
        if self.noise not in NOISES:
            raise OptionError(f"unknown noise {self.noise!r}; {near(self.noise, NOISES)}")


@dataclass(frozen=True)
class Options(HeadOptions):
    """Flags of eagle1."""

    tree: StaticTree = field(default_factory=StaticTree)


class Net(nn.Module):
    """fc over [embedding, feature], then one decoder layer (EAGLE-1, figure 7)."""

    def __init__(self, shape: LayerShape, fc_bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=fc_bias)
        self.layer = DecoderLayer(shape)

    def forward(
        self, features_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, mask_R1NW: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Predicted features [R, N, D]; causal over N without a cache."""
        x_RND = self.fc(torch.cat([embeddings_RND, features_RND], dim=-1))
        return self.layer(x_RND, position_RN, mask_R1NW, cache)  # type: ignore[no-any-return]


class EagleSession(DraftSession):
    """Rows of the draft's cache: slot t holds the pair (feature of token t, token t+1).

    `pending` are the features of committed tokens that the net has not read yet: their next tokens are known up to the last, whose next
    token is the coming root. `draft` reads them first, then grows the tree.
    """

    def __init__(self, drafter: Method, rows: int, longest_path: int) -> None:
        self.drafter, self.rows = drafter, rows
        target, shape = drafter.target, drafter.shape
        layout = ((shape.num_kv_heads, shape.head_dim, shape.head_dim),)
        self.cache = KVCache(layout, rows, drafter.dtype, target.device)
        self.length_B = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.pending_BPF = torch.zeros(rows, longest_path, target.hidden_size, dtype=target.dtype, device=target.device)
        self.pending_next_BP = torch.zeros(rows, longest_path, dtype=torch.long, device=target.device)
        self.pending_B = torch.zeros(rows, dtype=torch.long, device=target.device)

    def begin(self, row: int) -> None:
        self.length_B[row] = 0
        self.pending_B[row] = 0

    def end(self, row: int) -> None:
        self.begin(row)

    def keep(self, row: int, length: int) -> int:
        """Pair m-1 needs token m to be unchanged, so of `length` equal tokens the pairs before the last stay."""
        kept = max(0, min(int(self.length_B[row]), length - 1))
        self.begin(row)
        self.length_B[row] = kept
        return kept

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """Read the chunk's pairs; its last feature waits for the next chunk's first token, or the root."""
        ids_T, features = tokens_T[1:], features_TF[:-1]
        if self.pending_B[row]:
            ids_T, features = tokens_T, torch.cat([self.pending_BPF[row, :1], features])
        if len(ids_T):
            order_1T = torch.arange(len(ids_T), device=ids_T.device)[None]
            span = slice(row, row + 1)
            causal_1TT = (order_1T[0, :, None] >= order_1T)[None]
            longest = position + PREFILL_CHUNK
            self._read(span, ids_T[None], features[None], order_1T, causal_1TT, order_1T, longest)
            self.length_B[row] += len(ids_T)
        self.pending_BPF[row, 0] = features_TF[-1]
        self.pending_B[row] = 1

    def _read(
        self, span: slice, ids_RN: Tensor, features_RND: Tensor, offset_RN: Tensor, visible_RNT: Tensor, slot_RN: Tensor, width: int
    ) -> Tensor:
        """One forward: positions, slots and visible slots are given relative to the rows' lengths."""
        drafter, length_R = self.drafter, self.length_B[span]
        self.cache.at(span, length_R[:, None] + slot_RN, width)
        mask_R1NW = slot_mask(length_R, visible_RNT, width)[:, None]
        embeddings_RND = drafter.embed(ids_RN).to(drafter.dtype)
        position_RN = length_R[:, None] + offset_RN
        predicted_RND: Tensor = drafter.net(features_RND.to(drafter.dtype), embeddings_RND, position_RN, mask_R1NW, self.cache)
        return predicted_RND

    def _catch_up(self, roots: Roots) -> Tensor:
        """Read the pending pairs, padded to the longest path so that shapes stay fixed; the predicted feature [B, D] of the root."""
        P = self.pending_BPF.shape[1]
        order_P = torch.arange(P, device=roots.tokens_B.device)
        last_B1 = (self.pending_B - 1).clamp(min=0)[:, None]
        next_BP = self.pending_next_BP.scatter(1, last_B1, roots.tokens_B[:, None])
        order_BP, causal_BPP = order_P.expand(self.rows, P), (order_P[:, None] >= order_P).expand(self.rows, P, P)
        hidden_BPD = self._read(slice(0, self.rows), next_BP, self.pending_BPF, order_BP, causal_BPP, order_BP, roots.longest + P)
        self.length_B = self.length_B + self.pending_B * roots.active_B
        self.pending_B = torch.zeros_like(self.pending_B)
        return hidden_BPD.gather(1, last_B1[..., None].expand(-1, -1, hidden_BPD.shape[-1]))[:, 0]

    def growth(self, roots: Roots) -> Growth:
        """Read what is pending; then the levels of the tree can be expanded, in slots behind the committed ones."""
        hidden_BD = self._catch_up(roots)

        def expand(tokens_BQ: Tensor, features_BQD: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            B, Q, T = visible_BQT.shape
            slot_BQ = torch.arange(T - Q, T, device=tokens_BQ.device).expand(B, Q)
            offset_BQ = torch.full_like(tokens_BQ, level)
            return self._read(slice(0, B), tokens_BQ, features_BQD, offset_BQ, visible_BQT, slot_BQ, roots.longest + T)

        return Growth(hidden_BD, self.drafter.head, expand)

    def draft(self, roots: Roots) -> Draft:
        return self.drafter.grow(self.growth(roots), roots)

    def commit(self, draft: Draft, verdict: Verdict, seen: Seen) -> None:
        path_BP = verdict.path_BP.clamp(min=0)
        self.pending_BPF = seen.features_BNF.gather(1, path_BP[..., None].expand(-1, -1, seen.features_BNF.shape[-1]))
        self.pending_next_BP = verdict.tokens_BP.roll(-1, dims=1)
        self.pending_B = verdict.length_B.clone()


class Method(Drafter):
    """EAGLE-1 with its static tree."""

    Options: ClassVar[type] = Options
    summary = "EAGLE-1: one decoder layer over features and shifted tokens, static tree"
    needs_weights = True
    trainable = True
    net: Net

    def __init__(self, target: Target, options: Any, net: Net, shape: LayerShape, embed_tokens: Tensor | None = None) -> None:
        super().__init__(target, options)
        self.net, self.shape, self.wants = net, shape, (target.num_layers,)
        self.embed_tokens = embed_tokens  # the head's own table, only where it differs from the target's
        self.plan()

    def plan(self) -> None:
        """Resolve the options once; OptionError when they are bad."""
        self.choices = self.options.tree.resolve()
        if max(path[-1] for path in self.choices) >= self.target.vocab_size:
            raise OptionError(f"tree.choices: more children than the vocabulary of {self.target.vocab_size} has tokens")

    @property
    def dtype(self) -> torch.dtype:
        return self.net.fc.weight.dtype

    @property
    def longest_path(self) -> int:
        return 1 + max(len(path) for path in self.choices)

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Strictly: hidden size and vocabulary must be the target's, every tensor must be there and nothing else."""
        if weights is None:
            raise CheckpointError("this method needs a trained head: name its folder or hub id with --draft")
        if weights.method != "eagle1":
            raise CheckpointError(f"{weights.source} holds a head of {weights.method}, not of EAGLE-1/2")
        config = weights.config
        for key, name, mine in (("hidden_size", "hidden size", target.hidden_size), ("vocab_size", "vocabulary", target.vocab_size)):
            if config[key] != mine:
                raise CheckpointError(
                    f"{weights.source}: the head's {name} is {config[key]}, the target's {mine}: it was made for another model"
                )
        shape = _shape(config)
        net = Net(shape, config["fc_bias"])
        shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        table = "embed.weight"
        checkpoints.expect(weights, {**shapes, table: (target.vocab_size, target.hidden_size)}, {table})
        net.load_state_dict({name: value for name, value in weights.tensors.items() if name != table})
        own = weights.tensors.get(table)
        net = net.to(device=target.device, dtype=target.dtype).eval()
        return cls(target, options or cls.Options(), net, shape, _own_table(own, target))

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0, **shape: Any) -> Self:
        """A head of the target's own layer shape (its width, heads and intermediate size) unless given otherwise."""
        layer = _shape_like(target, **shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Net(layer)
            for name, weight in net.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
                elif name.endswith("bias"):
                    nn.init.zeros_(weight)
        return cls(target, options or cls.Options(), net.to(device=target.device, dtype=target.dtype).eval(), layer)

    def open(self, rows: int) -> DraftSession:
        return EagleSession(self, rows, self.longest_path)

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens[ids]

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def grow(self, growth: Growth, roots: Roots) -> Draft:
        return grow_static(growth, roots, self.choices)

    def chain(self, depth: int) -> Method:
        return Method(self.target, Options(tree=StaticTree(f"chain-{depth}")), self.net, self.shape, self.embed_tokens)

    def describe(self) -> dict[str, Any]:
        return {"kind": "static", "choices": self.options.tree.choices, "nodes": len(self.choices) + 1, "depth": self.longest_path - 1}

    def weights(self) -> Weights:
        shape = self.shape
        config = {
            "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": self.target.vocab_size, "rms_eps": shape.rms_eps,
            "rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling, "max_positions": self.target.context,
            "fc_bias": self.net.fc.bias is not None, "qkv_bias": shape.qkv_bias, "act": "silu",
            "eyas": {"target_fingerprint": self.target.fingerprint()},
        }  # fmt: skip
        tensors = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        if self.embed_tokens is not None:
            tensors["embed.weight"] = self.embed_tokens
        return Weights("eagle1", config, tensors, "memory")

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, dict[str, float]]:
        """Section 4.2: smooth L1 between features + 0.1 x cross-entropy between the laws that the target's head makes of them.

        Slot t sees feature t (with noise U(-0.1, 0.1)) and token t+1; it is compared at feature t+1, which predicts token t+2: it counts
        when that token does. Averaged over the slots that count.
        """
        features_RTD = batch.features_RTF[:, :-2].to(self.dtype) + self._noise(batch, generator)
        position_RT = torch.arange(features_RTD.shape[1], device=features_RTD.device).expand(features_RTD.shape[:2])
        predicted_RTD = self.net(features_RTD, self.embed(batch.tokens_RT[:, 1:-1]).to(self.dtype), position_RT)
        true_RTD, mask_RT = batch.features_RTF[:, 1:-1], batch.counted_RT[:, 2:]
        count = mask_RT.sum().clamp(min=1)
        feature_loss = smooth_l1(predicted_RTD, true_RTD, mask_RT, count)
        token_loss, right = soft_cross_entropy_of(self.head, predicted_RTD, true_RTD, mask_RT, count, self.target.vocab_size)
        metrics = {
            "feature_loss": float(feature_loss.detach()),
            "token_loss": float(token_loss.detach()),
            "accuracy": float(right / count),  # teacher-forced: the draft's best token is the target's
        }
        return feature_loss + 0.1 * token_loss, metrics

    def _noise(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """[R, T-2, D]; none outside of training."""
        R, T, D = batch.features_RTF.shape
        if self.options.noise == "none" or not self.net.training:
            return torch.zeros((), dtype=self.dtype, device=batch.features_RTF.device)
        width = 0.2 * (512 / T if self.options.noise == "reference" else 1.0)
        noise_RTD = torch.rand(R, T - 2, D, generator=generator) - 0.5
        return noise_RTD.to(device=batch.features_RTF.device, dtype=self.dtype) * width


def _own_table(table: Tensor | None, target: Target) -> Tensor | None:
    """The head's embedding table, unless it is the target's own up to the rounding of storage."""
    if table is None:
        return None
    table = table.to(device=target.device, dtype=target.dtype)
    every = torch.arange(target.vocab_size, device=target.device)
    return None if torch.allclose(table, target.embed(every), rtol=1e-2, atol=1e-3) else table


def _shape(config: dict[str, Any]) -> LayerShape:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rms_eps",
        "rope_theta",
        "rope_scaling",
        "qkv_bias",
    )
    return LayerShape(**{name: config[name] for name in names if name in config})


def _shape_like(target: Target, **given: Any) -> LayerShape:
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
