"""`eyas regenerate`: the target answers the questions of chat data itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts.types import PositiveFloat, PositiveInt

from eyas.cli.tools import (
    AS_JSON,
    DraftOptions,
    FileRun,
    MethodOptions,
    Results,
    SamplingOptions,
    TargetOptions,
    UsageError,
    interruptible,
    load,
    note,
    note_no_head,
    option_group,
    progress_bar,
    sampling_of,
    spread,
)
from eyas.errors import InputError
from eyas_train.commands._data import check_files
from eyas_train.commands._replies import MakeReplier, Replier, ReplyOptions, tokens_of

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.commands._replies import Replies, Reply
    from eyas_train.regenerate import Conversation, DataLine, Regenerated, Skipped

GROUP = "Heads"
SHOWN_PROBLEMS = 20
EXAMPLES = """
eyas regenerate --target MODEL --data chat.jsonl --output own.jsonl  # every turn of the assistant's, greedily
eyas regenerate ... --draft HEAD --rows 32  # faster, with a head that is there already
eyas regenerate ... --temperature 0.7 --top-p 0.9 --seed 1  # sampled; each reply has a seed of its own
eyas train --target MODEL --data own.jsonl --output HEAD  # then train on it
"""
NOTES = (
    'Lines of --data: {"messages": [...]}, {"conversations": [...]} or {"prompt": "..."}, with "tools".',
    'Lines of --output: {"messages": [...]}, their source, how each reply ended; finished ones are not done again.',
)
COUNTS = ("conversations", "replies", "tokens", "cut", "shortened", "dropped", "bad", "there")
REMARKS = {
    "cut": "replies cut at the length",
    "shortened": "conversations cut short",
    "dropped": "dropped",
    "bad": "lines passed over",
    "there": "there before",
}


@option_group
class RegenerateOptions:
    """The conversations to answer, and the file that they are written to."""

    data: Annotated[tuple[str, ...], "Data", "FILE"]
    """Chats (JSONL, Parquet), .gz too, here or at a URL; several files are mixed."""
    last_only: Annotated[bool, "Data"] = False
    """Answer the last turn only; the turns before it stay as they are."""
    limit: Annotated[PositiveInt | None, "Data", "N"] = None
    """Only the first N conversations."""
    minutes: Annotated[PositiveFloat | None, "Data", "N"] = None
    """Begin no further conversation after N minutes."""
    output: Annotated[str, "Output", "FILE.jsonl"]
    """File for the conversations, one per line."""
    drop_cut: Annotated[bool, "Output"] = False
    """Leave out replies that --max-new-tokens cut, and the turns after them. Default: mark them."""
    as_json: AS_JSON = False
    max_new_tokens: Annotated[PositiveInt, "Sampling", "N"] = 1024
    """Longest reply in tokens; a longer one is cut."""
    rows: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Conversations to answer together. Default: 8 on a CPU, 16 elsewhere."""
    workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Answer with N processes, each with --rows of its own, on Ray (docs/guide/scale.md); conversations come in the order
    of the data."""


def command(
    *,
    job: RegenerateOptions,
    sampling: SamplingOptions,
    model: TargetOptions,
    draft: DraftOptions,
    options: MethodOptions,
) -> None:
    """Let the target answer the data's questions itself."""
    keywords = sampling_of(sampling)
    if job.workers is None:
        answer_data(job, keywords, lambda: load(model, draft, options), lambda llm: note_no_head(llm, model, draft))
        return
    if job.minutes is not None:
        raise UsageError("--minutes goes with one process: leave --workers out")
    _check(job)
    with _outputs(job) as (results, dropped):
        run = _Run(results, dropped, job)
        maker = MakeReplier(model, draft, options, keywords, reply_options(job), results.first)
        run.answer(partial(_spread_replies, maker, job.workers, model.device))


def _spread_replies(
    maker: MakeReplier,
    workers: int,
    device: str,
    conversations: Iterable[Conversation],
    total: int,
    on_step: Callable[[int], None],
) -> Iterator[Reply]:
    """Yield the outcomes of conversations by workers."""
    for outcome, by in spread(list(conversations), maker, workers, device):
        on_step(tokens_of(outcome))
        yield outcome, by


def answer_data(
    job: RegenerateOptions,
    sampling: dict[str, Any],
    load_llm: Callable[[], LLM],
    on_valid: Callable[[LLM], None] = lambda llm: None,
) -> dict[str, int]:
    """Answer the data's questions and return the counts.

    Args:
        sampling: the keywords of `Sampling`.
        load_llm: loads the target, or returns one that is there; called when the files are open.
        on_valid: called when nothing is wrong with the output, before the first answer.
    """
    _check(job)
    with _outputs(job) as (results, dropped):
        replier = Replier(load_llm(), sampling, reply_options(job))
        replier.check_same(results.first, str(results.path))
        on_valid(replier.llm)
        run = _Run(results, dropped, job)
        run.answer(replier.replies)
        return run.counts


def reply_options(job: RegenerateOptions) -> ReplyOptions:
    """Return the options of the command that concern a reply."""
    return ReplyOptions(job.max_new_tokens, job.last_only, job.drop_cut, job.rows)


@contextmanager
def _outputs(job: RegenerateOptions) -> Iterator[tuple[Results, Results | None]]:
    """Open the file of the conversations, and the file of the dropped ones."""
    with ExitStack() as files:
        results = files.enter_context(Results(job.output, ("key",), "messages"))
        dropped = files.enter_context(Results(f"{job.output}.dropped", ("key",), "reason")) if job.drop_cut else None
        yield results, dropped


