"""Messages with images, sounds or videos, by the processor that comes with the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from transformers import AutoProcessor

from eyas.arguments import MediaIds, Messages, as_prompts
from eyas.errors import InputError

__all__ = ["has_media", "processed"]

MEDIA_PARTS = ("image", "video", "audio")  # types of content parts, as the processors of transformers read them


def has_media(prompt: Any) -> bool:
    """Whether a prompt is a list of messages of which one holds an image or the like."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in MEDIA_PARTS for part in parts)


def processed(messages: Messages, source: str) -> MediaIds:
    """The prompt that the processor makes of the messages, by its chat template.

    Args:
        source: the target's folder or hub id.

    Raises:
        InputError: there is no processor, a package that it needs is missing, or it refuses the messages.
    """
    processor = _processor(source)
    try:
        inputs: Any = processor.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:  # images that cannot be read, and templates, which are programs
        raise InputError(f"the processor of {source} refuses these messages: {_line(error)}") from error
    (prompt,), _ = as_prompts(dict(inputs))
    if not isinstance(prompt, MediaIds):
        raise InputError(f"the processor of {source} leaves the images of these messages out: it reads text alone")
    return prompt


@cache
def _processor(source: str) -> Any:
    hint = "give what the model's processor returns as the prompt (docs/targets.md)"
    if not source:
        raise InputError(f"messages with images need the processor that comes with the target, and this target has no folder: {hint}")
    try:
        processor: Any = AutoProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source} has no processor that can be loaded here ({_line(error)}): {hint}") from error
    if not hasattr(processor, "apply_chat_template") or not hasattr(processor, "tokenizer"):
        raise InputError(f"{source} has no processor, so its messages cannot hold images: {hint}")
    return processor


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
