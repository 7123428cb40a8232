"""`eyas.attach(model)`: afterwards `model.generate` is decoded by eyas, for everybody who calls it.

Two attributes of the instance are set: `generate`, as transformers does itself for repositories
with a `custom_generate` folder, and `_eyas`, which holds what eyas keeps for the model (models.py).
`detach` removes both. The class, the weights, the configuration and the forward stay as they are.

With `custom_generate/` in the folder of a draft head, the head's name alone is enough for `generate`:

    model.generate(**inputs, custom_generate="path/or/hub-id", trust_remote_code=True)

transformers reads two files there: `generate.py`, which it runs, and `requirements.txt`, which it
checks and does not install.
"""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any, cast

from transformers import PreTrainedModel

from eyas import __version__
from eyas.api import Stats
from eyas.core.target import turn_of
from eyas.errors import InputError, ModelError, OptionError
from eyas.files import write_text
from eyas.hooks.custom import CustomGenerate, arguments_of_generate, hf, with_stop_strings
from eyas.hooks.models import forget, llm_for
from eyas.hooks.refusals import refused

MARK = "eyas_custom_generate"  # attribute of our function that replaces `generate`
GENERATE = '''\
"""Lets eyas decode with this draft head: model.generate(..., custom_generate="this repository", trust_remote_code=True)."""

from eyas.hooks import generate_by_folder


def generate(model, **arguments):
    """Do what the model's own generate does, decoded by eyas."""
    return generate_by_folder(model, **arguments)
'''
REQUIREMENTS = f"eyas>={__version__}\n"
OPTIONS = ("batch_size", "draft_with", "kernels", "method", "tree")  # options of eyas, which generate does not have


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
    """Give the model its own `generate` back, and free what eyas keeps for it, if something is attached."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"eyas detaches from a causal language model of transformers, not from {type(model).__name__}")
    if _custom(model.__dict__.get("generate")) is not None:
        del model.__dict__["generate"]
    forget(model)


class Attachment:
    """The result of `attach`: a context manager that returns the model, and undoes the attachment at its end."""

    def __init__(self, model: PreTrainedModel, custom: CustomGenerate, before: Any) -> None:
        self.model, self._custom, self._before = model, custom, before

    @property
    def stats(self) -> tuple[Stats, ...]:
        """Figures of each row of the last call."""
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
    return getattr(getattr(method, "__func__", None), MARK, None)


def _generate_by(custom: CustomGenerate, kind: Any) -> Any:
    signature = inspect.signature(kind.generate)

    @wraps(kind.generate)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("custom_generate") is not None:  # the caller asks for something else
            return kind.generate(self, **arguments)
        return _generate_with(self, custom, arguments)

    setattr(generate, MARK, custom)
    return generate


def _generate_with(model: PreTrainedModel, custom: CustomGenerate, arguments: dict[str, Any]) -> Any:
    if arguments.get("cache_implementation") == "paged":
        raise refused("cache_implementation='paged'", "it decodes by generate_batch of transformers")
    configs = [config for config in (arguments.get("generation_config"), model.generation_config) if config is not None]
    strings = arguments.get("stop_strings") or next(filter(None, (config.stop_strings for config in configs)), None)
    if strings and (tokenizer := arguments.get("tokenizer")) is not None:
        arguments["stopping_criteria"] = with_stop_strings(arguments.get("stopping_criteria") or (), tokenizer, strings)
        arguments["stop_strings"] = None
    return cast(Any, type(model)).generate(model, **{**arguments, "custom_generate": custom})


# --- by the folder of a head ----------------------------------------------------------------------


def write_custom_generate(folder: str | Path) -> Path:
    """Write `custom_generate/` with its two files into the folder of a draft head; returns it."""
    head = Path(folder).expanduser()
    if not (head / "config.json").is_file():
        raise InputError(f"{head} holds no draft head: there is no config.json")
    inner = head / "custom_generate"
    inner.mkdir(exist_ok=True)
    write_text(inner / "generate.py", GENERATE)
    write_text(inner / "requirements.txt", REQUIREMENTS)
    return inner


def generate_by_folder(model: PreTrainedModel, **arguments: Any) -> Any:
    """Decode with the head whose folder or hub id was given to `generate` as `custom_generate`. Among the arguments
    may be `method`, `tree`, `kernels`, `draft_with` and `batch_size` of eyas."""
    head = arguments_of_generate().get("custom_generate")
    if not isinstance(head, str):
        raise OptionError(
            'this is for model.generate(..., custom_generate="folder of the head"); from elsewhere use eyas.hf(draft=...)'
        )
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    return _generate_with(model, hf(head, **options), arguments)
