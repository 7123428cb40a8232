"""Prompts in, results out, line by line.

    in    {"prompt": "..."}  |  {"messages": [...]}  |  {"prompt_ids": [...]}     with an optional "id"
    out   {"id": ... or "line": n, and the fields of --json}

A result is appended as one whole line and handed to the system before the next prompt ends. Half a line at the end of a
file (the machine stopped) is cut off by the next run, which continues there. One process at a time writes into a file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from eyas.cli._errors import FULL
from eyas.cli._options import STDIN, Fields
from eyas.core.params import is_whole
from eyas.errors import EyasError, InputError, OptionError, near
from eyas.files import parse_json
from eyas.locks import locked_output
from eyas.text import template_keywords

KINDS = ("prompt", "messages", "prompt_ids")


@contextmanager
def file_errors(path: str | Path, what: str = "file") -> Iterator[None]:
    """Turn the system's error about a file that the user named into an InputError of one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {str(path)!r} is not text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        reason = _reason(error, Path(path))
        if error.errno == errno.ENOENT and what == "output file" and Path(path).parent.is_dir():
            reason = "cannot be created there"
        raise InputError(f"{what} {str(path)!r} {reason}") from error


def _reason(error: OSError, path: Path) -> str:
    if error.errno in FULL:
        return (
            "cannot be written: no space left on the device; free some and run the same command again, "
            "it continues after the last result"
        )
    if error.errno == errno.ENOENT:
        if path.parent.is_dir():
            return "does not exist"
        return f"cannot be opened: the folder {str(path.parent)!r} does not exist"
    if error.errno == errno.EISDIR:
        return "is a folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "cannot be used: permission denied"
    return f"cannot be used: {(error.strerror or str(error)).lower()}"


@dataclass(frozen=True)
class Task:
    line: int  # counted from 1
    id: str | int | None
    prompt: Any  # a prompt of LLM.generate
    template: Mapping[str, Any] = field(default_factory=dict)  # keywords of LLM.generate for the chat template

    @property
    def key(self) -> dict[str, str | int]:
        """The name of its result: its id, else the number of its line."""
        return {"line": self.line} if self.id is None else {"id": self.id}

    @property
    def prompt_hash(self) -> str:
        """Sixteen hexadecimal digits by which a changed prompt is noticed."""
        asked = [self.prompt, self.template] if self.template else self.prompt
        text = json.dumps(asked, sort_keys=True).encode("utf-8", "backslashreplace")
        return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class InvalidLine:
    line: int
    reason: str


def read_tasks(path: str) -> Iterator[Task | InvalidLine]:
    """Yield every line that is not blank; `-` reads stdin. Raise InputError when the file cannot be read."""
    seen: dict[str, int] = {}
    for number, raw in enumerate(_lines(path), start=1):
        if not raw.strip():
            continue
        try:
            task = _task(number, raw)
            key = json.dumps(task.key)
            if seen.setdefault(key, number) != number:
                raise InputError(f"the id {task.id!r} is on line {seen[key]} already: give each line its own")
            yield task
        except InputError as error:
            yield InvalidLine(number, str(error))


def _lines(path: str) -> Iterator[bytes]:
    from eyas.text.sources import as_file, is_parquet, open_file, parquet_rows

    if path == STDIN:
        yield from sys.stdin.buffer
    elif is_parquet(file := as_file(path)):
        yield from parquet_rows(file)
    elif isinstance(file, Path) and file.suffix != ".gz":
        with file_errors(path, "input file"), open(path, "rb") as stream:
            yield from stream
    else:
        with open_file(file) as unpacked:
            yield from unpacked


def _task(number: int, raw: bytes) -> Task:
    fields = parse_json(raw)
    if not isinstance(fields, Mapping):
        raise InputError('not a JSON object; write {"prompt": "..."}')
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        what = f"both {' and '.join(kinds)}: give one of them" if kinds else f"none of {', '.join(KINDS)}"
        raise InputError(f"the object has {what}{_suggestion(fields) if not kinds else ''}")
    name = fields.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise InputError(f"the id must be a string or a whole number, it is {json.dumps(name)[:40]}")
    return Task(number, name, _prompt(kinds[0], fields[kinds[0]]), template_keywords(fields))


def _suggestion(fields: Mapping[str, Any]) -> str:
    close = [(key, hint) for key in fields if (hint := near(key, KINDS)).startswith("did you")]
    return f"; {close[0][0]!r}: {close[0][1]}" if close else ""


def _prompt(kind: str, value: Any) -> Any:
    if kind == "prompt" and not isinstance(value, str):
        raise InputError("prompt must be a string (messages and prompt_ids are keys of their own)")
    if kind == "messages" and not (isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)):
        raise InputError('messages must be a list of objects like {"role": "user", "content": "..."}')
    if kind == "prompt_ids" and not (isinstance(value, list) and all(map(is_whole, value))):
        raise InputError("prompt_ids must be a list of whole numbers")
    return value


