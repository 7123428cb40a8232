"""Tools for authors of commands. A command is a module with a function `command` (see `_app.py`); a
distribution names it as an entry point of the group "eyas.commands". Modules that begin with an underscore may
change. Importing this imports no torch.
"""

from __future__ import annotations

from eyas.cli._app import parse
from eyas.cli._errors import Interrupted, UsageError, interruptible, note, problem
from eyas.cli._files import FileRun, InvalidLine, Results, differences, file_errors, read_tasks
from eyas.cli._load import (
    Here,
    cores_for,
    load,
    need_packages,
    need_tokenizer,
    note_no_head,
    on_cluster,
    plain_decoding,
    quiet,
    sampling_of,
    spread,
    wants_gpu,
)
from eyas.cli._options import (
    AS_JSON,
    DRAFT_WEIGHTS,
    TREE,
    VERBOSE,
    BenchMethodOptions,
    ConfigOptions,
    DraftOptions,
    ExactTarget,
    FeatureTarget,
    FilterOptions,
    MethodOptions,
    SamplingOptions,
    TargetOptions,
    TrainMethodOptions,
    option_group,
)
from eyas.cli._show import Painter, ProgressBar, TimedStream, print_table, progress_bar

__all__ = [
    "AS_JSON", "DRAFT_WEIGHTS", "TREE", "VERBOSE", "BenchMethodOptions", "ConfigOptions", "DraftOptions", "ExactTarget",
    "FeatureTarget", "FileRun", "FilterOptions", "Here", "Interrupted", "InvalidLine", "MethodOptions", "Painter", "ProgressBar", "Results",
    "SamplingOptions", "TargetOptions", "TimedStream", "TrainMethodOptions", "UsageError", "cores_for", "differences",
    "file_errors", "interruptible", "load", "need_packages", "need_tokenizer", "note", "note_no_head", "on_cluster",
    "option_group", "parse", "plain_decoding", "print_table", "problem", "progress_bar", "quiet", "read_tasks",
    "sampling_of", "spread", "wants_gpu",
]  # fmt: skip
