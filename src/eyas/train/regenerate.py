"""Conversations answered anew by the target itself: what a draft head is best trained on.

    a line of chat data --> Talk --> [ messages so far --> Decoder --> reply ] for each of the assistant's turns --> Answered

Many conversations share the Decoder's rows; a conversation's next turn goes on from the keys and values of the last. Each reply has a seed
of its own, made of the conversation's content and the turn: neither order nor interruption changes what is drawn.

This module knows no method, no output file and no terminal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.core.engine import Decoder, Request, Step
from eyas.core.sampling import Sampling
from eyas.drafters import Drafter
from eyas.errors import InputError
from eyas.metrics import StepTotals
from eyas.text import render
from eyas.train._chat import messages_of
from eyas.train.data import is_json, json_lines, parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Answered", "Manner", "Talk", "Unanswered", "answer", "read_lines", "talk_of"]


@dataclass(frozen=True)
class Manner:
    """How replies are made."""

    sampling: Sampling = field(default_factory=Sampling)  # its seed goes into the seed of every reply
    max_new_tokens: int = 1024  # of a reply; a longer one is cut there
    last_only: bool = False  # answer the last turn of the assistant's only, on the turns before it as they are
    drop_cut: bool = False  # leave out replies that were cut, and what follows them


@dataclass(frozen=True)
class Line:
    """A line of chat data, unread."""

    where: str  # file and number
    raw: bytes

    @property
    def key(self) -> dict[str, str | int]:
        """What names it wherever it stands: a hash of its content."""
        return {"key": hashlib.sha256(self.raw).hexdigest()[:20]}


@dataclass(frozen=True)
class Talk:
    """A conversation to be answered."""

    line: Line
    id: Any  # the line's own, if it has one
    messages: list[dict[str, Any]]
    turns: tuple[int, ...]  # the places of the replies that will be made; the last may be behind the last message


@dataclass(frozen=True)
class Answered:
    """A conversation with the target's own replies."""

    talk: Talk
    messages: list[dict[str, Any]]
    finish: tuple[str, ...]  # of each reply: "stop" | "length" (cut)
    tokens: tuple[int, ...]  # of each reply
    ended: str  # why it ends before its last turn; mostly empty
    emitted: int  # tokens from cycles, and cycles: for tau
    cycles: int


@dataclass(frozen=True)
class Unanswered:
    """A conversation without a reply that can be kept."""

    talk: Talk
    reason: str
    dropped: bool  # its first reply was made, cut, and left out
    tokens: int = 0


# --- lines ---------------------------------------------------------------------------------------------------------------------------


def read_lines(paths: Sequence[str | Path]) -> Iterator[Line]:
    """All lines that are not blank. InputError when a file cannot be read, or holds no conversations."""
    for path in map(Path, paths):
        if not is_json(path):
            raise InputError(f"{path} is plain text by its name, and has no questions: conversations are .jsonl, .ndjson or .json")
        for where, raw in json_lines(path):
            yield Line(where, raw)


def talk_of(line: Line, manner: Manner) -> Talk:
    """The conversation of a line: {"messages": ...}, {"conversations": ...} or {"prompt": "..."}. InputError says why there is none.

    What the assistant says before anybody asked stays. A conversation that ends with a question gets an answer.
    """
    record = parse(line.raw)
    if isinstance(record, Mapping) and isinstance(record.get("prompt"), str) and not {"messages", "conversations"} & record.keys():
        record = {**record, "messages": [{"role": "user", "content": record["prompt"]}]}
    messages = messages_of(record)
    asked = next((k for k, message in enumerate(messages) if message["role"] == "user"), len(messages))
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k > asked]
    if messages and messages[-1]["role"] == "user":
        turns.append(len(messages))
    if not turns:
        raise InputError("nobody asks anything, so there is nothing to answer; drop the line")
    turns = turns[-1:] if manner.last_only else turns
    if any(message["role"] == "tool" for message in messages[turns[0] :]):
        raise InputError("a tool's turn belongs to a reply that would be replaced; drop the line (or --last-only, where the last has none)")
    return Talk(line, record.get("id"), messages, tuple(turns))


