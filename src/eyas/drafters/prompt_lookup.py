"""prompt_lookup: drafts the tokens that followed the last ones where they occurred earlier in the text (Prompt
Lookup Decoding, Saxena 2023; LLMA, Yang et al. 2023, arXiv 2304.04487).

The last n tokens, the longest n first, are looked up in the row's own prompt and output. The tokens that
followed them there are proposed as a chain. Several matches make a trie of chains. A match so near the end that
its copy would run past it goes on with the copy itself, as in LZ77: a repeated phrase is proposed whole.

It has no other text than the row's own. How probable a copied token is, it knows from the length of
the match alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from eyas.core.drafter import DraftSession
from eyas.core.features import Guess
from eyas.drafters._method import DraftMethod
from eyas.drafters._ngram import Index, MatchRates, TextSession
from eyas.drafters._options import check_choice, check_whole
from eyas.errors import OptionError

__all__ = ["Lookup", "Method", "NgramIndex"]


@dataclass(frozen=True)
class Lookup:
    """The length of the looked up text, and the size of the draft tree."""

    longest: int = 3
    """Most tokens that are looked up."""
    shortest: int = 1
    """Fewest tokens that are looked up, when longer ones were not found."""
    depth: int = 10
    """Draft tokens that a match proposes."""
    matches: int = 1
    """Most matches that are proposed, as a trie."""
    pick: Literal["newest", "oldest"] = "newest"
    """Which matches, of several."""

    def __post_init__(self) -> None:
        check_whole("lookup", 1, longest=self.longest, shortest=self.shortest, depth=self.depth, matches=self.matches)
        if self.shortest > self.longest:
            raise OptionError(f"lookup.shortest is {self.shortest}, more than lookup.longest, {self.longest}")
        check_choice("lookup.pick", self.pick, ("newest", "oldest"))


@dataclass(frozen=True)
class Options:
    """Options of prompt_lookup."""

    lookup: Lookup = field(default_factory=Lookup)


class NgramIndex(Index):
    """The places after every n-gram of the text, in order."""

    def __init__(self, options: Lookup) -> None:
        self.options = options
        super().__init__()

    def _clear(self) -> None:
        self.tokens, self.rates = list[int](), MatchRates()
        self.places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def _newest(self) -> list[tuple[int, ...]]:
        """Return the n-grams that end with the text, the longest first."""
        lengths = range(min(self.options.longest, len(self.tokens)), self.options.shortest - 1, -1)
        return [tuple(self.tokens[-n:]) for n in lengths]

    def append(self, token: int) -> None:
        length, picked = self._matches()
        if picked:
            self.rates.count(length, self.tokens[picked[0]] == token)
        self.tokens.append(token)
        for ngram in self._newest():
            self.places[ngram].append(len(self.tokens))

    def _matches(self) -> tuple[int, list[int]]:
        """Return the length of the longest match, and the places after it that are picked."""
        for ngram in self._newest():
            if len(places := self.places[ngram]) > 1:
                end, matches = len(places) - 1, self.options.matches  # the last place is the end of the text
                newest = self.options.pick == "newest"
                return len(ngram), places[max(0, end - matches) : end][::-1] if newest else places[: min(end, matches)]
        return 0, []

    def guesses(self, least: float = 0.0) -> list[Guess]:
        length, picked = self._matches()
        trie, guesses = dict[tuple[int, int], int](), list[Guess]()
        for number, place in enumerate(picked):
            node, period = 0, len(self.tokens) - place
            for k in range(self.options.depth):
                token = self.tokens[place + k % period]
                chance = self.rates.chance(min(length + k, self.options.longest))
                if (node, token) not in trie:
                    # a later match is right only where the ones before it are wrong
                    guesses.append(Guess(node, token, math.log(chance) + number * math.log(1 - chance)))
                    trie[node, token] = len(guesses)
                node = trie[node, token]
        return guesses


class Method(DraftMethod):
    """The tokens that followed the last ones earlier in the row's own text."""

    Options: ClassVar[type] = Options
    summary = "prompt lookup (PLD, LLMA): copies what followed the last tokens earlier in the text"
    model_free = chooses_nodes = True

    def open(self, rows: int) -> DraftSession:
        options: Lookup = self.options.lookup
        return TextSession(
            rows, lambda: NgramIndex(options), 1 + options.matches * options.depth, options.depth, scored=False
        )

    def describe(self) -> dict[str, Any]:
        options: Lookup = self.options.lookup
        kind = "chain" if options.matches == 1 else "trie"
        return {"kind": kind, "nodes": 1 + options.matches * options.depth, "depth": options.depth}
