"""`eyas datastore`: texts and chats as tokens in which the method rest looks up what comes next. Run again, the same command goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from eyas.cli._errors import Interrupted, note
from eyas.cli._load import quiet, versions
from eyas.cli._options import VERBOSE, Command, examples, option, stack
from eyas.errors import InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.datastore import Manifest, Settings, Source
    from eyas.train.data import Report

__all__ = ["command"]

WHOLE = 1 << 30  # tokens: documents are not cut
SHOWN_PROBLEMS = 5
EXAMPLES = examples(
    ("eyas datastore build --target MODEL --data chat.jsonl --output DATASTORE", "a file of chats or of plain text"),
    ('eyas generate --target MODEL --method rest --datastore DATASTORE "Why ..."', "draft from it"),
    ("eyas datastore build --target MODEL --data more.txt --output DATASTORE --append", "a further segment"),
    ("eyas datastore build --target MODEL --output DATASTORE --merge", "all segments into one: faster to look up"),
    ("eyas datastore verify DATASTORE", "compare every checksum"),
    more=("Whatever ends a build, the same command goes on; what was there before stays usable until it is done.",),
)


@click.group("datastore", cls=click.RichGroup, epilog=EXAMPLES, panel="Heads")
def command() -> None:
    """Make a datastore for the method rest."""


@command.command("build", cls=Command, epilog=EXAMPLES)
@stack(
    option("Data", "--data", multiple=True, metavar="FILE", help="Chats (JSONL) or plain text, .gz too; may be given several times."),
    option("Data", "--output", required=True, metavar="FOLDER", help="Where the datastore is, or will be."),
    option("Data", "--append", is_flag=True, help="Add --data to what is there, as further segments."),
    option("Data", "--merge", is_flag=True, help="Sort everything together, in as few segments as --segment-tokens allows."),
    option("Model", "--target", metavar="PATH|HUB", help="The model whose tokenizer is used. Default: the embedded model."),
    option("Model", "--tokenizer", metavar="PATH|HUB", help="Where it is not in the target's folder."),
    option("Model", "--trust-remote-code", is_flag=True, help="Run Python code that comes with the tokenizer."),
    option(
        "Machine", "--segment-tokens", type=click.IntRange(min=1, max=2**32 - 1), default=1 << 24,
        help="Tokens that are sorted together, at about 60 bytes of memory each.",
    ),
    VERBOSE,
)  # fmt: skip
def build(**given: Any) -> int:
    """Make tokens of data, and sort them."""
    from eyas import datastore

    if not given["data"] and not given["merge"]:
        raise click.UsageError("Missing option '--data'")
    if missing := [path for path in given["data"] if not Path(path).exists()]:
        raise InputError(f"{missing[0]} does not exist; check the path of the data")
    folder = Path(given["output"]).expanduser()
    words = _tokenizer(given)
    sources = [_source(path, words) for path in given["data"]]
    how = {"append": given["append"], "merge": given["merge"], "on_stage": note}
    try:
        manifest = datastore.build(folder, _settings(words, given), sources, versions(), **how)
    except KeyboardInterrupt:
        raise Interrupted(f"what was read is kept in {folder}; the same command goes on") from None
    note(_said(folder, manifest))
    return 0


@command.command("verify", cls=Command)
@click.argument("folder")
def verify(folder: str) -> int:
    """Compare every checksum of a datastore."""
    from eyas.datastore import Manifest

    place = Path(folder).expanduser()
    manifest = Manifest.read(place)
    with _bar(manifest.bytes) as show:
        manifest.check(place, show)
    note(f"{_said(place, manifest)}; every checksum is right")
    return 0


def _said(folder: Path, manifest: Manifest) -> str:
    segments, sources = len(manifest.segments), len(manifest.sources)
    return (
        f"{folder} holds {manifest.tokens:,} tokens of {sources} source{'s' * (sources != 1)}, "
        f"{segments} segment{'s' * (segments != 1)}, {manifest.bytes / 2**20:,.1f} MiB"
    )


def _settings(words: PreTrainedTokenizerBase, given: dict[str, Any]) -> Settings:
    from eyas.datastore import Settings
    from eyas.train.store import tokenizer_identity

    name = given["tokenizer"] or given["target"] or "embedded"
    return Settings(tokenizer_identity(words), name, max(words.get_vocab().values()) + 1, given["segment_tokens"])


def _tokenizer(given: dict[str, Any]) -> PreTrainedTokenizerBase:
    """That of the target, without the target."""
    from eyas import tiny

    named = given["tokenizer"] or given["target"]
    if named is None:
        return tiny.tokenizer()
    with quiet(given["verbose"]):
        from transformers import AutoTokenizer

        try:
            words: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(named, trust_remote_code=given["trust_remote_code"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"tokenizer {named!r} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    return words


def _source(path: str, words: PreTrainedTokenizerBase) -> Source:
    """A file; it is read when its turn comes."""
    from eyas.datastore import Source
    from eyas.train.data import data_hash

    def read() -> Iterator[Sequence[int]]:
        from rich.console import Console

        from eyas.train import data

        with Console(stderr=True).status(f"reading {path}") as status:

            def say(report: Report) -> None:
                if report.lines % 500 == 0:
                    status.update(f"reading {path}: {report.lines:,} lines, {report.tokens:,} tokens")

            found = data.read(path, words, max_length=WHOLE, heldout=0.0, on_line=say)
        for problem in found.report.problems[:SHOWN_PROBLEMS]:
            note(problem)
        if found.report.bad:
            note(f"{path}: {found.report.bad:,} of {found.report.lines:,} lines cannot be used")
        for example in found.train:
            yield example.ids

    return Source(Path(path).name, data_hash(path), read)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Bytes that were read, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda size: progress.advance(task, size)
