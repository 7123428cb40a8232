"""suffix: drafts the tokens that followed the longest earlier occurrence of the end of the text (SAM-Decoding,
Hu et al. 2024, arXiv 2411.10666; SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

A suffix automaton of the row's own prompt and output is built token by token (Blumer et al. 1985).
Its suffix link from the end of the text *is* the longest earlier match. From there the most
probable continuations are expanded, best first, until the tree is full. The estimate is PPM's (Cleary, Witten
1984), from the counts so far:

    P(token | match)  =  (1 - escape) * share of the match's occurrences that the token followed
                         + escape * P(token | next shorter match)             for tokens that never followed the longer one
    escape            =  how often a match of this length was followed by something new, in this text so far (`MatchRates`)

so a long match proposes one long continuation and a short one many short ones.

It has no other text than the row's own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, NamedTuple

from eyas.core.drafter import DraftSession
from eyas.core.features import Guess
from eyas.drafters._method import DraftMethod
from eyas.drafters._ngram import Index, MatchRates, TextSession
from eyas.drafters._options import check_whole

__all__ = ["Method", "SuffixAutomaton", "SuffixOptions"]

# how many of the matches ending at a token are counted, longest first; bounds the work on
# repetitive texts
COUNTED = 32


@dataclass(frozen=True)
class SuffixOptions:
    """The size of the draft tree."""

    nodes: int = 16
    """Verified per cycle, the root included."""
    depth: int = 12
    """Most draft tokens on a path."""
    branch: int = 4
    """Most children that one match gives a node."""

    def __post_init__(self) -> None:
        check_whole("suffix", 1, nodes=self.nodes, depth=self.depth, branch=self.branch)


@dataclass(frozen=True)
class Options:
    """Options of suffix."""

    suffix: SuffixOptions = field(default_factory=SuffixOptions)


class _Match(NamedTuple):
    """An end of the text and of a node's path that occurs earlier in the text, from where it may go on."""

    node: int
    state: int
    length: int  # the state may hold longer substrings
    logp: float  # log-probability that none of `known` follows the node
    known: Mapping[int, int] = {}  # tokens that followed longer matches


class _Child(NamedTuple):
    """A continuation, and the match that it makes."""

    parent: int
    token: int
    state: int
    length: int
    logp: float  # log-probability given its parent


class SuffixAutomaton(Index):
    """All substrings of a text; those that end at the same places share a state. State 0 is the
    empty one.

    At most 2 states a token; appending costs O(1), amortised, and a bounded number of counts.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        super().__init__()

    def _clear(self) -> None:
        self.tokens = list[int]()
        self.next: list[dict[int, int]] = [{}]
        # the longest shorter substring that ends elsewhere too; the state's longest substring
        self.link, self.length = [-1], [0]
        self.count, self.latest = [0], [0]  # how often it occurs; where it ended last
        self.last = 0  # the state of the whole text
        self.rates = MatchRates()  # a match is right if a known token follows it

    def append(self, token: int) -> None:
        self._score(token)
        self.tokens.append(token)
        new = self._add_state({}, 0, self.length[self.last] + 1)
        state = self._redirect(self.last, token, None, new)
        if state >= 0:
            match = self.next[state][token]
            # only the shorter substrings of that state end here too
            if self.length[state] + 1 != self.length[match]:
                match = self._split(state, token, match)
            self.link[new] = match
        self.last = new
        for _ in range(COUNTED):
            self.count[new] += 1
            self.latest[new] = len(self.tokens)
            if (new := self.link[new]) == 0:
                break

    def _add_state(self, following: dict[int, int], link: int, length: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.latest.append(0)
        return len(self.link) - 1

    def _redirect(self, state: int, token: int, old: int | None, new: int) -> int:
        """Let `token` lead to `new` wherever it led to `old`, from `state` along the links; return the first state
        where it did not, or -1."""
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = new
            state = self.link[state]
        return state

    def _split(self, state: int, token: int, longer: int) -> int:
        short = self._add_state(dict(self.next[longer]), self.link[longer], self.length[state] + 1)
        self.count[short], self.latest[short] = self.count[longer], self.latest[longer]
        self._redirect(state, token, longer, short)
        self.link[longer] = short
        return short

    def _score(self, token: int) -> None:
        """Count whether this token followed the longest match."""
        match = self.link[self.last]
        if match > 0:
            self.rates.count(self.length[match], token in self.next[match])

    def guesses(self, least: float = 0.0) -> list[Guess]:
        """Return the most probable continuations, the best first, as many as the tree holds."""
        start, guesses, depths, number = self.link[self.last], list[Guess](), [0], count()
        max_cost = -math.log(least) if least > 0 else math.inf
        waiting = list[tuple[float, int, _Match | _Child]]()  # cost; of equals the older

        def wait(cost: float, item: _Match | _Child) -> None:
            if cost <= max_cost:
                heapq.heappush(waiting, (cost, next(number), item))

        if start > 0 and self.rates.chance(self.length[start]) >= least:
            wait(0.0, _Match(0, start, self.length[start], 0.0))
        while waiting and len(depths) < self.options.nodes:
            cost, _, best = heapq.heappop(waiting)
            if isinstance(best, _Match):
                for continuation in self._open(best):
                    wait(cost + best.logp - continuation.logp, continuation)
            else:
                guesses.append(Guess(best.parent, best.token, best.logp))
                depths.append(depths[best.parent] + 1)
                if depths[-1] < self.options.depth:
                    wait(cost, _Match(len(guesses), best.state, best.length, 0.0))
        return guesses

    def _open(self, match: _Match) -> list[_Match | _Child]:
        """Return the match's continuations, the most frequent first (of equals the latest), then the next
        shorter match."""
        following, state, length = self.next[match.state], match.state, match.length
        fresh = [
            (self.count[after], self.latest[after], token, after)
            for token, after in following.items()
            if token not in match.known
        ]
        continuations, passed = list[_Match | _Child](), 0.0
        if fresh:
            chance, total = self.rates.chance(length), sum(occurs for occurs, *_ in fresh)
            passed, log_share = math.log(1 - chance), math.log(chance / total)
            for occurs, _, token, after in heapq.nlargest(self.options.branch, fresh):
                continuations.append(
                    _Child(match.node, token, after, length + 1, match.logp + log_share + math.log(occurs))
                )
        # what follows a match follows all that are shorter
        while state > 0 and len(self.next[state]) == len(following):
            state = self.link[state]
        if state > 0:
            continuations.append(_Match(match.node, state, self.length[state], match.logp + passed, following))
        return continuations


class Method(DraftMethod):
    """The longest earlier match of the end of the text, and its continuation."""

    Options: ClassVar[type] = Options
    summary = "suffix automaton over prompt and output (SAM-Decoding, SuffixDecoding): the most probable continuations of the longest match"
    model_free = chooses_nodes = True

    def open(self, rows: int) -> DraftSession:
        options: SuffixOptions = self.options.suffix
        return TextSession(rows, lambda: SuffixAutomaton(options), options.nodes, options.depth, scored=True)

    def describe(self) -> dict[str, Any]:
        options: SuffixOptions = self.options.suffix
        return {"kind": "suffix", "nodes": options.nodes, "depth": options.depth, "branch": options.branch}
