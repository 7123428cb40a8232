"""A text that the answer probably repeats (OpenAI's Predicted Outputs), from which its tokens are drafted.

The answer is followed through the predicted text:

    prediction    a b c d e f g h i
    answer        a b c                 follows it: `d e f ...` is drafted, the more tokens the longer the answer has followed
    answer        a b c X               leaves it: X may replace d, or be inserted: both `e f ...` and `d e ...` are drafted
    answer        a b c X Y g h         comes back: to the position before which the prediction has the longest end of the answer;
                                        of several, to the one nearest to where it left

The prediction is only drafted: it changes how many tokens a cycle emits, never which. `Step.extra`
has "predicted": how many of the accepted draft tokens it proposed.

This module knows no trees and no method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.core.features import MAX_CONTINUATION, Continuation, RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Cycle
from eyas.errors import InputError

__all__ = ["Predicted", "Prediction"]

MAX_MATCH = 32  # tokens of the answer's end that are looked up
FIRST_TOKENS = 8  # tokens that are drafted before the answer has begun
# Until the answer has left the prediction by more tokens than this, words may have been replaced or
# inserted, and the prediction is still drafted.
MAX_UNMATCHED_TOKENS = 4


@dataclass(frozen=True)
class Predicted(RequestFeature):
    """The predicted text of a request."""

    tokens: tuple[int, ...]

    def check(self, request: Request, vocab: int) -> None:
        outside = [token for token in self.tokens if not 0 <= token < vocab]
        if outside:
            raise InputError(
                f"prediction: token id {outside[0]} is outside the target's vocabulary of {vocab} (0..{vocab - 1})"
            )

    def open(self, request: Request, target: Target) -> RowFeature:
        return _RowPrediction(Prediction(self.tokens, MAX_CONTINUATION), len(request.prompt))


class _RowPrediction(RowFeature):
    """The prediction of one row's text."""

    guides = True

    def __init__(self, prediction: Prediction, read: int) -> None:
        self.prediction, self.read = prediction, read
        self.proposed: list[list[int]] = []  # in the current cycle

    def continuations(self, text: Sequence[int]) -> list[Continuation]:
        for token in text[self.read :]:
            self.prediction.read(token)
        self.read = len(text)
        found = self.prediction.continuations()
        self.proposed = [continuation.tokens for continuation in found]
        return found

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        accepted = list(tokens[: max(0, len(path) - 1)])
        longest = 0
        for proposed in self.proposed:
            while longest < min(len(proposed), len(accepted)) and proposed[: longest + 1] == accepted[: longest + 1]:
                longest += 1
        return {"predicted": longest} if longest else {}


class Prediction:
    """The position of one answer in its predicted text.

    Args:
        max_tokens: most tokens of a continuation.
    """

    def __init__(self, text: Sequence[int], max_tokens: int) -> None:
        self.text, self.max_tokens = list(text), max_tokens
        self.position = 0  # index of the token that is expected next
        self.matched = 0  # how many tokens before `position` are the answer's end, up to MAX_MATCH
        self.unmatched = 0  # tokens of the answer since it left the prediction
        self._answer: list[int] = []  # the answer's last MAX_MATCH tokens
        # token -> the indices right after each of its occurrences
        self._next_positions: defaultdict[int, list[int]] = defaultdict(list)
        for index, token in enumerate(self.text, start=1):
            self._next_positions[token].append(index)

    def read(self, token: int) -> None:
        """Follow one emitted token: on from the place in the predicted text, or to the likeliest place where it
        occurs."""
        self._answer = [*self._answer[1 - MAX_MATCH :], token]
        if not self.unmatched and self.text[self.position : self.position + 1] == [token]:
            self.position += 1
            self.matched = min(self.matched + 1, MAX_MATCH)
            return
        self.unmatched += 1
        found = [
            (self._common_end(index), -abs(index - self.position - self.unmatched), index)
            for index in self._next_positions.get(token, ())
        ]
        if found:
            self.matched, _, self.position = max(found)
            self.unmatched = 0
        else:
            self.matched = 0

    def _common_end(self, index: int) -> int:
        """Return how many tokens before `index` of the prediction are the end of the answer."""
        length, most = 0, min(index, len(self._answer))
        while length < most and self.text[index - 1 - length] == self._answer[-1 - length]:
            length += 1
        return length

    def continuations(self) -> list[Continuation]:
        """Return possible continuations of the answer, the most probable first."""
        if self.unmatched:
            if self.unmatched > MAX_UNMATCHED_TOKENS:
                return []
            positions = sorted({self.position + self.unmatched, self.position}, reverse=True)
            texts = (self.text[position : position + MAX_UNMATCHED_TOKENS] for position in positions)
            return [Continuation(text, 0.3) for text in texts if text]
        started = self.matched or not self.position
        count = min(self.max_tokens, FIRST_TOKENS if not self.matched else 2 * self.matched + 2) if started else 0
        tokens = self.text[self.position : self.position + count]
        return [Continuation(tokens, (self.matched + 1) / (self.matched + 2))] if tokens else []
