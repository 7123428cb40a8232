"""rest: drafts the continuations that the end of the text has in a datastore (REST, He et al. 2023,
arXiv 2311.08252).

The longest end of the row's text that occurs in the datastore is found there, and its continuations make a
trie. A node's weight is the number of continuations that pass through it. The heaviest `nodes` are verified
(section 3.2 of the paper). Where a match has more continuations than `samples`, an even sample of them is
counted. A node's probability is its share of its parent's weight; below the root times the rate at which
matches of this length had the next token at all.

`eyas datastore build` makes a datastore. This module reads no other text than that, and knows no net.

Letters: S continuations, D their tokens, M nodes of the whole trie.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from eyas.checkpoints import Weights
from eyas.core.drafter import DraftSession
from eyas.core.features import Guess
from eyas.core.target import Target
from eyas.drafters import DraftMethod
from eyas.drafters.tools import Index, MatchRates, TextSession, check_whole
from eyas.errors import OptionError
from eyas_lab.datastore import DEPTH, Datastore

__all__ = ["Method", "Retrieval", "trie"]

RANDOM_TOKENS = 4096


@dataclass(frozen=True)
class Retrieval:
    """The length of the looked up text, and the size of the draft tree."""

    longest: int = 16
    """Most tokens that are looked up."""
    shortest: int = 2
    """Fewest tokens that are looked up, when longer ones were not found."""
    samples: int = 512
    """Continuations that are counted, of however many there are."""
    nodes: int = 60
    """Verified per cycle, the root included."""
    depth: int = 10
    """Most draft tokens on a path."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("longest", "shortest", "samples", "nodes", "depth")}
        check_whole("rest", 1, **values)
        if self.shortest > self.longest:
            raise OptionError(f"rest.shortest is {self.shortest}, more than rest.longest, {self.longest}")
        if self.longest + self.depth > DEPTH:
            raise OptionError(
                f"rest.longest + rest.depth may be {DEPTH}, the depth to which a datastore is sorted; they are {self.longest + self.depth}"
            )


@dataclass(frozen=True)
class Options:
    """Options of rest."""

    datastore: str | None = None
    """Folder that `eyas datastore build` made."""
    rest: Retrieval = field(default_factory=Retrieval)


def trie(following_SD: np.ndarray[Any, Any], separator: int, max_nodes: int) -> list[Guess]:
    """Return the `max_nodes` heaviest nodes of the trie of these rows, which are sorted; at equal weight the
    shallower one, then the first.

    In sorted rows a node is a run of rows that agree up to its depth. So a node begins where a row differs from
    its predecessor in that column or an earlier one. A parent is as heavy as its child, and shallower: it is
    kept whenever its child is.
    """
    S, D = following_SD.shape
    begins_SD = np.ones((S, D), bool)
    np.logical_or.accumulate(following_SD[1:] != following_SD[:-1], axis=1, out=begins_SD[1:])
    begins_DS = begins_SD.T
    # the node of each row at each depth: all of depth 1, then all of depth 2
    number_DS = np.cumsum(begins_DS).reshape(D, S) - 1
    start_M = np.flatnonzero(begins_DS)
    weight_M = np.diff(start_M, append=D * S)
    depth_M, row_M = np.divmod(start_M, S)
    ended_SD = np.logical_or.accumulate(following_SD == separator, axis=1)
    weight_M = np.where(ended_SD[row_M, depth_M], 0, weight_M)
    lightness_M = (S - weight_M).astype(np.min_scalar_type(S))  # a small dtype, which numpy sorts by radix
    heaviest = np.sort(np.argsort(lightness_M, kind="stable")[:max_nodes])
    heaviest = heaviest[weight_M[heaviest] > 0]
    parent = np.where(depth_M[heaviest] > 0, number_DS[depth_M[heaviest] - 1, row_M[heaviest]], -1)
    place = np.where(parent < 0, 0, np.searchsorted(heaviest, parent) + 1)
    share = weight_M[heaviest] / np.where(parent < 0, S, weight_M[parent])
    columns = (place, following_SD[row_M[heaviest], depth_M[heaviest]], np.log(share))
    return [Guess(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


class DatastoreIndex(Index):
    """A row's text, looked up at its end."""

    def __init__(self, datastore: Datastore, options: Retrieval) -> None:
        self.datastore, self.options = datastore, options
        super().__init__()

    def _clear(self) -> None:
        self.tokens, self.rates = list[int](), MatchRates()
        self._guessed: tuple[int, set[int]] | None = None  # (length of the match, next tokens) at the end of the text

    def append(self, token: int) -> None:
        if self._guessed is not None:
            length, following = self._guessed
            self.rates.count(length, token in following)
        self.tokens.append(token)
        self._guessed = None

    def guesses(self, least: float = 0.0) -> list[Guess]:
        options, datastore = self.options, self.datastore
        matches = datastore.look_up(
            self.tokens[-options.longest :], options.shortest, options.longest, options.depth, options.samples
        )
        if matches is None or options.nodes == 1:
            return []
        guesses = trie(matches.following_SD, datastore.separator, options.nodes - 1)
        self._guessed = matches.length, {guess.token for guess in guesses if not guess.parent}
        rate = math.log(self.rates.chance(matches.length))
        return [guess if guess.parent else guess._replace(logp=guess.logp + rate) for guess in guesses]


class Method(DraftMethod):
    """Retrieval from a datastore (REST)."""

    Options: ClassVar[type] = Options
    summary = "REST: what followed the end of the text in a datastore (--datastore, made by `eyas datastore build`)"
    model_free = chooses_nodes = True

    def __init__(self, target: Target, options: Any = None, datastore: Datastore | None = None) -> None:
        super().__init__(target, options)
        self.datastore = self._open() if datastore is None else datastore

    def _open(self) -> Datastore:
        if self.options.datastore is None:
            raise OptionError(
                "rest needs a datastore: make one with `eyas datastore build --data FILE --output FOLDER`, name it: --datastore"
            )
        folder = Path(self.options.datastore).expanduser()
        datastore = Datastore.open(folder)
        if datastore.vocab_size > self.target.vocab_size:
            largest, vocab = datastore.vocab_size - 1, self.target.vocab_size
            raise OptionError(
                f"{folder} was made with another tokenizer: it holds token {largest}, the target's vocabulary is 0..{vocab - 1}; "
                "build one with --target"
            )
        return datastore

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Method:
        """Raise OptionError without a datastore, InputError when it cannot be used."""
        return cls(target, options)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Method:
        """Return the method with a datastore of random tokens, in memory, unless the options name one."""
        options = options or cls.Options()
        if options.datastore is not None:
            return cls(target, options)
        rng = random.Random(seed)
        documents = [rng.choices(range(target.vocab_size), k=RANDOM_TOKENS // 8) for _ in range(8)]
        return cls(target, options, Datastore.from_documents(documents, target.vocab_size))

    def open(self, rows: int) -> DraftSession:
        options: Retrieval = self.options.rest
        return TextSession(
            rows, lambda: DatastoreIndex(self.datastore, options), options.nodes, options.depth, scored=True
        )

    def describe(self) -> dict[str, Any]:
        options: Retrieval = self.options.rest
        return {"kind": "trie", "nodes": options.nodes, "depth": options.depth, "datastore": self.options.datastore}
