"""Conversations with new replies by the target itself: the best texts to train a draft head on.

    a line of chat data --> Conversation --> [ messages so far --> Decoder --> reply ] for each assistant's turn --> Regenerated

Several conversations share the Decoder's rows; the next turn of a conversation continues from the
keys and values of the last one. Each reply has a seed of its own, made of the conversation's
content and the turn: neither order nor interruption changes the sampled texts.

This module knows no method, no output file and no terminal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request, Step
from eyas.core.requests import check_steps
from eyas.core.sampling import Sampling
from eyas.core.totals import StepTotals
from eyas.errors import InputError
from eyas.text import render, reply_message, template_keywords
from eyas.text.sources import as_file
from eyas_lab.chat_files import chat_lines, is_chat_file, messages_of, parse_chat_line
from eyas_train._chat import has_weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the generated replies."""

    sampling: Sampling = field(default_factory=Sampling)  # its seed goes into the seed of every reply
    max_new_tokens: int = 1024  # most tokens of a reply; a longer one is cut there
    last_only: bool = False  # replace only the last reply; the turns before it stay as they are
    drop_cut: bool = False  # leave out replies that were cut, and what follows them


@dataclass(frozen=True)
class DataLine:
    """A line of chat data, unparsed."""

    where: str  # file and number
    raw: bytes

    @property
    def key(self) -> dict[str, str | int]:
        """Identifies the line by a hash of its content, wherever it is."""
        return {"key": hashlib.sha256(self.raw).hexdigest()[:20]}


@dataclass(frozen=True)
class Conversation:
    """A conversation whose replies are to be generated."""

    line: DataLine
    id: Any  # the line's "id", if it has one
    messages: list[dict[str, Any]]
    turns: tuple[int, ...]  # indices of the messages to generate; the last may be one past the end
    template: Mapping[str, Any] = field(default_factory=dict)  # the line's keywords of `text.render`


@dataclass(frozen=True)
class Regenerated:
    """A conversation with the target's own replies, or without any that can be kept."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    finish: tuple[str, ...]  # how each reply ended: "stop" | "length" (cut); empty where there is none
    tokens: tuple[int, ...]  # number of tokens of each reply, and of one that was cut and left out
    ended: str  # why the conversation ends before its last turn; mostly empty
    dropped: bool  # its last reply was generated, cut, and left out
    emitted: int  # tokens of draft cycles, without the prefill's token
    cycles: int


# --- lines


def read_lines(paths: Sequence[str | Path]) -> Iterator[DataLine]:
    """Yield all lines that are not blank. Raise InputError when a file cannot be read, or holds no conversations."""
    for path in map(as_file, paths):
        if not is_chat_file(path):
            raise InputError(
                f"{path} is plain text, and has no questions: conversations are JSON objects, one a line, or .parquet"
            )
        for where, raw in chat_lines(path):
            yield DataLine(where, raw)


def parse_conversation(line: DataLine, settings: GenerationSettings) -> Conversation:
    """Return the conversation of a line: {"messages": ...}, {"conversations": ...} or {"prompt": "..."}. Raise
    InputError when it cannot be used.

    Assistant's messages before the first question stay, and messages of weight 0. A conversation that
    ends with a question gets a reply to it.
    """
    record = parse_chat_line(line.raw)
    has_prompt = isinstance(record, Mapping) and isinstance(record.get("prompt"), str)
    if has_prompt and not {"messages", "conversations"} & record.keys():
        record = {**record, "messages": [{"role": "user", "content": record["prompt"]}]}
    messages = messages_of(record)
    first_question = next((k for k, message in enumerate(messages) if message["role"] == "user"), len(messages))
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k > first_question]
    turns = [k for k in replies if has_weight(messages[k], k + 1)]
    if messages and messages[-1]["role"] == "user":
        turns.append(len(messages))
    if not turns:
        raise InputError("nobody asks anything, so there is nothing to answer; drop the line")
    turns = turns[-1:] if settings.last_only else turns
    if any(message["role"] == "tool" for message in messages[turns[0] :]):
        raise InputError(
            "a tool's turn belongs to a reply that would be replaced; drop the line (or --last-only, where the last has none)"
        )
    return Conversation(line, record.get("id"), messages, tuple(turns), template_keywords(record))


# --- replies


def regenerate(
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    conversations: Iterable[Conversation],
    settings: GenerationSettings,
    rows: int,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Regenerated]:
    """Generate the replies of conversations, `rows` of them at a time; yields them in the order in
    which they end.

    Args:
        eos: tokens that end a reply.
        on_step: called with the number of tokens of each cycle.
    """
    scheduler, waiting = _Scheduler(drafter, tokenizer, eos, settings, rows), iter(conversations)
    while True:
        while len(scheduler.active) < rows and (conversation := next(waiting, None)) is not None:
            if (skipped := scheduler.add_request(_ActiveConversation(conversation))) is not None:
                yield skipped
        if not scheduler.active:
            return
        for step in check_steps(scheduler.decoder.step()):
            if on_step is not None:
                on_step(len(step.tokens))
            if (ended := scheduler.add_step(step)) is not None:
                yield ended


class _ActiveConversation:
    """A conversation whose replies are being generated."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.messages = conversation.messages[: conversation.turns[0]]  # so far
        self.turns = list(conversation.turns)  # still to be generated, the current one first
        self.reply: list[int] = []  # tokens of the current turn
        self.finish: list[str] = []
        self.tokens: list[int] = []
        self.totals = StepTotals()

    def result(self, ended: str = "", dropped: bool = False) -> Regenerated:
        """Return the conversation up to its last reply. `ended`: why it ends early."""
        messages, totals = self.messages, self.totals
        while self.finish and messages[-1]["role"] != "assistant":  # questions without a reply
            messages = messages[:-1]
        tokens = (*self.tokens, len(self.reply)) if dropped else tuple(self.tokens)
        finish = tuple(self.finish)
        return Regenerated(self.conversation, messages, finish, tokens, ended, dropped, totals.emitted, totals.cycles)


