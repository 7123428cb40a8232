"""Prompts with images, sounds or videos: what a processor of transformers makes of them, beside token ids.

The model's own forward reads such a prompt, whole: only its code knows where the features of an image go, which tokens of an image see
each other (in Gemma 3 all of them), and how positions count (in Qwen's models in three dimensions). Its keys and values are then put into
a row's cache (`TargetSession.prefill`). What follows is text, and is decoded as behind any prompt; but where positions count otherwise, the
text's go on from another number than the prompt's length: `position_shift`.

This module knows no cache of ours, no tree and no method. Letters: T tokens, V vocabulary, F feature width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from eyas.errors import InputError, ModelError

if TYPE_CHECKING:
    from eyas.core.target import Target

__all__ = ["MediaPrompt", "check_media", "counts_otherwise", "read_media"]


class MediaPrompt(NamedTuple):
    """The result of reading a prompt with media."""

    logits_TV: Tensor  # of all tokens, or of the last one
    features_TF: Tensor
    cache: DynamicCache  # keys and values of one row
    position_shift: int  # the position of the token behind the prompt, less the prompt's number of tokens


def counts_otherwise(model: nn.Module) -> bool:
    """Whether positions behind an image do not count the image's tokens one by one."""
    return _counting(model) is not None


def _counting(model: nn.Module) -> Any:
    """The part of the model that counts positions, and keeps the shift of the last prompt as `rope_deltas`; None: there is none."""
    return next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)


def check_media(target: Target, media: Mapping[str, Tensor], tokens: Sequence[int]) -> None:
    """
    Raises:
        InputError: an input that the model's forward does not take.
        ModelError: a model with recurrent state, whose states are not read this way.
    """
    known = inspect.signature(target.model.forward).parameters
    if unknown := [name for name in media if name not in known]:
        raise InputError(f"{type(target.model).__name__} takes no {unknown[0]}: the prompt was made by the processor of another model")
    if target.family.has_states:
        raise ModelError(f"{', '.join(media)}: eyas reads images only into models without recurrent state; give text alone")
    for name, value in media.items():
        if "token_type_ids" in name and value.shape[-1] != len(tokens):
            raise InputError(f"{name} describes {value.shape[-1]} tokens, and the prompt has {len(tokens)}")


def read_media(
    target: Target, tokens: Sequence[int], media: Mapping[str, Tensor], feature_layers: tuple[int, ...], all_logits: bool
) -> MediaPrompt:
    """Read a whole prompt by the model's own forward.

    Raises:
        InputError: the model refuses it, for example because images and their tokens do not match.
    """
    dtype, device = target.dtype, target.device
    inputs = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in media.items()}
    extra: dict[str, Any] = {} if all_logits or not target._keeps_logits else {"logits_to_keep": 1}
    cache = DynamicCache()
    ids_1T = torch.tensor([list(tokens)], device=device)
    counting = _counting(target.model)
    if counting is not None:
        counting.rope_deltas = None  # of an earlier prompt
    with target.tap(feature_layers) as features:
        try:
            output = target.model(input_ids=ids_1T, past_key_values=cache, use_cache=True, **inputs, **extra)
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{type(target.model).__name__} cannot read this prompt with {', '.join(media)}: {reason}") from error
        features_1TF = features() if feature_layers else output.logits[..., :0]
    shift = getattr(counting, "rope_deltas", None)
    return MediaPrompt(output.logits[0], features_1TF[0], cache, 0 if shift is None else int(shift.flatten()[0]))
