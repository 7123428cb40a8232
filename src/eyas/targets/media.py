"""Prompts with images, sounds or videos: token ids, and the other inputs that a processor of
transformers makes of them.

The model's own forward reads such a prompt as a whole, because only its code knows where the features of an
image go. It also knows which tokens of an image see each other (in Gemma 3 all of them), and which positions
they get (in Qwen's models in three dimensions). Its keys and values are then put into a row's cache
(`Extension.read_media`). Text is then decoded as after any prompt. If positions do not advance by one per
token, the text's first position is not the prompt's length: `position_shift`.

This module knows no tree and no method. Letters: B rows, R rows of a forward, Q new nodes, T tokens,
V vocabulary, F feature width, K heads, h head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from eyas.core.extensions import OnChunk, OnLogits, TargetExtension, TargetState
from eyas.core.families import cache_argument_of
from eyas.core.target import Target, TargetSession
from eyas.errors import InputError, ModelError, one_line
from eyas.targets.placement import has_several_devices

__all__ = [
    "Extension", "MediaPrompt", "check_media", "describes_media", "read_media", "reads_media", "round_states", "shifts_positions",
    "tells_nothing",
]  # fmt: skip

# Inputs of transformers' models that hold no text.
MEDIA_INPUTS = frozenset({"pixel_values", "pixel_values_videos", "input_features", "input_values"})
# Words in the names of the inputs that a processor makes of images, sounds and videos. They go in with the prompt
# alone; generate hands others, such as encoder_hidden_states, to every forward.
MEDIA_WORDS = frozenset(
    {"aspect", "audio", "chunk", "crops", "feature", "features", "frames", "grid", "image", "images", "mm", "patches", "pixel",
     "qformer", "sizes", "spatial", "tile", "video", "videos"}
)  # fmt: skip
TOKEN_TYPES = "token_type_ids"  # the end of their names


class Extension(TargetExtension):
    """Prompts with further inputs than tokens, which the forward of every model may take."""

    order = 50

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return True

    def __init__(self, target: Target) -> None:
        self.shifts_positions = shifts_positions(target.model)

    def check_media(self, target: Target, media: Mapping[str, Any], tokens: Sequence[int]) -> bool:
        check_media(target.model, target.family.has_states, media, tokens)
        return True

    def read_media(
        self, session: TargetSession, row: int, tokens: Sequence[int], media: Mapping[str, Any], on_chunk: OnChunk | None,
        on_logits: OnLogits | None,
    ) -> Tensor | None:  # fmt: skip
        """Read the prompt in one call of the model's own forward; its keys and values are copied
        into the row."""
        target, cache, T = session.target, session.cache, len(tokens)
        tokens_1T = torch.tensor([list(tokens)], device=target.device)
        read = read_media(target.model, tokens_1T, media, target.tap(session.feature_layers), on_logits is not None)
        if any(
            not cache.stores_of(n) or keys.shape[-2] != T for n, (keys, _) in read.keys_values.items() if keys.numel()
        ):
            raise InputError(
                f"{', '.join(media)}: layers of {type(target.model).__name__} attend to images apart from the text, but eyas keeps "
                "the text's keys alone; give text alone"
            )
        cache.prepare(range(row, row + 1), lambda: torch.arange(T, device=target.device)[None], T)
        is_rounded = target.runner.weight_format.kv != "exact"
        for number, states in read.keys_values.items():
            if states[0].numel():
                keys, values = (round_states(x, cache.dtype) for x in states) if is_rounded else states
                cache.update(keys, values, number)
        session.length_B[row] = T
        session.lengths[row] = T
        for state in session.states:
            if isinstance(state, PositionShifts):
                state.shift_B[row] = read.position_shift
        if on_chunk is not None:
            on_chunk(tokens_1T[0], read.features_TF, 0)
        if on_logits is not None:
            on_logits(read.logits_TV, 0)
        return read.logits_TV[-1]

    def open(self, session: TargetSession) -> TargetState | None:
        return PositionShifts(session.length_B) if self.shifts_positions else None


class PositionShifts(TargetState):
    """By how much the positions of each row are shifted after its images."""

    def __init__(self, length_B: Tensor) -> None:
        self.shift_B = torch.zeros_like(length_B)  # added to the numbers of slots

    def positions(self, position_RQ: Tensor, rows: Sequence[int]) -> Tensor:
        shift_R = self.shift_B[rows.start : rows.stop] if isinstance(rows, range) else self.shift_B[list(rows)]
        return position_RQ + shift_R[:, None]

    def truncate(self, row: int, length: int, length_B: Tensor) -> None:
        if length == 0:
            self.shift_B[row] = 0

    def copy(self, source: int, row: int, length: int, length_B: Tensor) -> None:
        self.shift_B[row] = 0  # texts after images are not copied


class MediaPrompt(NamedTuple):
    """The result of reading a prompt with media."""

    logits_TV: Tensor  # after all tokens, or after the last one
    features_TF: Tensor
    keys_values: dict[int, tuple[Tensor, Tensor]]  # [1, K, T, h] of each layer that stores any
    position_shift: int  # the position of the token after the prompt, less the prompt's number of tokens


def reads_media(model: nn.Module) -> bool:
    """Return whether the model's forward takes images, sounds or videos."""
    return not MEDIA_INPUTS.isdisjoint(inspect.signature(model.forward).parameters)


