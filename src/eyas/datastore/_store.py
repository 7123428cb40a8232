"""Look-ups in all segments: the longest match of a context in any of them, and an even sample of
its continuations.

Shapes: S matches, D tokens after a match. This module knows no tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.datastore._manifest import DEPTH, Manifest, map_segment
from eyas.datastore._segment import Segment, dtype_for, join_documents, separator_of
from eyas.datastore._suffixes import Array

__all__ = ["Datastore", "Matches"]


@dataclass(frozen=True)
class Matches:
    """The occurrences of a context's suffix in a datastore, and their continuations."""

    length: int  # tokens of the suffix
    count: int  # occurrences
    following_SD: Array  # tokens after an even sample of them, sorted; `separator` from the end of a document on


class Datastore:
    """Looks contexts up. A match and its continuation have at most DEPTH tokens together, as the
    suffixes are sorted to that depth.
    """

    def __init__(self, segments: Sequence[Segment], vocab_size: int) -> None:
        """`vocab_size`: above all tokens in the segments."""
        self.segments = tuple(segments)
        self.vocab_size = vocab_size
        self.separator = separator_of(self.segments[0].tokens_T.dtype)

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """Open a folder that `build` wrote. InputError when there is none, or files are missing or
        of another size.
        """
        manifest = Manifest.read(folder)
        manifest.check(folder)
        return cls([Segment(*map_segment(folder, stored)) for stored in manifest.segments], manifest.largest_token + 1)

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
        """A datastore in memory."""
        return cls([Segment.of(join_documents(documents, dtype_for(vocab_size)), DEPTH)], vocab_size)

    def look_up(self, context: Sequence[int], shortest: int, longest: int, depth: int, most: int) -> Matches | None:
        """The longest suffix of `context` that the datastore contains, with its continuations.

        Args:
            shortest, longest: bounds of the suffix's number of tokens.
            depth: tokens of a continuation; longest + depth is at most DEPTH.
            most: continuations of a frequent suffix; they are an even sample of all.

        Returns:
            None when the suffix of `shortest` tokens does not occur.
        """
        assert longest + depth <= DEPTH
        spans = []
        for segment in self.segments:
            span = segment.longest(context, shortest, longest)
            if span is not None:
                shortest = span.length
                spans.append((segment, span))
        best = [(segment, span) for segment, span in spans if span.length == shortest]
        if not best:
            return None
        counts = [span.end - span.begin for _, span in best]
        bounds, total = np.cumsum([0, *counts]), sum(counts)
        chosen_S = np.arange(total) if total <= most else np.arange(most) * total // most
        cuts = np.searchsorted(chosen_S, bounds)
        parts = [
            segment.following(span, chosen_S[cuts[i] : cuts[i + 1]] - bounds[i], depth)
            for i, (segment, span) in enumerate(best)
        ]
        following_SD = parts[0] if len(parts) == 1 else _sorted(np.concatenate(parts))
        # no target can embed the values of a damaged file
        following_SD[following_SD >= self.vocab_size] = self.separator
        return Matches(shortest, total, following_SD)


def _sorted(rows_SD: Array) -> Array:
    """Rows sorted by their tokens, the first token first."""
    return rows_SD[np.lexsort(rows_SD.T[::-1])]
