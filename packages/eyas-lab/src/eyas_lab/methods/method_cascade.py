"""cascade: a small model drafts for the target, and n-grams of the row's text draft for the small model.

    Cascade Speculative Drafting (Chen et al. 2023, arXiv 2312.11462)    a chain (the default)
    Staged Speculative Decoding (Spector and Re 2023, arXiv 2308.04623)  a tree: --dynamic.nodes 16

**Vertical cascade** (section 3.1 of the first paper; section 3.2 of the second). A pass of the small model reads, after each node of
the tree, the tokens that followed the same n-gram earlier in the text (Max-Gram: the longest match). If the small
model then drafts these tokens, their level needs no pass, because the small model has read them. The small model drafts
the same tree without n-grams, with more passes.

**Horizontal cascade** (section 3.2 of the first paper). Later tokens are accepted less often, so the cheapest drafter
drafts them: `tail` tokens by n-grams follow the deepest node of the small model.

Children are chosen with the target's own noise, so the text is plain decoding's. The papers sample them, and use an
n-gram model of a corpus (section 3.2 of the second paper) and of bigrams; here the n-grams are the row's own.

Letters: B rows, Q nodes of a level, T nodes of all levels, N nodes of a pass, X nodes of all passes, M nodes of a
tail, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession, TreeSize
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import small_model
from eyas.drafters.prompt_lookup import Lookup, NgramIndex
from eyas.drafters.tools import check_whole

__all__ = ["Method", "Options"]

Path = tuple[int, ...]  # the tokens from the root, which is not among them, to a node


@dataclass(frozen=True)
class Cascade:
    """The part of n-grams."""

    ahead: int = 4
    """Tokens that the small model reads ahead after each node (vertical cascade); 0: none."""
    tail: int = 3
    """Tokens after the small model's (horizontal cascade); 0: none."""
    longest: int = 8
    """Most tokens of an n-gram."""

    def __post_init__(self) -> None:
        check_whole("cascade", 0, ahead=self.ahead, tail=self.tail)
        check_whole("cascade", 1, longest=self.longest)


@dataclass(frozen=True)
class Options(small_model.Options):
    """Options of cascade."""

    cascade: Cascade = field(default_factory=Cascade)


def continuation(index: NgramIndex, path: Path, count: int) -> list[int]:
    """Return the tokens, at most `count`, that followed the longest n-gram at the end of text and path earlier in the
    text."""
    end = [*index.tokens[-index.options.longest :], *path][-index.options.longest :]
    for begin in range(len(end)):
        places = [place for place in index.places.get(tuple(end[begin:]), ())[-2:] if place < len(index.tokens)]
        if places:  # the last place of an n-gram of the text alone is the text's end, which nothing follows
            return index.tokens[places[-1] : places[-1] + count]
    return []


