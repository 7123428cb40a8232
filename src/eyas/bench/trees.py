"""One cycle's draft tree as text: what was drafted, and what the target accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eyas.core.engine import Decoder, Request, Step
from eyas.drafters import Drafter

__all__ = ["Line", "deepest_cycle", "draw", "tree_lines"]


class Line(NamedTuple):
    """A node of the tree."""

    accepted: bool
    lead: str  # branches of the drawing
    token: str
    bonus: str  # the target's own next token, behind the last accepted node; else empty


def tree_lines(step: Step, tokenizer: Any) -> list[Line]:
    """The nodes of a Step's tree in drawing order; padding is left out."""
    assert step.draft is not None
    tree, tokens_N = step.draft.tree, step.draft.tokens_BN[step.row].tolist()
    parents_N, candidate_N = tree.parents_BN[step.row].tolist(), tree.candidate_BN[step.row].tolist()
    children: dict[int, list[int]] = {n: [] for n in range(len(parents_N))}
    for node, parent in enumerate(parents_N):
        if node and candidate_N[node]:
            children[parent].append(node)

    def text(token: int) -> str:
        return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)

    def visit(node: int, lead: str, last: bool) -> Iterator[Line]:
        branch = "" if node == 0 else "`-- " if last else "|-- "
        is_end = node == step.path[-1] and len(step.tokens) == len(step.path)
        yield Line(node in step.path, lead + branch, text(tokens_N[node]), text(step.tokens[-1]) if is_end else "")
        below = "" if node == 0 else lead + ("    " if last else "|   ")
        for i, child in enumerate(children[node]):
            yield from visit(child, below, i == len(children[node]) - 1)

    return list(visit(0, "", True))


def draw(lines: list[Line]) -> str:
    """Plain text: accepted nodes are marked with *, the target's own token stands behind ->."""
    return "\n".join(f"{'*' if n.accepted else ' '} {n.lead}{n.token}" + (f"   -> {n.bonus}" if n.bonus else "") for n in lines)


def deepest_cycle(drafter: Drafter, request: Request, cycles: int = 12) -> Step | None:
    """Of the first cycles of an answer, the one that accepted most draft tokens; None where nothing was drafted."""
    decoder, steps = Decoder(drafter.target, drafter), list[Step]()
    decoder.add(request)
    while not decoder.finished and len(steps) < cycles:
        steps += [step for step in decoder.step() if not step.prefill]
    drafted = [s for s in steps if s.draft is not None and s.draft.tree.nodes > 1]
    return max(drafted, key=lambda step: step.accepted, default=None)
