"""`eyas generate`: one prompt, or a file of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from eyas.cli._answers import Answered, Answerer, MakeAnswerer, described
from eyas.cli._errors import Interrupted, UsageError, interruptible, note, problem
from eyas.cli._files import FileRun, InvalidLine, Results, Task, differences, read_tasks
from eyas.cli._load import (
    load_adapted,
    note_no_head,
    record,
    sampling_of,
    save_adapted,
    spread,
    structure_of,
    text_of,
)
from eyas.cli._options import (
    AS_JSON,
    STDIN,
    AdaptOptions,
    AnswerOptions,
    DraftOptions,
    Fields,
    MethodOptions,
    StructureOptions,
    TargetOptions,
    option_group,
)
from eyas.cli._show import TimedStream, progress_bar, summary
from eyas.errors import InputError
from eyas.files import write_text

if TYPE_CHECKING:
    from eyas.api import LLM, Piece, Result
    from eyas.core.requests import Step

GROUP = "Answers"
EXAMPLES = """
eyas generate "Tell me a story."  # the embedded model
eyas generate --target MODEL --draft HEAD --temperature 0.7 -  # the prompt from stdin
eyas generate --input prompts.jsonl --output results.jsonl  # many; run it again to continue after an interrupt
eyas generate --json-schema person.json "Who are you?"  # JSON of this schema
eyas generate --target MODEL --prompt-ids 1,15043 --json  # no tokenizer needed
eyas generate --target MODEL --image cat.png "What is this?"  # a model that reads images
eyas generate "Tell me a story." --view story.html  # every cycle's tree
"""
NOTES = (
    'Lines of --input: {"prompt": "..."} or {"messages": [...]} or {"prompt_ids": [...]}, with an optional "id" and "tools".',
    'Lines of --output: the object of --json, and the "id" or else "line". Results that are there are not made again.',
)


@option_group
class InputOptions:
    """The prompts to answer, and the file that the answers are written to."""

    prompt_ids: Annotated[str | None, "Prompt", "1,2,3"] = None
    """Give the prompt as token ids instead of text."""
    image: Annotated[tuple[str, ...], "Prompt", "FILE"] = ()
    """Image to put before the prompt, for a model that reads images. May be given several times."""
    system: Annotated[str | None, "Prompt", "TEXT"] = None
    """System message."""
    raw: Annotated[bool, "Prompt"] = False
    """Take the prompt as it is, without the chat template."""
    input: Annotated[str | None, "Prompt", "FILE"] = None
    """Answer many prompts: a JSONL or Parquet file, a URL, or - for stdin."""
    output: Annotated[str | None, "Output", "FILE.jsonl"] = None
    """With --input: write the results here. Default: stdout."""
    view: Annotated[str | None, "Output", "FILE.html"] = None
    """Write a page that shows every cycle of the answer: the tree, its probabilities, the accepted tokens."""
    as_json: AS_JSON = False
    logprobs: Annotated[int | None, "Output", "N"] = None
    """With --json or --output: the log-probability of each token and of the N most probable tokens."""
    prompt_logprobs: Annotated[int | None, "Output", "N"] = None
    """With --json or --output: log-probabilities for the prompt, too."""
    ignore_eos: Annotated[bool, "Sampling"] = False
    """Go on to --max-new-tokens."""
    n: Annotated[PositiveInt, "Sampling", "N"] = 1
    """Give N answers, with the seeds --seed, --seed + 1, and so on. The prompt is read once."""
    prediction: Annotated[str | None, "Method", "FILE"] = None
    """File with text that the answer may repeat."""
    drafting: Annotated[str | None, "Method", "auto|off|N"] = None
    """auto: draft where that pays. off: no drafts. N: at most N draft tokens per cycle. Default: auto."""
    batch_size: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Prompts of --input, or answers of --n, to decode together. Default: 1 on a CPU, 8 elsewhere."""
    workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Answer the lines of --input with N processes, on Ray (docs/guide/scale.md)."""


def command(
    prompt: Annotated[str | None, "Prompt", Parameter(help="The prompt; - reads it from stdin.")] = None,
    /,
    *,
    inputs: InputOptions,
    sampling: AnswerOptions,
    structure: StructureOptions,
    adapt: AdaptOptions,
    model: TargetOptions,
    draft: DraftOptions,
    options: MethodOptions,
) -> int:
    """Answer a prompt, or a file of prompts."""
    _check(prompt, inputs)
    if inputs.workers and adapt.adapt:
        raise UsageError("--adapt lets one head learn from all answers: leave --workers out")
    names = ("ignore_eos", "system", "raw", "logprobs", "prompt_logprobs")
    keywords = {**sampling_of(sampling), **structure_of(structure), **{name: getattr(inputs, name) for name in names}}
    keywords |= _drafts(inputs)
    if inputs.input is None:
        text = _prompt(prompt, inputs.prompt_ids)
        content = _with_images(text, inputs.image)
        llm = load_adapted(adapt, model, draft, options)
        if inputs.n > 1:
            _answer_several(llm, content, keywords, inputs)
        else:
            view = None if inputs.view is None else CycleView(inputs.view, text, inputs.system)
            _answer_one(llm, content, keywords, inputs.as_json, model, draft, view)
        save_adapted(llm, adapt)
        return 0
    with Results(inputs.output) as results:
        items = list(read_tasks(inputs.input))
        run = _Run(results, inputs, keywords)
        if inputs.workers:
            tasks = run.remaining(items)
            answerers = MakeAnswerer(model, draft, options, keywords, inputs.batch_size, results.first)
            return run.answer(spread(tasks, answerers, inputs.workers, model.device), len(tasks))
        llm = load_adapted(adapt, model, draft, options)
        run.refuse_others(differences(results.first, described(llm)))
        tasks = run.remaining(items)
        run.note_other_drafts(llm)
        if keywords.get("drafting") != "off":
            note_no_head(llm, model, draft)
        status = run.answer(Answerer(llm, keywords, inputs.batch_size)(tasks), len(tasks))
        save_adapted(llm, adapt)
        return status


def _check(prompt: str | None, inputs: InputOptions) -> None:
    ways = {"PROMPT": prompt, "--prompt-ids": inputs.prompt_ids, "--input": inputs.input}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise UsageError(f"give only one of {' and '.join(chosen)}")
    if not chosen:
        raise UsageError(f"nothing to answer: give one of {', '.join(ways)}")
    if inputs.view and inputs.input:
        raise UsageError("--view shows one answer: give the prompt itself, without --input")
    if inputs.output and not inputs.input:
        raise UsageError("--output goes with --input; for one prompt use --json")
    if inputs.batch_size and not inputs.input and inputs.n == 1:
        raise UsageError("--batch-size goes with --input or --n")
    if inputs.workers and not inputs.input:
        raise UsageError("--workers goes with --input")
    if inputs.n > 1 and (inputs.input or inputs.view):
        raise UsageError("--n gives several answers to one prompt: leave --input and --view out")
    if (inputs.logprobs is not None or inputs.prompt_logprobs is not None) and not (inputs.as_json or inputs.input):
        raise UsageError("log-probabilities are in the JSON object: add --json")
    if inputs.system and (inputs.raw or inputs.prompt_ids):
        bypass = "--raw" if inputs.raw else "--prompt-ids"
        raise UsageError(f"--system needs the chat template, which {bypass} bypasses")
    if inputs.image and (inputs.raw or prompt is None):
        raise UsageError(
            "--image goes with a prompt of text, by the chat template; lines of --input hold images in their messages"
        )
    if inputs.output and inputs.output == inputs.input:
        raise UsageError("--output would write into the file that --input reads: give it another name")


def _drafts(inputs: InputOptions) -> Fields:
    from eyas.arguments import as_drafting

    keywords: Fields = {}
    if inputs.drafting is not None:
        keywords["drafting"] = as_drafting(int(inputs.drafting) if inputs.drafting.isdecimal() else inputs.drafting)
    if inputs.prediction is not None:
        path = Path(inputs.prediction).expanduser()
        keywords["prediction"] = text_of(path, f"--prediction {inputs.prediction} cannot be read")
    return keywords


def _prompt(text: str | None, prompt_ids: str | None) -> str | list[int]:
    if prompt_ids is None:
        assert text is not None
        return sys.stdin.read() if text == STDIN else text
    try:
        return [int(part) for part in prompt_ids.replace(" ", ",").split(",") if part]
    except ValueError:
        raise InputError(
            f"--prompt-ids must be whole numbers separated by commas, like 1,2,3; got {prompt_ids!r}"
        ) from None


def _with_images(prompt: str | list[int], images: Sequence[str]) -> Any:
    if not images:
        return prompt
    if missing := next((path for path in images if not Path(path).expanduser().is_file()), None):
        raise InputError(f"--image {missing}: there is no such file")
    parts = [{"type": "image", "path": str(Path(path).expanduser())} for path in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]


def _answer_one(
    llm: LLM,
    prompt: Any,
    keywords: Fields,
    as_json: bool,
    model: TargetOptions,
    draft: DraftOptions,
    view: CycleView | None,
) -> None:
    on_step = None if view is None else view.watch(llm)
    stream = TimedStream(llm.stream(prompt, on_step=on_step, **keywords))
    stopped = False
    try:
        for number, piece in enumerate(stream):
            if number == 0:  # the request is valid
                if keywords.get("drafting") != "off":
                    note_no_head(llm, model, draft)
                if (
                    isinstance(prompt, str)
                    and llm.tokenizer
                    and not (llm.tokenizer.chat_template or keywords.get("raw"))
                ):
                    note("this tokenizer has no chat template: the model continues the prompt as it is")
            if not as_json:
                separator = "" if llm.tokenizer or piece.finish_reason else ","
                print(_shown(llm, piece), end=separator, flush=True)
    except KeyboardInterrupt:
        stopped = True
    result = stream.result()
    print(json.dumps(record(llm, result), ensure_ascii=False) if as_json else "")
    if view is not None:
        view.write(llm, result)
    if stopped:
        raise Interrupted(f"{len(result.token_ids)} tokens are above")
    if not as_json:
        note(summary(llm, result))


def _answer_several(llm: LLM, prompt: Any, keywords: Fields, inputs: InputOptions) -> None:
    """Answer one prompt several times: the texts one below the other, or one JSON object with the results."""
    results = llm.generate(prompt, n=inputs.n, batch_size=inputs.batch_size, **keywords)
    if inputs.as_json:
        print(json.dumps({"results": [record(llm, result) for result in results]}, ensure_ascii=False))
        return
    for number, result in enumerate(results, start=1):
        note(f"{number}: {summary(llm, result)}")
        print(_shown(llm, result), flush=True)


def _shown(llm: LLM, answer: Piece | Result) -> str:
    """Return the text; without a tokenizer, the token ids."""
    return answer.text if llm.tokenizer else ",".join(map(str, answer.token_ids))


class _Run(FileRun):
    def __init__(self, results: Results, inputs: InputOptions, keywords: Fields) -> None:
        super().__init__(results, ("results", "skipped", "bad", "tokens"))
        self.inputs = inputs
        self.keywords = keywords

    def remaining(self, items: Sequence[Task | InvalidLine]) -> list[Task]:
        """Return the tasks that have no result yet; refuse results of other prompts or settings."""
        self.refuse_others(differences(self.results.first.get("settings"), self.keywords))
        tasks = []
        for item in items:
            if isinstance(item, InvalidLine):
                self._reject(item)
            else:
                tasks.append(item)
        todo = [task for task in tasks if not self.results.holds(task)]
        self.results_before = self.counts["skipped"] = len(tasks) - len(todo)
        if self.results_before:
            note(f"{self.results_before} of {len(tasks)} are in {self.results.path} already")
        return todo

    def note_other_drafts(self, llm: LLM) -> None:
        """Note if the results that are there were drafted otherwise."""
        first = self.results.first
        now = {"method": llm.method, "tree": llm.drafter.describe()}
        drafted = [f"{name} {first.get(name)}" for name, value in now.items() if first.get(name) != value]
        if self.results_before and drafted:
            note(f"results already in {self.results.path} were made with {', '.join(drafted)}")

    def answer(self, outcomes: Iterable[Answered | InvalidLine], total: int) -> int:
        """Write the answers and return the exit status: 2 when a line could not be used."""
        with interruptible(self.kept), progress_bar("generating", total) as bar:
            for outcome in outcomes:
                if isinstance(outcome, InvalidLine):
                    self._reject(outcome)
                else:
                    self._write(outcome)
                bar.show(self.counts["results"], f"tau {self.tau:.2f}")
        shown = [f"{value} {name}" for name, value in self.counts.items() if value or name == "results"]
        note(f"{', '.join(shown)}, tau {self.tau:.2f}")
        if self.inputs.as_json and self.results.path:
            self.print_json()
        return 2 if self.counts["bad"] else 0

    def _write(self, answered: Answered) -> None:
        task = answered.task
        origin = {"prompt_sha256": task.prompt_hash, "settings": self.keywords} if self.results.path else {}
        self.results.write({**task.key, **answered.fields, **origin})
        self.counts["results"] += 1
        self.counts["tokens"] += len(answered.fields["token_ids"])
        self.emitted += answered.emitted
        self.cycles += answered.cycles

    def _reject(self, line: InvalidLine) -> None:
        self.counts["bad"] += 1
        problem(f"{'stdin' if self.inputs.input == STDIN else self.inputs.input}:{line.line}: {line.reason}")


class CycleView:
    """Collects the cycles of one answer and writes them into a file, which is checked before anybody waits."""

    def __init__(self, path: str, prompt: str | Sequence[int], system: str | None) -> None:
        self.path = Path(path)
        self.prompt = prompt if isinstance(prompt, str) else ", ".join(map(str, prompt))
        self.system = system
        self._cycles: list[Fields] = []
        folder = self.path.parent
        if self.path.is_dir():
            raise InputError(f"output file {path!r} is a folder")
        if not folder.is_dir():
            raise InputError(f"output file {path!r} cannot be written: the folder {str(folder)!r} does not exist")
        if not os.access(folder, os.W_OK):
            raise InputError(f"output file {path!r} cannot be written: permission denied")

    def watch(self, llm: LLM) -> Callable[[Step], None]:
        """Return a function that is called with each Step of the answer, and records it."""
        from eyas.serve.cycles import CycleWriter

        writer = CycleWriter(llm.tokenizer)
        return lambda step: self._cycles.append(writer.write(step))

    def write(self, llm: LLM, result: Result) -> None:
        """Write the page that shows every cycle of the answer."""
        from eyas.serve.page import one_file

        data = {
            "prompt": self.prompt,
            "system": self.system,
            "target": llm.target.name,
            "method": llm.method,
            "tau": result.stats.tau,
            "seconds": result.stats.seconds,
            "text": None if llm.tokenizer is None else result.text,  # None: the numbers of the tokens
            "cycles": self._cycles,
        }
        write_text(self.path, one_file(data))
        note(f"every cycle: {self.path}")