def table(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return the rows, int64 [B, width], padded with zeros."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)


class NodeReader:
    """Reads the nodes of the small model's tree in one cycle, each with the tokens that n-grams expect after it."""

    def __init__(self, session: Session, cycle_input: CycleInput) -> None:
        self.session, self.cycle_input = session, cycle_input
        self.drafted: list[Tensor] = []  # tokens [B, Q] of each level
        self.place: list[dict[Path, int]] = [{} for _ in range(session.rows)]  # number among the X nodes
        self.depth_BX = torch.empty(session.rows, 0, dtype=torch.long, device=cycle_input.tokens_B.device)
        self.logits: list[Tensor] = []  # [B, N, V] of each pass

    def __call__(self, tokens_BQ: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
        """Return the logits [B, Q, V] of the nodes of a level."""
        self.drafted.append(tokens_BQ)
        paths: list[list[Path]] = [[] for _ in range(self.session.rows)]
        tokens_BT = torch.cat(self.drafted, dim=1)
        for row in self.cycle_input.active_rows:
            paths[row] = [tuple(tokens_BT[row, seen_T].tolist()) for seen_T in visible_BQT[row]]
        unread = [self._unread(row, wanted) for row, wanted in enumerate(paths)]
        if any(unread):
            self._read(unread)
        places = [[place[path] for path in wanted] for place, wanted in zip(self.place, paths, strict=True)]
        place_BQ = table(places, tokens_BQ.shape[1], tokens_BQ.device)
        logits_BXV = torch.cat(self.logits, dim=1)
        return logits_BXV.gather(1, place_BQ[..., None].expand(-1, -1, logits_BXV.shape[-1]))

    def _unread(self, row: int, wanted: Sequence[Path]) -> list[Path]:
        """Return the wanted nodes that were not read yet, and the nodes expected after them, parents first."""
        drafter, unread = self.session.drafter, dict[Path, None]()
        for path in wanted:
            if path in self.place[row]:
                continue
            count = min(drafter.options.cascade.ahead, drafter.depth - 1 - len(path))  # the deepest are not read
            expected = continuation(self.session.indexes[row], path, count) if count > 0 else []
            for n in range(len(expected) + 1):
                unread[*path, *expected[:n]] = None
        return [path for path in unread if path not in self.place[row]]

    def _read(self, unread: Sequence[Sequence[Path]]) -> None:
        """Read these nodes of each row in one pass."""
        first, device = self.depth_BX.shape[1], self.depth_BX.device
        N = max(map(len, unread))
        visible_BNX = torch.eye(N, first + N, dtype=torch.bool).roll(first, 1).repeat(len(unread), 1, 1)
        for row, paths in enumerate(unread):
            for n, path in enumerate(paths):
                self.place[row][path] = first + n
                ancestors = [path[:k] for k in range(1, len(path))]
                visible_BNX[row, n, [self.place[row][ancestor] for ancestor in ancestors]] = True
        depth_BN = table([[len(path) - 1 for path in paths] for paths in unread], N, device)
        tokens_BN = table([[path[-1] for path in paths] for paths in unread], N, device)
        self.depth_BX = torch.cat([self.depth_BX, depth_BN], dim=1)
        logits_BNV = self.session.extend(tokens_BN, self.depth_BX, visible_BNX.to(device), self.cycle_input)
        self.logits.append(logits_BNV)


class Session(small_model.LanguageModelSession):
    """The small model's keys and values, and the n-grams of each row's text."""

    drafter: Method

    def __init__(self, drafter: Method, rows: int) -> None:
        super().__init__(drafter, rows)
        lookup = Lookup(longest=drafter.options.cascade.longest)
        self.indexes = [NgramIndex(lookup) for _ in range(rows)]

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        super().begin(row, cached_tokens, total)
        self.indexes[row].cut(0)

    def draft(self, cycle_input: CycleInput) -> Draft:
        for row in cycle_input.active_rows:
            index = self.indexes[row]
            for token in cycle_input.row_tokens[row][len(index.tokens) :]:
                index.append(token)
        return self._with_tails(super().draft(cycle_input), cycle_input.active_rows)

    def node_reader(self, cycle_input: CycleInput) -> Callable[[Tensor, Tensor, int], Tensor]:
        return NodeReader(self, cycle_input)

    def _with_tails(self, draft: Draft, rows: Sequence[int]) -> Draft:
        """Return the draft with tokens by n-grams after the deepest node of each row; of several, the most probable."""
        tree, tail = draft.tree, self.drafter.options.cascade.tail
        assert draft.log_q_BN is not None
        log_q_BN = torch.where(tree.mask_BNN, draft.log_q_BN[:, None], 0.0).sum(-1)
        leaf_B = (tree.depth_BN + log_q_BN.exp() / 2).masked_fill(~tree.acceptable_BN, -1).argmax(-1)
        tails = [list[int]() for _ in range(self.rows)]
        for row in rows if tail else ():
            path = draft.tokens_BN[row, tree.mask_BNN[row, leaf_B[row]]].tolist()
            tails[row] = continuation(self.indexes[row], tuple(path[1:]), tail)
        M, device = max(map(len, tails)), leaf_B.device
        if not M:
            return draft
        later_BM = torch.arange(tree.nodes, tree.nodes + M - 1, device=device).expand(self.rows, -1)
        parents_BN = torch.cat([tree.parents_BN, leaf_B[:, None], later_BM], dim=1)
        exists_BM = table([[1] * len(tokens) for tokens in tails], M, device).bool()
        acceptable_BN = torch.cat([tree.acceptable_BN, exists_BM], dim=1)
        tokens_BM = table(tails, M, device)
        log_q_BM = torch.zeros_like(tokens_BM, dtype=draft.log_q_BN.dtype)  # an n-gram's only continuation
        return Draft(
            Tree.build(parents_BN, tree.max_depth + M, acceptable_BN),
            torch.cat([draft.tokens_BN, tokens_BM], dim=1),
            torch.cat([draft.log_q_BN, log_q_BM], dim=1),
        )


class Method(small_model.Method):
    """A small model with n-grams before and after it."""

    Options: ClassVar[type] = Options
    summary = "cascade and staged drafting: n-grams draft for a small model, and after it"
    trainable = False

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        if not options.dynamic.is_used:
            options = replace(options, tree=replace(options.tree, noise="coupled"))
        super().__init__(target, options, draft)

    @property
    def max_tree(self) -> TreeSize | None:
        return None if self.options.cascade.tail else super().max_tree  # a tree with tails has no values

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)

    def chain(self, depth: int) -> Method:
        without_tail = replace(self.options, cascade=replace(self.options.cascade, tail=0))
        return small_model.Method.chain(type(self)(self.target, without_tail, self.draft_model), depth)

    def describe(self) -> dict[str, Any]:
        cascade: Cascade = self.options.cascade
        return {**super().describe(), "ahead": cascade.ahead, "tail": cascade.tail}
