"""The best static tree, against every tree there is; counting acceptance by rank."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.core.tree import Choices, check_choices
from eyas.errors import OptionError

sys.path.append(str(Path(__file__).parents[1] / "runs"))
from _optimal import count_ranks, measuring_choices, optimal_choices, rates_of, tree_value


def every_tree(nodes: int, depth: int, ranks: int) -> Iterator[Choices]:
    """All static trees of that many nodes, root not counted."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(paths, nodes):
        with contextlib.suppress(OptionError):
            yield check_choices(chosen)


@pytest.mark.quick("5-2-3-any", "5-2-3-falling", "4-3-2-any", "4-3-2-falling")
@pytest.mark.parametrize("falling", [True, False], ids=["falling", "any"])
@pytest.mark.parametrize(
    ("nodes", "depth", "ranks"), [(2, 3, 2), (4, 3, 2), (5, 2, 3), (6, 3, 2), (4, 2, 4), (3, 1, 4)]
)
def test_no_tree_is_better(nodes: int, depth: int, ranks: int, falling: bool) -> None:
    """Guards the dynamic program: its tree is worth as much as the best of all. Rates that do not fall with the rank,
    as counts of few cycles do, defeat taking the best node again and again. Brute force: no odds."""
    dice = random.Random(nodes * 100 + depth * 10 + ranks)
    for _ in range(4):
        rates = []
        for _ in range(dice.randint(1, depth)):
            cuts = sorted(dice.random() for _ in range(ranks))
            row = [b - a for a, b in itertools.pairwise([0.0, *cuts])]
            rates.append(sorted(row, reverse=True) if falling else row)
        found = optimal_choices(rates, nodes + 1, depth)
        assert len(found) == nodes
        assert max(map(len, found)) <= depth
        assert tree_value(found, rates) == pytest.approx(
            max(tree_value(tree, rates) for tree in every_tree(nodes, depth, ranks))
        )


def test_edges() -> None:
    """Guards ties, rates of zero, more nodes than fit, and nothing to choose from. Deterministic."""
    assert optimal_choices([[0.5]], 4, 9) == ((0,), (0, 0), (0, 0, 0))
    assert optimal_choices([[0.0, 0.0]], 3, 5) == ((0,), (1,))  # worth nothing, but asked for
    assert len(optimal_choices([[0.6, 0.2]], 99, 3)) == 2 + 4 + 8
    assert optimal_choices([[0.5, 0.1], [0.9, 0.0]], 4, 3) == ((0,), (0, 0), (0, 0, 0))
    assert tree_value(((0,), (1,), (0, 0)), [[0.5, 0.25]]) == 0.5 + 0.25 + 0.25
    for rates, nodes, depth in (([[0.5]], 1, 3), ([[0.5]], 5, 0), ([], 5, 5)):
        with pytest.raises(OptionError, match="root alone"):
            optimal_choices(rates, nodes, depth)


def test_counting() -> None:
    """Guards what counts as reached: parents with all their children, whose own acceptance does not
    count. Deterministic."""
    parents = [-1, 0, 0, 1, 1, 2]
    counts = count_ranks([(parents, [0, 1, 4]), (parents, [0, 2]), (parents, [0]), (parents, [0, 1])], 3, 2)
    assert counts == ([4, 2, 0], [[2, 1], [0, 1], [0, 0]])  # node 2 has one child only
    assert rates_of(counts) == [[0.5, 0.25], [0.0, 0.5]]


def test_measuring() -> None:
    """Guards that inner nodes have all children. Deterministic."""
    tree = measuring_choices(3, 3, 5)
    assert {len([c for c in tree if c[:-1] == parent]) for parent in {c[:-1] for c in tree}} == {3}
    assert len({c[:-1] for c in tree}) == 5
    assert max(map(len, tree)) == 3
    assert measuring_choices(4, 1, 5) == ((0,), (1,), (2,), (3,))
