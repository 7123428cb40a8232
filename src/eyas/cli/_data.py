"""Where the examples of a training come from: --data, read here and now, or --features, a folder that `eyas features` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._errors import note
from eyas.errors import InputError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.drafters import Drafter
    from eyas.train.data import Data, Report
    from eyas.train.loop import TrainConfig

__all__ = ["check_layers", "check_source", "options_of", "read_data", "training_data"]

SHOWN_PROBLEMS = 5


def check_source(given: Mapping[str, Any]) -> None:
    """--data or --features; and what they name must be there, before a model is loaded for it."""
    if bool(given["data"]) == bool(given["features"]):
        raise click.UsageError("give only one of --data and --features" if given["data"] else "Missing option '--data' (or '--features')")
    missing = [path for path in given["data"] if not Path(path).exists()]
    if missing:
        raise InputError(f"{missing[0]} does not exist; check the path of the training data")


def options_of(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a training; length and held-out share of features are those that they were made with."""
    if not given["features"]:
        return dict(options)
    from eyas.train.store import Manifest

    made = Manifest.read(Path(given["features"])).settings
    fixed = {"max_length": made.max_length, "heldout": made.heldout}
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise OptionError(f"{given['features']} was made with {name} {value}, so it cannot be {options[name]}; leave the option out")
    return {**options, **fixed}


def training_data(llm: LLM, given: Mapping[str, Any], config: TrainConfig) -> tuple[Data, dict[str, Any]]:
    """The examples, and what training.json says about them."""
    if given["data"]:
        from eyas.train.data import data_hash

        data = read_data(llm, given["data"], config.max_length, config.heldout)
        about = {"files": [Path(path).name for path in given["data"]], "sha256": data_hash(given["data"]), "report": str(data.report)}
        return data, {"data": about}
    from eyas.train.store import FeatureStore

    store = FeatureStore(Path(given["features"]))
    store.check(llm.target, llm.tokenizer)
    data, made = store.data(), store.settings
    every, there = len(store.lengths), len(data.train) + len(data.heldout)
    part = "" if there == every else f"; only {there:,} of its {every:,} examples are there: the same `eyas features` makes the rest"
    note(f"{given['features']} holds the features of {data.report}{part}")
    about = {"files": [file["name"] for file in made.data["files"]], "sha256": data.sha256, "report": str(data.report)}
    stored = {"id": store.id, "layers": list(made.layers), "dtype": made.dtype, "target_dtype": made.target["dtype"]}
    return data, {"data": about, "features": stored}


def check_layers(data: Data, drafter: Drafter) -> None:
    """InputError when the features lack layers that the method's loss reads."""
    from eyas.train.store import StoredExamples

    if isinstance(data.train, StoredExamples):
        data.train.store.check_layers(drafter.train_feature_layers)


def read_data(llm: LLM, paths: Sequence[str], max_length: int, heldout: float) -> Data:
    """Read, tokenise and split, with a progress display; bad lines are said."""
    from rich.console import Console

    from eyas.train.data import read

    if llm.tokenizer is None:
        raise InputError("this target has no tokenizer: name one with --tokenizer")
    console = Console(stderr=True)
    with console.status("reading data") as status:

        def say(report: Report) -> None:
            if report.lines % 500 == 0:
                status.update(f"reading data: {report.lines:,} lines, {report.tokens:,} tokens")

        longest = min(max_length, llm.target.context)
        data = read(list(paths), llm.tokenizer, max_length=longest, heldout=heldout, on_line=say)
    largest, vocabulary = max(max(e.ids) for side in (data.train, data.heldout) for e in side), llm.target.vocab_size
    if largest >= vocabulary:
        raise InputError(
            f"the tokenizer makes token {largest} of this data, the target's vocabulary is 0..{vocabulary - 1}: name the target's own "
            "with --tokenizer"
        )
    for problem in data.report.problems[:SHOWN_PROBLEMS]:
        note(problem)
    if len(data.report.problems) > SHOWN_PROBLEMS:
        note(f"and {len(data.report.problems) - SHOWN_PROBLEMS} lines more that cannot be used")
    note(str(data.report))
    return data
