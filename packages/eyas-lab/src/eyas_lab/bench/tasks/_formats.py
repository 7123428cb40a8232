"""Read one line of a benchmark's file. The line's own keys decide on the format, not the name of
its file.

    keys                              format
    turns                             Spec-Bench, MT-bench, the EAGLE evaluation files: user turns, a question_id and a category
    messages | conversations          a whole chat; one that ends with a reply is asked up to its longest reply
    prompt, canonical_solution        HumanEval: plain continuation
    instruction (, input)             Alpaca
    article                           CNN/DailyMail, asked as Spec-Bench asks it
    question | question_text          GSM8K, Natural Questions
    prompt_ids                        token ids
    prompt                            a user's message, or a list of the user's turns

This module knows no file, no task and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.core.params import is_whole
from eyas.errors import InputError, near
from eyas.text import template_keywords
from eyas_lab.chat_files import messages_of

__all__ = ["OWN", "Prompt", "check_own_line", "parse_line", "speed_bench_line"]

Record = Mapping[str, Any]
Fields = dict[str, Any]

OWN = ("prompt", "messages", "turns", "prompt_ids")  # a line of the user's own file holds exactly one of them
NAMES = ("id", "question_id", "prompt_id", "task_id")  # keys of a line's id in the formats; the first one counts
SUMMARISE = "Summarize: "  # as in Spec-Bench's and EAGLE's files
# SPEED-Bench's published files have this in place of each text that its authors may not publish.
MISSING = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task: turns, or messages, or token ids; the others are empty."""

    id: str  # stable within its task, "mt_bench/81"
    task: str  # "mt_bench"; of a set of tasks "spec_bench/translation"
    turns: tuple[str, ...]  # the user's turns; the second is asked after the model's own answer to the first
    system: str | None = None
    max_new_tokens: int | None = None  # where the task has a usual limit
    raw: bool = False  # plain continuation, without the chat template
    messages: tuple[dict[str, str], ...] | None = None  # a whole chat that ends with the question
    prompt_ids: tuple[int, ...] | None = None
    template: Record = field(default_factory=dict, repr=False)  # tools and the like, for LLM.generate
    category: str = field(default="", repr=False, compare=False)  # "" where the format has none


def parse_line(record: Any) -> tuple[str | None, Fields]:
    """Return the id of a line, if it has one, and the fields of its Prompt. Raise InputError, without the line's place,
    when it cannot be used."""
    if not isinstance(record, Mapping):
        raise InputError("not a JSON object; a line is one object")
    read = next((read for keys, read in FORMATS if keys <= record.keys()), None)
    if read is None:
        keys = ", ".join(map(repr, record)) or "none"
        raise InputError(f'its keys ({keys}) belong to no known format; {{"prompt": "..."}} always works')
    fields = {"turns": (), **read(record), **_settings(record), "category": str(record.get("category") or "")}
    if fields.get("system") and not fields["turns"]:
        raise InputError('"system" goes with "prompt" or "turns"; in "messages" it is the first message')
    if fields.get("raw") and (fields.get("system") or len(fields["turns"]) != 1):
        raise InputError('"raw" goes with one "prompt", without "system": it bypasses the chat template')
    return _name(record), fields


def speed_bench_line(record: Any) -> Any:
    """Return a line of SPEED-Bench in the form of Spec-Bench: its messages are the user's turns.

    Raises:
        InputError: the text is not there, as the file was not prepared.
    """
    if not isinstance(record, Mapping):
        return record
    messages = record.get("messages")
    if isinstance(messages, list) and all(isinstance(m, Mapping) and m.get("role") == "user" for m in messages):
        record = {**{k: v for k, v in record.items() if k != "messages"}, "turns": [m.get("content") for m in messages]}
    turns = record.get("turns")
    if isinstance(turns, list) and any(isinstance(turn, str) and MISSING in turn for turn in turns):
        raise InputError("its text is not in the file: fetch it with SPEED-Bench's prepare.py: docs/guide/benchmark.md")
    return record


