"""`eyas datastore`: texts and chats as sorted tokens, in which the method rest looks up the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts.types import PositiveInt

from eyas.cli.tools import VERBOSE, UsageError, interruptible, note, option_group, quiet, spread
from eyas.errors import InputError
from eyas_train.commands._data import check_files, note_problems, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas_lab.datastore import Source

GROUP = "Heads"
HELP = "Make a datastore for the method rest."
EXAMPLES = """
eyas datastore build --target MODEL --data chat.jsonl --output DATASTORE  # a file of chats or of plain text
eyas generate --target MODEL --method rest --datastore DATASTORE "Why ..."  # draft from it
"""
NOTES = ("Sorting needs about 60 bytes of memory for each token. Nothing is written before all is sorted.",)


@option_group
class BuildOptions:
    """The texts that the datastore is made from."""

    data: Annotated[tuple[str, ...], "Data", "FILE"] = ()
    """Chats (JSONL, Parquet) or plain text, .gz too, here or at a URL; may be given several times."""
    output: Annotated[str, "Data", "FOLDER"]
    """The folder of the datastore."""
    target: Annotated[str | None, "Model", "PATH|HUB"] = None
    """Model whose tokenizer to use. Default: the embedded model."""
    tokenizer: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The tokenizer, when it is not in the target's folder."""
    trust_remote_code: Annotated[bool, "Model"] = False
    """Run Python code that comes with the tokenizer."""
    workers: Annotated[PositiveInt | None, "Machine", "N"] = None
    """Tokenise the data with N processes, on Ray (docs/guide/scale.md)."""
    verbose: VERBOSE = False


def build(*, options: BuildOptions) -> None:
    """Turn data into tokens, and sort them."""
    from eyas import hardware, named
    from eyas_lab import datastore
    from eyas_train._manifest import tokenizer_identity

    if not options.data:
        raise UsageError("option --data is missing")
    check_files(options.data)
    folder, tokenizer = Path(options.output).expanduser(), _tokenizer(options)
    name, vocab_size = options.tokenizer or options.target or named.EMBEDDED, max(tokenizer.get_vocab().values()) + 1
    settings = datastore.Settings(tokenizer_identity(tokenizer), name, vocab_size)
    sources = [_source(path, tokenizer, options) for path in options.data]
    with interruptible(lambda: "nothing was written"):
        made = datastore.build(folder, settings, sources, hardware.versions(), on_stage=note)
    count = len(made.sources)
    note(f"{folder} holds {made.tokens:,} tokens of {count} source{'s' * (count != 1)}")


COMMANDS = {"build": build}


def _tokenizer(options: BuildOptions) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer, without the target."""
    from eyas import named, tiny
    from eyas.targets.pretrained import read_tokenizer

    place = named.place_of(options.tokenizer or options.target or named.EMBEDDED)
    if not place:
        return tiny.tokenizer()
    with quiet(options.verbose):
        tokenizer = read_tokenizer(place, options.trust_remote_code, required=True)
    assert tokenizer is not None
    return tokenizer


def _source(path: str, tokenizer: PreTrainedTokenizerBase, options: BuildOptions) -> Source:
    """Return a file as a source, which is read when its turn comes."""
    from eyas.text.sources import as_file
    from eyas_lab.chat_files import is_chat_file
    from eyas_lab.datastore import Source
    from eyas_train.data import Report, check_lines, data_hash, raw_lines

    file = as_file(path)

    def documents() -> Iterator[Sequence[int]]:
        report = Report()
        maker, workers, lines = _MakeReader(options, is_chat_file(file)), options.workers, raw_lines(file)
        outcomes = spread(list(lines), maker, workers, "cpu") if workers else maker.read(tokenizer, lines)
        with reading(path) as on_line:
            for outcome in outcomes:
                report.lines += 1
                on_line(report)
                if isinstance(outcome, str):
                    report.bad += 1
                    report.problems.append(outcome)
                else:
                    report.tokens += sum(map(len, outcome))
                    yield from outcome
        check_lines(file, report.lines, report.bad, report)
        note_problems(report.problems)
        if report.bad:
            note(f"{path}: {report.bad:,} of {report.lines:,} lines cannot be used")

    return Source(file.name, data_hash(path), documents)


@dataclass(frozen=True)
class _MakeReader:
    """Loads the tokenizer in a worker."""

    options: BuildOptions
    is_chat: bool

    def __call__(self) -> Callable[[Iterable[tuple[str, bytes]]], Iterator[list[list[int]] | str]]:
        tokenizer = _tokenizer(self.options)
        return lambda lines: self.read(tokenizer, lines)

    def read(
        self, tokenizer: PreTrainedTokenizerBase, lines: Iterable[tuple[str, bytes]]
    ) -> Iterator[list[list[int]] | str]:
        """Yield the token ids of the documents of each line, or the fault of the line."""
        from eyas_train.data import LineReader, Report

        reader = LineReader(tokenizer, 1 << 30, Report())  # documents are not cut
        for where, raw in lines:
            try:
                yield [example.ids for _, example in reader.examples_of(raw, self.is_chat)]
            except InputError as error:
                yield f"{where}: {error}"
