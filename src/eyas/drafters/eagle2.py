"""eagle2: EAGLE-2 (Li et al. 2024, arXiv 2406.16858): EAGLE-1's net, with a tree whose shape follows the draft's own confidence.

The net's probabilities foretell acceptance well, so the most probable nodes are expanded, and of everything drafted the most probable are
verified. The tree is chosen, not drawn: at any temperature the same tokens come out as by plain decoding with the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eyas.core.drafter import CycleInput, Shape
from eyas.core.tree import Draft
from eyas.drafters import eagle1
from eyas.drafters._eagle import EagleMethod
from eyas.drafters._grow import DynamicTree, Growth, grow_dynamic

__all__ = ["Method"]


@dataclass(frozen=True)
class Options(eagle1.HeadOptions):
    """Flags of eagle2."""

    tree: DynamicTree = field(default_factory=DynamicTree)


class Method(eagle1.Method):
    """EAGLE-1's net with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "EAGLE-2: EAGLE-1's net, dynamic tree by confidence"

    def plan(self) -> None:
        pass  # every shape that the options allow can be grown

    @property
    def longest_path(self) -> int:
        return 1 + int(self.options.tree.depth)

    @property
    def max_tree(self) -> Shape | None:
        tree: DynamicTree = self.options.tree
        return tree.shape

    @property
    def samples_children(self) -> bool:
        return False

    def grow(self, growth: Growth, roots: CycleInput) -> Draft:
        return grow_dynamic(growth, roots, self.options.tree)

    def describe(self) -> dict[str, Any]:
        return {**self.options.tree.describe(), **EagleMethod.describe(self)}
