"""eagle2: EAGLE-2 (Li et al. 2024, arXiv 2406.16858): EAGLE-1's net with a dynamic tree, which
follows the draft's confidence.

The draft's confidence predicts acceptance well. So the most probable paths are expanded, and of all
drafted nodes the most probable are verified. The tree is deterministic: at any temperature the tokens equal
plain decoding with the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eyas.drafters import eagle1
from eyas.drafters._eagle import DynamicEagle
from eyas.drafters._grow import DynamicTree

__all__ = ["Method"]


@dataclass(frozen=True)
class Options(eagle1.HeadOptions):
    """Options of eagle2."""

    tree: DynamicTree = field(default_factory=DynamicTree)


class Method(DynamicEagle, eagle1.Method):
    """EAGLE-1's net with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "EAGLE-2: EAGLE-1's net, dynamic tree by confidence"

    def chain(self, depth: int) -> Any:
        return eagle1.Method.chain(self, depth)

    def resolve_tree(self) -> None:
        """Do nothing: every shape that the options allow can be grown."""
