"""Prompts in, results out, line by line.

    in    {"prompt": "..."}  |  {"messages": [...]}  |  {"prompt_ids": [...]}     any of them with an "id"
    out   {"id": ... or "line": n, and the fields of --json}

A result is appended as one whole line and is with the system before the next prompt ends, so whatever stops a run leaves whole lines.
Half a line at the end of a file (the machine stopped) is cut off by the next run, which then goes on after what is there.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from eyas.cli._errors import FULL
from eyas.errors import EyasError, InputError, near

__all__ = ["Bad", "Results", "Task", "read_tasks", "told"]

KINDS = ("prompt", "messages", "prompt_ids")


@contextmanager
def told(path: str | Path, what: str = "file") -> Iterator[None]:
    """What the system says about a file that the user named, as one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {str(path)!r} is no text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{what} {str(path)!r} {_reason(error, Path(path))}") from error


def _reason(error: OSError, path: Path) -> str:
    if error.errno in FULL:
        return "cannot be written: no space left on the device; free some and run the same command again, it goes on after the last result"
    if error.errno == errno.ENOENT:
        return "does not exist" if path.parent.is_dir() else f"cannot be opened: the folder {str(path.parent)!r} does not exist"
    if error.errno == errno.EISDIR:
        return "is a folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "cannot be used: permission denied"
    return f"cannot be used: {(error.strerror or str(error)).lower()}"


@dataclass(frozen=True)
class Task:
    """One usable line."""

    line: int  # counted from 1
    id: str | int | None
    prompt: Any  # what LLM.generate takes

    @property
    def key(self) -> dict[str, str | int]:
        """What names its result: its own id, else the number of its line."""
        return {"line": self.line} if self.id is None else {"id": self.id}


@dataclass(frozen=True)
class Bad:
    """A line that cannot be used, and why."""

    line: int
    reason: str


def read_tasks(path: str) -> Iterator[Task | Bad]:
    """Every line that is not blank; `-` reads stdin. InputError when the file cannot be read."""
    seen: dict[str, int] = {}
    with told(path, "input file"), _opened(path) as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                task = _task(number, raw)
                key = json.dumps(task.key)
                if seen.setdefault(key, number) != number:
                    raise InputError(f"the id {task.id!r} stands on line {seen[key]} already: give each line its own")
                yield task
            except InputError as error:
                yield Bad(number, str(error))


def _opened(path: str) -> IO[bytes]:
    return sys.stdin.buffer if path == "-" else open(path, "rb")


def _task(number: int, raw: bytes) -> Task:
    try:
        held = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from error
    if not isinstance(held, Mapping):
        raise InputError('not a JSON object; write {"prompt": "..."}')
    given = [kind for kind in KINDS if kind in held]
    if len(given) != 1:
        what = f"both {' and '.join(given)}: give one of them" if given else f"none of {', '.join(KINDS)}"
        raise InputError(f"the object has {what}{_meant(held) if not given else ''}")
    name = held.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise InputError(f"the id must be a string or a whole number, it is {json.dumps(name)[:40]}")
    return Task(number, name, _prompt(given[0], held[given[0]]))


def _meant(held: Mapping[str, Any]) -> str:
    """Which of its keys was probably meant to be one of ours."""
    close = [(key, hint) for key in held if (hint := near(key, KINDS)).startswith("did you")]
    return f"; {close[0][0]!r}: {close[0][1]}" if close else ""


def _prompt(kind: str, value: Any) -> Any:
    if kind == "prompt" and not isinstance(value, str):
        raise InputError("prompt must be a string (messages and prompt_ids are keys of their own)")
    if kind == "messages" and not (isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)):
        raise InputError('messages must be a list of objects like {"role": "user", "content": "..."}')
    if kind == "prompt_ids" and not (isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)):
        raise InputError("prompt_ids must be a list of whole numbers")
    return value


class Keyed(Protocol):
    """What a result is of."""

    @property
    def key(self) -> Mapping[str, str | int]: ...


class Results:
    """Where results go: a file that is appended to, or stdout.

    Args:
        names: what names a result: it has one of these fields, as its first.
        needs: a field that every result has.

    Raises InputError when the file cannot be written, or holds something else than results.
    """

    def __init__(self, path: str | None, names: Sequence[str] = ("id", "line"), needs: str = "token_ids") -> None:
        self.path, self.names, self.needs = path, names, needs
        self.done, self.first = set[str](), dict[str, Any]()
        if path is None:
            return
        with told(path, "output file"):
            self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`; says early whether it can be written
            try:
                if Path(path).is_file():
                    self._read(Path(path))
            except BaseException:
                self._stream.close()
                raise

    def holds(self, task: Keyed) -> bool:
        return json.dumps(task.key) in self.done

    def write(self, fields: Mapping[str, Any]) -> None:
        """One result, as one line."""
        line = (json.dumps(fields, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if self.path is None:
            sys.stdout.write(line.decode())
            sys.stdout.flush()
            return
        with told(self.path, "output file"):
            before = os.fstat(self._stream.fileno()).st_size
            try:
                while line:
                    line = line[self._stream.write(line) :]
            except OSError:
                if Path(self.path).is_file():
                    self._stream.truncate(before)  # no half lines
                raise

    def close(self) -> None:
        if self.path is not None:
            self._stream.close()

    def _read(self, path: Path) -> None:
        """Learn what is done already; cut off half a line at the end."""
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
                    if not any(
                        raw.startswith(begin) or begin.startswith(raw) for begin in (f'{{"{name}":'.encode() for name in self.names)
                    ):
                        raise
                    self._stream.truncate(end)

    def _learn(self, raw: bytes, where: str) -> None:
        try:
            held = json.loads(raw)
            key = {name: held[name] for name in self.names if name in held}
            known = len(key) == 1 and self.needs in held
        except (ValueError, TypeError):
            known = False
        if not known:
            raise InputError(f"output file {self.path!r} holds something else than results ({where}): choose another name")
        self.first = self.first or held
        self.done.add(json.dumps(key))
