"""The texts that a head learns from: token ids and the target's features of them, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafters import Batch
from eyas.nn import Documents

__all__ = ["MAX_TEXT", "Text", "Texts"]

MAX_TEXT = 512  # tokens of one text; of a longer one the end is kept
MIN_COUNTED = 4  # tokens of an answer: from fewer there is nothing to learn


@dataclass(eq=False)
class Text:
    """Consecutive tokens of one request, and what the target made of them."""

    tokens: list[int]
    features_TF: Tensor
    answer: int  # index of the first token that the target wrote
    uses: int = 0  # how many steps have read it

    @property
    def bytes(self) -> int:
        """Bytes of its features."""
        return self.features_TF.numel() * self.features_TF.element_size()


class Texts:
    """The newest texts. The oldest ones leave when there are too many, and each leaves when it has been used often.

    Args:
        max_tokens, max_bytes: of all texts.
        max_uses: steps that read a text.
    """

    def __init__(self, max_tokens: int = 16_384, max_bytes: int = 256 * 2**20, max_uses: int = 4) -> None:
        self.max_tokens, self.max_bytes, self.max_uses = max_tokens, max_bytes, max_uses
        self.texts: list[Text] = []  # the oldest first

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def bytes(self) -> int:
        """Bytes of all texts."""
        return sum(text.bytes for text in self.texts)

    def add(self, text: Text) -> None:
        """Keep a text."""
        if len(text.tokens) - text.answer < MIN_COUNTED:
            return
        self.texts.append(text)
        while self.texts and (self.tokens > self.max_tokens or self.bytes > self.max_bytes):
            self.texts.pop(0)

    def clear(self) -> None:
        """Forget all texts."""
        self.texts = []

    def take(self, tokens: int) -> list[Text]:
        """Return texts of about so many tokens for one step: those that were used least, the newest first."""
        order = sorted(range(len(self.texts)), key=lambda i: (self.texts[i].uses, -i))
        taken, count = list[Text](), 0
        for i in order:
            if count >= tokens:
                break
            taken.append(self.texts[i])
            count += len(self.texts[i].tokens)
        for text in taken:
            text.uses += 1
        self.texts = [text for text in self.texts if text.uses < self.max_uses]
        return taken


def batch_of(texts: Sequence[Text], device: torch.device) -> Batch:
    """Return a batch in which the tokens that the target wrote count."""
    counted = [place >= text.answer for text in texts for place in range(len(text.tokens))]
    tokens_N = torch.tensor([token for text in texts for token in text.tokens], device=device)
    # features were made in inference mode, in which nothing can be learnt: this is a copy
    features_NF = torch.cat([text.features_TF for text in texts]).clone()
    documents = Documents(tuple(len(text.tokens) for text in texts))
    return Batch(tokens_N, features_NF, torch.tensor(counted, device=device), documents)
