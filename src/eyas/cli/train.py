"""`eyas train`: a draft head for a target, from chats or plain text. Run again, the same command goes on where it was interrupted.

Under torchrun every process runs it; the first one speaks.
"""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._data import check_layers, check_source, options_of, training_data
from eyas.cli._errors import Interrupted, note
from eyas.cli._load import ITSELF, check_exact, load, quiet
from eyas.cli._options import MODEL_BASE, Flag, MethodCommand, examples, field_option, flags_of, method_options, option, stack
from eyas.errors import EyasError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.drafters import Drafter
    from eyas.train.data import Data
    from eyas.train.loop import TrainConfig, TrainResult

__all__ = ["command"]

PANEL = "Training"
GRACE_SECONDS = 3.0  # what one process finds wrong the first one mostly finds too, and says; torchrun then ends the others
EXAMPLES = examples(
    ("eyas train --target MODEL --data chat.jsonl --output HEAD", "one epoch of eagle3"),
    ("eyas train ... --data chat.jsonl --data novels.txt --epochs 3 --lr 3e-4", "several files, longer"),
    ("eyas train ... --features FEATURES", "what `eyas features` wrote, instead of --data"),
    ("torchrun --nproc-per-node 4 -m eyas train ... --accumulation 4", "on four GPUs"),
    ("eyas generate --target MODEL --draft HEAD 'Why ...'", "what it is for"),
    more=(
        '[bold]Data[/]: {"messages": \\[...]} or {"conversations": \\[...]} a line; anything but .json, .jsonl and .ndjson is plain text.',
        "Training is best on what the target itself would say: its own answers, on prompts like yours.",
    ),
)


class _TrainCommand(MethodCommand):
    """Takes the fields of TrainConfig as well."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        return [*own[:-1], *_config_flags(), *own[-1:]]


@functools.cache
def _config_flags() -> tuple[click.Parameter, ...]:
    from eyas.train.loop import TrainConfig

    return tuple(_config_flag(flag, f"{flag.help} [{flag.shown or 'none'}]") for flag in flags_of(TrainConfig))


def _config_flag(flag: Flag, said: str) -> click.Option:
    made = field_option(flag, PANEL, said)
    if flag.annotation is not bool:
        return made
    return click.RichOption([f"--{flag.name}"], is_flag=True, callback=made.callback, expose_value=False, help=flag.help, panel=PANEL)


@click.command("train", cls=_TrainCommand, without=(), epilog=EXAMPLES, panel="Heads")
@stack(
    option("Data", "--data", multiple=True, metavar="FILE", help="Chats (JSONL) or plain text, .gz too; several are mixed."),
    option("Data", "--features", metavar="FOLDER", help="What `eyas features` wrote, instead of --data."),
    option("Data", "--output", required=True, metavar="FOLDER", help="Where the head goes, and the state from which a run goes on."),
    option("Model", "--method", default="eagle3", metavar="NAME", help="Whose head: see `eyas methods`."),
    option("Model", "--init", metavar="PATH|HUB", help="Begin with this head instead of a new one; it keeps its draft vocabulary."),
    option("Data", "--restart", is_flag=True, help="Forget the state in --output and begin anew."),
    MODEL_BASE,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> int:
    """Train a draft head for a target."""
    from eyas.train.dist import world_size

    rank = int(os.environ.get("RANK", "0")) if world_size() > 1 else 0
    try:
        with _silent(rank > 0):
            return _train(ctx, given)
    except Interrupted:
        if rank:
            return 130
        raise
    except EyasError as error:
        if not rank:
            raise
        time.sleep(GRACE_SECONDS)
        raise EyasError(f"process {rank}: {error}") from error


@contextmanager
def _silent(wanted: bool) -> Iterator[None]:
    with redirect_stderr(io.StringIO()) if wanted else nullcontext():
        yield


def _train(ctx: click.RichContext, given: dict[str, Any]) -> int:
    from eyas.core.drafter import build_options
    from eyas.train import alpha, progress
    from eyas.train.dist import world_size
    from eyas.train.loop import TrainConfig, train
    from eyas.train.trackers import check_trackers

    check_exact(given)
    check_source(given)
    config = TrainConfig(**options_of(given, ctx.meta.get(PANEL, {})))
    config.check_processes(world_size())
    check_trackers(config.trackers)
    kind = _method(given["method"])
    options = method_options(ctx)
    if given["init"] and (own := [f"--{name}" for name in options if name.startswith("head.")]):
        raise OptionError(f"--init brings a head that is as it is: leave {', '.join(own)} out")
    chosen = build_options(kind.Options, options)
    llm = load({**given, **ITSELF, "device": _device(given["device"])}, {})
    if config.max_length > llm.target.context:
        note(f"max_length is {config.max_length}, the target's context {llm.target.context}: examples are cut there")
    data, about = training_data(llm, given, config)
    drafter = _drafter(kind, llm, given, chosen, data, config)
    check_layers(data, drafter)
    with progress.bar() as show, quiet(given["verbose"]):
        outcome = train(
            drafter, data.train, data.heldout, config, given["output"],
            resume=not given["restart"], evaluate=alpha.chain_figures(data.heldout, llm.eos), progress=show, about=about,
        )  # fmt: skip
    return _report(outcome, given["output"], config)


def _device(name: str) -> str:
    """Each process of a machine has a GPU of its own."""
    import torch

    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if local and name in ("auto", "cuda") and torch.cuda.is_available() else name


def _method(name: str) -> type[Drafter]:
    from eyas import drafters

    if not drafters.find(name).trainable:
        able = [method for method in drafters.names() if drafters.find(method).trainable]
        raise OptionError(f"the method {name!r} has nothing to train; these have: {', '.join(able)}")
    return drafters.find(name)


def _drafter(kind: type[Drafter], llm: LLM, given: dict[str, Any], options: Any, data: Data, config: TrainConfig) -> Drafter:
    """A new head, made for what the data asks for, or the one that --init names."""
    from eyas import checkpoints
    from eyas.drafters._eagle import EagleMethod
    from eyas.train.vocab import count_tokens

    if given["init"]:
        drafter = kind.load(checkpoints.load(given["init"]), llm.target, options)
        if isinstance(drafter, EagleMethod) and drafter.trained_window:
            note(f"{given['init']} was trained with a window of {drafter.trained_window}; here it sees whole examples and has none")
            drafter.trained_window = None
        return drafter
    return kind.init_for_training(llm.target, options, config.seed, count_tokens(data.train, llm.target.vocab_size))


def _report(outcome: TrainResult, folder: str, config: TrainConfig) -> int:
    from eyas.train.progress import figures_text

    if outcome.interrupted:
        raise Interrupted(f"step {outcome.step} of {outcome.steps} is saved in {folder}; the same command goes on from there")
    figures = f": held-out {figures_text(outcome.heldout)}" if outcome.heldout else ""
    early = f" (ended early: {config.patience} evaluations without a better one)" if outcome.step < outcome.steps else ""
    note(f"{folder} holds the head of step {outcome.best_step} of {outcome.steps}{early}{figures}; {outcome.seconds / 60:.1f} minutes")
    return 0
