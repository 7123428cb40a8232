"""eyas refuses by name, and never ignores, the arguments of `model.generate` that it cannot keep.

A setting that only says how transformers would compute (use_cache, cache_implementation "static",
compile_config, prefill_chunk_size) changes no text, and is accepted. This module knows no decoding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from eyas.arguments import Keywords
from eyas.errors import ModelError, OptionError
from eyas.targets.media import describes_media, tells_nothing

WAY_OUT = "leave it out, or call generate without eyas (eyas.detach(model))"
MODES = {
    "beam": "num_beams: eyas decodes greedily or samples, without beams",
    "contrastive": "penalty_alpha: eyas decodes greedily or samples, without contrastive search",
    "dola": "dola_layers: eyas reads the logits of the last layer only",
    "assisted": "assisted generation (assistant_model, prompt_lookup_num_tokens, use_mtp, ...): eyas drafts by itself, give it the draft",
}
SETTINGS = {
    "output_attentions": "the kernels keep no attention weights",
    "output_hidden_states": "eyas keeps no hidden states of every layer",
    "token_healing": "the prompt would be changed before eyas sees it",
}
# Keyword arguments of the model's forward that generate prepares itself, and those that eyas reads.
PREPARED = frozenset(
    {"attention_mask", "cache_position", "logits_to_keep", "output_attentions", "output_hidden_states", "past_key_values", "position_ids",
     "use_cache"}
)  # fmt: skip
ENCODED = "mm_encoder_outputs"  # generate has encoded the images already


def refused(name: str, why: str) -> OptionError:
    """Return the error for a setting that eyas cannot keep. `why`: the reason, for the message."""
    return OptionError(f"{name} is not served by eyas ({why}): {WAY_OUT}")


def check_call(model: PreTrainedModel, config: GenerationConfig, model_kwargs: Keywords, given: Keywords) -> None:
    """Refuse settings that eyas cannot keep. `given`: local variables of generate, its arguments."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"a model of type {model.config.model_type} cannot be served: it is an encoder-decoder model")
    mode = str(getattr(config.get_generation_mode(given.get("assistant_model")), "value", ""))
    if mode not in ("greedy_search", "sample"):
        reason = next((text for part, text in MODES.items() if part in mode), mode)
        raise OptionError(f"{reason}; {WAY_OUT}")
    for name, why in SETTINGS.items():
        if getattr(config, name, None):
            raise refused(name, why)
    if config.cache_implementation in ("quantized", "offloaded", "paged"):
        raise refused(
            f"cache_implementation={config.cache_implementation!r}",
            "eyas keeps exact keys and values on the model's device",
        )
    if given.get("synced_gpus"):
        raise refused("synced_gpus", "the whole model must be on one device")
    _check_inputs(model, model_kwargs)
    _check_cache(model_kwargs.get("past_key_values"), given)


def media_of(model: PreTrainedModel, model_kwargs: Keywords) -> dict[str, Any]:
    """Return the inputs of the model's forward beyond a prompt's text, such as its images; empty for plain text."""
    given = {name: value for name, value in model_kwargs.items() if name not in PREPARED and value is not None}
    if all(tells_nothing(model, name, value) for name, value in given.items()):
        return {}
    positions = model_kwargs.get("position_ids")
    # [3, B, T]: positions that count images
    return {**given, "position_ids": positions} if positions is not None and positions.ndim == 3 else given


def _check_inputs(model: PreTrainedModel, model_kwargs: Keywords) -> None:
    media = media_of(model, model_kwargs)
    for name, value in media.items():
        if not describes_media(name, value) or not (isinstance(value, Tensor) or name == ENCODED):
            raise refused(name, "eyas reads token ids, an attention mask, and tensors of images, sounds and videos")
    mask = model_kwargs.get("attention_mask")
    if media and mask is not None and len(mask) > 1:
        raise refused(min(media), "prompts with images are read one by one, but this batch has several rows")


def _check_cache(cache: Any, given: Keywords) -> None:
    own = (given.get("kwargs") or {}).get("past_key_values")
    filled = isinstance(cache, Cache) and cache.get_seq_length() > 0
    if own is not None or filled or getattr(cache, "_is_user_defined", False):
        raise refused("past_key_values", "eyas keeps keys and values in a cache of its own")