def check_own_line(record: Any) -> None:
    """Raise InputError unless a line of the user's own file holds exactly one of the keys of OWN."""
    if not isinstance(record, Mapping):
        raise InputError('not a JSON object; write {"prompt": "..."}')
    given = [way for way in OWN if way in record]
    if len(given) > 1:
        raise InputError(f"it has both {' and '.join(given)}: give one of them")
    if not given:
        hints = ((key, near(str(key), OWN)) for key in record)
        close = next((f"; {key!r}: {hint}" for key, hint in hints if hint.startswith("did you")), "")
        raise InputError(f"it has none of {', '.join(OWN)}{close}")


# --- the formats -------------------------------------------------------------------------------------


def _turns(record: Record) -> Fields:
    return {"turns": _texts(record["turns"], "turns")}


def _prompt(record: Record) -> Fields:
    prompt = record["prompt"]
    return {"turns": _texts(prompt, "prompt") if isinstance(prompt, list) else (_text(prompt, "prompt"),)}


def _one(key: str, before: str = "") -> Callable[[Record], Fields]:
    """Return a reader of the text under a key, which puts a question before it."""
    return lambda record: {"turns": (before + _text(record[key], key),)}


def _instruction(record: Record) -> Fields:
    instruction, more = _text(record["instruction"], "instruction"), record.get("input")
    return {"turns": (f"{instruction}\n\n{_text(more, 'input')}" if more else instruction,)}


def _continuation(record: Record) -> Fields:
    return {"turns": (_text(record["prompt"], "prompt"),), "raw": True}


def _ids(record: Record) -> Fields:
    ids = record["prompt_ids"]
    if not (isinstance(ids, list) and ids and all(is_whole(i) and i >= 0 for i in ids)):
        raise InputError('"prompt_ids" must be a list of token ids, whole numbers from 0')
    return {"prompt_ids": tuple(ids)}


def _chat(record: Record) -> Fields:
    messages = messages_of(record)
    if not any(message["role"] == "user" for message in messages):
        raise InputError("nobody asks anything in these messages; drop the line")
    if messages[-1]["role"] == "assistant":
        question = next(k for k, message in enumerate(messages) if message["role"] == "user")
        replies = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k > question]
        if not replies:
            raise InputError("no reply follows a question in these messages; drop the line")
        messages = messages[: max(replies, key=lambda k: len(messages[k]["content"]))]
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        _text("-" if not content or isinstance(content, list) else content, f"message {number}")
    return {"messages": tuple(messages)}


FORMATS: tuple[tuple[frozenset[str], Callable[[Record], Fields]], ...] = (
    (frozenset({"turns"}), _turns),
    (frozenset({"messages"}), _chat),
    (frozenset({"conversations"}), _chat),
    (frozenset({"prompt", "canonical_solution"}), _continuation),
    (frozenset({"instruction"}), _instruction),
    (frozenset({"article"}), _one("article", SUMMARISE)),
    (frozenset({"question"}), _one("question")),
    (frozenset({"question_text"}), _one("question_text")),
    (frozenset({"prompt_ids"}), _ids),
    (frozenset({"prompt"}), _prompt),
)


# --- what they share ---------------------------------------------------------------------------------


def _settings(record: Record) -> Fields:
    """Settings of its prompt that a line of any format may give."""
    settings: Fields = {}
    if record.get("system") is not None:
        settings["system"] = _text(record["system"], "system")
    if template := template_keywords(record):
        settings["template"] = template
    most = record.get("max_new_tokens")
    if most is not None:
        if not is_whole(most) or most < 1:
            raise InputError(f'"max_new_tokens" must be a whole number from 1, it is {most!r}')
        settings["max_new_tokens"] = most
    if "raw" in record:
        if not isinstance(record["raw"], bool):
            raise InputError('"raw" must be true or false')
        settings["raw"] = record["raw"]
    return settings


def _name(record: Record) -> str | None:
    name = next((record[key] for key in NAMES if record.get(key) is not None), None)
    if name is None:
        return None
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise InputError(f"the id must be a string or a whole number, it is {str(name)[:40]!r}")
    return str(name).rpartition("/")[2] if "task_id" in record else str(name)  # HumanEval/12


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f'"{what}" must be a string that is not empty')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f'"{what}" is not valid Unicode: half a surrogate pair at character {error.start}') from None
    return value


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise InputError(f'"{what}" must be a list of the user\'s turns, strings, at least one')
    return tuple(_text(value, f"{what}[{k}]") for k, value in enumerate(values))
