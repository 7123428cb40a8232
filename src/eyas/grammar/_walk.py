"""A request's constraint: a grammar's matcher, walked over draft trees.

The matcher is at the end of the accepted text. `mask` walks the tree depth first and leaves the
matcher where it was; nodes whose token their parent forbids are not visited, nor are nodes after
the end of the text.

Letters: N nodes, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.grammar._llguidance import LLMatcher
from eyas.grammar._vocabulary import Vocabulary

__all__ = ["GrammarConstraint"]


class GrammarConstraint:
    """The texts of one request (`core.features.Constraint`).

    The request is finished at the token that completes its text: an end-of-sequence token that would have
    to follow is not waited for.

    Args:
        eos: ids that may end the text where the grammar lets it end; those that are text themselves
            (stop tokens of a request) are text for the grammar.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, eos: Collection[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = sorted(token for token in eos if 0 <= token < vocabulary.size and not vocabulary.texts[token])
        self._ended = False
        # the tokens that may follow the accepted text (bool [V]), and whether it may end
        self._root: tuple[Tensor, bool] | None = None

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """See `Constraint.mask`."""
        nodes = len(parents)
        if nodes == 1 and not self._ended:
            allowed_V, may_end = self._next()
            allowed_1V, ends_1 = allowed_V[None].clone(), torch.tensor([may_end])
        elif self._ended:
            return torch.ones(nodes, self._vocabulary.size, dtype=torch.bool)
        else:
            allowed_1V, ends_1 = self._walk(parents, tokens)
        return self._with_eos(allowed_1V, ends_1)

    def _with_eos(self, allowed_NV: Tensor, ends_N: Tensor) -> Tensor:
        """Return the masks with the end-of-sequence ids, where the text may end and may go on. The
        rows of nodes that complete it stay empty."""
        allowed_NV[:, self._eos] |= (ends_N & allowed_NV.any(-1))[:, None]
        return allowed_NV

    def _walk(self, parents: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        children: list[list[int]] = [[] for _ in parents]
        texts, size = self._vocabulary.texts, self._vocabulary.size
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if parent >= 0 and token < size and texts[token]:
                children[parent].append(node)
        bits_NW = torch.full((len(parents), self._vocabulary.words), -1, dtype=torch.int32)
        self._matcher.walk(children, tokens, bits_NW)
        return self._vocabulary.allowed(bits_NW)

    def accept(self, tokens: Sequence[int]) -> None:
        """See `Constraint.accept`.

        Raises:
            InputError: the grammar forbids a token, which happens only where something else forbids
                all that it allows.
        """
        for token in tokens:
            if self._ended:
                return
            if token in self._eos:
                self._ended = True
            elif not self._matcher.accept(token):
                raise InputError(
                    f"token {token} cannot follow: what the constraint allows is forbidden by the request's other options"
                )
            self._root = None

    @property
    def finished(self) -> bool:
        """See `Constraint.finished`."""
        if not self._ended:
            allowed_V, _ = self._next()
            self._ended = not bool(allowed_V.any())
        return self._ended

    def forced(self, limit: int) -> list[int]:
        """See `Constraint.forced`. The last token is left out where text may follow: it may be a
        longer one then."""
        if limit < 1 or self.finished:
            return []
        text = self._matcher.forced(limit + 1)
        return self._vocabulary.split(text)[:-1][:limit] if text else []

    def _next(self) -> tuple[Tensor, bool]:
        if self._root is None:
            bits_1W = torch.full((1, self._vocabulary.words), -1, dtype=torch.int32)
            self._matcher.walk([[]], [0], bits_1W)
            allowed_1V, ends_1 = self._vocabulary.allowed(bits_1W)
            self._root = allowed_1V[0], bool(ends_1[0])
        return self._root