def _check(job: RegenerateOptions) -> None:
    from eyas.text.sources import as_file

    check_files(job.data)
    output = Path(job.output)
    for file in map(as_file, job.data):
        if isinstance(file, Path) and output.exists() and file.samefile(output):
            raise UsageError("--output would write into a file that --data reads: give it another name")


class _Run(FileRun):
    """One run of the command."""

    def __init__(self, results: Results, dropped: Results | None, job: RegenerateOptions) -> None:
        super().__init__(results, COUNTS)
        self.dropped = dropped
        self.job = job
        self.first_problem = ""
        self.began = time.monotonic()

    @property
    def tokens_per_second(self) -> float:
        from eyas.core.totals import tokens_per_second

        return tokens_per_second(self.counts["tokens"], time.monotonic() - self.began)

    def is_late(self) -> bool:
        """Return whether no further conversation may begin."""
        return self.job.minutes is not None and time.monotonic() - self.began > 60 * self.job.minutes

    def answer(self, replies: Replies) -> None:
        """Answer the conversations that have no answer yet.

        Args:
            replies: from conversations, their number, and a function that is told the tokens of each cycle, to
                outcomes.
        """
        from eyas_train.regenerate import Regenerated

        counts = self.counts
        todo = self._todo()
        with interruptible(self.kept), progress_bar("answering", len(todo)) as bar:
            self.began = time.monotonic()

            def on_step(tokens: int) -> None:
                counts["tokens"] += tokens
                done = counts["conversations"] + counts["dropped"] + counts["bad"]
                bar.show(done, f"{self.tokens_per_second:,.0f} tokens/s, tau {self.tau:.2f}")

            for outcome, by in replies(self._conversations(todo), len(todo), on_step):
                if isinstance(outcome, Regenerated):
                    self._write(outcome, by)
                else:
                    self._pass_over(outcome)
        self._report()

    def _todo(self) -> set[str]:
        """Return the keys of the lines to be answered. Copies of a line are one."""
        from eyas_train.regenerate import read_lines

        keys = dict[str, bool]()
        for line in read_lines(self.job.data):
            if len(keys) == self.job.limit:
                break
            keys[str(line.key["key"])] = self._is_done(line)
        if not keys:
            raise InputError(f"{', '.join(self.job.data)}: there is no line in it")
        self.results_before = self.counts["there"] = sum(keys.values())
        if self.results_before:
            note(f"{self.results_before} of {len(keys)} conversations are in {self.results.path} already")
        return {key for key, done in keys.items() if not done}

    def _is_done(self, line: DataLine) -> bool:
        return self.results.holds(line) or (self.dropped is not None and self.dropped.holds(line))

    def _conversations(self, todo: set[str]) -> Iterator[Conversation]:
        from eyas_train.regenerate import GenerationSettings, parse_conversation, read_lines

        settings = GenerationSettings(last_only=self.job.last_only)
        remaining = set(todo)
        for line in read_lines(self.job.data):
            if line.key["key"] not in remaining:
                continue
            if self.is_late():
                return
            remaining.discard(str(line.key["key"]))
            try:
                yield parse_conversation(line, settings)
            except InputError as error:
                self._reject(f"{line.where}: {error}")
            if not remaining:
                return

    def _write(self, answered: Regenerated, by: Mapping[str, Any]) -> None:
        conversation, counts = answered.conversation, self.counts
        fields = {
            **conversation.line.key,
            "id": conversation.id,
            "source": conversation.line.where,
            **conversation.template,
            "messages": answered.messages,
            "finish": list(answered.finish),
            "tokens": list(answered.tokens),
            "ended": answered.ended,
            "by": by,
        }
        absent = [name for name in ("id", "ended") if fields[name] in (None, "")]
        self.results.write({name: value for name, value in fields.items() if name not in absent})
        counts["conversations"] += 1
        counts["replies"] += len(answered.finish)
        counts["cut"] += answered.finish.count("length")
        counts["shortened"] += bool(answered.ended)
        self.emitted += answered.emitted
        self.cycles += answered.cycles

    def _pass_over(self, unanswered: Skipped) -> None:
        line = unanswered.conversation.line
        if unanswered.dropped and self.dropped is not None:
            self.dropped.write({**line.key, "source": line.where, "reason": unanswered.reason})
            self.counts["dropped"] += 1
        else:
            self._reject(f"{line.where}: {unanswered.reason}")

    def _reject(self, problem: str) -> None:
        self.counts["bad"] += 1
        if self.counts["bad"] <= SHOWN_PROBLEMS:
            note(problem)
        self.first_problem = self.first_problem or problem

    def _report(self) -> None:
        counts = self.counts
        if counts["bad"] > SHOWN_PROBLEMS:
            note(f"and {counts['bad'] - SHOWN_PROBLEMS} lines more that cannot be answered")
        if counts["bad"] and not counts["conversations"] + counts["there"] + counts["dropped"]:
            raise InputError(f"none of {counts['bad']} lines can be answered; the first: {self.first_problem}")
        done = ", ".join(f"{counts[name]:,} {name}" for name in ("conversations", "replies", "tokens"))
        remarks = "".join(f"; {counts[name]:,} {meaning}" for name, meaning in REMARKS.items() if counts[name])
        note(f"{done}, {self.tokens_per_second:,.1f} tokens/s, tau {self.tau:.2f}{remarks}")
        if self.job.as_json:
            self.print_json(tokens_per_second=self.tokens_per_second)
