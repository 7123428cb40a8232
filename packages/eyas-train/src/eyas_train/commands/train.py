"""`eyas train`: a draft head for a target, from chats or plain text.

Run again, the same command goes on where it was interrupted. Under torchrun every process runs it
and the first one prints.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts.types import PositiveFloat, PositiveInt

from eyas import elsewhere
from eyas.cli.tools import (
    ConfigOptions,
    FeatureTarget,
    Here,
    Interrupted,
    TrainMethodOptions,
    UsageError,
    cores_for,
    interruptible,
    need_packages,
    note,
    option_group,
    progress_bar,
    quiet,
    wants_gpu,
)
from eyas.errors import EyasError, OptionError
from eyas_lab.folders import check_output_folder
from eyas_train.commands._data import check_exact, check_source, load_target, training_data, training_options

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.drafters import DraftMethod
    from eyas_train.config import TrainConfig
    from eyas_train.data import Data, FeatureReader
    from eyas_train.loop import TrainResult
    from eyas_train.reporter import OnProgress, Progress

GROUP = "Heads"
EXAMPLES = """
eyas train --target MODEL --data chat.jsonl --output HEAD  # one epoch of eagle3
eyas train ... --data chat.jsonl --data novels.txt --epochs 3 --lr 3e-4  # several files, longer
eyas train ... --features FEATURES  # the folder that `eyas features` wrote, instead of --data
torchrun --nproc-per-node 4 -m eyas train ... --accumulation 4  # on four GPUs
eyas generate --target MODEL --draft HEAD 'Why ...'  # then generate with the new head
"""
NOTES = (
    'Data: {"messages": [...]} or {"conversations": [...]} a line; anything but .json, .jsonl and .ndjson is plain text.',
    "The best data is the target's own answers, on prompts like yours.",
)


@option_group
class HeadOptions:
    """The data, and the head that is trained."""

    data: Annotated[tuple[str, ...], "Data", "FILE"] = ()
    """Chats (JSONL, Parquet) or plain text, .gz too, here or at a URL; several files are mixed."""
    features: Annotated[str | None, "Data", "FOLDER"] = None
    """The folder that `eyas features` wrote, or a URL that it was copied to, instead of --data."""
    features_cache: Annotated[PositiveFloat, "Data", "GIB"] = 20.0
    """Room in the temporary folder (TMPDIR) for features from a URL, for each process."""
    output: Annotated[str, "Data", "FOLDER"]
    """Folder for the head, and for the state from which a run continues."""
    restart: Annotated[bool, "Data"] = False
    """Forget the state in --output and begin again."""
    method: Annotated[str, "Method", "NAME"] = "eagle3"
    """Method to train a head for; `eyas methods` lists them."""
    init: Annotated[str | None, "Model", "PATH|HUB"] = None
    """Start from this head, which keeps its draft vocabulary."""
    workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Train with N processes on Ray, which restarts a lost one (docs/guide/scale.md), instead of with torchrun.
    All machines must see --output."""
    min_workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Run with N processes while the cluster has no room for all of --workers."""


class TrainingOptions(ConfigOptions):
    """The fields of TrainConfig that were given."""

    @staticmethod
    def declared() -> type:
        """Return the config of a training."""
        from eyas_train.config import TrainConfig

        return TrainConfig


def command(*, head: HeadOptions, training: TrainingOptions, model: FeatureTarget, options: TrainMethodOptions) -> int:
    """Train a draft head for a target."""
    if head.workers is None and head.min_workers is not None:
        raise UsageError("--min-workers goes with --workers")
    if head.workers is not None:
        _train_with_workers(head, training, model, options)
        return 0
    rank = _rank()
    try:
        with redirect_stderr(io.StringIO()) if rank > 0 else nullcontext():
            _train(head, training, model, options)
        return 0
    except Interrupted:
        if rank:
            return 130
        raise
    except EyasError as error:
        if not rank:
            raise
        time.sleep(3)  # the first process mostly finds the same, reports it, and torchrun then ends the others
        raise EyasError(f"process {rank}: {error}") from error


@dataclass(frozen=True)
class _Loop:
    """Train in one of Ray's processes."""

    head: HeadOptions
    training: dict[str, Any]
    model: FeatureTarget
    options: dict[str, Any]

    def __call__(self, stop: Callable[[], bool]) -> str | None:
        try:
            _train(self.head, self.training, self.model, self.options, stop)
        except Interrupted as stopped:
            return str(stopped)
        return None


