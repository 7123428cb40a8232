"""`eyas generate`: one prompt, or a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._errors import Interrupted, note, problem
from eyas.cli._files import Bad, Results, Task, read_tasks
from eyas.cli._load import check_sampling, load, note_no_head, record, sampling_of
from eyas.cli._options import MODEL, SAMPLING, MethodCommand, examples, method_options, option, stack
from eyas.cli._show import Tally, summary
from eyas.errors import EyasError, InputError

if TYPE_CHECKING:
    from eyas.api import LLM

__all__ = ["command"]

EXAMPLES = examples(
    ('eyas generate "Tell me a story."', "the embedded model"),
    ("eyas generate --target MODEL --draft HEAD --temperature 0.7 -", "the prompt from stdin"),
    ("eyas generate --input prompts.jsonl --output results.jsonl", "many; the same again goes on after an interrupt"),
    ("eyas generate --target MODEL --prompt-ids 1,15043 --json", "no tokenizer needed"),
    more=(
        '[bold]Lines of --input[/]: {"prompt": "..."} or {"messages": \\[...]} or {"prompt_ids": \\[...]}, any of them with an "id".',
        '[bold]Lines of --output[/]: what --json prints, and the "id", or else "line": its number. What is there is not done again.',
    ),
)

INPUT = stack(
    click.argument("prompt", required=False, help="What to answer; - reads it from stdin.", panel="Prompt"),
    option("Prompt", "--prompt-ids", metavar="1,2,3", help="Token ids instead of text."),
    option("Prompt", "--system", metavar="TEXT", help="A system message."),
    option("Prompt", "--raw", is_flag=True, help="Take the prompt as it is, without the chat template."),
    option("Prompt", "--input", "input_file", metavar="FILE.jsonl", help="Many prompts, one a line; - reads stdin."),
    option("Output", "--output", "output_file", metavar="FILE.jsonl", help="Where their results go, one a line; default: stdout."),
    option("Output", "--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout."),
    option("Sampling", "--ignore-eos", is_flag=True, help="Go on to --max-new-tokens."),
    option(
        "Machine", "--batch-size", type=click.IntRange(min=1), metavar="N",
        help="Prompts of --input that are decoded together. Default: 1 on a CPU, 8 elsewhere.",
    ),
)  # fmt: skip


@click.command("generate", cls=MethodCommand, epilog=EXAMPLES, panel="Answers")
@stack(INPUT, SAMPLING, MODEL)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> int:
    """Answer a prompt, or a file of prompts."""
    _check(given)
    check_sampling(given)
    if given["input_file"] is None:
        prompt = _prompt(given)
        _one(load(given, method_options(ctx)), prompt, given)
        return 0
    with closing(Results(given["output_file"])) as results:
        items = list(read_tasks(given["input_file"]))
        return _Many(load(given, method_options(ctx)), results, given).run(items)


def _check(given: dict[str, Any]) -> None:
    """Flags that exclude each other or need each other."""
    ways = {"PROMPT": "prompt", "--prompt-ids": "prompt_ids", "--input": "input_file"}
    chosen = [shown for shown, name in ways.items() if given[name] is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"give only one of {' and '.join(chosen)}")
    if not chosen:
        raise click.UsageError(f"nothing to answer: give one of {', '.join(ways)}")
    if given["output_file"] and not given["input_file"]:
        raise click.UsageError("--output goes with --input; for one prompt use --json")
    if given["batch_size"] and not given["input_file"]:
        raise click.UsageError("--batch-size goes with --input")
    if given["system"] and (given["raw"] or given["prompt_ids"]):
        raise click.UsageError(f"--system needs the chat template, which {'--raw' if given['raw'] else '--prompt-ids'} bypasses")
    if given["output_file"] and given["output_file"] == given["input_file"]:
        raise click.UsageError("--output would write into the file that --input reads: give it another name")


def _prompt(given: dict[str, Any]) -> str | list[int]:
    if given["prompt_ids"] is None:
        text: str = given["prompt"]
        return sys.stdin.read() if text == "-" else text
    try:
        return [int(part) for part in given["prompt_ids"].replace(" ", ",").split(",") if part]
    except ValueError:
        raise InputError(f"--prompt-ids must be whole numbers separated by commas, like 1,2,3; got {given['prompt_ids']!r}") from None


def _one(llm: LLM, prompt: str | Sequence[int], given: dict[str, Any]) -> None:
    """Answer one prompt: streamed, or as one JSON object."""
    keywords = {**sampling_of(given), "system": given["system"], "raw": given["raw"], "ignore_eos": given["ignore_eos"]}
    tally, stopped, silent = Tally.of(llm, prompt, **keywords), False, given["as_json"]
    try:
        for number, piece in enumerate(tally):
            if number == 0:  # the request was good
                note_no_head(llm, given)
            if not silent:
                ids = "" if llm.tokenizer else f"{','.join(map(str, piece.token_ids))}{'' if piece.finish_reason else ','}"
                click.echo(piece.text or ids, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        stopped = True
    result = tally.result()
    click.echo(json.dumps(record(llm, result), ensure_ascii=False) if silent else "")
    if stopped:
        raise Interrupted(f"{len(result.token_ids)} tokens are above")
    if not silent:
        note(summary(llm, result))


class _Many:
    """Answers lines of a file."""

    def __init__(self, llm: LLM, results: Results, given: dict[str, Any]) -> None:
        self.llm, self.results, self.given = llm, results, given
        self.bad = self.written = self.tokens = 0
        self.emitted = self.cycles = 0

    def run(self, items: Sequence[Task | Bad]) -> int:
        """The exit status: 2 when a line could not be used."""
        tasks, skipped = [item for item in items if isinstance(item, Task)], 0
        for item in items:
            if isinstance(item, Bad):
                self._refuse(item.line, item.reason)
        todo = [task for task in tasks if not self.results.holds(task)]
        skipped = len(tasks) - len(todo)
        if skipped:
            note(f"{skipped} of {len(tasks)} are in {self.results.path} already")
            self._compare()
        try:
            self._answer(todo)
        except KeyboardInterrupt:
            where = f"are in {self.results.path}; the same command goes on after them" if self.results.path else "are above"
            raise Interrupted(f"{skipped + self.written} results {where}") from None
        self._say(skipped)
        return 2 if self.bad else 0

    def _refuse(self, line: int, reason: str) -> None:
        self.bad += 1
        problem(f"{self.given['input_file']}:{line}: {reason}")

    def _compare(self) -> None:
        """Say so when the results that are there were made with other settings."""
        first = self.results.first
        now = {"method": self.llm.method, "target": self.llm.target.name, "tree": self.llm.drafter.describe()}
        other = [f"{name} {first.get(name)}" for name, value in now.items() if first.get(name) != value]
        form = asdict(self.llm.target.run.form).items()  # results of earlier versions do not say it
        other += [f"{name} {first.get(name, 'exact')}" for name, value in form if first.get(name, "exact") != value]
        if other:
            note(f"results already in {self.results.path} were made with {', '.join(other)}")

    def _answer(self, tasks: Sequence[Task]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from eyas.metrics import tau

        console = Console(stderr=True)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        ready = self._requests(tasks)
        note_no_head(self.llm, self.given)
        sampling = {**sampling_of(self.given), "ignore_eos": self.given["ignore_eos"], "batch_size": self.given["batch_size"]}
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=len(ready))
            for i, result in self.llm.generate_each([ids for _, ids in ready], **sampling):
                self.results.write({**ready[i][0].key, **record(self.llm, result)})
                self.written += 1
                self.tokens += len(result.token_ids)
                self.emitted, self.cycles = self.emitted + result.stats.tokens, self.cycles + result.stats.cycles
                progress.update(bar, advance=1, description=f"tau {tau(self.emitted, self.cycles):.2f}")

    def _requests(self, tasks: Sequence[Task]) -> list[tuple[Task, tuple[int, ...]]]:
        """The tasks that can be served, as token ids; a line that cannot is named and left out."""
        from eyas.core.engine import Decoder

        keywords, probe, ready = sampling_of(self.given), Decoder(self.llm.target, self.llm.drafter), []
        for task in tasks:
            try:
                request, _ = self.llm.request(task.prompt, system=self.given["system"], raw=self.given["raw"], **keywords)
                probe.cancel(probe.add(request))  # adding is what refuses
                ready.append((task, request.prompt))
            except EyasError as error:
                self._refuse(task.line, str(error))
        return ready

    def _say(self, skipped: int) -> None:
        counts = {"results": self.written, "skipped": skipped, "bad": self.bad, "tokens": self.tokens}
        from eyas.metrics import tau as tau_of

        tau = tau_of(self.emitted, self.cycles)
        note(", ".join(f"{value} {name}" for name, value in counts.items() if value or name == "results") + f", tau {tau:.2f}")
        if self.given["as_json"] and self.results.path:
            click.echo(json.dumps({**counts, "tau": tau, "output": self.results.path}))
