"""The tiny target and the heads, in numpy, from the files that engines read. Nothing of eyas is here. This
second implementation checks the vectors; it has no tricks, and a reader can compare it with the papers.

A head reads the target's hidden states of committed tokens (`commit`), and gives the logits of the tokens that come next: below
the root (`root`), and below drafted nodes (`expand`). `states` are Hugging Face's hidden_states of the target: k is the input of
layer k, L comes after the final norm. L + 1 is the last layer's output before that norm, which only a planted fault reads.

Letters: P committed tokens, N nodes, D hidden, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from draft_vectors.arrays import Bools, Cache, Floats, Ints, Layer, rms_norm, silu

__all__ = [
    "HEADS", "Block", "DSpark", "Eagle1", "Eagle3", "Head", "Medusa", "Mtp", "Node", "PEagle", "States", "Target", "parents_of",
]  # fmt: skip

States = Sequence[Floats]


@dataclass
class Node:
    """A drafted token, or the root."""

    token: int
    parent: Node | None = None
    depth: int = 0
    log_q: float = 0.0  # log of the draft's probability after the parent
    value: float = 0.0  # log of the product along the path (EAGLE-2)
    hidden: Floats | None = None  # the head's output at the node, if the head drafts step by step
    logits: Floats | None = None  # [v], of the node's children, if it was expanded
    slot: int = -1  # in the head's cache

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        return [*(self.parent.path() if self.parent else ()), self]


def parents_of(nodes: Sequence[Node]) -> list[int]:
    """Return the number of each node's parent; -1 for the root."""
    number = {id(node): n for n, node in enumerate(nodes)}
    return [-1 if node.parent is None else number[id(node.parent)] for node in nodes]


def visible(old: int, new: Bools) -> Bools:
    """Return which slots new nodes see: all `old` ones, and of the new ones those that `new` [N, N'] says."""
    return np.concatenate([np.ones((len(new), old), bool), new], 1)


def causal(count: int) -> Bools:
    """Return a causal mask, bool [count, count]."""
    return np.tril(np.ones((count, count), bool))


class Target:
    """The target, a LLaMA."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = load_file(folder / "model.safetensors")
        self.layers = [
            Layer(self.tensors, f"model.layers.{i}.", self.config) for i in range(self.config["num_hidden_layers"])
        ]

    def new_caches(self) -> list[Cache]:
        """Return an empty cache for each layer."""
        return [layer.new_cache() for layer in self.layers]

    def embed(self, ids: Sequence[int]) -> Floats:
        """Return the embeddings of ids."""
        return self.tensors["model.embed_tokens.weight"][np.asarray(ids, np.int64)]

    def head(self, hidden: Floats) -> Floats:
        """Return the logits [..., V] of hidden states after the final norm."""
        return np.asarray(hidden @ self.tensors["lm_head.weight"].T, np.float32)

    def __call__(self, ids: Sequence[int], position_N: Ints, new: Bools, caches: list[Cache]) -> list[Floats]:
        """Run tokens or nodes, which see all slots of the caches and each other as `new` [N, N] says. Return the states."""
        hidden, states = self.embed(ids), []
        for layer, cache in zip(self.layers, caches, strict=True):
            states.append(hidden)
            hidden = layer(layer.norm("input_layernorm", hidden), hidden, position_N, cache, visible(len(cache), new))
        final = rms_norm(hidden, self.tensors["model.norm.weight"], self.config["rms_norm_eps"])
        return [*states, final, hidden]


class Head:
    """A head in one text.

    Attributes:
        layers: which states it reads.
        ids: the target's ids of the draft vocabulary.
        offset: added to the positions of drafted nodes; 0 but for a planted fault.
        without: norms that are left out; empty but for a planted fault.
        stale: whether the cache keeps rejected drafts; False but for a planted fault.
        shifted: whether pairs are (feature of token t, token t+1); True but for a planted fault.
    """

    file = "model.safetensors"

    def __init__(self, folder: Path, target: Target, window: tuple[int, int] | None = None) -> None:
        self.target, self.window = target, window  # (first pairs, last pairs) that SEAGLE's cache keeps
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = load_file(folder / self.file)
        self.layers: tuple[int, ...] = (len(target.layers),)
        self.ids = np.arange(target.config["vocab_size"])
        self.offset, self.without, self.stale, self.shifted = 0, set[str](), False, True
        self.caches: list[Cache] = []
        self.committed = 0  # slots of the committed tokens
        self.setup()

    def setup(self) -> None:
        """Read the settings of the files, and make the layers."""

    def norm(self, name: str, x: Floats) -> Floats:
        """Return x normalised by the norm of this name; x itself where the norm is left out."""
        if name in self.without:
            return x
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.get("rms_norm_eps", 1e-5))

    def features(self, states: States) -> Floats:
        """Return the states that the head reads, side by side."""
        return np.concatenate([states[k] for k in self.layers], -1)

    def commit(self, states: States, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Read committed tokens, their states, and the tokens that follow each of them: the last one is the root."""
        raise NotImplementedError

    def root(self) -> tuple[Floats | None, Floats]:
        """Return the head's output [D] and the logits [v] of the tokens after the root."""
        raise NotImplementedError

    def expand(self, nodes: Sequence[Node]) -> None:
        """Set `hidden` and `logits` of nodes of one depth."""
        raise NotImplementedError

    def forget(self, accepted: Sequence[Node]) -> None:
        """Drop all that the caches hold of drafted nodes: accepted ones are read again, with the target's states."""


