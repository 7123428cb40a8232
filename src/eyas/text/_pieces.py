"""Token ids to text, piece by piece; stop strings.

This module knows one Hugging Face tokenizer. It knows no model, no end-of-sequence rule and no length limit.

Incremental detokenising is exact. `tokenizer.decode` skips special tokens and hands the other tokens to a decoder of
one of two kinds. For each kind there is a class here that does a bounded amount of work for a token:

    byte-level        tokens are bytes, the text is their UTF-8. An incremental UTF-8 decoder holds back at most three bytes.
    piece by piece    a token's text depends on its neighbours in three ways only: it is the first; it is the last; or it
                      belongs to a run of byte tokens <0xE2><0x82><0xAC>, which is one text if the
                      whole run is UTF-8, and else one replacement character for each byte. So no
                      text of a run is certain before the run ends.

Other tokenizers (written in Python, or with a decoder not listed here) are decoded over a short window of tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.errors import InputError, ModelError
from eyas.text._messages import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokeniser:
    """Turns token ids into text, token by token.

    After any ids, the texts that `feed` returned and `tail()` together are exactly `tokenizer.decode(ids,
    skip_special_tokens=True, clean_up_tokenization_spaces=False)`. Text that `feed` returned never changes. Ids
    that the tokenizer does not have (a padded vocabulary) have no text, as in `decode`. For a tokenizer outside the
    two kinds named at the top of this file this holds as far as its decoding is local.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = _engine(tokenizer)
        self._ended = False

    def feed(self, token_id: int) -> str:
        """Read a token; returns the text that is certain now."""
        assert not self._ended, "fed after flush"
        return self._engine.feed(token_id)

    def tail(self) -> str:
        """Return the text that is held back, as it reads if no token follows."""
        return "" if self._ended else self._engine.tail()

    def flush(self) -> str:
        """Return the text that is held back, and end: no token may follow."""
        text = self.tail()
        self._ended = True
        return text


def _engine(tokenizer: PreTrainedTokenizerBase) -> _Bytes | _Pieces | _Window:
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


