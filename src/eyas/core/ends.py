"""Where a text ends, and so at which nodes of a draft tree plain decoding could stand.

Plain decoding asks constraints and logits processors about a text only while the text goes on. A
node of a tree is asked about under the same rule: neither the node nor one of its ancestors ends
the text. Each of these ends it:

    EOS, a stop token       the node's token is one
    a stop string           the node's token completes it
    the length              the request may have no further token; it fits the model's context
    a complete structure    the constraint allows nothing after the node (its feature sees that in the mask)

Stopping criteria of transformers are called with emitted texts only, so what they end is not known
here. What fails beyond such an end fails nothing: an error counts when the emitted text reaches it.

This module knows no tokenizer and no constraint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["OpenNodes", "TextEnd"]

# the nodes at which plain decoding could stand, each with the tokens from below the root to it
OpenNodes = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class TextEnd:
    """The conditions that end the text of one row. The row's newest token is the root of the tree.

    Attributes:
        eos: tokens that end the text, wherever `min_tokens` allows them.
        remaining: tokens that may still be emitted.
        stops_after: whether the text ends, by a stop string, with the last of these tokens, which
            follow the root. None: nobody knows beforehand.
    """

    eos: Collection[int] = frozenset()
    remaining: int = sys.maxsize
    stops_after: Callable[[Sequence[int]], bool] | None = None

    def open_nodes(
        self, parents: Sequence[int], tokens: Sequence[int], acceptable: Sequence[bool] | None = None
    ) -> OpenNodes:
        """Return the nodes at which plain decoding could stand, each after its parent; the root always.

        Args:
            parents: the parent of each node, which comes before it; -1 for node 0, the root.
            acceptable: nodes that may be accepted; None: all of them.
        """
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, len(parents)):
            above, token = paths.get(parents[node]), tokens[node]
            if above is None or (acceptable is not None and not acceptable[node]):
                continue
            path = (*above, token)
            ended = token in self.eos or len(path) >= self.remaining
            if not ended and not (self.stops_after is not None and self.stops_after(path)):
                paths[node] = path
        return paths