def _train_with_workers(
    head: HeadOptions, training: dict[str, Any], model: FeatureTarget, options: dict[str, Any]
) -> None:
    from eyas_train.config import TrainConfig

    workers, folder = head.workers, Path(head.output).expanduser().absolute()  # Ray's processes begin in other folders
    assert workers is not None
    if head.restart:
        raise UsageError(
            "a training that Ray begins again must go on: leave --restart out, and empty --output yourself"
        )
    if (least := head.min_workers or workers) > workers:
        raise UsageError(f"--min-workers {least} is more than --workers {workers}")
    config = TrainConfig(**training_options(head.features, training))
    for count in range(least, workers + 1):  # before any of them is started
        config.check_processes(count)
    need_packages("train --workers", "ray", "ray")
    ray, ray_training = elsewhere.part("workers", "train --workers"), elsewhere.part("training", "train --workers")
    share = ray.Workers(workers, cpus=cores_for(workers), gpus=float(wants_gpu(model.device)))
    loop = Here(_Loop(replace(head, output=str(folder)), dict(training), model, dict(options)))
    with interruptible(lambda: "the same command goes on from the state that was saved last"):
        stopped = ray_training.train_with(loop, share, folder, head.min_workers)
    if stopped is not None:
        raise Interrupted(stopped)
    note(f"the head is in {folder}")