def describes_media(name: str, value: Any) -> bool:
    """Return whether an input of the forward is read with the prompt alone. It may belong to images or the
    like, be token types that mark their tokens, or positions that count them (three numbers for each token)."""
    if name == "position_ids":
        return isinstance(value, Tensor) and value.ndim == 3
    return name.endswith(TOKEN_TYPES) or name.startswith("input_values") or not MEDIA_WORDS.isdisjoint(name.split("_"))


def tells_nothing(model: nn.Module, name: str, value: Any) -> bool:
    """Return whether these token types are the ones that a prompt of text alone has anyway. GPT-2 adds a token's
    embedding for each, type 0 included."""
    plain = reads_media(model) or any("token_type_embeddings" in path for path, _ in model.named_modules())
    return name.endswith(TOKEN_TYPES) and plain and not bool(torch.as_tensor(value).any())


def shifts_positions(model: nn.Module) -> bool:
    """Return whether positions do not advance by one per token of an image."""
    return _position_module(model) is not None


def round_states(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as the kernels round them: slots [..., h + 4] in int8, or [..., h] in another dtype."""
    if dtype != torch.int8:
        return states.to(dtype)
    largest = states.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    numbers = (states.float() * (127 / largest)).round().to(torch.int8)
    return torch.cat((numbers, (largest / 127).view(torch.int8)), -1)


def _position_module(model: nn.Module) -> Any:
    """Return the part of the model that computes positions, and keeps the shift of the last prompt as
    `rope_deltas`; None if there is none."""
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
    for name, value in media.items():
        if not describes_media(name, value) or (name.endswith(TOKEN_TYPES) and not _has_images(media)):
            raise InputError(
                f"{name} is not served by eyas, which reads token ids, images, sounds and videos: leave it out"
            )
    if has_states:
        raise ModelError(
            f"{', '.join(media)}: eyas reads images only into models without recurrent state; give text alone"
        )
    for name, value in media.items():
        if "token_type_ids" in name and value.shape[-1] != len(tokens):
            raise InputError(f"{name} describes {value.shape[-1]} tokens, but the prompt has {len(tokens)}")


def _has_images(media: Mapping[str, Any]) -> bool:
    return any(
        describes_media(name, value) and not name.endswith((TOKEN_TYPES, "position_ids"))
        for name, value in media.items()
    )


def _place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a tensor on the model's device, floats in the model's dtype; other objects, such as the outputs of an
    encoder, as they are."""
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
    inputs = {name: _place(value, tokens_1T.device, model.dtype) for name, value in media.items()}
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