class Eagle1(Head):
    """EAGLE-1 and EAGLE-2: fc over [embedding, feature], a layer without an input norm; the target's lm_head."""

    drafted = 0  # drafted nodes in the cache; their slots come after the committed pairs

    def setup(self) -> None:
        self.nets = [Layer(self.tensors, "layers.0.", self.config)]
        self.caches = [layer.new_cache() for layer in self.nets]

    def fuse(self, features: Floats) -> Floats:
        """Return the features as they are."""
        return features

    def join(self, hidden: Floats, embedding: Floats) -> tuple[Floats, Floats]:
        """Return the input of attention, and the residual."""
        x = np.concatenate([embedding, hidden], -1) @ self.tensors["fc.weight"].T
        return x, x

    def logits(self, hidden: Floats) -> Floats:
        """Return logits by the target's output matrix."""
        return self.target.head(hidden)

    def carried(self, hidden: Floats) -> Floats:
        """Return the hidden state that the next step reads."""
        return hidden

    def run(self, hidden: Floats, ids: Sequence[int], position_N: Ints, new: Bools) -> Floats:
        """Run pairs, and return the output. `new` says which of the slots after the committed ones each sees."""
        x, out = self.join(hidden, self.target.embed(ids))
        for number, layer in enumerate(self.nets):
            if number:
                x = layer.norm("input_layernorm", out)
            cache = self.caches[number]
            out = layer(x, out, position_N, cache, visible(len(cache) + len(ids) - new.shape[1], new))
        return self.carried(out)

    def commit(self, states: States, tokens: Sequence[int], following: Sequence[int]) -> None:
        hidden, position = self.fuse(self.features(states)), self.committed + np.arange(len(tokens))
        out = self.run(hidden, following if self.shifted else tokens, position, causal(len(tokens)))
        self.newest = out[-1]
        self.committed += len(tokens)
        if self.window and self.committed > sum(self.window):
            first, last = self.window
            for cache in self.caches:
                cache.keep([*range(first), *range(len(cache) - last, len(cache))])
                cache.position_W = np.arange(len(cache))
            self.committed = first + last

    def root(self) -> tuple[Floats | None, Floats]:
        return self.newest, self.logits(self.newest)

    def expand(self, nodes: Sequence[Node]) -> None:
        begin, depth = len(self.caches[0]), nodes[0].depth
        for number, node in enumerate(nodes):
            node.slot = begin + number
        new = np.zeros((len(nodes), begin + len(nodes)), bool)
        new[:, : begin - self.drafted] = True
        for number, node in enumerate(nodes):
            new[number, [step.slot for step in node.path()[1:]]] = True
        self.drafted += len(nodes)
        hidden = np.stack([node.parent.hidden for node in nodes if node.parent and node.parent.hidden is not None])
        position = np.full(len(nodes), self.committed + depth - 1 + self.offset)
        out = self.run(hidden, [node.token for node in nodes], position, new)
        for node, hidden_D, logits_v in zip(nodes, out, self.logits(out), strict=True):
            node.hidden, node.logits = hidden_D, logits_v

    def forget(self, accepted: Sequence[Node]) -> None:
        again = {node.slot for node in accepted}
        for cache in self.caches:
            begin, end = len(cache) - self.drafted, len(cache)
            rejected = [slot for slot in range(begin, end) if slot not in again]
            cache.keep([*range(begin), *(rejected if self.stale else ())])
        self.drafted = 0