def _train(
    head: HeadOptions,
    training: dict[str, Any],
    model: FeatureTarget,
    options: dict[str, Any],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    from eyas.core.options import build_options
    from eyas_train.config import TrainConfig
    from eyas_train.dist import world_size
    from eyas_train.reporter import check_trackers

    check_exact(model)
    check_source(head.data, head.features)
    config = TrainConfig(**training_options(head.features, training))
    config.check_processes(world_size())
    check_trackers(config.trackers)
    kind = _trainable_method(head.method)
    if head.init and (described := [f"--{name}" for name in options if name.startswith("head.")]):
        raise OptionError(f"--init names a finished head: leave {', '.join(described)} out")
    method_options = build_options(kind.Options, options)
    if _rank() == 0:
        check_output_folder(Path(head.output).expanduser())
    llm = load_target(model, _device(model.device))
    train_head(llm, head, config, method_options, verbose=model.verbose, stop=stop)


def train_head(
    llm: LLM,
    head: HeadOptions,
    config: TrainConfig,
    options: Any,
    *,
    verbose: bool = False,
    stop: Callable[[], bool] = lambda: False,
    **evaluation: int,
) -> TrainResult:
    """Train a head for a target that is loaded, or go on with it. Interrupted when the run was stopped.

    Args:
        options: the method's own.
        stop: as for `loop.train`.
        evaluation: arguments of `chain_figures`, where its defaults do not suit.
    """
    from eyas_train import alpha
    from eyas_train.loop import train
    from eyas_train.start import fit_start
    from eyas_train.state import saved_states
    from eyas_train.store import StoredExamples

    folder = Path(head.output).expanduser()
    if config.max_length > llm.target.context:
        note(f"max_length is {config.max_length}, the target's context {llm.target.context}: examples are cut there")
    data, about = training_data(llm, head.data, head.features, config, int(head.features_cache * 2**30))
    drafter = _drafter(_trainable_method(head.method), llm, head.init, options, data, config)
    if head.init is None and (head.restart or not saved_states(folder)):
        with progress_bar("fitting the first weights", unit="tokens", hidden=_rank() > 0) as bar:
            fit = fit_start(
                drafter, data.train, config.batch_tokens, config.seed, lambda done, n: bar.show(done, total=n)
            )
        if fit:
            note(fit)
    if isinstance(data.train, StoredExamples):
        data.train.store.check_layers(drafter.train_feature_layers)
    with _progress() as show, quiet(verbose):
        outcome = train(
            drafter,
            data.train,
            data.heldout,
            config,
            head.output,
            resume=not head.restart,
            evaluate=alpha.chain_figures(data.heldout, llm.eos, **evaluation),
            progress=show,
            about=about,
            stop=stop,
            read=_reader(llm, config, data),
        )
    _report(outcome, head.output, config)
    return outcome


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a bar with steps, loss, held-out figures and speed; without a terminal, a line every half minute."""
    from eyas_train.reporter import figures_text

    told = 0.0
    with progress_bar("training", hidden=_rank() > 0) as bar:

        def show(now: Progress) -> None:
            nonlocal told
            heldout = f"  | held-out {figures_text(now.heldout)}" if now.heldout else ""
            text = f"{figures_text(now.figures)}  {now.tokens_per_second:,.0f} tok/s{heldout}"
            bar.show(now.step, text, total=now.steps)
            line = now.note
            if not line and not sys.stderr.isatty() and (time.monotonic() - told > 30 or now.step == now.steps):
                told, line = time.monotonic(), f"step {now.step}/{now.steps}  {text}"
            if line:
                note(line)

        yield show


def _rank() -> int:
    """Return the number of this process among those that torchrun has started; 0 without torchrun."""
    from eyas_train.dist import launched_as, world_size

    return launched_as("RANK", 0) if world_size() > 1 else 0


def _device(name: str) -> str:
    """Return the GPU of this process: under torchrun each one of a machine has its own."""
    import torch

    from eyas_train.dist import launched_as

    first_of_all = "LOCAL_RANK" not in os.environ or name not in ("auto", "cuda") or not torch.cuda.is_available()
    return name if first_of_all else f"cuda:{launched_as('LOCAL_RANK', 0)}"


def _trainable_method(name: str) -> type[DraftMethod]:
    from eyas import drafters

    if not drafters.find(name).trainable:
        trainable = [method for method in drafters.names() if drafters.find(method).trainable]
        raise OptionError(f"the method {name!r} has nothing to train; these have: {', '.join(trainable)}")
    return drafters.find(name)


def _drafter(
    kind: type[DraftMethod], llm: LLM, init: str | None, options: Any, data: Data, config: TrainConfig
) -> DraftMethod:
    """Return the head of --init, or else a new one that fits the data."""
    from eyas import checkpoints
    from eyas.drafters.tools import EagleMethod
    from eyas_train.new_heads import count_tokens

    if init is None:
        counts = count_tokens(data.train, llm.target.vocab_size)
        return kind.init_for_training(llm.target, options, config.seed, counts)
    drafter = kind.load(checkpoints.load(init), llm.target, options)
    if isinstance(drafter, EagleMethod) and drafter.trained_window:
        note(f"{init} was trained with a window of {drafter.trained_window}; here it sees whole examples and has none")
        drafter.trained_window = None
    return drafter


def _reader(llm: LLM, config: TrainConfig, data: Data) -> FeatureReader | None:
    """Return the kernels that read features, where rounding is allowed and they suit the target."""
    from eyas_train.kernel_features import feature_reader
    from eyas_train.store import StoredExamples

    if config.precision == "float32" or isinstance(data.train, StoredExamples) or llm.target.device.type != "cpu":
        return None
    if (read := feature_reader(llm.target)) is None:
        return None
    note("features are read by kernels, with weights in int8 and activations in int16 (--precision float32: exactly)")
    return lambda tokens_N, documents, layers: read(tokens_N, documents.lengths, layers)


def _report(outcome: TrainResult, folder: str, config: TrainConfig) -> None:
    from eyas_train.reporter import figures_text
    from eyas_train.state import saved_states, step_of

    if outcome.interrupted:
        if not (saved := saved_states(Path(folder).expanduser())):
            raise Interrupted("no step is saved; the same command begins again")
        step = step_of(saved[-1])  # an earlier one than the outcome's, where Ctrl-C has cut a step off
        raise Interrupted(f"step {step} of {outcome.steps} is saved in {folder}; the same command goes on from there")
    figures = f": held-out {figures_text(outcome.heldout)}" if outcome.heldout else ""
    is_early = outcome.step < outcome.steps
    early = f" (ended early: {config.patience} evaluations without a better one)" * is_early
    best = f"{folder} holds the head of step {outcome.best_step} of {outcome.steps}"
    note(f"{best}{early}{figures}; {outcome.seconds / 60:.1f} minutes")
