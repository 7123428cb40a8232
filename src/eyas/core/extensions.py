"""The socket for properties of targets beyond layers with keys and values: recurrent state, prompts with
images, layers on several devices, quantised layers.

A module in the folder eyas/targets declares an extension by a class `Extension`, a subclass of
`TargetExtension`; an installed package by an entry point of the group "eyas.target_extensions". The core knows
none of them by name. `Target` makes those that apply to its model, and opens their `TargetState`s in each of
its sessions. Both base classes do nothing, so that an extension overrides only the methods that it needs.

Letters: B rows, R rows of a forward, Q new nodes, T tokens or uncommitted nodes, P path, V vocabulary.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache, PreTrainedModel

from eyas.errors import ModelError, one_line

__all__ = ["OnChunk", "OnLogits", "TargetExtension", "TargetState", "known_extensions"]

FOLDER = Path(__file__).resolve().parents[1] / "targets"
GROUP = "eyas.target_extensions"

OnChunk = Callable[[Tensor, Tensor, int], None]  # (tokens_T, features_TF, position of the first)
OnLogits = Callable[[Tensor, int], None]  # (logits_TV, position of the first)


class TargetState:
    """Holds the state of a session's rows beyond keys and values, such as recurrent state.

    `length_B` is always the number of committed tokens of each row before the call.
    """

    def max_chunk(self, row: int, length: int) -> int | None:
        """Return how many tokens of a prompt may go through the model at a time, after `length`
        tokens; None for as many as usual."""
        return None

    def positions(self, position_RQ: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the positions of new nodes, from the numbers of their slots."""
        return position_RQ

    def reading(self, inputs: Any, length_B: Tensor, fresh: bool) -> AbstractContextManager[None]:
        """Return the context in which the model runs over `inputs`, a `core.target.ForwardInput`.

        Args:
            fresh: the first row of the forward is empty.
        """
        return nullcontext()

    def prompt_read(self, row: int, length: int) -> None:
        """Note that a prompt was read; the row has `length` tokens."""

    def commit(self, length_B: Tensor, path_BP: Tensor, count_B: Tensor, active_B: Tensor) -> None:
        """Commit the first `count_B` nodes of each active row's path (-1 past its end)."""

    def advance(self, length_B: Tensor, count_B: Tensor) -> None:
        """Commit the first `count_B` nodes of each row, which are a chain."""

    def longest_known_prefix(self, row: int, length_B: Tensor, max_length: int) -> int:
        """Return the most tokens, up to `max_length`, to which the row can be cut, or of which it can be copied."""
        return max_length

    def truncate(self, row: int, length: int, length_B: Tensor) -> None:
        """Cut a row back to its first `length` tokens."""

    def copy(self, source: int, row: int, length: int, length_B: Tensor) -> None:
        """Replace a row by the first `length` tokens of another."""

    def clear(self, row: int) -> None:
        """Empty a row whose tensors may hold NaN."""


class TargetExtension:
    """A property of a target beyond layers with keys and values.

    Attributes:
        order: extensions are asked in the order of these numbers.
        own_forward_only: for each kind of runner that cannot serve the target, the reason:
            "kernels" (compiled for a CPU) or "graphs" (CUDA graphs; here a whole sentence).
        probe_tokens: how many different tokens the target is to be tried on when it is made; 0: any.
    """

    order: ClassVar[int] = 100
    own_forward_only: Mapping[str, str] = {}
    probe_tokens: int = 0

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        """Return whether the target of this model needs the extension."""
        raise NotImplementedError

    def __init__(self, target: Any) -> None:
        """Attach to a new `core.target.Target`, whose `model` and `family` are set.

        Raises:
            ModelError: the model cannot be served.
        """

    def probing(self) -> AbstractContextManager[Cache | None]:
        """Return the context in which the model is tried; it yields the cache to use, or None."""
        return nullcontext()

    def read_probe(self, cache: Cache) -> None:
        """Look at the cache that the trial has filled. Raise ModelError if the model cannot be served."""

    def caveat(self) -> str:
        """Return why a text may differ from plain decoding's, for a warning; "": it does not."""
        return ""

    def check_media(self, target: Any, media: Mapping[str, Any], tokens: Sequence[int]) -> bool:
        """Check a prompt's further inputs (`Request.media`), and return whether `read_media` takes them.

        Raises:
            InputError, ModelError: they cannot be read.
        """
        return False

    def read_media(
        self, session: Any, row: int, tokens: Sequence[int], media: Mapping[str, Any], on_chunk: OnChunk | None,
        on_logits: OnLogits | None,
    ) -> Tensor | None:  # fmt: skip
        """Read a whole prompt with further inputs into an empty row of a `core.target.TargetSession`.

        Returns:
            the logits [V] of the last token; None if this extension reads no such prompts.
        """
        return None

    def open(self, session: Any) -> TargetState | None:
        """Return the state of a new session, whose cache may be replaced; None if it has no state."""
        return None


@cache
def known_extensions() -> tuple[type[TargetExtension], ...]:
    """Return the extensions in the folder and in installed packages, in their order.

    Raises:
        ModelError: an installed package's extension cannot be loaded.
    """
    modules = [module.name for module in pkgutil.iter_modules([str(FOLDER)]) if not module.name.startswith("plug_")]
    names = [f"eyas.{FOLDER.name}.{name}" for name in modules]
    found = [getattr(importlib.import_module(name), "Extension", None) for name in names]
    found += [_load(point) for point in entry_points(group=GROUP)]
    return tuple(sorted((kind for kind in found if kind is not None), key=lambda kind: kind.order))


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # the code of another package
        raise ModelError(f"the target extension {point.value} cannot be loaded: {one_line(error, 200)}") from error
