"""Draft trees, and the records that the stages of a cycle hand to each other.

    prompt -> prefill -> [ draft  ->  forward of the target  ->  verify  ->  commit ]*
                           Draft      TargetOutput               Verdict

A chain is a tree too, and plain decoding has a tree of the root alone. A tree is given by the parent of each node;
depths, ancestor mask and paths follow from the parents. Node 0 is the root: the newest token, already emitted and
not yet in the target's cache. This example has two tokens in the next position and three in the one after:

    node      0   1  2  3  4  5            mask (row attends to column)
    parent   -1   0  0  1  1  2                0 1 2 3 4 5
    depth     0   1  1  2  2  2             0  x
                                            1  x x
        0 --- 1 --- 3                       2  x   x
          |     |-- 4                       3  x x   x
          |---- 2 --- 5                     4  x x     x
                                            5  x   x     x

Letters: B rows, N nodes, M nodes of a second tree, X all drafted nodes, P nodes on the longest path (max depth
+ 1), V vocabulary, F feature width. This module knows no model, no method and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core.params import is_whole
from eyas.errors import EyasError, OptionError

__all__ = [
    "Choices", "Cycle", "Draft", "Failures", "FullDraft", "TargetOutput", "Tree", "Verdict", "build_trie",
    "chain_choices", "check_choices", "matching_nodes", "merge", "padded_nodes", "unpack_verdict",
]  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """B trees of N nodes each, one for every row of the batch. `Tree.build` makes them; a parent
    comes before its children."""

    parents_BN: Tensor  # int64; -1 for the root, node 0
    # bool; False: padding, or a node that is forwarded for its logits only (lookahead decoding)
    acceptable_BN: Tensor
    depth_BN: Tensor  # int64; 0 for the root
    mask_BNN: Tensor  # bool; [b, n, m] = m is n or an ancestor of n
    max_depth: int  # upper bound of the depths, known to the host
    # how many nodes each row has, known to the host; those behind them are padding, whose output nobody reads. (): all
    counts: tuple[int, ...] = ()

    @classmethod
    def build(
        cls, parents_BN: Tensor, max_depth: int, acceptable_BN: Tensor | None = None, counts: tuple[int, ...] = ()
    ) -> Tree:
        """Build trees from the parents of their nodes.

        Args:
            parents_BN: int64, -1 in column 0 and nowhere else, each parent before its children.
            max_depth: an upper bound of the depths. With it, shapes do not depend on the values of
                `parents_BN`.
            acceptable_BN: which nodes may be accepted; all by default. Nodes below one that may not
                be accepted are not accepted either.
            counts: see `Tree`.
        """
        B, N = parents_BN.shape
        mask_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
        ancestor_BN = parents_BN
        for _ in range(max_depth):
            reached_BNN = torch.arange(N, device=parents_BN.device) == ancestor_BN[..., None]
            mask_BNN = mask_BNN | reached_BNN
            ancestor_BN = torch.where(ancestor_BN < 0, -1, parents_BN.gather(1, ancestor_BN.clamp(min=0)))
        if acceptable_BN is None:
            acceptable_BN = torch.ones_like(parents_BN, dtype=torch.bool)
        return cls(parents_BN, acceptable_BN, mask_BNN.sum(-1) - 1, mask_BNN, max_depth, counts)

    @classmethod
    def chain(cls, rows: int, nodes: int, device: torch.device | str = "cpu") -> Tree:
        """Return the tree 0 - 1 - 2 - ... of a drafter that proposes one continuation. One node: plain decoding."""
        parents_BN = torch.arange(-1, nodes - 1, device=device).expand(rows, nodes)
        return cls.build(parents_BN, nodes - 1)

    def for_rows(self, rows: int) -> Tree:
        """Repeat a tree of one row for `rows` rows."""
        parents_BN, acceptable_BN, depth_BN = (
            x.expand(rows, -1) for x in (self.parents_BN, self.acceptable_BN, self.depth_BN)
        )
        return Tree(parents_BN, acceptable_BN, depth_BN, self.mask_BNN.expand(rows, -1, -1), self.max_depth)

    def first_nodes(self, nodes: int) -> Tree:
        """Return the trees of the first nodes."""
        part = slice(nodes)
        mask_BNN = self.mask_BNN[:, part, part]
        return Tree(
            self.parents_BN[:, part], self.acceptable_BN[:, part], self.depth_BN[:, part], mask_BNN, self.max_depth
        )

    def tokens_seen(self, tokens_BN: Tensor, history_BV: Tensor) -> Tensor:
        """Return which tokens occur, bool [B, N, V], in the text up to and including each node: in `history_BV`, in
        its ancestors or in itself."""
        seen_BNV = history_BV[:, None].repeat(1, self.nodes, 1)
        b, n, ancestor = self.mask_BNN.nonzero(as_tuple=True)
        seen_BNV[b, n, tokens_BN[b, ancestor]] = True
        return seen_BNV

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.parents_BN.shape[0]

    @property
    def nodes(self) -> int:
        """N, the number of nodes of a row, padding and the root included."""
        return self.parents_BN.shape[1]


@dataclass(frozen=True)
class FullDraft:
    """All X nodes that a dynamic tree was selected from. The root comes first, a parent before its
    children, siblings best first."""

    parents_BX: Tensor  # int64; -1 for the root
    value_BX: Tensor  # float32; as `Draft.value_BN`


@dataclass(frozen=True)
class Draft:
    """The trees that a drafter proposes, with their tokens and probabilities."""

    tree: Tree
    tokens_BN: Tensor  # int64; column 0 holds the root
    log_q_BN: Tensor | None = None
    """float32; log q(node | parent); 0 at the root. None: the drafter has no q."""
    q_BNV: Tensor | None = None
    """float32 [B, n, V] with n <= N. At node n: the draft's distribution (after `apply_sampling`)
    from which the children of n were sampled without replacement, in node order. None: a
    deterministic tree, whose children were picked by a rule. With n < N only the first n nodes are
    the sampled tree; the others may be accepted in rows of `deterministic_B` only."""
    block_verification: bool = False
    """With `q_BNV`: the tree is one chain, and block verification applies (`core.verify`)."""
    value_BN: Tensor | None = None
    """float32; log of EAGLE-2's value, the estimated probability that the path to the node is
    accepted. Dynamic trees only."""
    drafted: FullDraft | None = None
    """All nodes that were drafted; a dynamic tree keeps the nodes of the highest values."""
    deterministic_B: Tensor | None = None  # bool; with `q_BNV`: rows verified as deterministic trees; None: greedy ones
    rule: Callable[..., tuple[Tensor, Tensor]] | None = None  # the method's own for sampled rows (`core.verify`)


@dataclass(frozen=True)
class TargetOutput:
    """The result of one forward of the target over the trees."""

    logits_BNV: Tensor
    features_BNF: Tensor  # hidden states of the layers that the drafter reads (`Drafter.feature_layers`), concatenated

    def features_at(self, path_BP: Tensor) -> Tensor:
        """Return the features [B, P, F] at these nodes; past the end of a path, where it is -1, the root's."""
        index_BP1 = path_BP.clamp(min=0)[..., None]
        return self.features_BNF.gather(1, index_BP1.expand(-1, -1, self.features_BNF.shape[-1]))


