"""Padded batches of transformers as prompts. Letters: B rows, T tokens of the widest prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.errors import InputError

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """The rows of a batch, padded on the left to one width."""

    ids_BT: Tensor  # int64, with the padding
    padding: tuple[int, ...]  # tokens on the left of each row that are not part of its prompt
    prompts: tuple[tuple[int, ...], ...]  # without padding
    media: Mapping[str, Any] | None = None  # see `Request.media`; the batch has one row then

    @property
    def width(self) -> int:
        """Tokens of a row, the padding included."""
        return int(self.ids_BT.shape[1])

    @classmethod
    def from_call(
        cls,
        ids_BT: Tensor,
        mask_BT: Tensor | None,
        positions: Tensor | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Batch:
        """
        Args:
            mask_BT: 0 for padding; None without padding.
            positions: position_ids [B or 1, T], checked against the mask; with media [3, B, T], which are not
                checked.
            media: inputs of the model's forward that describe images.

        Raises:
            InputError: a mask that hides more than padding on the left, or other positions.
        """
        rows, width = ids_BT.shape
        if mask_BT is None:
            padding = [0] * rows
        else:
            mask = (mask_BT != 0).long()
            padding = (width - mask.sum(-1)).tolist()
            if mask.shape != ids_BT.shape or not all(
                bool(row[count:].all()) for row, count in zip(mask, padding, strict=True)
            ):
                raise InputError(
                    "attention_mask hides tokens on the right or inside of a prompt: pad on the left (padding_side='left')"
                )
        if any(count == width for count in padding):
            raise InputError("a prompt is empty: give at least one token that the attention mask shows")
        if media and (rows > 1 or padding[0]):
            raise InputError(f"{min(media)}: prompts with images are read one by one, without padding")
        if positions is not None and not (media and positions.ndim == 3):
            _check_positions(positions, padding, rows, width)
        prompts = tuple(tuple(row[count:]) for row, count in zip(ids_BT.tolist(), padding, strict=True))
        return cls(ids_BT, tuple(padding), prompts, media or None)


def _check_positions(positions: Tensor, padding: list[int], rows: int, width: int) -> None:
    """Raise InputError unless the prompts' tokens are counted from 0."""
    listed = positions.tolist() if positions.ndim == 2 else [[]]
    listed = listed * rows if len(listed) == 1 else listed
    expected = [list(range(width - count)) for count in padding]
    if [row[count:] for row, count in zip(listed, padding, strict=False)] != expected:
        raise InputError(
            "position_ids: eyas counts the tokens of a prompt from 0, as generate does by itself: leave them out"
        )
