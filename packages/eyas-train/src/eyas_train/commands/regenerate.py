"""`eyas regenerate`: the target answers the questions of chat data itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
    differences,
    interruptible,
    load,
    need_tokenizer,
    note,
    note_no_head,
    option_group,
    progress_bar,
    sampling_of,
    spread,
)
from eyas.errors import InputError, OptionError
from eyas_train.commands._data import check_files

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas_train.regenerate import Conversation, DataLine, Regenerated

    Reply = tuple[Regenerated, Mapping[str, Any]]  # and what a line says about who has answered
    Replies = Callable[[Iterable[Conversation], int, Callable[[int], None]], Iterator[Reply]]

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
    keywords, workers = sampling_of(sampling), job.workers
    if workers is None:
        answer_data(job, keywords, lambda: load(model, draft, options), lambda llm: note_no_head(llm, model, draft))
        return
    if job.minutes is not None:
        raise UsageError("--minutes goes with one process: leave --workers out")

    def by_workers(results: Results) -> Replies:
        maker = MakeReplier(model, draft, options, keywords, job, results.first)

        def replies(conversations: Iterable[Conversation], _: int, on_step: Callable[[int], None]) -> Iterator[Reply]:
            for outcome, by in spread(list(conversations), maker, workers, model.device):
                on_step(sum(outcome.tokens))
                yield outcome, by

        return replies

    _answer(job, by_workers)


def answer_data(
    job: RegenerateOptions,
    sampling: dict[str, Any],
    load_llm: Callable[[], LLM],
    on_valid: Callable[[LLM], None] = lambda llm: None,
) -> None:
    """Answer the data's questions in this process.

    Args:
        sampling: the keywords of `Sampling`.
        load_llm: loads the target, or returns one that is there; called when the files are open.
        on_valid: called when nothing is wrong with the output, before the first answer.
    """

    def here(results: Results) -> Replies:
        replier = Replier(load_llm(), sampling, job)
        replier.check_same(results.first, str(results.path))
        on_valid(replier.llm)
        return replier.replies

    _answer(job, here)


def _answer(job: RegenerateOptions, make: Callable[[Results], Replies]) -> None:
    """Answer the data's questions; `make` is called when the file of the conversations is open."""
    from eyas.text.sources import as_file

    check_files(job.data)
    output = Path(job.output)
    for file in map(as_file, job.data):
        if isinstance(file, Path) and output.exists() and file.samefile(output):
            raise UsageError("--output would write into a file that --data reads: give it another name")
    with ExitStack() as files:
        results = files.enter_context(Results(job.output, ("key",), "messages"))
        dropped = files.enter_context(Results(f"{job.output}.dropped", ("key",), "reason")) if job.drop_cut else None
        _Run(results, dropped, job).answer(make(results))