@dataclass(frozen=True)
class Verdict:
    """The accepted path of each row, and its bonus token."""

    path_BP: Tensor  # int64; node numbers, starting with node 0; -1 past the end
    tokens_BP: Tensor  # int64; the tokens of those nodes; 0 past the end
    length_B: Tensor  # int64; nodes on the path, the root included: 1 or more
    bonus_B: Tensor  # int64; the target's own token after the path: the next root
    has_nan_B: Tensor | None = None  # bool; rows whose scores contain NaN; None: verification did not check
    # all of this as `Cycle.host_result_BX`, if verification has made it
    host_result_BX: Tensor | None = None


Failures = Mapping[tuple[int, int], EyasError]  # (row, node) -> why the node has no distribution


@dataclass(frozen=True)
class Cycle:
    """The result of one cycle; its tensors are on the device."""

    draft: Draft
    output: TargetOutput
    scores_BNV: Tensor  # float32, or logits in their own dtype if nothing changes them
    verdict: Verdict
    # int64; all that the host reads, in one transfer: path length, bonus, NaN flag, P tokens, P
    # path nodes
    host_result_BX: Tensor
    failures: Failures  # nodes without a distribution
    logprobs_BPX: Tensor | None = None  # `logprobs.path_logprobs`, if a row asks for it
    # waits until the asynchronous copy of `host_result_BX` has arrived; None: there is no copy in
    # flight
    wait_for_copy: Callable[[], None] | None = None

    def read_on_host(self) -> list[list[int]]:
        """Wait for the cycle's end, and return `host_result_BX` as lists."""
        if self.wait_for_copy is not None:
            self.wait_for_copy()
        return self.host_result_BX.tolist()

    def first_failure(self, row: int, path: Sequence[int]) -> tuple[int, EyasError | None]:
        """Return how many nodes of the row's path have a distribution, up to the first that has none; and why
        that one has none."""
        for place, node in enumerate(path if self.failures else ()):
            if (error := self.failures.get((row, node))) is not None:
                return place, error
        return len(path), None


def unpack_verdict(host_result_BX: Tensor) -> Verdict:
    """Return the verdict from the columns of `Cycle.host_result_BX`."""
    P = (host_result_BX.shape[1] - 3) // 2
    length_B, bonus_B, has_nan_B = host_result_BX[:, :3].unbind(1)
    return Verdict(
        host_result_BX[:, 3 + P :], host_result_BX[:, 3 : 3 + P], length_B, bonus_B, has_nan_B, host_result_BX
    )


