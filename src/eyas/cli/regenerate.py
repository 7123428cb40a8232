"""`eyas regenerate`: the target answers the questions of chat data itself. Run again, the same command goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._errors import Interrupted, note
from eyas.cli._files import Results
from eyas.cli._load import check_sampling, load, note_no_head
from eyas.cli._options import LAW, MODEL, SAMPLING_LAW, MethodCommand, examples, method_options, option, stack
from eyas.errors import InputError, OptionError

if TYPE_CHECKING:
    from eyas.api import LLM
    from eyas.train.regenerate import Conversation, DataLine, GenerationSettings, Regenerated, Skipped

__all__ = ["command"]

SHOWN_PROBLEMS = 20
ROWS = {"cpu": 8}  # elsewhere 16
EXAMPLES = examples(
    ("eyas regenerate --target MODEL --data chat.jsonl --output own.jsonl", "every turn of the assistant's, greedily"),
    ("eyas regenerate ... --draft HEAD --rows 32", "faster, with a head that is there already"),
    ("eyas regenerate ... --temperature 0.7 --top-p 0.9 --seed 1", "drawn; each reply has a seed of its own"),
    ("eyas train --target MODEL --data own.jsonl --output HEAD", "what it is for"),
    more=(
        '[bold]Lines of --data[/]: {"messages": \\[...]}, {"conversations": \\[...]} or {"prompt": "..."}.',
        '[bold]Lines of --output[/]: {"messages": \\[...]}, where they come from, how each reply ended; what is there is not done again.',
    ),
)


@click.command("regenerate", cls=MethodCommand, epilog=EXAMPLES, panel="Heads")
@stack(
    option("Data", "--data", multiple=True, required=True, metavar="FILE", help="Chats (JSONL), .gz too; several are mixed."),
    option("Data", "--last-only", is_flag=True, help="Answer the last turn only; the turns before it stay as they are."),
    option("Data", "--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N conversations."),
    option("Output", "--output", required=True, metavar="FILE.jsonl", help="Where the conversations go, one a line."),
    option("Output", "--drop-cut", is_flag=True, help="Leave out replies that --max-new-tokens cut, and what follows; default: marked."),
    option("Output", "--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout."),
    option("Sampling", "--max-new-tokens", type=click.IntRange(min=1), default=1024, help="Of a reply; a longer one is cut."),
    option(
        "Machine", "--rows", type=click.IntRange(min=1), metavar="N", help="Conversations at a time. Default: 8 on a CPU, 16 elsewhere."
    ),
    LAW,
    MODEL,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> None:
    """Let the target answer the data's questions itself."""
    from eyas.train.regenerate import GenerationSettings

    check_sampling(given)
    _check(given)
    law = {name: given[name] for name in SAMPLING_LAW}
    with ExitStack() as files:
        results = files.enter_context(closing(Results(given["output"], ("key",), "messages")))
        dropped = files.enter_context(closing(Results(f"{given['output']}.dropped", ("key",), "reason"))) if given["drop_cut"] else None
        llm = load(given, method_options(ctx))
        if llm.tokenizer is None:
            raise InputError("this target has no tokenizer: name one with --tokenizer")
        from eyas.core.sampling import Sampling

        manner = GenerationSettings(Sampling(**law), given["max_new_tokens"], given["last_only"], given["drop_cut"])
        run = _Run(llm, manner, results, dropped, given)
        run.check_same()
        note_no_head(llm, given)
        run.go()


def _check(given: Mapping[str, Any]) -> None:
    output = Path(given["output"])
    for path in map(Path, given["data"]):
        if not path.exists():
            raise InputError(f"{path} does not exist; check the path of the data")
        if output.exists() and path.samefile(output):
            raise click.UsageError("--output would write into a file that --data reads: give it another name")


@dataclass
class _Counts:
    """What was done in this run."""

    conversations: int = 0
    replies: int = 0
    tokens: int = 0
    cut: int = 0  # replies that ended by length
    shortened: int = 0  # conversations that end before their last turn
    dropped: int = 0
    bad: int = 0
    there: int = 0  # conversations that were in the file before
    emitted: int = 0
    cycles: int = 0
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def tau(self) -> float:
        from eyas.metrics import tau

        return tau(self.emitted, self.cycles)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.began)


