"""What authors of commands use. A command is a module with a function `command` (see `_app.py`); a distribution names
it as an entry point of the group "eyas.commands".

    options    option_group, TargetOptions, ...    groups of options; annotations with panels and help
    loading    load, quiet, ...                    from options to an LLM
    files      read_tasks, FileRun, Results, ...   prompts in, results out, line by line
    showing    print_table, progress_bar, ...
    ends       UsageError, Interrupted, note, ...  which exception becomes which line and exit status
    workers    spread, Here, cores_for, ...        the work of a command on several processes

Everything else in modules that begin with an underscore may change. Importing this module does not import torch.
"""

from __future__ import annotations

from eyas.cli._app import parse
from eyas.cli._errors import Interrupted, UsageError, interruptible, note, problem
from eyas.cli._files import FileRun, InvalidLine, Results, differences, read_tasks
from eyas.cli._load import load, need_packages, need_tokenizer, note_no_head, quiet, sampling_of
from eyas.cli._options import (
    AS_JSON,
    DRAFT_WEIGHTS,
    VERBOSE,
    BenchMethodOptions,
    ConfigOptions,
    DraftOptions,
    FilterOptions,
    MethodOptions,
    SamplingOptions,
    TargetOptions,
    TrainMethodOptions,
    option_group,
)
from eyas.cli._show import ProgressBar, print_table, progress_bar
from eyas.cli._spread import Here, cores_for, on_cluster, spread, wants_gpu

__all__ = [
    "AS_JSON", "DRAFT_WEIGHTS", "VERBOSE", "BenchMethodOptions", "ConfigOptions", "DraftOptions", "FileRun",
    "FilterOptions", "Here", "Interrupted", "InvalidLine", "MethodOptions", "ProgressBar", "Results", "SamplingOptions",
    "TargetOptions", "TrainMethodOptions", "UsageError", "cores_for", "differences", "interruptible", "load",
    "need_packages", "need_tokenizer", "note", "note_no_head", "on_cluster", "option_group", "parse",
    "print_table", "problem", "progress_bar", "quiet", "read_tasks", "sampling_of", "spread",
    "wants_gpu",
]  # fmt: skip
