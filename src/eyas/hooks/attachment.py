"""`eyas.attach(model)`: afterwards `model.generate` is decoded by eyas, for everybody who calls it.

Two attributes of the instance are set: `generate`, as transformers does itself for repositories
with a `custom_generate` folder, and `_eyas`, which holds what eyas keeps for the model (models.py).
`detach` removes both. The class, the weights, the configuration and the forward stay as they are.
"""

from __future__ import annotations

import copy
import inspect
from functools import wraps
from types import MethodType, TracebackType
from typing import Any, cast

from transformers import PreTrainedModel

from eyas.api import Stats
from eyas.core.target import turn_of
from eyas.errors import ModelError
from eyas.hooks.custom import CustomGenerate, hf
from eyas.hooks.models import forget, llm_for
from eyas.hooks.refusals import refused

__all__ = ["Attachment", "attach", "detach", "generate_with"]

MARK = "eyas_custom_generate"  # attribute of our function that replaces `generate`


def attach(model: PreTrainedModel, draft: Any = None, method: str | None = None, **options: Any) -> Attachment:
    """Let eyas decode for `model.generate`, pipelines and whatever else calls it; until
    `detach(model)`, or to the end of a `with` block:

        with eyas.attach(model, "path/or/hub-id"):
            model.generate(**inputs)

    A second call replaces the first. The head is loaded at once.

    Args:
        model: a causal language model of transformers, in eval mode.
        draft, method, options: as for `eyas.hf`.

    Raises:
        ModelError, CheckpointError, OptionError: as `eyas.load`.
    """
    custom = hf(draft, method, **options)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas attaches to a causal language model of transformers, not to {type(model).__name__}")
    kind: Any = type(model)
    before = model.__dict__.get("generate")
    if before is not None and _custom(before) is None and getattr(before, "__func__", None) is not kind.generate:
        raise ModelError(
            "the model has a generate of its own already (a custom_generate of its repository, or another library's)"
        )
    with turn_of(model):
        llm_for(model, custom.settings)
    model.__dict__["generate"] = MethodType(_generate_by(custom, kind), model)
    return Attachment(model, custom, before)


def detach(model: PreTrainedModel) -> None:
    """Give the model its own `generate` back, and free what eyas keeps for it. Nothing happens
    where nothing is attached."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas detaches from a causal language model of transformers, not from {type(model).__name__}")
    if _custom(model.__dict__.get("generate")) is not None:
        del model.__dict__["generate"]
    forget(model)


class Attachment:
    """The result of `attach`: a context manager that returns the model, and undoes the attachment
    at its end."""

    def __init__(self, model: PreTrainedModel, custom: CustomGenerate, before: Any) -> None:
        self.model, self._custom, self._before = model, custom, before

    @property
    def stats(self) -> tuple[Stats, ...]:
        """Figures of each row of the last call; empty before."""
        return self._custom.stats

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Undo this attachment: the one before it holds again, if there was one."""
        if _custom(self.model.__dict__.get("generate")) is not self._custom:
            return  # another one has taken its place
        if self._before is None:
            detach(self.model)
        else:
            self.model.__dict__["generate"] = self._before


def _custom(method: Any) -> CustomGenerate | None:
    """Return the CustomGenerate of a `generate` that eyas has set; None for any other."""
    return getattr(getattr(method, "__func__", None), MARK, None)


def _generate_by(custom: CustomGenerate, kind: Any) -> Any:
    """Return the function that takes the place of `generate` of this class of models."""
    signature = inspect.signature(kind.generate)

    @wraps(kind.generate)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("custom_generate") is not None:  # the caller asks for something else
            return kind.generate(self, **arguments)
        return generate_with(self, custom, arguments)

    setattr(generate, MARK, custom)
    return generate


def generate_with(model: PreTrainedModel, custom: CustomGenerate, arguments: dict[str, Any]) -> Any:
    """Call the model's `generate` with these arguments, decoded by `custom`; returns its result."""
    if arguments.get("cache_implementation") == "paged":
        raise refused("cache_implementation='paged'", "it decodes by generate_batch of transformers")
    one, kind = custom.with_arguments(_carry(model, arguments)), cast(Any, type(model))
    try:
        return kind.generate(model, **{**arguments, "custom_generate": one})
    finally:
        custom.stats = one.stats


def _carry(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take out of the arguments what transformers would not hand on: the streamer, and stop strings
    with their tokenizer."""
    carried = {"streamer": arguments.pop("streamer")} if arguments.get("streamer") is not None else {}
    tokenizer, config = arguments.get("tokenizer"), arguments.get("generation_config")
    strings = (
        arguments.get("stop_strings") or getattr(config, "stop_strings", None) or model.generation_config.stop_strings
    )
    if tokenizer is None or not strings:
        return carried
    if config is not None and config.stop_strings:
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if "stop_strings" in arguments or model.generation_config.stop_strings:
        arguments["stop_strings"] = None
    return carried | {"tokenizer": tokenizer, "stop_strings": strings}