class Eagle3(Eagle1):
    """EAGLE-3: fc over the states of three layers, a layer over [norm(embedding), norm(hidden)], a head of its own."""

    first = "midlayer"

    def setup(self) -> None:
        depth, L = self.config["num_hidden_layers"], len(self.target.layers)
        names = [self.first, *(f"layers.{i}" for i in range(1, depth))]
        self.nets = [Layer(self.tensors, f"{name}.", self.config) for name in names]
        self.caches = [layer.new_cache() for layer in self.nets]
        self.layers = (2, L // 2, L - 3)
        self.ids = np.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]  # the file has differences
        self.carries_normed = False  # EAGLE-3.1 does

    def fuse(self, features: Floats) -> Floats:
        """Return the features of three layers as one."""
        return np.asarray(features @ self.tensors["fc.weight"].T, np.float32)

    def join(self, hidden: Floats, embedding: Floats) -> tuple[Floats, Floats]:
        parts = self.norm(f"{self.first}.input_layernorm", embedding), self.norm(f"{self.first}.hidden_norm", hidden)
        return np.concatenate(parts, -1), hidden

    def logits(self, hidden: Floats) -> Floats:
        """Return logits over the draft vocabulary."""
        normed = hidden if self.carries_normed else self.norm("norm", hidden)
        return np.asarray(normed @ self.tensors["lm_head.weight"].T, np.float32)

    def carried(self, hidden: Floats) -> Floats:
        return self.norm("norm", hidden) if self.carries_normed else hidden


