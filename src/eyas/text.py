"""Text in, text out: chat messages and prompts to token ids, token ids to text piece by piece, stop strings.

What it knows is one Hugging Face tokenizer. It knows no model, no vocabulary size of a model, no end-of-sequence rule and no length limit.

How the incremental detokenising stays exact. `tokenizer.decode` skips special tokens and hands the other tokens to a decoder that
is one of two kinds. Each is followed by an engine that does a bounded amount of work for a token:

    byte-level          tokens are bytes, the text is their UTF-8:  an incremental UTF-8 decoder holds at most three bytes back
    piece by piece      a token's text depends on its neighbours only through (a) being the first, (b) being the last,
                        (c) a run of byte tokens <0xE2><0x82><0xAC>, which is one text if all of it is UTF-8 and else one
                        replacement character a byte: so nothing of a run is certain before the run ends

A tokenizer of neither kind (one written in Python, or with a decoder not known here) is decoded over a short window of tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eyas.errors import InputError, near

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ROLES", "Detokeniser", "StopPiece", "StopStrings", "encode", "render"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles a message may have. Whether a chat template knows them all is for the template to say."""


# --- text to ids ---------------------------------------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of a raw prompt, with the special tokens that the tokenizer itself adds (a leading <s>, or none).

    Raises InputError when the prompt is no string, is empty, is not valid Unicode, or gives no token at all.
    """
    if not isinstance(prompt, str):
        raise InputError(f"a prompt must be a string, this one is {_kind(prompt)}")
    if not prompt:
        raise InputError("the prompt is empty: give it at least one character")
    _check_unicode(prompt, "the prompt")
    # verbose=False: whether a prompt is too long is said once, by the room that knows the model's context
    ids: list[int] = list(tokenizer(prompt, verbose=False)["input_ids"])
    if not ids:
        raise InputError(f"the tokenizer makes no token of the prompt {prompt[:40]!r}: give it another one")
    return ids


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
    """The ids of a chat, through the tokenizer's own chat template.

    messages: dicts with "role" (one of ROLES) and "content" (a string); further keys are handed to the template as they are.
    add_generation_prompt: end with the opening of an assistant turn, so that the model answers.
    Raises InputError when a message is malformed, when the tokenizer has no chat template, and with the template's own reason
    when the template refuses the chat (a role that it does not know, turns that do not alternate).
    """
    _check_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this tokenizer has no chat template: pass a plain prompt or token ids instead of messages")
    chat = [dict(message) for message in messages]
    try:
        out: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True)
    except Exception as error:  # a template is a program of somebody else's and may raise anything
        raise InputError(f"the chat template refuses these messages: {_reason(error)}") from error
    ids: list[int] = list(out["input_ids"])
    if not ids:
        raise InputError("the chat template makes no token of these messages: pass a plain prompt or token ids")
    return ids


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f'messages must be a list of {{"role": ..., "content": ...}}, this is {_kind(messages)}')
    if not messages:
        raise InputError("the list of messages is empty: give at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise InputError(f'message {number} must be a dict with "role" and "content", it is {_kind(message)}')
        for key in ("role", "content"):
            if key not in message:
                raise InputError(f'message {number} has no "{key}": every message needs "role" and "content"')
            if not isinstance(message[key], str):
                raise InputError(f'the "{key}" of message {number} must be a string, it is {_kind(message[key])}')
        if message["role"] not in ROLES:
            raise InputError(f"message {number} has the unknown role {message['role']!r}; {near(message['role'], ROLES)}")
        _check_unicode(message["content"], f"the content of message {number}")


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not valid Unicode: half a surrogate pair at character {error.start}") from None


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _reason(error: Exception) -> str:
    """The first line of what an exception says; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- ids to text ---------------------------------------------------------------------------------------------------------------------


