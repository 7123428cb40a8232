"""`eyas train`: a draft head for a target, from chats or plain text. Run again, the same command goes on where it was interrupted."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._data import check_layers, check_source, options_of, training_data
from eyas.cli._errors import Interrupted, note
from eyas.cli._load import load, quiet
from eyas.cli._options import MODEL_BASE, MethodCommand, examples, field_option, flags_of, method_options, option, stack
from eyas.errors import OptionError

if TYPE_CHECKING:
    from eyas.drafters import Drafter
    from eyas.llm import LLM
    from eyas.train.loop import Outcome, TrainConfig

__all__ = ["command"]

PANEL = "Training"
EXAMPLES = examples(
    ("eyas train --method eagle1 --target MODEL --data chat.jsonl --output HEAD", "one epoch"),
    ("eyas train ... --data chat.jsonl --data novels.txt --epochs 3 --lr 3e-4", "several files, longer"),
    ("eyas train ... --features FEATURES", "what `eyas features` wrote, instead of --data"),
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

    return tuple(field_option(flag, PANEL, f"{flag.help} [{flag.shown}]") for flag in flags_of(TrainConfig))


@click.command("train", cls=_TrainCommand, epilog=EXAMPLES, panel="Heads")
@stack(
    option("Data", "--data", multiple=True, metavar="FILE", help="Chats (JSONL) or plain text, .gz too; several are mixed."),
    option("Data", "--features", metavar="FOLDER", help="What `eyas features` wrote, instead of --data."),
    option("Data", "--output", required=True, metavar="FOLDER", help="Where the head goes, and the state from which a run goes on."),
    option("Model", "--method", default="eagle1", metavar="NAME", help="Whose head: see `eyas methods`."),
    option("Model", "--init", metavar="PATH|HUB", help="Begin with this head instead of a random one."),
    option("Data", "--restart", is_flag=True, help="Forget the state in --output and begin anew."),
    MODEL_BASE,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> None:
    """Train a draft head for a target."""
    from eyas.train import alpha, progress
    from eyas.train.loop import TrainConfig, train

    check_source(given)
    config = TrainConfig(**options_of(given, ctx.meta.get(PANEL, {})))
    _check_method(given["method"])
    llm = load({**given, "draft": None, "method": "vanilla"}, {})
    drafter = _drafter(llm, given, method_options(ctx), config)
    data, about = training_data(llm, given, config)
    check_layers(data, drafter)
    with progress.bar() as show, quiet(given["verbose"]):
        outcome = train(
            drafter, data.train, data.heldout, config, given["output"],
            resume=not given["restart"], evaluate=alpha.chain_figures(data.heldout, llm.eos), progress=show, about=about,
        )  # fmt: skip
    _report(outcome, given["output"], config)


def _check_method(name: str) -> None:
    from eyas import drafters

    if not drafters.find(name).trainable:
        able = [method for method in drafters.names() if drafters.find(method).trainable]
        raise OptionError(f"the method {name!r} has nothing to train; these have: {', '.join(able)}")


def _drafter(llm: LLM, given: dict[str, Any], options: dict[str, Any], config: TrainConfig) -> Drafter:
    """A random head of the method, or the one that --init names."""
    from eyas import checkpoints, drafters
    from eyas.drafters._base import options_from

    kind = drafters.find(given["method"])
    chosen = options_from(kind.Options, options)
    if given["init"]:
        return kind.load(checkpoints.load(given["init"]), llm.target, chosen)
    return kind.random(llm.target, chosen, seed=config.seed)


def _report(outcome: Outcome, folder: str, config: TrainConfig) -> None:
    from eyas.train.progress import figures_text

    if outcome.interrupted:
        raise Interrupted(f"step {outcome.step} of {outcome.steps} is saved in {folder}; the same command goes on from there")
    figures = f": held-out {figures_text(outcome.heldout)}" if outcome.heldout else ""
    early = f" (ended early: {config.patience} evaluations without a better one)" if outcome.step < outcome.steps else ""
    note(f"{folder} holds the head of step {outcome.best_step} of {outcome.steps}{early}{figures}; {outcome.seconds / 60:.1f} minutes")
