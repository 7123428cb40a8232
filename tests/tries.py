"""A toy constraint: a trie of texts whose branches follow from the tokens before."""

from collections.abc import Sequence

import torch
from torch import Tensor

import zoo

VOCAB, EOS, LONGEST = zoo.VOCAB, 2, 9


class Trie:
    """Texts of up to LONGEST tokens, ended by EOS or (`ends_by_itself`) by length. Insists on `Constraint`'s rules."""

    def __init__(self, ends_by_itself: bool = False) -> None:
        self.ends_by_itself = ends_by_itself
        self.text: tuple[int, ...] = ()
        self.masks = 0

    def children(self, text: tuple[int, ...]) -> list[int]:
        """The tokens that may follow; none behind the end."""
        if EOS in text or len(text) >= LONGEST:
            return []
        if len(text) == LONGEST - 1 and not self.ends_by_itself:
            return [EOS]
        place = 31 * sum(text) + 7 * len(text)
        if len(text) % 3 == 2:
            return [3 + place % (VOCAB - 3)]  # forced
        end = [EOS] if len(text) > 5 and not self.ends_by_itself else []
        return sorted({3 + (place + 13 * k) % (VOCAB - 3) for k in range(9)}) + end

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        assert list(parents[:1]) == [-1]
        assert not self.finished, "nothing is asked behind the end"
        assert all(-1 < parent < n for n, parent in enumerate(parents) if n)
        self.masks += 1
        mask_NV = torch.ones(len(parents), VOCAB, dtype=torch.bool)
        texts: list[tuple[int, ...] | None] = [self.text]
        for parent, token in zip(parents[1:], tokens[1:], strict=True):
            above = texts[parent]
            texts.append((*above, token) if above is not None and token in self.children(above) else None)
        for n, text in enumerate(texts):
            if text is not None and (after := self.children(text)):
                mask_NV[n] = False
                mask_NV[n, after] = True
        return mask_NV

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.children(self.text), "a token that is not allowed was emitted"
            self.text += (token,)

    @property
    def finished(self) -> bool:
        return EOS in self.text or (self.ends_by_itself and len(self.text) >= LONGEST)

    def forced(self, limit: int) -> list[int]:
        found = list[int]()
        while len(found) < limit and len(after := self.children((*self.text, *found))) == 1:
            found += after
        return found