def matching_nodes(draft: Draft, other: Draft) -> Tensor:
    """Return for each node of `other` the node of `draft` with the same path of tokens, int64 [B, M]; -1 where there
    is none.

    The roots match each other. Other nodes match only if both may be accepted.
    """
    tree, other_tree = draft.tree, other.tree
    acceptable_BM = other_tree.acceptable_BN & (other_tree.parents_BN >= 0)
    same_token_BMN = (
        (other.tokens_BN[:, :, None] == draft.tokens_BN[:, None])
        & acceptable_BM[..., None]
        & tree.acceptable_BN[:, None]
    )
    match_BM = torch.where(other_tree.parents_BN < 0, 0, -1)
    # each round matches one more level: parents before children
    for _ in range(min(tree.max_depth, other_tree.max_depth)):
        parent_BM = match_BM.gather(1, other_tree.parents_BN.clamp(min=0))
        same_path_BMN = (
            same_token_BMN & (parent_BM >= 0)[..., None] & (tree.parents_BN[:, None] == parent_BM[..., None])
        )
        match_BM = torch.where(same_path_BMN.any(-1), same_path_BMN.int().argmax(-1), match_BM)
    return match_BM


def merge(draft: Draft, other: Draft, match_BM: Tensor | None = None) -> Draft:
    """Merge two trees with the same root into one of N + M - 1 nodes: the nodes of `draft`, then the nodes
    of `other` without its root.

        0 --- 1:a --- 2:b     and     0 --- 1:a --- 2:c     are     0 --- 1:a --- 2:b         node 3, the second tree's `a`, is padding
                                                                         |---- 4:c

    Where both have a path of the same tokens, the node of `other` becomes padding, and its children
    become children of the node of `draft`. A merged tree has no q, so it is verified as a
    deterministic tree even if its children were drawn. It has `log_q_BN` if both trees have it.

    Args:
        match_BM: `matching_nodes(draft, other)`, if it is known already.
    """
    match_BM = matching_nodes(draft, other) if match_BM is None else match_BM
    N, M = draft.tree.nodes, other.tree.nodes
    # in the merged tree
    number_BM = torch.where(match_BM >= 0, match_BM, torch.arange(N - 1, N + M - 1, device=match_BM.device))
    parents_BM = number_BM.gather(1, other.tree.parents_BN.clamp(min=0))

    def join(first_BN: Tensor, second_BM: Tensor) -> Tensor:
        return torch.cat([first_BN, second_BM[:, 1:]], dim=1)

    log_q_BN = None
    if draft.log_q_BN is not None and other.log_q_BN is not None:
        log_q_BN = join(draft.log_q_BN, other.log_q_BN)
    tree = Tree.build(
        join(draft.tree.parents_BN, parents_BM),
        max(draft.tree.max_depth, other.tree.max_depth),
        join(draft.tree.acceptable_BN, other.tree.acceptable_BN & (match_BM < 0)),
    )
    return Draft(tree, join(draft.tokens_BN, other.tokens_BN), log_q_BN)


def build_trie(chains: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return (parents, tokens) of the trie of chains, in order; parent -1 is the root."""
    parents, tokens, known = list[int](), list[int](), dict[tuple[int, int], int]()
    for chain in chains:
        at = -1
        for token in chain:
            if (at, token) not in known:
                known[at, token] = len(tokens)
                parents.append(at)
                tokens.append(token)
            at = known[at, token]
    return parents, tokens


# A static tree: for each node its path from the root, as ranks among siblings; (0, 1) is the second
# child of the root's first child.
Choices = tuple[tuple[int, ...], ...]


def padded_nodes(drafted: int) -> int:
    """Return the nodes of a tree with room for the root and `drafted` nodes: 1, 2, 3, 5, 9, 17, ..., so
    that there are few shapes."""
    nodes = 1
    while nodes <= drafted:
        nodes = 2 * nodes - (nodes > 1)
    return nodes


def chain_choices(depth: int) -> Choices:
    """Return the static tree that is a chain of `depth` draft tokens."""
    return tuple((0,) * d for d in range(1, depth + 1))


def check_choices(choices: Iterable[Sequence[int]]) -> Choices:
    """Sort the paths of a static tree by depth, then rank; raise OptionError if they do not form a tree.

    A path lists, from the root down, the rank of each node among its parent's children: (0,), (1,), (0, 0), ...
    """
    paths = sorted({tuple(c) for c in choices}, key=lambda c: (len(c), c))
    known = set(paths)
    for path in paths:
        if not path or any(not is_whole(rank) or rank < 0 for rank in path):
            raise OptionError(f"tree choices: {list(path)} is not a list of ranks (whole numbers from 0)")
        if len(path) > 1 and path[:-1] not in known:
            raise OptionError(f"tree choices: {list(path)} has no parent; add {list(path[:-1])}")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            raise OptionError(f"tree choices: {list(path)} has no elder sibling; add {[*path[:-1], path[-1] - 1]}")
    if not paths:
        raise OptionError("tree choices: the tree is empty; give at least [0]")
    return tuple(paths)
