"""`eyas predict`: which speed-up to expect, by arithmetic, before a machine is bought or a head trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts.types import NonNegativeInt, PositiveInt

from eyas.cli.tools import AS_JSON, UsageError, note, option_group, print_table, quiet
from eyas.errors import OptionError

if TYPE_CHECKING:
    from eyas.core.drafter import TreeSize
    from eyas_lab.predict import Prediction
    from eyas_lab.predict.prediction import TreePrediction

GROUP = "Information"
EXAMPLES = """
eyas predict --target meta-llama/Llama-3.1-8B-Instruct --machine h100  # with a typical EAGLE-3 head
eyas predict --target config.json --machine h200 --method mtp --rows 16  # a model that is not there yet, 16 requests
eyas predict --target MODEL --machine cpu --draft HEAD --weights int8  # this CPU, measured; the head's own acceptance
eyas predict --target MODEL --machine my_gpu.json --acceptance 0.8,0.75,0.7  # docs/guide/predict.md has the fields
"""
NOTES = ("A config.json is enough. On CPUs 10 of 15 were within 20 %; no GPU was tried: docs/guide/predict.md.",)


@option_group
class PredictOptions:
    """The options of `eyas predict`."""

    target: Annotated[str, "Model", "PATH|HUB|CONFIG"] = "embedded"
    """The target model: a name, a folder, a hub id, or just its config.json."""
    machine: Annotated[str, "Machine", "cpu|h100|h200|FILE"] = "cpu"
    """cpu: this machine, measured once in half a minute. h100, h200: published figures. Or a JSON file
    with bandwidth, rates and overheads (docs/guide/predict.md)."""
    draft: Annotated[str | None, "Model", "PATH|HUB|CONFIG"] = None
    """The draft head, or a small model: a folder, a hub id, or just its config.json. Default: a
    typical head of the method."""
    method: Annotated[str | None, "Method", "NAME"] = None
    """eagle1, eagle2, eagle3, seagle, mtp, small_model, suffix or prompt_lookup. Default: the head's;
    without a head, eagle3."""
    acceptance: Annotated[str | None, "Method", "A,A,..."] = None
    """How often a first draft token is accepted at depth 1, 2, ..., given that all before it were; the
    last one holds for all deeper ones. Default: what the head's training measured, or what is
    typical of the method."""
    tree: Annotated[str, "Method", "NODES/DEPTH/BRANCH"] = "60/8/10"
    """The largest tree."""
    weights: Annotated[Literal["auto", "float32", "bfloat16", "int8", "int4"], "Machine"] = "auto"
    """Format of the target's weights. auto: the checkpoint's own."""
    activations: Annotated[Literal["exact", "bfloat16", "int16", "int8"], "Machine"] = "exact"
    """Inputs of products on this CPU, as for `eyas generate`."""
    rows: Annotated[PositiveInt, "Limits", "N"] = 1
    """Requests at a time."""
    context: Annotated[NonNegativeInt, "Limits", "N"] = 512
    """Tokens of each request before the cycle."""
    trees: Annotated[PositiveInt, "Output", "N"] = 5
    """Show the N fastest trees."""
    force: Annotated[bool, "Machine"] = False
    """Measure this CPU again."""
    as_json: AS_JSON = False


def command(*, job: PredictOptions) -> None:
    """Predict the speed-up of speculative decoding for a model and a machine, and show the arithmetic."""
    from eyas_lab.predict import Prediction, Settings, read_head, read_machine, read_model, weights_of

    settings = Settings(job.weights, job.rows, job.context, _limit(job.tree))
    acceptance = None if job.acceptance is None else _acceptance(job.acceptance)
    if job.machine != "cpu" and (job.force or job.activations != "exact"):
        raise UsageError("--force and --activations are for --machine cpu")
    machine = None if job.machine == "cpu" else read_machine(job.machine)
    with quiet():
        model = read_model(job.target)
        head = read_head(job.draft, job.method, model, acceptance)
        if machine is None:
            from eyas_lab.predict.measure import measured_machine

            machine = measured_machine(weights_of(job.weights, model.dtype), job.activations, job.force)
    prediction = Prediction(model, machine, head, settings)
    if job.as_json:
        print(json.dumps(prediction.to_json(job.trees)))
        return
    _show(prediction, prediction.trees(job.trees))


def _limit(text: str) -> TreeSize:
    from eyas.core.drafter import TreeSize

    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"--tree {text!r}: write nodes, depth and branch, such as 60/8/10")
    return TreeSize(*map(int, parts))


def _acceptance(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise OptionError(f"--acceptance {text!r}: write numbers from 0 to 1 by depth, such as 0.8,0.75,0.7")
    return rates


def _show(prediction: Prediction, trees: Sequence[TreePrediction]) -> None:
    from eyas_lab.predict.prediction import TOKENS

    model, machine, head, settings = prediction.model, prediction.machine, prediction.head, prediction.settings
    read = f"{model.weights / 1e6:,.0f}M weights in {settings.weights}"
    print(f"{model.name} ({model.model_type}, {model.layers} layers, {read}) on {machine.name}")
    print(
        f"{settings.rows} x {settings.context} tokens; draft: {head.name}, {head.level + head.shared:,} weights a level"
    )
    rows = []
    for each in map(prediction.pass_of, TOKENS):
        ratio = each.seconds / prediction.pass_of(1).seconds
        figures = f"{each.bytes / 1e9:.3f}", f"{each.flops / 1e9:.1f}", f"{1e3 * each.seconds:.3f}", f"{ratio:.2f}x"
        rows.append((str(each.tokens), *figures, each.bound))
    print_table(("tokens", "GB read", "GFLOP", "ms", "vs 1", "bound by"), rows, title="Passes of the target")
    depths = [(str(depth), f"{alpha:.2f}", f"{tau:.2f}") for depth, alpha, tau in prediction.chains()]
    print_table(("depth", "accepted", "tau of a chain"), depths, title=f"Acceptance, {head.acceptance.source}")
    print_table(
        ("nodes", "depth", "branch", "tau", "draft, ms", "pass, ms", "c", "speed-up", "from", "to"),
        [
            (
                *map(str, tree.tree),
                f"{tree.tau:.2f}",
                *(f"{1e3 * seconds:.3f}" for seconds in (tree.draft_seconds, tree.pass_seconds)),
                *(f"{figure:.2f}" for figure in (tree.c, tree.speedup, tree.low, tree.high)),
            )
            for tree in trees
        ],
        title=f"Trees; plain decoding: {settings.rows / prediction.plain():,.1f} tokens/s",
    )
    note(f"{machine.name}: {machine.source or 'no source is given'}")
    print(prediction.verdict(trees))
