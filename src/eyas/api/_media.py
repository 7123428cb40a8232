"""Messages with images, sounds or videos as prompts, by the processor that comes with a target. The model reads them by
`targets.media`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PreTrainedModel

from eyas.arguments import MEDIA_PARTS, MediaIds, Messages, as_prompts
from eyas.errors import InputError, one_line
from eyas.targets.media import reads_media
from eyas.text import check_messages, for_template
from eyas.text.forms import other_forms


def media_prompt(
    messages: Messages,
    model: PreTrainedModel,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> MediaIds:
    """Return the prompt that the target's processor makes of messages, by its chat template. Keywords as in
    `text.render`. Variables of the template are booleans. The processor gets the variables that the template
    does not have, and it would read files that other values name."""
    if not reads_media(model):
        raise InputError(f"{type(model).__name__} reads text alone: leave the images out of the messages")
    source = getattr(model.config, "name_or_path", "")
    chat: Sequence[Mapping[str, Any]] = check_messages(messages, MEDIA_PARTS)
    processor = _processor(source)
    _check_files(chat)
    written = getattr(processor, "chat_template", None)
    own = inspect.signature(processor.apply_chat_template).parameters
    for name, value in (chat_template_kwargs or {}).items():
        if name in own or name.startswith("do_") or not isinstance(value, bool):
            raise InputError(
                f"{name}: with images, variables of a chat template are true or false, and none of the processor's own"
            )
    refusals, inputs = [], None
    for form in chain([chat], other_forms(chat)):
        try:
            inputs = processor.apply_chat_template(
                for_template(form, str(written)),
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **(chat_template_kwargs or {}),
            )
            break
        except Exception as error:  # images that cannot be read, and templates, which are programs
            refusals.append(error)
    if inputs is None:
        raise InputError(f"the processor of {source} refuses these messages: {_line(refusals[0])}") from refusals[0]
    (prompt,), _ = as_prompts(dict(inputs))
    if not isinstance(prompt, MediaIds):
        raise InputError(f"the processor of {source} leaves the images of these messages out: it reads text alone")
    return prompt


def _check_files(messages: Messages) -> None:
    """Raise InputError for a part whose file is not there: the processor's own message is long."""
    for number, message in enumerate(messages, start=1):
        for part in message["content"]:
            path = part.get("path")
            if part["type"] in MEDIA_PARTS and isinstance(path, str) and not Path(path).is_file():
                raise InputError(f"message {number}: there is no {part['type']} {path}")


@cache
def _processor(source: str) -> Any:
    hint = "give what the model's processor returns as the prompt (docs/guide/models.md)"
    if not source:
        raise InputError(
            f"messages with images need the processor that comes with the target, but this target has no folder: {hint}"
        )
    try:
        processor: Any = AutoProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source} has no processor that can be loaded here ({_line(error)}): {hint}") from error
    if not hasattr(processor, "apply_chat_template") or not hasattr(processor, "tokenizer"):
        raise InputError(f"{source} has no processor, so its messages cannot hold images: {hint}")
    return processor


def _line(error: Exception) -> str:
    return one_line(error, 200) or type(error).__name__