class Results:
    """A file that results are appended to, or stdout. In a `with` block no other process can write into the file.
    `names`: the fields one of which names a result, as its first field. `needs`: a field that every result has."""

    def __init__(self, path: str | None, names: Sequence[str] = ("id", "line"), needs: str = "token_ids") -> None:
        self.path = path
        self.names = names
        self.needs = needs
        self.done: dict[str, str | None] = {}  # key of a result -> hash of its prompt
        self.first: Fields = {}  # the first result
        self._files = ExitStack()

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        with ExitStack() as files, file_errors(self.path, "output file"):
            # opened first: the message about a file that cannot be written is better than the lock's
            self._stream = files.enter_context(open(self.path, "ab", buffering=0))
            files.enter_context(locked_output(self.path))
            if Path(self.path).is_file():
                self._read(Path(self.path))
            self._files = files.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.close()

    def holds(self, task: Any) -> bool:
        """Return whether something with a `key` has its result. Raise OptionError if the result belongs to another prompt."""
        key = json.dumps(task.key)
        made_for = self.done.get(key)
        if isinstance(task, Task) and made_for is not None and made_for != task.prompt_hash:
            name = " ".join(f"{name} {value!r}" for name, value in task.key.items())
            raise OptionError(f"{self.path} holds the answer to another prompt for {name}: use another --output")
        return key in self.done

    def write(self, fields: Mapping[str, Any]) -> None:
        """Append one result as one line."""
        line = (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if self.path is None:
            sys.stdout.write(line.decode())
            sys.stdout.flush()
            return
        with file_errors(self.path, "output file"):
            before = os.fstat(self._stream.fileno()).st_size
            try:
                while line:
                    line = line[self._stream.write(line) :]
            except OSError:
                if Path(self.path).is_file():
                    self._stream.truncate(before)  # no half lines
                raise

    def _read(self, path: Path) -> None:
        """Learn which tasks are done already; cut off half a line at the end."""
        end = 0
        with open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.endswith(b"\n"):
                    self._learn(raw, f"line {number}")
                    end += len(raw)
                    continue
                try:
                    self._learn(raw, "its only line" if number == 1 else "its last line")
                    self._stream.write(b"\n")
                except EyasError:
                    begins = (f'{{"{name}":'.encode() for name in self.names)
                    is_part = any(raw.startswith(begin) or begin.startswith(raw) for begin in begins)
                    if not is_part or _is_json(raw):
                        raise
                    self._stream.truncate(end)

    def _learn(self, raw: bytes, where: str) -> None:
        try:
            result = parse_json(raw)
        except InputError:
            result = None
        key = {name: result[name] for name in self.names if name in result} if isinstance(result, dict) else {}
        if len(key) != 1 or self.needs not in result:
            raise InputError(
                f"output file {self.path!r} holds something other than results ({where}): choose another name"
            )
        self.first = self.first or result
        made_for = result.get("prompt_sha256")
        self.done[json.dumps(key)] = made_for if isinstance(made_for, str) else None


def _is_json(raw: bytes) -> bool:
    """Return whether a line is complete JSON, which the beginning of an object is not."""
    try:
        parse_json(raw)
    except InputError:
        return False
    return True


class FileRun:
    """A run that answers the lines of a file, and counts its work; the first of `counts` are the results."""

    def __init__(self, results: Results, counts: Sequence[str]) -> None:
        self.results = results
        self.noun = counts[0]
        self.counts = dict.fromkeys(counts, 0)
        self.results_before = 0  # results that were in the file already
        self.emitted = self.cycles = 0  # tokens of draft cycles, and how many cycles

    @property
    def tau(self) -> float:
        from eyas.core.totals import tau

        return tau(self.emitted, self.cycles)

    def refuse_others(self, differences: Sequence[str]) -> None:
        if differences:
            raise OptionError(
                f"{self.results.path} holds answers made with other settings: {'; '.join(differences)}; use another file"
            )

    def kept(self) -> str:
        """Say which results are kept when the run ends here, and how to go on."""
        path = self.results.path
        where = f"are in {path}; the same command goes on after them" if path else "are above"
        return f"{self.results_before + self.counts[self.noun]} {self.noun} {where}"

    def print_json(self, **figures: float) -> None:
        print(json.dumps({**self.counts, "tau": self.tau, **figures, "output": self.results.path}))


def differences(there: Any, now: Mapping[str, Any]) -> list[str]:
    """Describe where the settings in a file, if there are any, differ from the settings of this run."""
    recorded = there if isinstance(there, Mapping) else {}
    pairs = [(name, recorded[name], json.loads(json.dumps(value))) for name, value in now.items() if name in recorded]
    return [f"{name} {old} there, {new} now" for name, old, new in pairs if old != new]
