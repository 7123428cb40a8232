"""`eyas bench`: every method on the same prompts in one run."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts.types import PositiveInt

from eyas.cli.tools import (
    AS_JSON,
    DRAFT_WEIGHTS,
    BenchMethodOptions,
    DraftOptions,
    FilterOptions,
    TargetOptions,
    interruptible,
    load,
    note,
    option_group,
    print_table,
    problem,
    progress_bar,
    quiet,
    sampling_of,
)
from eyas.errors import InputError, OptionError

if TYPE_CHECKING:
    from eyas_lab.bench.run import Bench, OnPrompt
    from eyas_lab.bench.tasks import Prompt

GROUP = "Answers"
EXAMPLES = """
eyas bench  # the embedded model, 24 bundled prompts, every method that can run
eyas bench --target MODEL --draft HEAD --prompts mine.jsonl  # your model on your prompts
eyas bench --methods eagle2,eagle2:tree.nodes=26:tree.depth=5 --temperature 0 --temperature 1  # variants side by side
eyas bench --tasks spec_bench:question.jsonl --limit 20 --output out/spec  # a public set from a file
eyas bench --compare out/bench out/spec  # two runs
"""
NOTES = (
    'Lines of --prompts: {"prompt": "..."}, {"turns": [...]}, {"messages": [...]} or {"prompt_ids": [...]}.',
    "The same command, run again, continues where it was stopped.",
)


@option_group
class BenchOptions:
    """The contestants, the prompts, and the folder of the results."""

    methods: Annotated[str, "Model", "A,B"] = "all"
    """Names, or NAME:option=value:...; all: every method that can run."""
    draft: Annotated[tuple[str, ...], "Model", "[NAME=]PATH|HUB"] = ()
    """A head, for the methods that it was made for, or for NAME; several may be given."""
    heads: Annotated[str | None, "Model", "FOLDER"] = None
    """Heads in folders named by their method. Default: out/heads, if it is there."""
    tasks: Annotated[str, "Prompt", "A,B:PATH"] = "bundled"
    """Sets of prompts: NAME or NAME:PATH."""
    prompts: Annotated[str | None, "Prompt", "FILE.jsonl"] = None
    """Your own prompts, instead of --tasks."""
    limit: Annotated[PositiveInt | None, "Prompt", "N"] = None
    """Largest number of prompts, all sets together."""
    temperature: Annotated[tuple[float, ...], "Sampling"] = (0.0,)
    """Temperature; 0 is greedy. May be given several times. Default: 0."""
    max_new_tokens: Annotated[PositiveInt, "Sampling", "N"] = 128
    """Longest answer in tokens."""
    output: Annotated[str, "Output", "FOLDER"] = "out/bench"
    """Answers, summary and report."""
    restart: Annotated[bool, "Output"] = False
    """Forget the answers in --output."""
    as_json: AS_JSON = False
    compare: Annotated[tuple[str, str] | None, "Output", "A B"] = None
    """Only compare two finished benches: folders or summaries."""
    simulate_acceptance: Annotated[str | None, "Method", "A,B,..."] = None
    """Accept draft tokens at random with these rates by depth, for targets with random weights; all
    else is measured."""
    draft_weights: DRAFT_WEIGHTS = "auto"


def command(*, job: BenchOptions, sampling: FilterOptions, model: TargetOptions, options: BenchMethodOptions) -> int:
    """Compare methods: speed, acceptance, and whether the texts are equal."""
    if job.compare:
        return _compare(job, sampling, model)
    from eyas.core.sampling import Sampling
    from eyas_lab.bench.simulate import parse_rates
    from eyas_lab.folders import locked_folder

    keywords = sampling_of(sampling)
    for temperature in job.temperature:
        Sampling(temperature=temperature)  # refuses an impossible one
    if job.simulate_acceptance is not None:
        parse_rates(job.simulate_acceptance)
    prompts, folder = _prompts(job), Path(job.output)
    with locked_folder(folder):
        summary = _measure(job, model, keywords, options, prompts, folder)
    return _report(summary, folder, job.as_json)


def _measure(
    job: BenchOptions,
    model: TargetOptions,
    sampling: dict[str, Any],
    options: Mapping[str, Any],
    prompts: list[Prompt],
    folder: Path,
) -> dict[str, Any]:
    """Return the bench, from the models to the files in its folder; returns its summary."""
    from eyas_lab.bench.entries import Entrants, contestants
    from eyas_lab.bench.run import Bench

    llm = load(model, DraftOptions(method="vanilla", draft_weights=job.draft_weights), {})
    entrants = Entrants(llm, job.methods, job.draft, job.heads, not model.target, job.simulate_acceptance, options)
    with quiet(model.verbose):
        entered, skipped = contestants(entrants)
    for name, why in skipped.items():
        note(f"{name} is left out: {why}")
    temperatures = tuple(dict.fromkeys(job.temperature))
    bench = Bench(llm, entered, prompts, temperatures, job.max_new_tokens, sampling, job.simulate_acceptance)
    bench.prompts = _fitting(bench)
    if job.restart:
        bench.forget(folder)
    return run_bench(bench, folder, skipped)


def run_bench(bench: Bench, folder: Path, skipped: Mapping[str, str]) -> dict[str, Any]:
    """Run a bench, or go on with it, and write its files; returns its summary. See `summarise`."""
    import sys

    from eyas.hardware.machine import snapshot
    from eyas_lab.bench.summary import summarise, write

    before, command_line = snapshot(), shlex.join(["eyas", *sys.argv[1:]])
    message = f"whole prompts are kept in {folder}; the same command goes on from there"
    with interruptible(lambda: message), _progress() as on_prompt:
        answers = bench.run(folder, on_prompt)
    summary = summarise(bench, answers, before, command_line, skipped)
    write(folder, summary)
    return summary


def _prompts(job: BenchOptions) -> list[Prompt]:
    from eyas_lab.bench.tasks import load as load_task
    from eyas_lab.bench.tasks import read_prompts

    if job.prompts:
        prompts, complaints = read_prompts(job.prompts)
        for line in complaints:
            note(line)
        return prompts[: job.limit]
    with quiet():
        prompts = [p for task in job.tasks.split(",") for p in load_task(task.strip(), job.limit)]
    name, count = Counter(p.id for p in prompts).most_common(1)[0]
    if count > 1:
        raise OptionError(f"--tasks: two prompts are called {name}: ask one of the sets at a time")
    return prompts


def _fitting(bench: Bench) -> list[Prompt]:
    """Return the prompts that can be asked; the others are reported. Raise InputError when none can."""
    unfit = bench.unfit()
    if len(unfit) == len(bench.prompts):
        raise InputError(f"no prompt can be asked; the first, {bench.prompts[0].id}: {unfit[bench.prompts[0].id]}")
    for name, why in unfit.items():
        note(f"prompt {name} is left out: {why}")
    return [p for p in bench.prompts if p.id not in unfit]


@contextmanager
def _progress() -> Iterator[OnPrompt]:
    """Show the prompts done, the time left and the present work; without a terminal, a line now and then."""
    with progress_bar("prompts") as bar:

        def on_prompt(done: int, total: int, what: str) -> None:
            bar.show(done, what, total)
            if what and bar.display.disable:
                note(f"prompt {done + 1} of {total}: {what}" if done < total else what)

        yield on_prompt


def _report(summary: Mapping[str, Any], folder: Path, as_json: bool) -> int:
    """Print the pooled tables and where the rest is. Status 1 when a float32 text is not plain
    decoding's, or when every method failed."""
    from eyas_lab.bench import report
    from eyas_lab.bench.summary import wrong_texts

    if as_json:
        print(json.dumps(dict(summary)))
    else:
        pooled = dict[float, Any]()
        for temperature, _, rows in report.sections(summary):
            pooled.setdefault(temperature, rows)
        for temperature, rows in pooled.items():
            title = f"T = {temperature:g}, {rows[0]['prompts']} prompts"
            print_table(report.COLUMNS, [report.cells(row, intervals=False) for row in rows], title)
    for name, why in summary["failed"].items():
        problem(f"{name} failed and is in no figure: {why}")
    for warning in summary["warnings"]:
        note(warning)
    note(f"{folder}/report.md, summary.json, answers.jsonl")
    wrong = wrong_texts(summary)
    for line in wrong:
        problem(line)
    methods = {
        name for name in summary["settings"]["methods"] if name != "vanilla" and not name.startswith("transformers")
    }
    return 1 if wrong or (methods and methods <= summary["failed"].keys()) else 0


def _compare(job: BenchOptions, *groups: Any) -> int:
    """Show two finished benches. Raise OptionError for any other option, as nothing is measured."""
    from eyas_lab.bench import report

    assert job.compare is not None
    for group in (job, *groups):
        for field in fields(group):
            if field.name != "compare" and getattr(group, field.name) != field.default:
                name = field.name.replace("_", "-").removeprefix("as-")
                raise OptionError(f"--compare only shows two finished benches: leave --{name} out")
    first, second = (report.read_summary(Path(place)) for place in job.compare)
    print(report.comparison(first, second, job.compare))
    return 0