class Replier:
    """Answers conversations with a model, in this process or in a worker.

    Args:
        sampling: the keywords of `Sampling`.
    """

    def __init__(self, llm: LLM, sampling: Mapping[str, Any], job: RegenerateOptions) -> None:
        from eyas.core.sampling import Sampling
        from eyas.targets.fingerprints import fingerprint
        from eyas_train.regenerate import GenerationSettings

        need_tokenizer(llm)
        self.llm = llm
        self.rows = job.rows or (8 if llm.target.device.type == "cpu" else 16)
        own = {"max_new_tokens": job.max_new_tokens, "last_only": job.last_only, "drop_cut": job.drop_cut}
        self.config = GenerationSettings(Sampling(**sampling), **own)  # type: ignore[arg-type]
        self.settings = {**sampling, **own, **asdict(llm.target.runner.weight_format)}
        self.by = {"target": llm.target.name, "fingerprint": fingerprint(llm.target), **self.settings}

    def check_same(self, first: Mapping[str, Any], path: str) -> None:
        """Raise OptionError if the first conversation of a file was answered by another target or with other
        settings."""
        from eyas.targets.fingerprints import has_fingerprint

        there = first.get("by")
        other, recorded = differences(there, self.settings), there if isinstance(there, dict) else {}
        if there and not has_fingerprint(self.llm.target, str(recorded.get("fingerprint", ""))):
            other.insert(0, f"target {recorded.get('target', there)!r} there, {self.llm.target.name!r} now")
        if other:
            raise OptionError(f"{path} holds answers made with other settings: {'; '.join(other)}; use another file")

    def replies(
        self, conversations: Iterable[Conversation], total: int, on_step: Callable[[int], None]
    ) -> Iterator[Reply]:
        """Yield the outcomes of conversations, `total` of them, in the order in which they end. `on_step` is told the
        tokens of each cycle."""
        from eyas.core.dormant import with_policy
        from eyas_train.regenerate import regenerate

        llm, rows = self.llm, min(self.rows, max(1, total))
        assert llm.tokenizer is not None
        drafter = with_policy(llm.drafter, llm.policy)
        for outcome in regenerate(drafter, llm.tokenizer, llm.eos, conversations, self.config, rows, on_step):
            yield outcome, self.by

    def __call__(self, conversations: Sequence[Conversation]) -> Iterator[Reply]:
        """Yield the outcomes of conversations in their own order, as a worker does."""
        replies = self.replies(conversations, len(conversations), lambda tokens: None)
        answered = {id(outcome.conversation): (outcome, by) for outcome, by in replies}
        return (answered[id(conversation)] for conversation in conversations)


@dataclass(frozen=True)
class MakeReplier:
    """Loads the model in a worker.

    Attributes:
        first: the first conversation that is there already; it must have been answered in the same way.
    """

    model: TargetOptions
    draft: DraftOptions
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]
    job: RegenerateOptions
    first: Mapping[str, Any]

    def __call__(self) -> Replier:
        """Return the function that answers conversations. Raise EyasError if the options do not fit, or other
        answers are there."""
        replier = Replier(load(self.model, self.draft, self.options), self.sampling, self.job)
        replier.check_same(self.first, "the output")
        return replier


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

    def answer(self, replies: Replies) -> None:
        """Answer the conversations that have no answer yet.

        Args:
            replies: from conversations, their number, and a function that is told the tokens of each cycle, to
                outcomes.
        """
        counts, todo = self.counts, self._todo()
        with interruptible(self.kept), progress_bar("answering", len(todo)) as bar:
            self.began = time.monotonic()

            def on_step(tokens: int) -> None:
                counts["tokens"] += tokens
                done = counts["conversations"] + counts["dropped"] + counts["bad"]
                bar.show(done, f"{self.tokens_per_second:,.0f} tokens/s, tau {self.tau:.2f}")

            for outcome, by in replies(self._conversations(todo), len(todo), on_step):
                self._write(outcome, by)
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
        """Yield the conversations that have no answer yet, until the minutes are over."""
        from eyas_train.regenerate import GenerationSettings, parse_conversation, read_lines

        settings, limit = GenerationSettings(last_only=self.job.last_only), self.job.minutes
        for line in read_lines(self.job.data):
            key = str(line.key["key"])
            if not todo or (limit is not None and time.monotonic() - self.began > 60 * limit):
                return
            if key in todo:
                todo.discard(key)
                try:
                    yield parse_conversation(line, settings)
                except InputError as error:
                    self._reject(f"{line.where}: {error}")

    def _write(self, answered: Regenerated, by: Mapping[str, Any]) -> None:
        conversation, counts = answered.conversation, self.counts
        line = conversation.line
        if not answered.finish:
            if answered.dropped and self.dropped is not None:
                self.dropped.write({**line.key, "source": line.where, "reason": answered.ended})
                counts["dropped"] += 1
            else:
                self._reject(f"{line.where}: {answered.ended}")
            return
        fields = {
            **line.key,
            "id": conversation.id,
            "source": line.where,
            **conversation.template,
            "messages": answered.messages,
            "finish": list(answered.finish),
            "tokens": list(answered.tokens[: len(answered.finish)]),
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
