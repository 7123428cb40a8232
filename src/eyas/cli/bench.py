"""`eyas bench`: every method on the same prompts in one run; run again, the same command goes on where it was stopped."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.core import ParameterSource

from eyas.cli._contestants import HEADS, contestants
from eyas.cli._errors import Interrupted, note, problem
from eyas.cli._load import load, quiet
from eyas.cli._options import (
    DRAFT_WEIGHTS,
    LAW_BASE,
    MODEL_BASE,
    SAMPLING_LAW,
    TRAINING,
    MethodCommand,
    examples,
    method_options,
    option,
    stack,
)  # fmt: skip
from eyas.errors import InputError, OptionError

if TYPE_CHECKING:
    from eyas.bench.run import Bench, OnPrompt
    from eyas.bench.tasks import Prompt

__all__ = ["command"]

NEAR_TIE = 1e-5  # of two scores in float32: below it, either token is plain decoding's
NEAR_TIE_OF_KERNELS = 2e-4  # where kernels run the target: transformers' own forward rounds otherwise
EXAMPLES = examples(
    ("eyas bench", "the embedded model, our own 24 prompts, every method that can run"),
    ("eyas bench --target MODEL --draft HEAD --prompts mine.jsonl", "your model on your prompts"),
    ("eyas bench --methods eagle2,eagle2:tree.nodes=26:tree.depth=5 --temperature 0 --temperature 1", "variants side by side"),
    ("eyas bench --tasks spec_bench:question.jsonl --limit 20 --output out/spec", "a public set from a file"),
    ("eyas bench --methods eagle3 --limit 1 --profile", "where a cycle's time goes, and how far it is from the machine's bound"),
    ("eyas bench --compare out/bench out/spec", "two runs"),
    more=('[bold]Lines of --prompts[/]: {"prompt": "..."}, {"turns": \\[...]}, {"messages": \\[...]} or {"prompt_ids": \\[...]}.',),
)


@click.command("bench", cls=MethodCommand, without=(TRAINING,), epilog=EXAMPLES, panel="Answers")
@stack(
    option("Model", "--methods", default="all", metavar="A,B", help="Names, or NAME:option=value:...; all: every method that can run."),
    option(
        "Model", "--draft", "drafts", multiple=True, metavar="[NAME=]PATH|HUB",
        help="A head, for the methods that it was made for, or for NAME; several may be given.",
    ),
    option("Model", "--heads", metavar="FOLDER", help=f"Heads in folders named by their method. Default: {HEADS}, if it is there."),
    option("Prompt", "--tasks", default="bundled", metavar="A,B:PATH", help="Sets of prompts: NAME or NAME:PATH."),
    option("Prompt", "--prompts", metavar="FILE.jsonl", help="Your own prompts, instead of --tasks."),
    option("Prompt", "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many prompts of each set."),
    option(
        "Sampling", "--temperature", "temperatures", type=float, multiple=True, default=(0.0,), help="0: greedy; several may be given."
    ),
    option("Sampling", "--max-new-tokens", type=click.IntRange(min=1), default=128, metavar="N", help="Of an answer, at most."),
    LAW_BASE,
    option("Output", "--output", default="out/bench", metavar="FOLDER", help="Answers, summary and report."),
    option("Output", "--restart", is_flag=True, help="Forget the answers in --output."),
    option("Output", "--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout."),
    option("Output", "--compare", nargs=2, metavar="A B", help="Only show two finished benches side by side: folders or summaries."),
    option(
        "Output", "--probe", type=click.IntRange(min=0), default=6, metavar="N",
        help="Prompts on which drafted trees are looked at node by node, in a pass of its own.",
    ),
    option(
        "Output", "--profile", is_flag=True,
        help="Show also where a cycle's time goes and how far a pass is from the machine's bound; write a trace of each method.",
    ),
    option(
        "Method", "--simulate-acceptance", metavar="A,B,...",
        help="Accept draft tokens at these rates by depth, by lot: for targets with random weights. All else is measured.",
    ),
    MODEL_BASE,
    DRAFT_WEIGHTS,
)  # fmt: skip
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> int:
    """Compare methods: speed, acceptance, and whether the texts are equal."""
    if given["compare"]:
        return _compare(ctx, *given["compare"], as_json=given["as_json"])
    from eyas.bench.run import locked
    from eyas.bench.simulate import parse_rates
    from eyas.core.sampling import Sampling

    for temperature in given["temperatures"]:
        Sampling(temperature=temperature, **_law(given))
    if given["simulate_acceptance"] is not None:
        parse_rates(given["simulate_acceptance"])
    prompts, folder = _prompts(given), Path(given["output"])
    with locked(folder):
        summary = _measured(given, method_options(ctx), prompts, folder)
    return _say(summary, folder, given)


def _law(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in SAMPLING_LAW if name != "temperature"}


def _measured(given: Mapping[str, Any], options: Mapping[str, Any], prompts: list[Prompt], folder: Path) -> dict[str, Any]:
    """The bench, from the models to the files in its folder."""
    from eyas.bench.machine import snapshot
    from eyas.bench.run import Bench
    from eyas.bench.summary import summarise, write

    llm = load({**given, "draft": None, "method": "vanilla"}, {})
    entered, skipped = contestants(llm, given, options)
    for name, why in skipped.items():
        note(f"{name} is left out: {why}")
    simulated, temperatures = given["simulate_acceptance"], tuple(dict.fromkeys(given["temperatures"]))
    bench = Bench(llm, entered, prompts, temperatures, given["max_new_tokens"], _law(given), simulated)
    bench.prompts = _fitting(bench)
    if given["profile"]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal when it begins and ends
    if given["restart"]:
        bench.forget(folder)
    before, command_line = snapshot(), shlex.join(["eyas", *sys.argv[1:]])
    try:
        with _bar() as on_prompt:
            answers = bench.run(folder, on_prompt)
            summary = summarise(
                bench, answers, before, command_line, probe_prompts=given["probe"], skipped=skipped, on_prompt=on_prompt,
                traces=folder if given["profile"] else None,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interrupted(f"whole prompts are kept in {folder}; the same command goes on from there") from None
    write(folder, summary)
    return summary


def _prompts(given: Mapping[str, Any]) -> list[Prompt]:
    from eyas.bench.tasks import load as load_task
    from eyas.bench.tasks import read_prompts

    if given["prompts"]:
        found, complaints = read_prompts(given["prompts"])
        for line in complaints:
            note(line)
        return found[: given["limit"]]
    with quiet():
        found = [p for spec in given["tasks"].split(",") for p in load_task(spec.strip(), given["limit"])]
    count = Counter(p.id for p in found)
    if len(count) < len(found):
        raise OptionError(f"--tasks: two prompts are called {count.most_common(1)[0][0]}: ask one of the sets at a time")
    return found


def _fitting(bench: Bench) -> list[Prompt]:
    """The prompts that can be asked; the others are said. InputError when none can."""
    unfit = bench.unfit()
    if len(unfit) == len(bench.prompts):
        raise InputError(f"no prompt can be asked; the first, {bench.prompts[0].id}: {unfit[bench.prompts[0].id]}")
    for name, why in unfit.items():
        note(f"prompt {name} is left out: {why}")
    return [p for p in bench.prompts if p.id not in unfit]


@contextmanager
def _bar() -> Iterator[OnPrompt]:
    """Prompts done, time left, what is going on; where there is no terminal a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:

        def line(done: int, of: int, what: str) -> None:
            if what:
                note(f"prompt {done + 1} of {of}: {what}" if done < of else what)

        yield line
        return
    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=console, redirect_stdout=False) as shown:
        task = shown.add_task("prompts", total=None, what="")
        yield lambda done, of, what: shown.update(task, completed=done, total=of, what=what)