class _Scheduler:
    """The conversations in work, and the Decoder that they share."""

    def __init__(
        self,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase,
        eos: frozenset[int],
        settings: GenerationSettings,
        rows: int,
    ) -> None:
        self.tokenizer, self.eos, self.settings = tokenizer, eos, settings
        self.context = drafter.target.context
        self.decoder = Decoder(drafter.target, drafter, rows, reuse=True)
        self.active: dict[int, _ActiveConversation] = {}  # by the Decoder's request number

    def add_step(self, step: Step) -> Regenerated | None:
        """Add the tokens of a cycle; returns the conversation if it ends with them."""
        active = self.active[step.request_id]
        active.reply += step.tokens
        active.totals.add(step)
        if step.finish is None:
            return None
        del self.active[step.request_id]
        if step.finish == "length" and self.settings.drop_cut:
            return active.result(f"the reply was cut after {len(active.reply)} tokens", dropped=True)
        active.messages = [*active.messages, reply_message(self.tokenizer, active.reply, self.eos)]
        active.finish.append(step.finish)
        active.tokens.append(len(active.reply))
        active.reply = []
        turn = active.turns.pop(0)
        if not active.turns:
            return active.result()
        active.messages += active.conversation.messages[turn + 1 : active.turns[0]]
        return self.add_request(active)

    def add_request(self, active: _ActiveConversation) -> Regenerated | None:
        """Ask for the next reply; returns the conversation when that is impossible."""
        try:
            prompt = tuple(render(self.tokenizer, active.messages, **active.conversation.template))
            room = self.context - len(prompt)
            if room < 1:
                return active.result(f"{len(prompt)} tokens before the reply do not fit the context of {self.context}")
            sampling = replace(self.settings.sampling, seed=self._seed(active))
            request = Request(prompt, min(self.settings.max_new_tokens, room), sampling, self.eos)
            number = self.decoder.add(request)
        except InputError as error:
            return active.result(str(error))
        self.active[number] = active
        return None

    def _seed(self, active: _ActiveConversation) -> int:
        name = f"{self.settings.sampling.seed}/{active.conversation.line.key['key']}/{active.turns[0]}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
