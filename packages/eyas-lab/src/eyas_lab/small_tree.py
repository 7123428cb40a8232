"""The tree with which benches and the demo draft for the embedded model, unless a tree is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["with_small_tree"]

# The fastest static tree in `make bench`: on a CPU in float32 every verified node costs time.
# Dynamic trees adapt (eyas.adaptive).
SMALL_TREE = {"tree.choices": "chain-3"}


def with_small_tree(asked: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method with a static tree; the small tree unless they name one.

    Args:
        usual: the method's options and their defaults.
    """
    if asked.keys() & {*SMALL_TREE, "tree.nodes", "tree.depth", "tree.branch", "depth", "dynamic.nodes"}:
        return dict(asked)
    return {**{name: value for name, value in SMALL_TREE.items() if name in usual}, **asked}
