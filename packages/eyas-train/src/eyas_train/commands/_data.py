"""The target and the examples of a training. These are read from --data, or from --features, a folder (here or at a URL)
that `eyas features` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli.tools import DraftOptions, TargetOptions, UsageError, load, need_tokenizer, note
from eyas.errors import InputError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.config import TrainConfig
    from eyas_train.data import Data, Report

SHOWN_PROBLEMS = 5


def check_source(data: Sequence[str], features: str | None) -> None:
    """Refuse both and neither of --data and --features, and files that are not there."""
    if data and features:
        raise UsageError("give only one of --data and --features")
    if not data and not features:
        raise UsageError("option --data (or --features) is missing")
    check_files(data)


def check_files(paths: Sequence[str]) -> None:
    """Refuse data that is not there."""
    from eyas.text.sources import RemoteFile, as_file, opened, read_errors

    for path in paths:
        file = as_file(path)
        if isinstance(file, RemoteFile):
            with read_errors(file), opened(file):
                pass
        elif not file.exists():
            raise InputError(f"{path} does not exist; check the path of the data")


def training_options(features: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a training; features bring the length and the held-out share they were
    made with."""
    if not features:
        return dict(options)
    from eyas.text.sources import as_file
    from eyas_train._manifest import Manifest

    settings = Manifest.read(as_file(features)).settings
    fixed = {"max_length": settings.max_length, "heldout": settings.heldout}
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise OptionError(
                f"{features} was made with {name} {value}, so it cannot be {options[name]}; leave the option out"
            )
    return {**options, **fixed}


def training_data(
    llm: LLM, files: Sequence[str], features: str | None, config: TrainConfig, cache_bytes: int
) -> tuple[Data, dict[str, Any]]:
    """Return the examples, and their entry in training.json.

    Args:
        cache_bytes: how much of features at a URL is kept here.
    """
    if not features:
        from eyas.text.sources import as_file
        from eyas_train.data import data_hash

        data = read_data(llm, files, config.max_length, config.heldout)
        names = [as_file(path).name for path in files]
        return data, {"data": {"files": names, "sha256": data_hash(files), "report": str(data.report)}}
    from eyas_train.remote_store import open_store

    store = open_store(features, cache_bytes)
    store.check(llm.target, llm.tokenizer)
    data, settings = store.data(), store.settings
    total, present = len(store.lengths), len(data.train) + len(data.heldout)
    rest = f"; only {present:,} of its {total:,} examples are there: the same `eyas features` makes the rest"
    note(f"{features} holds the features of {data.report}{rest if present < total else ''}")
    return data, {
        "data": {
            "files": [file["name"] for file in settings.data["files"]],
            "sha256": data.sha256,
            "report": str(data.report),
        },
        "features": {
            "id": store.id,
            "layers": list(settings.layers),
            "dtype": settings.dtype,
            "target_dtype": settings.target["dtype"],
        },
    }


@contextmanager
def reading(what: str) -> Iterator[Callable[[Report], None]]:
    """Show the progress of reading; yield the function to call for each line that was read."""
    from rich.console import Console

    with Console(stderr=True).status(f"reading {what}") as status:

        def on_line(report: Report) -> None:
            if report.lines % 500 == 0:
                status.update(f"reading {what}: {report.lines:,} lines, {report.tokens:,} tokens")

        yield on_line


def note_problems(problems: Sequence[str]) -> None:
    """Report the first lines that cannot be used, and how many there are."""
    for problem in problems[:SHOWN_PROBLEMS]:
        note(problem)
    if len(problems) > SHOWN_PROBLEMS:
        note(f"and {len(problems) - SHOWN_PROBLEMS} lines more that cannot be used")


def read_data(llm: LLM, paths: Sequence[str], max_length: int, heldout: float) -> Data:
    """Read, tokenise and split, with a progress display; lines that cannot be used are reported."""
    from eyas_train.data import read

    need_tokenizer(llm)
    assert llm.tokenizer is not None
    length = min(max_length, llm.target.context)
    with reading("data") as on_line:
        data = read(list(paths), llm.tokenizer, max_length=length, heldout=heldout, on_line=on_line)
    largest = max(max(example.ids) for part in (data.train, data.heldout) for example in part)
    if largest >= llm.target.vocab_size:
        raise InputError(
            f"the tokenizer makes token {largest} of this data, the target's vocabulary is "
            f"0..{llm.target.vocab_size - 1}: pass the target's own with --tokenizer"
        )
    note_problems(data.report.problems)
    note(str(data.report))
    return data


# --- targets


def check_exact(model: TargetOptions) -> None:
    """Refuse a rounded target and kernels where features are read."""
    allowed = {"kernels": ("auto", "off"), "weights": ("exact",), "activations": ("exact",), "kv": ("exact",)}
    for name, fitting in allowed.items():
        if (given := getattr(model, name)) not in fitting:
            raise OptionError(f"--{name} {given}: features are read by the model's own forward, as it is: leave it out")


def load_target(model: TargetOptions, device: str | None = None) -> LLM:
    """Return the target by its own forward, with plain decoding: for reading its features."""
    check_exact(model)
    llm = load(replace(model, kernels="off", device=device or model.device), DraftOptions(method="vanilla"), {})
    if llm.adapters:
        raise OptionError(
            "features are read from one model: give one adapter without a name, --adapter FOLDER, which is merged"
        )
    return llm


def training_record(folder: Path) -> dict[str, Any]:
    """Return the training.json of a head's folder; empty when it is missing or broken."""
    try:
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def recorded_target(record: Mapping[str, Any]) -> str:
    """Return the folder or hub id of the target in a head's record; empty when it is unknown or
    embedded. A model with a short name is recorded by its hub id."""
    from eyas import named

    target = record.get("target")
    name = str(target.get("name") or "") if isinstance(target, dict) else ""
    model = named.of_target(name)
    return name if model is None else model.published
