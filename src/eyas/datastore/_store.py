"""Segments together: the longest match of a context in any of them, and a fair sample of what followed it.

Letters: S matches, D tokens after a match. This module knows no tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.datastore._manifest import DEPTH, Manifest, mapped
from eyas.datastore._segment import Array, Segment, dtype_for, joined, separator_of

__all__ = ["Datastore", "Found"]


@dataclass(frozen=True)
class Found:
    """Where the end of a context stood, and what followed."""

    length: int  # tokens of the context that were found
    count: int  # how often
    following_SD: Array  # of some of these places, evenly chosen; sorted; `separator` stands for the end of a document and after it


class Datastore:
    """Looks contexts up. The depth to which it is sorted bounds what can be asked: match and continuation together."""

    def __init__(self, segments: Sequence[Segment], vocab_size: int) -> None:
        """`vocab_size`: every token in it is below that."""
        self.segments, self.vocab_size = tuple(segments), vocab_size
        self.separator = separator_of(self.segments[0].tokens_T.dtype)

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """Map a folder that `build` wrote; InputError when there is none, or files are missing or of another size."""
        manifest = Manifest.read(folder)
        manifest.check(folder)
        return cls([Segment(*mapped(folder, stored)) for stored in manifest.segments], manifest.largest_token + 1)

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
        """In memory."""
        return cls([Segment.of(joined(documents, dtype_for(vocab_size)), DEPTH)], vocab_size)

    def look_up(self, context: Sequence[int], shortest: int, longest: int, depth: int, most: int) -> Found | None:
        """The longest end of `context`, of `shortest` to `longest` tokens, and at most `most` of its continuations of `depth` tokens.

        None when it is found nowhere. longest + depth is at most DEPTH.
        """
        assert longest + depth <= DEPTH
        found, least = [], shortest
        for segment in self.segments:
            span = segment.longest(context, least, longest)
            if span is not None:
                least = span.length
                found.append((segment, span))
        best = [(segment, span) for segment, span in found if span.length == least]
        if not best:
            return None
        counts = [span.end - span.begin for _, span in best]
        bounds, total = np.cumsum([0, *counts]), sum(counts)
        chosen_S = np.arange(total) if total <= most else np.arange(most) * total // most
        cuts = np.searchsorted(chosen_S, bounds)
        parts = [segment.following(span, chosen_S[cuts[i] : cuts[i + 1]] - bounds[i], depth) for i, (segment, span) in enumerate(best)]
        return Found(least, total, parts[0] if len(parts) == 1 else _sorted(np.concatenate(parts)))


def _sorted(rows_SD: Array) -> Array:
    """Rows in the order of their tokens, the first token first."""
    return rows_SD[np.lexsort(rows_SD.T[::-1])]
