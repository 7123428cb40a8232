"""One cycle's draft tree as text: the draft, and the nodes that the target accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eyas.core.engine import Step

__all__ = ["Line", "Node", "tree_lines", "tree_nodes"]


class Node(NamedTuple):
    """A token of the picture. The root comes first, a parent before its children."""

    text: str
    parent: int  # -1 for the root
    kind: str  # "drafted" | "accepted" | "bonus", the target's own next token


class Line(NamedTuple):
    """A node of the tree."""

    accepted: bool
    lead: str  # branches of the drawing
    token: str
    bonus: str  # the target's own next token, after the last accepted node; else empty


def tree_nodes(step: Step, text: Callable[[int], str]) -> list[Node]:
    """Return the nodes of a Step's tree without padding, and last the bonus token, if the target added one.

    text: shows a token id.
    """
    assert step.draft is not None
    tree, row = step.draft.tree, step.row
    tokens_N, parents_N = step.draft.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    kept = [0, *(tree.acceptable_BN[row, 1:].nonzero()[:, 0] + 1).tolist()]
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    kinds = ("accepted" if node in step.path else "drafted" for node in kept)
    nodes = [Node(text(tokens_N[n]), place[parents_N[n]], kind) for n, kind in zip(kept, kinds, strict=True)]
    if len(step.tokens) == len(step.path):
        nodes.append(Node(text(step.tokens[-1]), place[step.path[-1]], "bonus"))
    return nodes


def tree_lines(nodes: Sequence[Node]) -> list[Line]:
    """Return the nodes in drawing order."""

    def visit(n: int, lead: str, below: str) -> Iterator[Line]:
        children = [m for m, node in enumerate(nodes) if node.parent == n and node.kind != "bonus"]
        bonus = nodes[-1].text if (nodes[-1].parent, nodes[-1].kind) == (n, "bonus") else ""
        yield Line(nodes[n].kind == "accepted", lead, nodes[n].text, bonus)
        for child in children:
            is_last = child == children[-1]
            yield from visit(child, below + ("`-- " if is_last else "|-- "), below + ("    " if is_last else "|   "))

    return list(visit(0, "", ""))
