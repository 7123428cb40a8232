"""Prompts with images, sounds or videos: token ids, and the other inputs that a processor of
transformers makes of them.

The model's own forward reads such a prompt, whole: only its code knows where the features of an
image go, which tokens of an image see each other (in Gemma 3 all of them), and which positions they
get (in Qwen's models in three dimensions). Its keys and values are then put into a row's cache
(`TargetSession.prefill`). Text is then decoded as after any prompt. If positions do not advance by
one per token, the text's first position is not the prompt's length: `position_shift`.

This module knows no cache of ours, no tree and no method. Letters: T tokens, V vocabulary, F
feature width, K heads, h head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from eyas.core.families import cache_argument_of
from eyas.core.placement import has_several_devices
from eyas.errors import InputError, ModelError, one_line

__all__ = ["MediaPrompt", "check_media", "read_media", "reads_media", "shifts_positions"]

# Inputs of transformers' models that hold no text.
MEDIA_INPUTS = frozenset({"pixel_values", "pixel_values_videos", "input_features", "input_values"})


class MediaPrompt(NamedTuple):
    """The result of reading a prompt with media."""

    logits_TV: Tensor  # after all tokens, or after the last one
    features_TF: Tensor
    keys_values: dict[int, tuple[Tensor, Tensor]]  # [1, K, T, h] of each layer that stores any
    position_shift: int  # the position of the token after the prompt, less the prompt's number of tokens


def reads_media(model: nn.Module) -> bool:
    """Whether the model's forward takes images, sounds or videos."""
    return not MEDIA_INPUTS.isdisjoint(inspect.signature(model.forward).parameters)


def shifts_positions(model: nn.Module) -> bool:
    """Whether positions do not advance by one per token of an image."""
    return _position_module(model) is not None


def _position_module(model: nn.Module) -> Any:
    """The part of the model that computes positions, and keeps the shift of the last prompt as
    `rope_deltas`; None: there is none."""
    return next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)


def check_media(model: PreTrainedModel, has_states: bool, media: Mapping[str, Any], tokens: Sequence[int]) -> None:
    """Check a prompt's further inputs.

    Raises:
        InputError: an input that the model's forward does not take.
        ModelError: a model with recurrent state, whose states are not read this way.
    """
    known = inspect.signature(model.forward).parameters
    if unknown := [name for name in media if name not in known]:
        raise InputError(
            f"{type(model).__name__} takes no {unknown[0]}: the prompt was made by the processor of another model"
        )
    if has_states:
        raise ModelError(
            f"{', '.join(media)}: eyas reads images only into models without recurrent state; give text alone"
        )
    for name, value in media.items():
        if "token_type_ids" in name and value.shape[-1] != len(tokens):
            raise InputError(f"{name} describes {value.shape[-1]} tokens, and the prompt has {len(tokens)}")


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A tensor on the model's device, and floats in its dtype. Other objects, such as the outputs
    of an encoder, as they are."""
    return value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value


def read_media(
    model: PreTrainedModel,
    tokens_1T: Tensor,
    media: Mapping[str, Any],
    tap: AbstractContextManager[Callable[[], Tensor]],
    all_logits: bool,
) -> MediaPrompt:
    """Read a whole prompt by the model's own forward.

    Args:
        media: see `core.requests.Request.media`.
        tap: yields the function that returns the features [1, T, F] of the last forward.

    Raises:
        InputError: the model refuses the prompt, for example because images and their tokens do not
            match.
    """
    inputs = {name: _placed(value, tokens_1T.device, model.dtype) for name, value in media.items()}
    takes_number = "logits_to_keep" in inspect.signature(model.forward).parameters
    # logits_to_keep is a tensor, which must be on the LM head's device
    if not all_logits and takes_number and not has_several_devices(model):
        inputs["logits_to_keep"] = torch.tensor([tokens_1T.shape[1] - 1], device=tokens_1T.device)
    cache, counting = DynamicCache(), _position_module(model)
    inputs[cache_argument_of(model)] = cache
    if counting is not None:
        counting.rope_deltas = None  # left from an earlier prompt
    with tap as features:
        try:
            logits_1TV = model(input_ids=tokens_1T, use_cache=True, **inputs).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code, on inputs that somebody sent
            raise InputError(
                f"{type(model).__name__} cannot read this prompt with {', '.join(media)}: {one_line(error, 200)}"
            ) from error
        features_1TF = features()
    stored = {
        number: (getattr(layer, "keys", None), getattr(layer, "values", None))
        for number, layer in enumerate(cache.layers)
    }
    if (positions := inputs.get("position_ids")) is not None:
        # the last three rows are the multimodal positions; a fourth, before them, counts text
        shift = positions[-3:].max() + 1 - tokens_1T.shape[1]
    else:
        shift = getattr(counting, "rope_deltas", None)
    return MediaPrompt(
        logits_1TV[0],
        features_1TF[0],
        {
            number: (keys, values)
            for number, (keys, values) in stored.items()
            if keys is not None and values is not None
        },
        0 if shift is None else int(shift.flatten()[0]),
    )