def token_bytes(tokenizer: PreTrainedTokenizerBase, count: int) -> list[bytes | None]:
    """Return the bytes that each of the ids 0..count - 1 adds in the middle of a text; None for special tokens and
    ids that the tokenizer does not have. Raise ModelError if the text of a token is not its own."""
    engine = _engine(tokenizer)
    if not isinstance(engine, _Bytes | _Pieces):
        raise ModelError(
            f"the tokens of {type(tokenizer).__name__} have no texts of their own: a fast tokenizer of transformers is needed"
        )
    return [engine.bytes_of(token_id) for token_id in range(count)]


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]] | None:
    """Return the steps of a `tokenizers` decoder as a flat list; None where other code decodes."""
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
    """Return whether a token's text depends on its neighbours only as `_Pieces` expects. Steps before Fuse see
    tokens, steps after it one long token, where only steps on single characters or on the beginning are local."""
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
    """Return the alphabet of byte-level BPE: printable Latin-1 characters are themselves, others U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _Bytes:
    """Byte-level BPE: every token is bytes; the text is their UTF-8, with U+FFFD for invalid bytes."""

    def __init__(self, piece_of: Callable[[int], str | None]) -> None:
        self._piece_of = piece_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        return "" if piece is None else self._utf8.decode(self._bytes(piece))

    def bytes_of(self, token_id: int) -> bytes | None:
        piece = self._piece_of(token_id)
        return None if piece is None else self._bytes(piece)

    def tail(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")

    @staticmethod
    def _bytes(piece: str) -> bytes:
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # an added token, written in plain text
            return piece.encode("utf-8")


class _Pieces:
    """Decoders that join the tokens' own texts: SentencePiece with or without byte tokens, WordPiece,
    </w> BPE, none.

    The tokenizer's decoder reads one *group* of tokens between two anchors, which represent the rest of the text:

        [anchor] group [anchor]     the group's text with more to come        (no left anchor for the first group)
        [anchor] group              its text if nothing follows               certain is what both begin with

    A group is one token, or a run of byte tokens, or, at the beginning of the text, the tokens up to the first
    that has text. A decoder strips leading spaces from the text, not from a token.
    """

    _ANCHOR = "a"

    def __init__(self, piece_of: Callable[[int], str | None], decode: Callable[[list[str]], str]) -> None:
        self._piece_of = piece_of
        self._decode = decode
        self._left: list[str] = []  # the anchor, once a first group is closed
        self._group: list[str] = []
        self._sent = 0  # characters of the group that were returned
        self._begin = len(decode([self._ANCHOR]))
        self._end = len(decode([self._ANCHOR, self._ANCHOR])) - self._begin
        self._falls_back = self._between("<0x41>").strip() == "A"  # byte tokens are bytes

    def feed(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        out = ""
        if self._group and not self._joins(piece):
            out = self._close()[self._sent :]
            self._left, self._group, self._sent = [self._ANCHOR], [], 0
        self._group.append(piece)
        if not _is_byte_token(piece):
            text = self._open()
            certain = _common(text, self._close())
            out += text[self._sent : certain]
            self._sent = certain
        return out

    def tail(self) -> str:
        return self._open()[self._sent :]

    def bytes_of(self, token_id: int) -> bytes | None:
        piece = self._piece_of(token_id)
        if piece is None:
            return None
        if _is_byte_token(piece) and self._falls_back:
            return bytes([int(piece[3:5], 16)])
        return self._between(piece).encode("utf-8")

    def _between(self, piece: str) -> str:
        text = self._decode([self._ANCHOR, piece, self._ANCHOR])
        return text[self._begin : len(text) - self._end]

    def _joins(self, piece: str) -> bool:
        if _is_byte_token(piece) and _is_byte_token(self._group[-1]):
            return True
        return not self._left and not self._open()

    def _open(self) -> str:
        return self._decode(self._left + self._group)[self._begin if self._left else 0 :] if self._group else ""

    def _close(self) -> str:
        text = self._decode([*self._left, *self._group, self._ANCHOR])
        return text[self._begin if self._left else 0 : len(text) - self._end]


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_byte_token(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


class _Window:
    """Any other tokenizer: the tokens of a piece are decoded after the piece before, as if that is all they need."""

    _MOST = 8  # tokens: a character has at most 4 bytes and a token at least one of them; twice that, to be safe

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the tokens of the last piece: they have text and begin with a whole character
        self._held: list[int] = []
        self._waits = 0  # tokens since text is held back

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self.tail()
        if not text:  # special tokens, or a leading space that is stripped
            self._held = self._held[-self._MOST :]
            return ""
        if text.endswith("\ufffd") and self._waits < self._MOST:  # perhaps the beginning of a character
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


# --- stop strings ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopPiece:
    """The text that one token adds. Made by StopStrings.feed."""

    text: str  # certain, and neither a stop string nor the beginning of one
    hit: str | None  # the stop string that this token completes; None: no stop string


class StopStrings:
    """Turns token ids into text that ends where a stop string begins.

    A token hits when the text of all tokens up to it contains a stop string for the first time. Of several, the one
    counts that ends first, and of those that end together the longest. The text ends before it; the ids end with the
    token. Text is held back only as long as it may still become a stop string.

        stops ["END", "."]    tokens "It was E" | "ND of" | " may." -> text "It was ", then "", hit "END" at the second token
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] | str | None = None) -> None:
        self._stops = _checked_stops(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._detokeniser = Detokeniser(tokenizer)
        self._held = ""  # certain text that begins a stop string
        self._ended = False

    def feed(self, token_id: int) -> StopPiece:
        """Read a token: the text that it adds and the stop string that it completes, which ends the text."""
        assert not self._ended, "fed after a stop string or flush"
        text = self._held + self._detokeniser.feed(token_id)
        if not self._stops:
            return StopPiece(text, None)
        hit = self._find(text + self._detokeniser.tail())
        if hit is not None:
            self._ended, self._held = True, ""
            begin, stop = hit
            return StopPiece((text + self._detokeniser.flush())[:begin], stop)
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return StopPiece(text[: len(text) - keep], None)

    def tail(self) -> str:
        """Return the text that is held back, as it reads if no token follows; none after a hit."""
        return "" if self._ended else self._held + self._detokeniser.tail()

    def flush(self) -> str:
        """Return the text that is held back (none after a hit), and end: no token may follow."""
        text = "" if self._ended else self._held + self._detokeniser.flush()
        self._ended, self._held = True, ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return (its begin, stop string) of the one that is completed first."""
        places = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        return min(places)[1:] if places else None

    def _begun(self, text: str) -> int:
        """Return the number of last characters that begin a stop string."""
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
        raise InputError(f"stop must be a string or a list of strings, it is {kind_of(stops)}")
    for number, stop in enumerate(listed, start=1):
        if not isinstance(stop, str):
            raise InputError(f"stop string {number} must be a string, it is {kind_of(stop)}")
        if not stop:
            raise InputError(f"stop string {number} is empty: it would stop before the first token; leave it out")
    return tuple(listed)
