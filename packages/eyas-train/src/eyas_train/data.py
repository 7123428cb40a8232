"""Chat data and plain text to token ids, with a mark on every token that counts, and batches of
them.

    chat.jsonl ----- _chat.py: the assistant's characters --+
    novels.txt ----- all tokens count ----------------------+--> Example(ids, counted) --> Batches

Files, plain or .gz, here or at a URL (`text.sources`), may be mixed:

    .jsonl .ndjson .json   one conversation a line, or one JSON array of them (.parquet: one a row, with these columns):
                           {"messages": [{"role", "content"}]}  or  {"conversations": [{"from", "value"} or {"role", "content"}]},
                           with "tools", where the assistant had any; a turn of "weight" 0 does not count
                           whatever its name, a file that begins with JSON objects is read so
    anything else          plain text; documents are separated by <|endoftext|>; a long one becomes pieces of `max_length` tokens

A line that cannot be used goes into the report with its file and number, and reading goes on. Which
lines are held out depends on their content alone, not on their place, so copies of a line stay on
one side.

Shapes: N tokens of a batch. This module knows no model and no method.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas import text
from eyas.errors import InputError, OptionError
from eyas.nn import Documents
from eyas.text.sources import File, as_file, open_file, opened, read_errors
from eyas_lab.chat_files import chat_lines, decode_line, is_chat_file, parse_chat_line
from eyas_train._chat import FIRST_COUNTABLE, ChatReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"


class Example(NamedTuple):
    """One sequence of at most `max_length` tokens."""

    ids: list[int]
    counted: list[bool]  # True: an assistant's token (its end of turn too), whose prediction is trained


class Examples(Sequence[Example]):
    """Many examples, in five bytes a token."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._counted = bytearray()
        self._ends = array("q", [0])

    def append(self, example: Example) -> None:
        """Add an example."""
        self._ids.extend(example.ids)
        self._counted.extend(example.counted)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        begin, end = self._ends[index % len(self)], self._ends[index % len(self) + 1]
        return Example(self._ids[begin:end].tolist(), [bool(c) for c in self._counted[begin:end]])

    def tensors(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an example's ids, int64 [T], and whether they count, bool [T]; without lists, in a tenth of the time."""
        begin, end = self._ends[index], self._ends[index + 1]
        ids_T, counted_T = np.array(self._ids[begin:end], np.int64), np.array(self._counted[begin:end], np.bool_)
        return torch.from_numpy(ids_T), torch.from_numpy(counted_T)


@dataclass
class Report:
    """Counts of the data that was read."""

    lines: int = 0  # conversations and documents
    bad: int = 0  # lines that cannot be used
    problems: list[str] = field(default_factory=list)  # one for each bad line: file, number, what is wrong, what to do
    examples: int = 0
    tokens: int = 0
    counted_tokens: int = 0
    truncated: int = 0  # conversations cut at max_length
    last_only: int = 0  # conversations of which only the last reply counts, because the template rewrites earlier turns
    left_out: int = 0  # conversations of which the template leaves out words of a reply
    unused_tools: int = 0  # conversations of which the template leaves out the tools

    def __str__(self) -> str:
        size = f"{self.examples:,} examples, {self.tokens:,} tokens, {self.counted_tokens:,} of them counted"
        left_out = "the template leaves out a part of a reply, such as its reasoning, which does not count"
        notes = {
            f"{self.bad:,} of {self.lines:,} lines cannot be used": self.bad,
            f"{self.truncated:,} conversations cut at the maximum length": self.truncated,
            f"in {self.last_only:,} only the last reply counts (the template rewrites earlier turns)": self.last_only,
            f"in {self.left_out:,} {left_out}": self.left_out,
            f"in {self.unused_tools:,} the template leaves out the tools": self.unused_tools,
        }
        return "; ".join([size, *(note for note, count in notes.items() if count)])


@dataclass(frozen=True)
class Data:
    """The examples of some files."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    report: Report
    sha256: str  # hash of the files, see data_hash


def read(
    paths: Sequence[str | Path] | str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 2048,
    heldout: float = 0.05,
    on_line: Callable[[Report], None] | None = None,
) -> Data:
    """Read, tokenize and split training data.

    Args:
        max_length: tokens; a longer conversation is cut there, a longer text becomes several
            examples.
        heldout: share of the lines that is held out, chosen by their hash; above 0, at least one of
            two or more examples is.
        on_line: called with the report at every line, for a progress display.

    Raises:
        InputError: a file is missing, unreadable or empty, or none of its lines can be used.
        OptionError: `max_length` or `heldout` is out of range.
    """
    files = _as_files(paths)
    if max_length <= FIRST_COUNTABLE:
        raise OptionError(f"max_length must be at least {FIRST_COUNTABLE + 1} tokens, got {max_length}")
    if not 0 <= heldout < 1:
        raise OptionError(f"heldout is a share from 0 up to, not including, 1; got {heldout}")
    report, examples, draws = Report(), Examples(), array("d")
    reader = LineReader(tokenizer, max_length, report, on_line)
    for file in files:
        lines_before, bad_before = report.lines, report.bad
        for raw, example in reader.examples(file):
            examples.append(example)
            draws.append(_uniform_hash(raw))
        check_lines(file, report.lines - lines_before, report.bad - bad_before, report)
    train_examples, heldout_examples = _split(examples, draws, heldout)
    return Data(train_examples, heldout_examples, report, data_hash(files))


def _as_files(paths: Sequence[str | File] | str | Path) -> list[File]:
    return [as_file(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]


def check_lines(file: File, lines: int, bad: int, report: Report) -> None:
    """Raise InputError if a file has no lines, or none that can be used."""
    if not lines:
        raise InputError(f"{file} is empty: there is nothing to train on")
    if lines == bad:
        raise InputError(f"{file}: none of its {lines} lines can be used; the first: {report.problems[-bad]}")


def data_hash(paths: Sequence[str | File] | str | Path) -> str:
    """Return SHA-256 of one file's bytes as on disk (as `sha256sum` prints it); of several files, of their
    hashes in order, one a line.
    """
    digests = []
    for file in _as_files(paths):
        with read_errors(file), opened(file) as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(f"{d}\n" for d in digests).encode()).hexdigest()


class LineReader:
    """Turns lines into examples, with one tokenizer. The report counts them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        report: Report,
        on_line: Callable[[Report], None] | None = None,
    ) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.report, self.on_line = report, on_line
        self.chat = ChatReader(tokenizer)

    def examples(self, file: File) -> Iterator[tuple[bytes, Example]]:
        """Yield (bytes that the split hashes, example) for every usable line or document of the file."""
        is_chat = is_chat_file(file)
        for where, raw in raw_lines(file):
            self.report.lines += 1
            if self.on_line is not None:
                self.on_line(self.report)
            try:
                examples = self.examples_of(raw, is_chat)
            except InputError as error:
                self.report.bad += 1
                self.report.problems.append(f"{where}: {error}")
                continue
            for key, example in examples:
                self.report.examples += 1
                self.report.tokens += len(example.ids)
                self.report.counted_tokens += sum(example.counted)
                yield key, example

    def examples_of(self, raw: bytes, is_chat: bool) -> list[tuple[bytes, Example]]:
        """Return the example of a conversation or a document, as above. Raise InputError if it cannot be used."""
        return [(raw, self._conversation(raw))] if is_chat else self._pieces(raw)

    def _conversation(self, raw: bytes) -> Example:
        conversation = self.chat.read(parse_chat_line(raw))
        ids, counted = conversation.ids[: self.max_length], conversation.counted[: self.max_length]
        if not any(counted[FIRST_COUNTABLE:]):
            first = conversation.counted.index(True) + 1
            raise InputError(
                f"the assistant's first token is number {first}, max_length is {self.max_length}; raise it or drop the line"
            )
        self.report.truncated += len(ids) < len(conversation.ids)
        self.report.last_only += conversation.last_only
        self.report.left_out += conversation.left_out
        self.report.unused_tools += conversation.unused_tools
        return Example(ids, counted)

    def _pieces(self, raw: bytes) -> list[tuple[bytes, Example]]:
        ids = text.encode(self.tokenizer, decode_line(raw).strip())
        pieces = [ids[begin : begin + self.max_length] for begin in range(0, len(ids), self.max_length)]
        usable = [piece for piece in pieces if len(piece) > FIRST_COUNTABLE]
        if not usable:
            raise InputError(f"the text has {len(ids)} tokens, at least {FIRST_COUNTABLE + 1} are needed; drop it")
        return [(array("i", piece).tobytes(), Example(piece, [True] * len(piece))) for piece in usable]


