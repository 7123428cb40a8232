"""A text that probably comes, as a draft: `Request.prediction`, called Predicted Outputs by OpenAI.

The answer is followed through the predicted text:

    prediction    a b c d e f g h i
    answer        a b c                 follows: `d e f ...` is drafted, the more of it the longer the answer has followed
    answer        a b c X               leaves it: X may stand for d, or be inserted: both `e f ...` and `d e ...` are drafted
    answer        a b c X Y g h         finds its place again: the place where the longest end of the answer stands in the prediction,
                                        of several the one nearest to where it left

Nothing of it is trusted: a draft changes how many tokens a cycle emits, never which.
This module knows no requests and no trees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Guess", "Prediction"]

MAX_MATCH = 32  # tokens of the answer's end that are looked up
FIRST_GUESS_TOKENS = 8  # tokens that are drafted before the answer has begun
# Within so many tokens after the answer has left the prediction, it may come back to it: words were
# replaced or inserted.
MAX_MISSED_TOKENS = 4


class Guess(NamedTuple):
    """A continuation of the text."""

    tokens: list[int]
    chance: float  # estimate that the target draws a token of it, given those before


class Prediction:
    """The place of one answer in its predicted text.

    Args:
        most: tokens of a guess, at most.
    """

    def __init__(self, text: Sequence[int], most: int) -> None:
        self.text, self.most = list(text), most
        self.place = 0  # index of the token that is expected next
        self.matched = 0  # how many tokens before `place` are the answer's end, up to MAX_MATCH
        self.missed = 0  # tokens of the answer since it left the prediction
        self._answer: list[int] = []  # its end, MAX_MATCH tokens
        self._behind: defaultdict[int, list[int]] = defaultdict(list)  # token -> the indices behind each of its places
        for index, token in enumerate(self.text, start=1):
            self._behind[token].append(index)

    def read(self, token: int) -> None:
        """The answer goes on with this token."""
        self._answer = [*self._answer[1 - MAX_MATCH :], token]
        if not self.missed and self.text[self.place : self.place + 1] == [token]:
            self.place += 1
            self.matched = min(self.matched + 1, MAX_MATCH)
            return
        self.missed += 1
        found = [
            (self._common_end(index), -abs(index - self.place - self.missed), index)
            for index in self._behind.get(token, ())
        ]
        if found:
            self.matched, _, self.place = max(found)
            self.missed = 0
        else:
            self.matched = 0

    def _common_end(self, index: int) -> int:
        """How many tokens before `index` of the prediction are the end of the answer."""
        length, most = 0, min(index, len(self._answer))
        while length < most and self.text[index - 1 - length] == self._answer[-1 - length]:
            length += 1
        return length

    def guesses(self) -> list[Guess]:
        """Guesses at the next tokens, the most probable first."""
        if self.missed:
            places = (
                sorted({self.place + self.missed, self.place}, reverse=True) if self.missed <= MAX_MISSED_TOKENS else []
            )
            return [
                Guess(self.text[place : place + MAX_MISSED_TOKENS], 0.3) for place in places if place < len(self.text)
            ]
        started = self.matched or not self.place
        count = min(self.most, FIRST_GUESS_TOKENS if not self.matched else 2 * self.matched + 2) if started else 0
        tokens = self.text[self.place : self.place + count]
        return [Guess(tokens, (self.matched + 1) / (self.matched + 2))] if tokens else []