class _Run:
    """One run of the command."""

    def __init__(self, llm: LLM, manner: GenerationSettings, results: Results, dropped: Results | None, given: Mapping[str, Any]) -> None:
        self.llm, self.manner, self.results, self.dropped, self.given = llm, manner, results, dropped, given
        self.counts = _Counts()
        law = {name: getattr(manner.sampling, name) for name in SAMPLING_LAW}
        self.by = {
            "target": llm.target.name, "fingerprint": llm.target.fingerprint(), **law, "max_new_tokens": manner.max_new_tokens,
            "last_only": manner.last_only, "drop_cut": manner.drop_cut,
            **asdict(llm.target.run.form),
        }  # fmt: skip

    def check_same(self) -> None:
        """One file holds the answers of one target, made in one manner."""
        made: dict[str, Any] = self.results.first.get("by", {})
        other = []
        if made and not self.llm.target.is_named(made.get("fingerprint", "")):
            other.append(f"target {made.get('target')!r} there, {self.by['target']!r} now")
        free = ("target", "fingerprint")
        made = {"weights": "exact", "activations": "exact", **made} if made else made  # files of earlier versions do not say it
        other += [
            f"{name} {made.get(name)} there, {value} now"
            for name, value in self.by.items()
            if made and name not in free and made.get(name) != value
        ]
        if other:
            raise OptionError(f"{self.results.path} holds answers made otherwise: {'; '.join(other)}; name another file")

    def go(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from eyas.train.regenerate import Regenerated, regenerate

        assert self.llm.tokenizer is not None
        todo = self._todo()
        rows = self.given["rows"] or ROWS.get(self.llm.target.device.type, 16)
        console = Console(stderr=True)
        columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        try:
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                task = progress.add_task("", total=len(todo))
                self.counts.began = time.monotonic()

                def on_step(tokens: int) -> None:
                    self.counts.tokens += tokens
                    said = f"{self.counts.tokens_per_second:,.0f} tokens/s, tau {self.counts.tau:.2f}"
                    progress.update(task, completed=done, description=said)

                done = 0
                talks = self._talks(todo)
                for found in regenerate(
                    self.llm.drafter, self.llm.tokenizer, self.llm.eos, talks, self.manner, max(1, min(rows, len(todo))), on_step
                ):
                    self._write(found) if isinstance(found, Regenerated) else self._pass_over(found)
                    done = self.counts.conversations + self.counts.dropped + self.counts.bad
        except KeyboardInterrupt:
            there = self.counts.there + self.counts.conversations
            raise Interrupted(f"{there} conversations are in {self.results.path}; the same command goes on after them") from None
        self._say()

    def _todo(self) -> set[str]:
        """The keys of the lines that are to be answered. Copies of a line are one."""
        from eyas.train.regenerate import read_lines

        keys = dict[str, bool]()
        for line in read_lines(self.given["data"]):
            if len(keys) == self.given["limit"]:
                break
            keys[str(line.key["key"])] = self._done(line)
        if not keys:
            raise InputError(f"{', '.join(self.given['data'])}: there is no line in it")
        self.counts.there = sum(keys.values())
        if self.counts.there:
            note(f"{self.counts.there} of {len(keys)} conversations are in {self.results.path} already")
        return {key for key, done in keys.items() if not done}

    def _done(self, line: DataLine) -> bool:
        return self.results.holds(line) or (self.dropped is not None and self.dropped.holds(line))

    def _talks(self, todo: set[str]) -> Iterator[Conversation]:
        from eyas.train.regenerate import parse_conversation, read_lines

        left = set(todo)
        for line in read_lines(self.given["data"]):
            if line.key["key"] not in left:
                continue
            left.discard(str(line.key["key"]))
            try:
                yield parse_conversation(line, self.manner)
            except InputError as error:
                self._bad(f"{line.where}: {error}")
            if not left:
                return

    def _bad(self, problem: str) -> None:
        self.counts.bad += 1
        if self.counts.bad <= SHOWN_PROBLEMS:
            note(problem)
        self.counts.problems = self.counts.problems or [problem]

    def _write(self, found: Regenerated) -> None:
        talk, counts = found.conversation, self.counts
        own = {"id": talk.id} if talk.id is not None else {}
        ended = {"ended": found.ended} if found.ended else {}
        self.results.write({
            **talk.line.key, **own, "source": talk.line.where, "messages": found.messages, "finish": list(found.finish),
            "tokens": list(found.tokens), **ended, "by": self.by,
        })  # fmt: skip
        counts.conversations += 1
        counts.replies += len(found.finish)
        counts.cut += found.finish.count("length")
        counts.shortened += bool(found.ended)
        counts.emitted, counts.cycles = counts.emitted + found.emitted, counts.cycles + found.cycles

    def _pass_over(self, found: Skipped) -> None:
        if found.dropped and self.dropped is not None:
            self.dropped.write({**found.conversation.line.key, "source": found.conversation.line.where, "reason": found.reason})
            self.counts.dropped += 1
        else:
            self._bad(f"{found.conversation.line.where}: {found.reason}")

    def _say(self) -> None:
        counts = self.counts
        if counts.bad > SHOWN_PROBLEMS:
            note(f"and {counts.bad - SHOWN_PROBLEMS} lines more that cannot be answered")
        if counts.bad and not counts.conversations + counts.there + counts.dropped:
            raise InputError(f"none of {counts.bad} lines can be answered; the first: {counts.problems[0]}")
        notes = {
            "replies cut at the length": counts.cut, "conversations cut short": counts.shortened, "dropped": counts.dropped,
            "lines passed over": counts.bad, "there before": counts.there,
        }  # fmt: skip
        said = "".join(f"; {value:,} {name}" for name, value in notes.items() if value)
        note(
            f"{counts.conversations:,} conversations, {counts.replies:,} replies, {counts.tokens:,} tokens, "
            f"{counts.tokens_per_second:,.1f} tokens/s, tau {counts.tau:.2f}{said}"
        )
        if self.given["as_json"]:
            names = ("conversations", "replies", "tokens", "cut", "shortened", "dropped", "bad", "there", "tau", "tokens_per_second")
            click.echo(json.dumps({**{name: getattr(counts, name) for name in names}, "output": self.results.path}))
