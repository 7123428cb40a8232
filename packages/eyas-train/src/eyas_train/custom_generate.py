"""The folder `custom_generate/` of a draft head, by which the head's name alone is enough for `model.generate` of transformers.

transformers reads two files there: `generate.py`, which it runs, and `requirements.txt`, which it checks and does not
install. `eyas.hooks.generate_by_folder` does the rest.
"""

from __future__ import annotations

from pathlib import Path

from eyas import __version__
from eyas.errors import InputError
from eyas.files import write_text

GENERATE = '''\
"""Lets eyas decode with this draft head: model.generate(..., custom_generate="this repository", trust_remote_code=True)."""

from eyas.hooks import generate_by_folder


def generate(model, **arguments):
    """Do what the model's own generate does, decoded by eyas."""
    return generate_by_folder(model, **arguments)
'''
REQUIREMENTS = f"eyas>={__version__}\n"


def write_custom_generate(folder: str | Path) -> Path:
    """Write `custom_generate/` with its two files into the folder of a draft head; returns it."""
    head = Path(folder).expanduser()
    if not (head / "config.json").is_file():
        raise InputError(f"{head} is not a draft head: it has no config.json")
    inner = head / "custom_generate"
    inner.mkdir(exist_ok=True)
    write_text(inner / "generate.py", GENERATE)
    write_text(inner / "requirements.txt", REQUIREMENTS)
    return inner
