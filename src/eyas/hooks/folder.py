"""`custom_generate/` in the folder of a draft head: with it the head's name alone is enough for
`generate`.

    model.generate(**inputs, custom_generate="path/or/hub-id", trust_remote_code=True)

transformers reads two files there: `generate.py`, which it runs, and `requirements.txt`, which it
checks and does not install.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eyas import __version__
from eyas.errors import InputError, OptionError
from eyas.files import write_text
from eyas.hooks.attachment import generate_with
from eyas.hooks.caller import arguments_of_generate
from eyas.hooks.custom import hf

__all__ = ["generate_by_folder", "write_custom_generate"]

GENERATE = '''\
"""Lets eyas decode with this draft head: model.generate(..., custom_generate="this repository", trust_remote_code=True)."""

from eyas.hooks import generate_by_folder


def generate(model, **arguments):
    """Do what the model's own generate does, decoded by eyas."""
    return generate_by_folder(model, **arguments)
'''
REQUIREMENTS = f"eyas>={__version__}\n"
OPTIONS = ("batch_size", "draft_with", "kernels", "method", "tree")  # options of eyas, which generate does not have


def write_custom_generate(folder: str | Path) -> Path:
    """Write `custom_generate/generate.py` and its requirements into the folder of a draft head;
    returns `custom_generate`.

    Raises:
        InputError: there is no draft head.
    """
    head = Path(folder).expanduser()
    if not (head / "config.json").is_file():
        raise InputError(f"{head} holds no draft head: there is no config.json")
    inner = head / "custom_generate"
    inner.mkdir(exist_ok=True)
    write_text(inner / "generate.py", GENERATE)
    write_text(inner / "requirements.txt", REQUIREMENTS)
    return inner


def generate_by_folder(model: PreTrainedModel, **arguments: Any) -> Any:
    """Decode with the head whose folder or hub id was given to `generate` as `custom_generate`.

    Args:
        arguments: as for `generate`; among them may be `method`, `tree`, `kernels`, `draft_with`
            and `batch_size` of eyas.

    Raises:
        OptionError: it was not called by `model.generate(..., custom_generate=...)`.
    """
    head = arguments_of_generate().get("custom_generate")
    if not isinstance(head, str):
        raise OptionError(
            'this is for model.generate(..., custom_generate="folder of the head"); from elsewhere use eyas.hf(draft=...)'
        )
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    return generate_with(model, hf(head, **options), arguments)
