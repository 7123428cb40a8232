"""Adjustments of a token's scores by the text before it, a logit bias, and a minimum length.

    repetition_penalty                      `seen_tokens`: the tokens of prompt and answer
    presence_penalty, frequency_penalty     `counts`: how often each token occurs in the answer
    logit_bias                              `bias`
    min_tokens                              `end_tokens`: the tokens that end the text;
                                            `tokens_before_end`: how many others must come before them

In a tree each node has a text of its own: the row's, then its ancestors and itself
(`for_tree`). Drafts that are grown level by level use `of_nodes` and `after_tokens` instead. A
field that no row of a batch needs is None; a batch that needs none has no Adjustments.

This module knows no model and no sampling: `sampling.apply_sampling` applies the numbers.
Letters: B rows, N nodes, Q nodes of a level, K of the next level, V vocabulary of the target, v of
the draft. [...] stands for equal dimensions in all fields: none (a single text), rows, or rows and nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.tree import Tree

__all__ = ["Adjustments"]


@dataclass(frozen=True, eq=False)
class Adjustments:
    """See the module. An index selects rows, or rows and nodes, in every field: `adjustments[b]`,
    `adjustments[:, nodes]`. The fields are frozen; only `append` writes into their tensors."""

    seen_tokens: Tensor | None = None  # bool [..., V]
    counts: Tensor | None = None  # float32 [..., V]
    bias: Tensor | None = None  # float32 [..., V]
    end_tokens: Tensor | None = None  # bool [..., V]
    tokens_before_end: Tensor | None = None  # int64 [...]; 0 or less: end tokens may come

    @classmethod
    def stack(cls, texts: Sequence[Adjustments | None]) -> Adjustments | None:
        """Stack the adjustments of single texts into [B, ...]. A field that a text does not need is
        zero in its row."""

        def stacked(name: str) -> Tensor | None:
            parts = [None if text is None else getattr(text, name) for text in texts]
            like = next((part for part in parts if part is not None), None)
            if like is None:
                return None
            return torch.stack([torch.zeros_like(like) if part is None else part for part in parts])

        if all(text is None for text in texts):
            return None
        batch = {field.name: stacked(field.name) for field in fields(cls)}
        return cls(**batch) if any(x is not None for x in batch.values()) else None

    def append(self, token: int) -> None:
        """Add one token to the answer of a single text, in place; `tokens_before_end` stays."""
        if self.seen_tokens is not None:
            self.seen_tokens[token] = True
        if self.counts is not None:
            self.counts[token] += 1

    # --- from rows to nodes

    def for_depths(self, level_Q: Tensor) -> Adjustments:
        """Return the adjustments [B, Q, ...] of each row for nodes at these depths, as if there were no tokens between
        them and the root."""
        nodes = self._map_vocab_fields(lambda x_BV: x_BV[:, None].expand(-1, len(level_Q), -1))
        return nodes._map_tokens_before_end(lambda wait_B: wait_B[:, None] - level_Q)

    def for_tree(self, tree: Tree, tokens_BN: Tensor) -> Adjustments:
        """Return the adjustments [B, N, ...] of each node."""
        nodes = self._map_vocab_fields(lambda x_BV: x_BV[:, None].expand(-1, tree.nodes, -1))._map_tokens_before_end(
            lambda wait_B: wait_B[:, None] - tree.depth_BN
        )
        if self.seen_tokens is not None:
            nodes = replace(nodes, seen_tokens=tree.tokens_seen(tokens_BN, self.seen_tokens))
        if nodes.counts is not None:
            below_root_BNN = tree.mask_BNN.float()
            below_root_BNN[..., 0] = 0  # the root is counted already, or it is the prompt's last token
            index_BNN = tokens_BN[:, None].expand_as(below_root_BNN)
            nodes = replace(nodes, counts=nodes.counts.clone().scatter_add_(2, index_BNN, below_root_BNN))
        return nodes

    def for_draft_vocab(self, ids_v: Tensor) -> Adjustments:
        """Return the adjustments [..., v] of a draft vocabulary, which is given by the target's ids."""
        return self._map_vocab_fields(lambda x: x[..., ids_v])

    def of_nodes(self, node_BK: Tensor) -> Adjustments:
        """Return the adjustments [B, K, ...] of K selected nodes."""
        nodes = self._map_vocab_fields(
            lambda x_BQv: x_BQv.gather(1, node_BK[..., None].expand(-1, -1, x_BQv.shape[-1]))
        )
        return nodes._map_tokens_before_end(lambda wait_BQ: wait_BQ.gather(1, node_BK))

    def after_tokens(self, token_BQ: Tensor) -> Adjustments:
        """Return the adjustments [B, Q, ...] after one more token in each node's text, given by its index in the
        vocabulary."""
        nodes, column_BQ1 = self._map_tokens_before_end(lambda wait_BQ: wait_BQ - 1), token_BQ[..., None]
        if self.seen_tokens is not None:
            nodes = replace(nodes, seen_tokens=self.seen_tokens.scatter(2, column_BQ1, True))
        if self.counts is not None:
            nodes = replace(
                nodes, counts=self.counts.scatter_add(2, column_BQ1, self.counts.new_ones(column_BQ1.shape))
            )
        return nodes

    def flat(self) -> Adjustments:
        """Return [B x N, ...], made of [B, N, ...]."""
        return self._map_vocab_fields(lambda x: x.flatten(0, 1))._map_tokens_before_end(lambda wait: wait.flatten())

    def __getitem__(self, index: Any) -> Adjustments:
        return self._map_vocab_fields(lambda x: x[index])._map_tokens_before_end(lambda wait: wait[index])

    def _map_vocab_fields(self, change: Callable[[Tensor], Tensor]) -> Adjustments:
        """Apply `change` to every field whose last dimension is the vocabulary."""
        names = ("seen_tokens", "counts", "bias", "end_tokens")
        return replace(self, **{name: None if (x := getattr(self, name)) is None else change(x) for name in names})

    def _map_tokens_before_end(self, change: Callable[[Tensor], Tensor]) -> Adjustments:
        return (
            self if self.tokens_before_end is None else replace(self, tokens_before_end=change(self.tokens_before_end))
        )
