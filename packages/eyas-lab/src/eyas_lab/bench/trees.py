"""One cycle's draft tree as text: the draft, and the nodes that the target accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eyas.core.engine import Decoder, Request, Step
from eyas.core.requests import check_steps
from eyas.drafters import Drafter

__all__ = ["Line", "Node", "deepest_cycle", "draw", "tree_lines", "tree_nodes"]

CYCLES = 12  # of an answer, from which the deepest tree is shown


class Node(NamedTuple):
    """A token of the picture. The root comes first, a parent before its children."""

    text: str
    parent: int | None
    kind: str  # "drafted" | "accepted" | "bonus", the target's own next token


class Line(NamedTuple):
    """A node of the tree."""

    accepted: bool
    lead: str  # branches of the drawing
    token: str
    bonus: str  # the target's own next token, after the last accepted node; else empty


def tree_nodes(step: Step, text: Callable[[int], str]) -> list[Node]:
    """Return the nodes of a Step's tree without padding, and last the bonus token, if the target
    added one.

    text: shows a token id.
    """
    assert step.draft is not None
    tree, tokens_N = step.draft.tree, step.draft.tokens_BN[step.row].tolist()
    parents_N, candidate_N = tree.parents_BN[step.row].tolist(), tree.acceptable_BN[step.row].tolist()
    kept = [n for n in range(len(parents_N)) if n == 0 or candidate_N[n]]
    place = {node: i for i, node in enumerate(kept)}
    nodes = [
        Node(text(tokens_N[n]), place.get(parents_N[n]), "accepted" if n in step.path else "drafted") for n in kept
    ]
    if len(step.tokens) == len(step.path):
        nodes.append(Node(text(step.tokens[-1]), place[step.path[-1]], "bonus"))
    return nodes


def tree_lines(nodes: Sequence[Node]) -> list[Line]:
    """Return the nodes in drawing order."""

    def visit(n: int, lead: str, last: bool) -> Iterator[Line]:
        children = [m for m, node in enumerate(nodes) if node.parent == n and node.kind != "bonus"]
        bonus = nodes[-1].text if nodes[-1].kind == "bonus" and nodes[-1].parent == n else ""
        branch = "" if n == 0 else "`-- " if last else "|-- "
        yield Line(nodes[n].kind == "accepted", lead + branch, nodes[n].text, bonus)
        below = "" if n == 0 else lead + ("    " if last else "|   ")
        for i, child in enumerate(children):
            yield from visit(child, below, i == len(children) - 1)

    return list(visit(0, "", True))


def draw(lines: Sequence[Line]) -> str:
    """Plain text: accepted nodes are marked with *, the target's own token comes after ->."""
    return "\n".join(
        f"{'*' if n.accepted else ' '} {n.lead}{n.token}" + (f"   -> {n.bonus}" if n.bonus else "") for n in lines
    )


def deepest_cycle(drafter: Drafter, request: Request) -> Step | None:
    """Return the cycle that accepted most draft tokens among the first CYCLES of an answer; None if nothing was
    drafted."""
    decoder, steps = Decoder(drafter.target, drafter), list[Step]()
    decoder.add(request)
    while not decoder.finished and len(steps) < CYCLES:
        steps += [step for step in check_steps(decoder.step()) if not step.prefill]
    drafted = [s for s in steps if s.draft is not None and s.draft.tree.nodes > 1]
    return max(drafted, key=lambda step: step.accepted, default=None)
