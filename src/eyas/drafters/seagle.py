"""seagle: EAGLE-3 whose draft sees a window (SEAGLE, Exxa 2025; attention sinks, Xiao et al. 2023):
the first pairs and the last ones.

A draft head is trained on short texts and fails beyond their length; the target does not. So the
draft's cache keeps `sink` + `size` pairs, rotated by their index in the cache, and never leaves the
positions that the head was trained on. Its time and memory then do not grow with the text. The
target sees everything, so the text stays the target's.
"""

from __future__ import annotations

from eyas.drafters import eagle3

__all__ = ["Method"]


class Method(eagle3.Method):
    """EAGLE-3 with a window; by default it is as long as the texts on which the head was trained."""

    summary = "SEAGLE: EAGLE-3 whose draft sees attention sinks and a rolling window, for long texts"
    default_window = True
