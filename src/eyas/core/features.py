"""The interface of request features: wishes of a request beyond its sampling, its length and its end.

A `RequestFeature` (core/requests.py) stands in `Request.features` and holds the wish. Its `open` makes the
`RowFeature` that follows one text. The loop knows these two classes and none of their subclasses, which are in
`eyas.features`, or yours:

    when                         the loop calls                what it is for
    the request is added         RequestFeature.check          refuse what cannot be served
    its prompt is read           prompt_logits, then open      see the logits after every token of the prompt
    a cycle drafts               continuations, guesses, mask  draft text that is likely, or must come; guide the growth of trees
    a cycle verifies             scores                        change the target's distribution at a node
    a token is emitted           accept                        follow the text, and end it
    a cycle's result is read     report                        what goes into `Step.extra`

A request without features costs nothing: "is anything special?" is the one question whether
`CycleInput.features` is empty. Penalties and limits of drafts are not features. Penalties are part of
`Sampling` and follow every node of a growing tree; limits decide whether a method runs at all.

**Open nodes.** Plain decoding asks constraints and logits processors about a text only while the text goes on. A
node of a tree is asked about under the same rule: neither the node nor one of its ancestors ends the text. Each of
these ends it:

    EOS, a stop token       the node's token is one
    a stop string           the node's token completes it
    the length              the request may have no further token; it fits the model's context
    a complete structure    the constraint allows nothing after the node (its feature sees that in the mask)

Stopping criteria of transformers are called with emitted texts only, so the texts that they end are not known
here. An error beyond such an end fails nothing: it counts when the emitted text reaches it.

This module knows no model and no method. Letters: N nodes of one row's tree, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.sampling import Sampling
from eyas.core.tree import Cycle
from eyas.errors import EyasError

__all__ = [
    "MAX_CONTINUATION", "Constraint", "Continuation", "Guess", "OpenNodes", "PromptLogits", "RowFeature", "RowNodes",
    "TextEnd",
]  # fmt: skip

MAX_CONTINUATION = 16  # tokens

# the nodes at which plain decoding could stand, each with the tokens from below the root to it
OpenNodes = Mapping[int, tuple[int, ...]]


class Continuation(NamedTuple):
    """Tokens that may follow the text of a row."""

    tokens: list[int]  # at most MAX_CONTINUATION
    chance: float  # estimated probability that the target draws a token of it, given those before


class Guess(NamedTuple):
    """A guessed continuation of a row's text, as a node of its tree; the first guess is node 1."""

    parent: int  # node number; 0 = the root
    token: int
    logp: float  # log of its estimated probability given its parent


class Constraint(Protocol):
    """The texts that one request may have. It follows the emitted tokens, so it serves one request, once."""

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return the tokens that may follow each node of a tree.

        Args:
            parents: the parent of each of N nodes, -1 for node 0, the root; each parent before its
                children.
            tokens: the token of each node. The root's has been accepted already, or is the prompt's
                last token.

        Returns:
            bool [N, V] on the CPU. No True for a node that completes the text, so that nothing may follow. All True
            for a node that the constraint forbids: one whose token its parent's row excludes, or that is below such a
            node, or after the end of the text. Such nodes are never accepted.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the emitted tokens, in order, an EOS included. Called after every cycle, and after
        the first token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may follow the accepted tokens: the request then ends with "stop"."""
        ...

    def forced(self, limit: int) -> list[int]:
        """Return the tokens that must come next, at most `limit`; they may be drafted, and are verified
        like any draft."""
        ...


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
            acceptable: nodes that may be accepted; None for all of them.
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


class RowNodes(NamedTuple):
    """One row of a draft tree in plain numbers."""

    parents: Sequence[int]  # the parent of each node, which comes before it; -1 for node 0, the root
    tokens: Sequence[int]
    text: Sequence[int]  # the row's prompt and emitted tokens; the last one is the root
    open_nodes: OpenNodes  # the nodes at which plain decoding could stand


class PromptLogits:
    """Reads the logits of a whole prompt, chunk by chunk."""

    def read(self, logits_TV: Tensor, position: int) -> None:
        """Read the logits after the tokens from `position` on; those after the last one are the answer's first."""
        raise NotImplementedError

    def report(self) -> Mapping[str, Any]:
        """Return entries of `Step.extra` for the prompt's Step."""
        raise NotImplementedError


class RowFeature:
    """A feature of one row, from its prompt to its last token. Methods that are not overridden do nothing.

    Attributes:
        guides: the row's draft may hold `continuations`. Its tree is then verified as a deterministic
            one, so its ids equal plain decoding's with any draft.
        masks: `mask` says which tokens a net may draft. It forbids nothing in the text: `scores` must, too.
        has_scores: `scores` computes the row's distributions; the `RequestFeature` says so as well.
        reads_cycle: `report` reads the scores or logits of every node, so cycles are not recorded.
        top_tokens: `Cycle.logprobs_BPX` has the log-probabilities of at least so many most probable tokens;
            None: they are not wanted.
    """

    guides: bool = False
    masks: bool = False
    has_scores: bool = False
    reads_cycle: bool = False
    top_tokens: int | None = None

    def continuations(self, text: Sequence[int]) -> list[Continuation]:
        """Return possible continuations of the row's text, the most certain first."""
        return []

    def guesses(self, own: list[Guess], depth: int, least: float) -> list[Guess]:
        """Return the guesses from which a method that reads text alone may choose, parents before children.

        Args:
            own: the guesses of the method.
            depth: no guess may be deeper.
            least: guesses that are less probable, from the root on, may be left out.
        """
        return own

    def mask(self, nodes: RowNodes) -> tuple[Tensor, Mapping[int, EyasError]]:
        """Return the tokens that may follow each node, bool [N, V] on the CPU, and why nodes failed."""
        raise NotImplementedError

    def scores(
        self, logits_NV: Tensor, nodes: RowNodes, sampling: Sampling, adjustments: Adjustments | None
    ) -> tuple[Tensor, Mapping[int, EyasError]]:
        """Return the scores of the row's nodes, float32 [N, V], and the nodes that have none, with the reason.

        Args:
            logits_NV: the target's raw logits.
            adjustments: [N, ...], as for `core.sampling.apply_sampling`.
        """
        raise NotImplementedError

    def accept(self, token: int) -> bool:
        """Follow the emitted token; return whether the text ends with it."""
        return False

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        """Return entries of `Step.extra` for one cycle, or for the first token.

        Args:
            row: the row's number in the cycle.
            tokens: the emitted tokens.
            path: accepted nodes, root first, before the cut at stop and length; empty for the first token.
            finish: why the answer ended in this cycle; None if it continues.
        """
        return {}