class PEagle(Eagle3):
    """P-EAGLE: EAGLE-3's net reads the newest pair and masks after it in one pass; slot j predicts j further."""

    first = "layers.0"

    def setup(self) -> None:
        super().setup()
        self.levels, self.mask = self.config["eyas"]["levels"], self.config["mask_token_id"]

    def root(self) -> tuple[Floats | None, Floats]:
        masks, begin = self.levels - 1, len(self.caches[0])
        hidden = np.repeat(self.fuse(self.tensors["mask_hidden"].reshape(1, -1)), masks, 0)
        position = self.committed + np.arange(masks) + self.offset
        out = self.run(hidden, [self.mask] * masks, position, causal(masks))
        for cache in self.caches:
            cache.keep(range(len(cache) if self.stale else begin))
        self.level_logits = self.logits(np.concatenate([self.newest[None], out]))
        return None, self.level_logits[0]

    def expand(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.logits = self.level_logits[node.depth]

    def forget(self, accepted: Sequence[Node]) -> None:
        """Do nothing: no node has a slot."""


class Mtp(Eagle1):
    """A multi-token-prediction module: EAGLE-1 with norms before fc, before attention and at the end."""

    def setup(self) -> None:
        self.config |= self.target.config
        self.nets = [Layer(self.tensors, "layers.0.mtp_block.", self.config)]
        self.caches = [layer.new_cache() for layer in self.nets]

    def join(self, hidden: Floats, embedding: Floats) -> tuple[Floats, Floats]:
        parts = self.norm("layers.0.enorm", embedding), self.norm("layers.0.hnorm", hidden)
        x = np.concatenate(parts, -1) @ self.tensors["layers.0.eh_proj.weight"].T
        return self.norm("layers.0.mtp_block.input_layernorm", x), x

    def carried(self, hidden: Floats) -> Floats:
        return self.norm("layers.0.post_norm", hidden)


class Block(Head):
    """DFlash: the block [root, mask, mask, ...] attends to itself and to keys and values of the target's states."""

    first_slot = 1  # slot 0 is the root's; slot i predicts the token at its own place

    def setup(self) -> None:
        inner = self.config.get("dflash_config") or self.config
        self.layers = tuple(k + 1 for k in inner["target_layer_ids"])  # the file counts outputs of layers
        self.mask, self.block = inner["mask_token_id"], self.config["block_size"]
        self.nets = [Layer(self.tensors, f"layers.{i}.", self.config) for i in range(self.config["num_hidden_layers"])]
        self.caches = [layer.new_cache() for layer in self.nets]

    def commit(self, states: States, tokens: Sequence[int], following: Sequence[int]) -> None:
        context = self.norm("hidden_norm", self.features(states) @ self.tensors["fc.weight"].T)
        position = self.committed + np.arange(len(tokens))
        for layer, cache in zip(self.nets, self.caches, strict=True):
            layer.store(context, position, cache)
        self.committed += len(tokens)
        self.anchor = following[-1]

    def root(self) -> tuple[Floats | None, Floats]:
        begin, n = len(self.caches[0]), self.block
        hidden = self.target.embed([self.anchor, *[self.mask] * (n - 1)])
        position = self.committed + np.arange(n) + self.offset
        for layer, cache in zip(self.nets, self.caches, strict=True):
            x = layer.norm("input_layernorm", hidden)
            hidden = layer(x, hidden, position, cache, np.ones((n, begin + n), bool))
            cache.keep(range(len(cache) if self.stale else begin))
        self.level_logits = self.target.head(self.norm("norm", hidden))[self.first_slot :]
        return None, self.after(self.level_logits[0], self.anchor)

    def after(self, logits: Floats, token: int) -> Floats:
        """Return the logits of a level below a node with this token."""
        return logits

    def expand(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.logits = self.after(self.level_logits[node.depth], node.token)


class DSpark(Block):
    """DSpark: slot i predicts the next token, and a matrix of low rank over pairs of tokens is added."""

    first_slot = 0

    def after(self, logits: Floats, token: int) -> Floats:
        before = self.tensors["markov_head.markov_w1.weight"][token]
        return np.asarray(logits + self.tensors["markov_head.markov_w2.weight"] @ before, np.float32)


class Medusa(Head):
    """Medusa: head k reads the newest committed token's state, and predicts the token k + 2 places after it."""

    file = "medusa_lm_head.safetensors"

    def commit(self, states: States, tokens: Sequence[int], following: Sequence[int]) -> None:
        self.feature = self.features(states)[-1]

    def level(self, k: int) -> Floats:
        """Return the logits of the k-th head."""
        hidden = self.feature + silu(
            self.tensors[f"{k}.0.linear.weight"] @ self.feature + self.tensors[f"{k}.0.linear.bias"]
        )
        return np.asarray(self.tensors[f"{k}.1.weight"] @ hidden, np.float32)

    def root(self) -> tuple[Floats | None, Floats]:
        return None, self.level(0)

    def expand(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.logits = self.level(node.depth)


HEADS: dict[str, type[Head]] = {
    "eagle1": Eagle1, "eagle2": Eagle1, "eagle3": Eagle3, "seagle": Eagle3, "mtp": Mtp, "dflash": Block, "dspark": DSpark,
    "peagle": PEagle, "medusa": Medusa,
}  # fmt: skip