# --- files


def raw_lines(file: File) -> Iterator[tuple[str, bytes]]:
    """Yield (where, bytes) of each conversation or document of a file."""
    return chat_lines(file) if is_chat_file(file) else _documents(file)


def _documents(file: File) -> Iterator[tuple[str, bytes]]:
    """Yield (where, text) of each document; `where` names the line that it begins on."""
    begin, number = 1, 0
    lines: list[bytes] = []
    with open_file(file) as stream:
        for number, line in enumerate(stream, start=1):
            first, *rest = line.split(END_OF_TEXT.encode())
            lines.append(first)
            for part in rest:
                if document := b"".join(lines).strip():
                    yield f"{file}:{begin}", document
                begin, lines = number + (not part.strip()), [part]
    if document := b"".join(lines).strip():
        yield f"{file}:{begin}", document


# --- split and batches


def _uniform_hash(raw: bytes) -> float:
    """Return a number in [0, 1) that depends on the content alone."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:6], "big") / 2**48


def _split(examples: Examples, draws: Sequence[float], share: float) -> tuple[Examples, Examples]:
    """Return (training, held out): examples whose draw is below the share; of two or more examples, never
    all and never none of them.
    """
    chosen = {i for i, draw in enumerate(draws) if draw < share}
    if share > 0 and not chosen and len(examples) > 1:
        chosen = {min(range(len(examples)), key=draws.__getitem__)}
    if chosen and len(chosen) == len(examples):
        chosen.remove(max(chosen, key=draws.__getitem__))
    train, heldout = Examples(), Examples()
    for i, example in enumerate(examples):
        (heldout if i in chosen else train).append(example)
    return train, heldout


FeatureReader = Callable[[Tensor, Documents, Sequence[int]], Tensor]
"""Packed tokens [N], their documents and feature layers -> features [N, F]."""


class Batches:
    """Batches of at most `batch_tokens` tokens, padding included, of examples of about one length.

    The batches of an epoch and their order are a function of (seed, epoch), so a place in the data
    is two numbers: epoch and index of the batch.
    """

    def __init__(
        self, examples: Sequence[Example], batch_tokens: int, seed: int = 0, read: FeatureReader | None = None
    ) -> None:
        """Raise OptionError if an example does not fit into a batch. `read`: reads features; None: the target does."""
        self.examples, self.batch_tokens = examples, batch_tokens
        self.seed, self.read = seed, read
        self.lengths = [len(example.ids) for example in examples]
        self._plan_of = lru_cache(maxsize=2)(self.plan)  # two: a step looks ahead into the next epoch
        if self.lengths and max(self.lengths) > batch_tokens:
            longest = max(self.lengths)
            raise OptionError(
                f"batch_tokens is {batch_tokens}, the longest example has {longest} tokens: raise it or lower max_length"
            )

    def plan(self, epoch: int | None) -> list[list[int]]:
        """Return the batches of an epoch, as indices of examples; None if sorted by length and not
        shuffled."""
        rng = random.Random(f"{self.seed}/{epoch}")
        noise = 0.0 if epoch is None else 0.1
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] * (1 + noise * rng.uniform(-1, 1)))
        batches: list[list[int]] = []
        longest = 0
        for i in order:
            longest = max(longest, self.lengths[i])
            if not batches or (len(batches[-1]) + 1) * longest > self.batch_tokens:
                batches.append([])
                longest = self.lengths[i]
            batches[-1].append(i)
        if epoch is not None:
            rng.shuffle(batches)
        return batches

    def take(self, position: tuple[int, int], count: int) -> tuple[list[list[int]], tuple[int, int]]:
        """Return the next `count` batches from a place in the data, and the place after them.

        Args:
            position: (epoch, index of the batch in it).
        """
        epoch, index = position
        batches: list[list[int]] = []
        while len(batches) < count:
            plan = self._plan_of(epoch)
            if index >= len(plan):
                epoch, index = epoch + 1, 0
            else:
                batches.append(plan[index])
                index += 1
        return batches, (epoch, index)

    def tokens(self, batch: Sequence[int]) -> int:
        """Return tokens of a batch without its padding."""
        return sum(self.lengths[i] for i in batch)

    def load(self, batch: Sequence[int]) -> tuple[Tensor, Tensor, Documents]:
        """Return (tokens_N int64, counted_N bool, documents): the examples end to end. The first tokens of
        an example never count.
        """
        rows = [example_tensors(self.examples, i) for i in batch]
        tokens_N, counted_N = (torch.cat(parts) for parts in zip(*rows, strict=True))
        documents = Documents(tuple(self.lengths[i] for i in batch))
        return tokens_N, counted_N & (documents.position_N() >= FIRST_COUNTABLE), documents


def example_tensors(examples: Sequence[Example], index: int) -> tuple[Tensor, Tensor]:
    """Return an example's ids, int64 [T], and whether they count, bool [T]."""
    if isinstance(examples, Examples):
        return examples.tensors(index)
    return torch.tensor(examples[index].ids), torch.tensor(examples[index].counted)