# --- replies -------------------------------------------------------------------------------------------------------------------------


def answer(
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    talks: Iterable[Talk],
    manner: Manner,
    rows: int,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Answered | Unanswered]:
    """Conversations as they are finished, in whatever order; `rows` of them are in work at a time.

    Args:
        eos: tokens that end a reply.
        on_step: told the tokens that each cycle made.
    """
    desk = _Desk(drafter, tokenizer, eos, manner, rows)
    waiting = iter(talks)
    more = True
    while True:
        while more and len(desk.open) < rows:
            talk = next(waiting, None)
            more = talk is not None
            if talk is not None and (refused := desk.take(talk)) is not None:
                yield refused
        if not desk.open:
            return
        for step in desk.decoder.step():
            if on_step is not None:
                on_step(len(step.tokens))
            if (done := desk.hear(step)) is not None:
                yield done


class _Open:
    """A conversation in work."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.turns = talk, list(talk.turns)
        self.messages = talk.messages[: talk.turns[0]]
        self.reply: list[int] = []
        self.finish: list[str] = []
        self.tokens: list[int] = []
        self.totals = StepTotals()

    def closed(self, ended: str = "", dropped: bool = False) -> Answered | Unanswered:
        if not self.finish:
            return Unanswered(self.talk, ended, dropped, len(self.reply))
        kept = self.messages
        while kept[-1]["role"] != "assistant":  # questions that have no answer
            kept = kept[:-1]
        return Answered(self.talk, kept, tuple(self.finish), tuple(self.tokens), ended, self.totals.emitted, self.totals.cycles)


class _Desk:
    """The conversations in work, and the Decoder that they share."""

    def __init__(self, drafter: Drafter, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int], manner: Manner, rows: int) -> None:
        self.tokenizer, self.eos, self.manner = tokenizer, eos, manner
        self.context = drafter.target.context
        self.decoder = Decoder(drafter.target, drafter, rows, reuse=True)
        self.open: dict[int, _Open] = {}  # by the Decoder's ticket

    def take(self, talk: Talk) -> Answered | Unanswered | None:
        """Begin a conversation; what becomes of it when it cannot be."""
        return self._ask(_Open(talk))

    def hear(self, step: Step) -> Answered | Unanswered | None:
        """What a cycle brought; the conversation that it ends."""
        talk = self.open[step.request]
        talk.reply += step.tokens
        talk.totals.add(step)
        if step.finish is None:
            return None
        del self.open[step.request]
        if step.finish == "length" and self.manner.drop_cut:
            return talk.closed(f"the reply was cut after {len(talk.reply)} tokens", dropped=True)
        text = self.tokenizer.decode(talk.reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        talk.messages = [*talk.messages, {"role": "assistant", "content": text}]
        talk.finish.append(step.finish)
        talk.tokens.append(len(talk.reply))
        talk.reply, turn = [], talk.turns.pop(0)
        if not talk.turns:
            return talk.closed()
        talk.messages += talk.talk.messages[turn + 1 : talk.turns[0]]
        return self._ask(talk)

    def _ask(self, talk: _Open) -> Answered | Unanswered | None:
        try:
            prompt = tuple(render(self.tokenizer, talk.messages))
            room = self.context - len(prompt)
            if room < 1:
                return talk.closed(f"{len(prompt)} tokens before the reply do not fit the context of {self.context}")
            law = replace(self.manner.sampling, seed=self._seed(talk))
            ticket = self.decoder.add(Request(prompt, min(self.manner.max_new_tokens, room), law, self.eos))
        except InputError as error:
            return talk.closed(str(error))
        self.open[ticket] = talk
        return None

    def _seed(self, talk: _Open) -> int:
        named = f"{self.manner.sampling.seed}/{talk.talk.line.key['key']}/{talk.turns[0]}"
        return int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big")