class Detokeniser:
    """Token ids to text, token by token.

    After any ids, the pieces that `feed` returned and then `tail()` are together exactly
    `tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`; what `feed` returned is never taken back.
    Ids that the tokenizer does not have (a padded vocabulary) have no text, as in `decode`.
    A tokenizer outside the two kinds named at the top of this file is exact only as far as its decoding is local.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = _engine(tokenizer)
        self._ended = False

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token: often the token's own, sometimes none, sometimes held-back text too."""
        assert not self._ended, "fed after flush"
        return self._engine.feed(token_id)

    def tail(self) -> str:
        """The text that is held back, as it reads if no token follows. Changes nothing."""
        return "" if self._ended else self._engine.tail()

    def flush(self) -> str:
        """The text that was held back. No token may follow."""
        text = self.tail()
        self._ended = True
        return text


class _Engine(Protocol):
    def feed(self, token_id: int) -> str: ...
    def tail(self) -> str: ...


def _engine(tokenizer: PreTrainedTokenizerBase) -> _Engine:
    """The engine for this tokenizer's decoder: byte-level, piece by piece, or the window for everything else."""
    steps = _decoder_steps(tokenizer)
    if steps is None:
        return _Window(tokenizer)
    backend: Any = tokenizer.backend_tokenizer
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}

    def piece_of(token_id: int) -> str | None:
        piece: str | None = backend.id_to_token(token_id)
        return None if piece in special else piece

    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Bytes(piece_of)
    if _is_local(steps):
        return _Pieces(piece_of, backend.decoder.decode if backend.decoder else " ".join)
    return _Window(tokenizer)


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]] | None:
    """The decoder of a tokenizer of the `tokenizers` library as a flat list of its steps; None where something else decodes."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if kind.decode is not PreTrainedTokenizerFast.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return []
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python cannot be described
        return None
    return _flat(state)


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _flat(part)]


def _is_local(steps: list[dict[str, Any]]) -> bool:
    """Whether a token's text depends on its neighbours only in the three ways that `_Pieces` knows.

    Before Fuse the steps see tokens, after it one long token: there only what works on single characters, or on the beginning, is local.
    """
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif not fused:
            if kind not in ("Replace", "Strip", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder"):
                return False
        elif kind == "Replace":
            if len(step["pattern"].get("String", "")) != 1:
                return False
        elif kind != "Strip" or step["stop"]:
            return False
    return True


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: the printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _Bytes:
    """Byte-level BPE: every token is bytes, the text is their UTF-8 with U+FFFD for what is none."""

    def __init__(self, piece_of: Callable[[int], str | None]) -> None:
        self._piece_of = piece_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        return "" if piece is None else self._utf8.decode(self._bytes(piece))

    def tail(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")

    @staticmethod
    def _bytes(piece: str) -> bytes:
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # an added token, written in plain text
            return piece.encode("utf-8")


class _Pieces:
    """Decoders whose output is the tokens' own texts in a row: SentencePiece with or without byte tokens, WordPiece, </w> BPE, none.

    The tokenizer's decoder is asked, over one *group* of tokens between two anchors that stand for the rest of the text:

        [anchor] group [anchor]     how the group reads with more to come        (no left anchor for the first group)
        [anchor] group              how it reads if the text ends here           what both have in common is certain

    A group is one token, or a run of byte tokens, or at the very beginning the tokens up to the first that shows any text: a
    decoder strips leading spaces from the text, not from a token.
    """

    _ANCHOR = "a"

    def __init__(self, piece_of: Callable[[int], str | None], decode: Callable[[list[str]], str]) -> None:
        self._piece_of = piece_of
        self._decode = decode
        self._left: list[str] = []  # the anchor, once a first group is closed
        self._group: list[str] = []
        self._sent = 0  # characters of the group that are already out
        self._begin = len(decode([self._ANCHOR]))
        self._end = len(decode([self._ANCHOR, self._ANCHOR])) - self._begin

    def feed(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        out = ""
        if self._group and not self._joins(piece):
            out = self._closed()[self._sent :]
            self._left, self._group, self._sent = [self._ANCHOR], [], 0
        self._group.append(piece)
        if not _is_byte_token(piece):
            text = self._open()
            certain = _common(text, self._closed())
            out += text[self._sent : certain]
            self._sent = certain
        return out

    def tail(self) -> str:
        return self._open()[self._sent :]

    def _joins(self, piece: str) -> bool:
        if _is_byte_token(piece) and _is_byte_token(self._group[-1]):
            return True
        return not self._left and not self._open()

    def _open(self) -> str:
        return self._decode(self._left + self._group)[self._begin if self._left else 0 :] if self._group else ""

    def _closed(self) -> str:
        text = self._decode([*self._left, *self._group, self._ANCHOR])
        return text[self._begin if self._left else 0 : len(text) - self._end]


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_byte_token(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


class _Window:
    """Any other tokenizer: decode the tokens of a piece after those of the piece before. Exact where text depends on no more than that."""

    _MOST = 8  # tokens: a character has at most 4 bytes, and a token at least one of them; then as much again

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the tokens of the last piece: they have text and begin with a whole character
        self._held: list[int] = []
        self._waits = 0  # tokens for which text was held back

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self.tail()
        if not text:  # special tokens, or a leading space that is not shown
            self._held = self._held[-self._MOST :]
            return ""
        if text.endswith("\ufffd") and self._waits < self._MOST:  # the beginning of a character, perhaps
            self._waits += 1
            return ""
        self._before, self._held, self._waits = self._held, [], 0
        return text

    def tail(self) -> str:
        before, text = self._text(self._before), self._text(self._before + self._held)
        return text[_common(before, text) :]

    def _text(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""
        assert isinstance(text, str)
        return text


# --- stop strings --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopPiece:
    """What one token added. Filled by StopStrings.feed."""

    text: str
    """Text to show: certain, and neither a stop string nor the beginning of one."""
    hit: str | None
    """The stop string that this token completed; None as long as there is none."""


class StopStrings:
    """Token ids to text that ends where a stop string begins.

    A token hits when the text of all tokens up to it contains a stop string for the first time. If it completes several, the one
    counts whose last character comes first, and of those that end together the longest: what a reader of single characters would
    have seen first. The text ends before that stop string; the ids end with the token. Without stops it is a Detokeniser.

        stops ["END", "."]    tokens "It was E" | "ND of" | " may." -> shown "It was ", then "", hit "END" at the second token

    Text is held back only as long as it may still become a stop string. With stops, an open run of byte tokens is looked through
    again at each of its tokens; all other work for a token is bounded by the token and the stop strings.
    Raises InputError when a stop is no string or is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] | str | None = None) -> None:
        self._stops = _checked_stops(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._detokeniser = Detokeniser(tokenizer)
        self._held = ""  # certain text that begins a stop string
        self._ended = False

    def feed(self, token_id: int) -> StopPiece:
        """The text that this token adds, and the stop string that it completes. After a hit no token may follow."""
        assert not self._ended, "fed after a stop string or flush"
        text = self._held + self._detokeniser.feed(token_id)
        if not self._stops:
            return StopPiece(text, None)
        found = self._find(text + self._detokeniser.tail())
        if found is not None:
            self._ended, self._held = True, ""
            begin, stop = found
            return StopPiece((text + self._detokeniser.flush())[:begin], stop)
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return StopPiece(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The text that was held back; none after a hit. No token may follow."""
        text = "" if self._ended else self._held + self._detokeniser.flush()
        self._ended, self._held = True, ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that is completed first begins, and which it is."""
        places = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        return min(places)[1:] if places else None

    def _begun(self, text: str) -> int:
        """How many of the last characters are the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _checked_stops(stops: Sequence[str] | str | None) -> tuple[str, ...]:
    if stops is None:
        return ()
    listed = (stops,) if isinstance(stops, str) else stops
    if not isinstance(listed, Sequence) or isinstance(listed, (bytes, bytearray)):
        raise InputError(f"stop strings must be a list of strings, this is {_kind(stops)}")
    for number, stop in enumerate(listed, start=1):
        if not isinstance(stop, str):
            raise InputError(f"stop string {number} must be a string, it is {_kind(stop)}")
        if not stop:
            raise InputError(f"stop string {number} is empty: it would stop before the first token; leave it out")
    return tuple(listed)