def _say(summary: Mapping[str, Any], folder: Path, given: Mapping[str, Any]) -> int:
    """The pooled tables and where the rest is. Status 1 when a float32 text is not plain decoding's, or when every method failed."""
    from eyas.bench import report

    if given["as_json"]:
        click.echo(json.dumps(dict(summary)))
    else:
        seen = set()
        for temperature, _, rows in report.sections(summary):
            if temperature in seen:
                continue
            seen.add(temperature)
            _print(f"T = {temperature:g}, {rows[0]['prompts']} prompts", report.HEADS, [report.cells(row, intervals=False) for row in rows])
        for title, heads, profiled in report.profile_tables(summary):
            _print(title, heads, profiled)
    for warning in summary["warnings"]:
        note(warning)
    for name, why in summary["failed"].items():
        problem(f"{name} failed and is in no figure: {why}")
    traces = [found["trace"] for found in summary["profiles"].values()]
    if traces:
        note(f"traces for https://ui.perfetto.dev: {', '.join(f'{folder}/{trace}' for trace in traces)}")
    note(f"{folder}/report.html, report.md, summary.json, answers.jsonl")
    wrong = [] if summary["settings"]["dtype"] != "float32" else _wrong(summary)
    for line in wrong:
        problem(line)
    methods = set(summary["settings"]["methods"]) - {"vanilla", "transformers", "transformers_prompt_lookup", "transformers_assisted"}
    return 1 if wrong or (methods and methods <= summary["failed"].keys()) else 0


def _print(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _wrong(summary: Mapping[str, Any]) -> list[str]:
    """Texts that are not plain decoding's, near ties apart; of transformers', only those without speculation are held against us."""
    said, by_kernels = [], summary["settings"].get("runs_by") == "kernels"
    for row in summary["rows"]:
        if row["task"] != "all" or row["method"].startswith("transformers_"):
            continue
        for prompt, turn, at, margin in row["differ"]:
            near = NEAR_TIE_OF_KERNELS if by_kernels and row["method"] == "transformers" else NEAR_TIE
            if margin is None or margin > near:
                where = f"{row['method']}, {prompt}, turn {turn + 1}, T = {row['temperature']:g}: token {at}"
                said.append(f"{where} is not plain decoding's (margin {'none' if margin is None else f'{margin:.2g}'}): a fault of eyas")
    return said


def _compare(ctx: click.RichContext, a: str, b: str, *, as_json: bool) -> int:
    from eyas.bench import report

    other = next((name for name in ctx.params if name not in ("compare", "as_json") and _is_given(ctx, name)), None)
    if other is not None:
        option_ = next(p.opts[0] for p in ctx.command.params if p.name == other)
        raise OptionError(f"--compare only shows two benches that are done: leave {option_} out")
    first, second = (report.read_summary(Path(x)) for x in (a, b))
    click.echo(json.dumps(report.compared(first, second)) if as_json else report.comparison(first, second, (a, b)))
    return 0


def _is_given(ctx: click.RichContext, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
