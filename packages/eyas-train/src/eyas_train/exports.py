"""Writes draft heads in the formats of other engines. The modules of `formats` are the formats."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from eyas.checkpoints import ExportTarget, Weights
from eyas.checkpoints.tools import formats, write
from eyas.errors import CheckpointError, InputError, near
from eyas.files import write_errors
from eyas_train import formats as own_formats


def exporting() -> list[Any]:
    """Return the modules that export heads: first the ones of `formats`, then the ones of other distributions."""
    modules = (module.name for module in pkgutil.iter_modules(own_formats.__path__))
    own = [importlib.import_module(f"{own_formats.__name__}.{name}") for name in modules]
    return [form for form in dict.fromkeys([*own, *formats()]) if hasattr(form, "EXPORTS")]


def export_formats() -> dict[str, tuple[str, ...]]:
    """Return the formats that heads are exported to, by name, each with the methods whose heads it holds."""
    methods: dict[str, tuple[str, ...]] = {}
    for form in exporting():
        methods[form.NAME] = (*methods.get(form.NAME, ()), *form.EXPORTS)
    return dict(sorted(methods.items()))


def export(
    weights: Weights, name: str, folder: str | os.PathLike[str], target: ExportTarget, dtype: str = ""
) -> list[str]:
    """Write a draft head in the format `name` into a new folder, or a new file where the format is one of single files.

    It is made under a temporary name next to its place and renamed, so that it is there completely or not at all.

    Args:
        target: known properties of the target model.
        dtype: in which type a GGUF file stores matrices; empty for the head's own.

    Returns:
        Lines by which the format's engines run the head.

    Raises:
        CheckpointError: there is no such format, or it cannot hold this head; the message has the reason.
        InputError: something is at that place already, or it cannot be written; the format has no such dtype.
    """
    form = _form(weights.method, name)
    place = Path(folder).expanduser()
    if hasattr(form, "SUFFIX") and place.suffix != form.SUFFIX:
        raise InputError(f"{place}: {name} is a single file: give it the ending {form.SUFFIX}")
    known = getattr(form, "DTYPES", ())
    if dtype and dtype not in known:
        raise InputError(f"{name} has no dtype {dtype!r}: {', '.join(known) or 'it keeps the type of the head'}")
    if place.exists() or place.is_symlink():
        raise InputError(f"{place} exists already: use another folder, because an export overwrites nothing")
    try:
        config, tensors = form.export(weights.method, weights.config, weights.tensors, target)
    except CheckpointError as error:
        raise CheckpointError(f"{weights.source} cannot be exported to {name}: {error}") from error
    temporary = place.absolute().with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        if hasattr(form, "write_file"):
            with write_errors(place):
                form.write_file(temporary, config, tensors, target, dtype)
        else:
            file = getattr(form, "EXPORT_FILE", getattr(form, "FILE", None))
            write(temporary, config, tensors, *([file] if file else []))
        if hasattr(form, "finish"):
            with write_errors(place):
                form.finish(temporary, target)
        with write_errors(place):
            temporary.rename(place)
    finally:
        with suppress(OSError):
            temporary.unlink() if temporary.is_file() else shutil.rmtree(temporary)
    lines: list[str] = form.usage(weights.method, weights.config, str(place), target.name or "TARGET")
    return lines


def usage(method: str, name: str, folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which the engines of a format run a head of this method."""
    lines: list[str] = _form(method, name).usage(method, {}, folder, target)
    return lines


def suffix(method: str, name: str) -> str:
    """Return the ending of the files of a format that is one of single files; empty where heads are folders."""
    return getattr(_form(method, name), "SUFFIX", "")


def _form(method: str, name: str) -> Any:
    """Return the format of that name for heads of this method."""
    known = export_formats()
    if name not in known:
        raise CheckpointError(f"there is no format {name!r} to export to; {near(name, known)}")
    if method not in known[name]:
        fitting = [other for other, methods in known.items() if method in methods]
        which = f"those are exported to {', '.join(fitting)}" if fitting else "no other engine reads those"
        raise CheckpointError(f"{name} has no format for heads of {method}; {which}")
    return next(form for form in exporting() if name == form.NAME and method in form.EXPORTS)
