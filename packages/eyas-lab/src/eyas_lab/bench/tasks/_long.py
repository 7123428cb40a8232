"""Passages of plain texts, to be summarised: prompts as long as one likes.

Lengths are in words, so that a task is the same text for every model; English has about 1.3 tokens
to a word.

    the words of a book  |----------------------------------------------------------------|
    passages                  [=====]      [=====]      [=====]      [=====]    evenly spread; the seed says where the first begins

A passage begins with a paragraph where there is one nearby. This module knows no tokenizer and no
model.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

from eyas.errors import InputError, OptionError
from eyas.text.sources import open_file
from eyas_lab.bench.tasks._formats import Prompt

__all__ = ["LENGTHS_WORDS", "PASSAGES", "passages"]

LENGTHS_WORDS: tuple[int, ...] = (1000,)
PASSAGES = 8  # passages of each length
ASK = "Summarize the following text in a few sentences.\n\n"
ENDINGS = (".txt", ".md", ".txt.gz", ".md.gz")


class Book(NamedTuple):
    """A text with the places of its words."""

    name: str
    text: str
    words: list[tuple[int, int]]  # first and past the last character of each
    paragraphs: list[int]  # the word that each begins with


def passages(place: str, seed: int, max_new_tokens: int | None) -> tuple[list[Prompt], list[str]]:
    """Return PASSAGES prompts of every length, in turn from every book, and the faults of books that cannot be used.

    Args:
        place: PATH@1000+4000, or PATH for LENGTHS_WORDS. Raise OptionError when a length is 0 or comes twice.
    """
    if not place:
        raise InputError("task long needs a path, long:PATH: a text, or a folder of texts; PATH@1000+4000 for lengths")
    lengths = LENGTHS_WORDS
    if found := re.search(r"@(\d+(?:\+\d+)*)$", place):
        lengths, place = tuple(map(int, found[1].split("+"))), place[: found.start()]
        if 0 in lengths or len(set(lengths)) < len(lengths):
            raise OptionError(f"{found[0]}: lengths are numbers of words, above 0 and each of them once")
    books, problems, prompts = list[Book](), list[str](), list[Prompt]()
    for file in _files(Path(place)):
        try:
            books.append(_book(file))
        except InputError as error:
            problems.append(str(error))
    for length in lengths:
        fit = [book for book in books if len(book.words) >= length]
        short = (book for book in books if book not in fit)
        problems += [f"{book.name} has {len(book.words)} words, fewer than {length}" for book in short]
        for k in range(PASSAGES if fit else 0):
            book, turn = fit[k % len(fit)], k // len(fit)
            turns = len(range(k % len(fit), PASSAGES, len(fit)))  # passages of this book
            first = _first_word(book, length, turn, turns, seed)
            text = book.text[book.words[first][0] : book.words[first + length - 1][1]]
            name, task = f"{book.name}-{first}", f"long/{length}"
            prompts.append(Prompt(f"{task}/{name}", task, (ASK + text,), max_new_tokens=max_new_tokens))
    return prompts, problems


def _first_word(book: Book, length: int, turn: int, turns: int, seed: int) -> int:
    """Return the word that the passage number `turn` of `turns` begins with."""
    room = len(book.words) - length + 1  # places to begin at
    shift = random.Random(f"{seed}/{book.name}/{length}").randrange(room)
    place = (turn * room + shift) // turns
    k = bisect_left(book.paragraphs, place)
    near = book.paragraphs[k] if k < len(book.paragraphs) else room
    return near if near < min(room, (turn + 1) * room // turns) else place


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.lower().endswith(ENDINGS))
    if not files:
        raise InputError(f"the folder {path} holds no text ({', '.join(ENDINGS)})")
    return files


def _book(file: Path) -> Book:
    with open_file(file) as stream:
        raw = stream.read()
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not text in UTF-8 (byte {error.start})") from error
    words = [match.span() for match in re.finditer(r"\S+", text)]
    starts = [begin for begin, _ in words]
    paragraphs = [bisect_left(starts, match.end()) for match in re.finditer(r"\n[ \t]*\n\s*(?=\S)", text)]
    return Book(file.name.partition(".")[0], text, words, paragraphs)
