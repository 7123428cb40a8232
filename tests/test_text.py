"""eyas.text on real tokenizers of every kind: streamed text equals `decode`, and stops cut where a search does."""

import copy
import json
import random
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eyas.api import TextReader
from eyas.errors import InputError
from eyas.text import Detokeniser, StopStrings, encode, render
from eyas.text import _pieces as room

SENTENCES = [
    "The young hawk, still in the nest, looks at the sky.  It doesn't fly yet!",
    "I would like to book a table for four people, please; at 7:30 p.m.",
    "她在看天空。今天天气很好,我们去公园散步吧。",
    "空を見ている。東京 タワー",
    "Cafe\u0301 nai\u0308ve: combining marks; e\u0301 is not é.",
    "emoji 😀😃 and families 👩\u200d👩\u200d👧 and flags 🇫🇷",
    "lines\n\n  indented\tcode(x) == [1, 2, 3]\r\n",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<u>{{ m['role'] }}: {{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any = None, texts: Any = SENTENCES) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    trainer.show_progress = False
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level() -> Tokenizer:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _trained(models.BPE(), trainer, bytes_, decoders.ByteLevel())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("é", " two words ", "天空")])
    return tokenizer


def _byte_fallback(decoder: Any) -> Tokenizer:
    """Like Llama's: SentencePiece BPE with ▁ for the space and <0x00> ... <0xFF> for what has no token."""
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"])
    latin = [sentence for sentence in SENTENCES if sentence.isascii()]
    tokenizer = _trained(models.BPE(unk_token="<unk>"), trainer, pre_tokenizers.Metaspace(), texts=latin)
    learnt, written = tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"]
    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in written]
    merges = [pair for pair in pairs if pair[0] in learnt]
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁▁", "▁▁▁"]
    pieces += [piece for piece in sorted(learnt, key=lambda piece: learnt[piece]) if piece not in set(pieces)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    full = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    full.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    full.decoder = decoder
    return full


def _llama(spaces: int | None = 1) -> Tokenizer:
    """Without `spaces` it is Gemma's."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(steps + ([] if spaces is None else [decoders.Strip(" ", spaces, 0)])))


def _word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=["[UNK]"])
    model = models.WordPiece(unk_token="[UNK]")
    return _trained(model, trainer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece())


def _unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>")
    return _trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def _end_of_word() -> Tokenizer:
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    return _trained(model, trainer, pre_tokenizers.Whitespace(), decoders.BPEDecoder())


def _words() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"])
    return _trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizers.Whitespace())


def _wrapped(
    tokenizer: Tokenizer, kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<u>", "</u>", "<a>")]
    )
    return kind(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


MAKERS = {
    "byte_level": _byte_level,
    "llama": _llama,
    "two_leading_spaces": lambda: _llama(2),
    "gemma": lambda: _llama(None),
    "metaspace_bytes": lambda: _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "word_piece": _word_piece,
    "unigram": _unigram,
    "end_of_word": _end_of_word,
    "no_decoder": _words,
}
TOKENIZERS = {name: _wrapped(make()) for name, make in MAKERS.items()}
KINDS = st.sampled_from(sorted(TOKENIZERS))
SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)


class Foreign(PreTrainedTokenizerFast):
    """A tokenizer that decodes in a way of its own: only the window can serve it."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs)


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Any, ids: list[int]) -> str:
    """The whole text by pieces; what is out and what is held back are the text so far, after every token."""
    detokeniser, out = Detokeniser(tokenizer), ""
    for n, token_id in enumerate(ids, start=1):
        out += detokeniser.feed(token_id)
        assert out + detokeniser.tail() == decode(tokenizer, ids[:n])
    return out + detokeniser.flush()


@st.composite
def ids_of(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of text, ids at random, and runs of the tokens where decoders have their rules."""
    tokenizer = TOKENIZERS[name]
    vocab = tokenizer.get_vocab()
    odd = sorted(
        i for piece, i in vocab.items() if piece.startswith(("<", "▁▁", "##")) or len(piece) == 1 or not piece.isascii()
    )
    part = st.one_of(
        st.text(max_size=12).map(lambda t: tokenizer(t)["input_ids"]),
        st.sampled_from(SENTENCES).map(lambda t: tokenizer(t)["input_ids"]),
        st.lists(st.integers(0, len(tokenizer) + 3), max_size=12),
        st.lists(st.sampled_from(odd), max_size=12),
    )
    return [i for ids in draw(st.lists(part, max_size=4)) for i in ids]


# --- incremental detokenising ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@SETTINGS
@given(KINDS.flatmap(lambda name: st.tuples(st.just(name), st.one_of(ids_of(name), st.text(max_size=60)))))
@example(("llama", "  leading spaces"))
@example(("gemma", "é" * 30 + "😀"))
def test_pieces_are_the_decode(case: tuple[str, Any]) -> None:
    """Bug: streamed text differs from decoding: lost or doubled spaces, cut characters, byte runs too early."""
    name, said = case
    ids = TOKENIZERS[name](said)["input_ids"] if isinstance(said, str) else said
    assert streamed(TOKENIZERS[name], ids) == decode(TOKENIZERS[name], ids)


@pytest.mark.slow
@SETTINGS
@given(st.lists(st.integers(0, 255), max_size=24), st.sampled_from(["byte_level", "llama", "gemma", "metaspace_bytes"]))
@example([0xF0, 0x9F, 0x98], "llama")
@example([0xED, 0xA0, 0x80, 0xF4, 0x90, 0x80, 0x80, 0xC0, 0xAF], "byte_level")
def test_any_bytes(codes: list[int], name: str) -> None:
    """Guards against counting replacement characters otherwise than `decode` does for bytes that are no UTF-8."""
    tokenizer = TOKENIZERS[name]
    letters = {code: letter for letter, code in room._byte_of_character().items()}
    pieces = [letters[code] if name == "byte_level" else f"<0x{code:02X}>" for code in codes]
    ids = [tokenizer.get_vocab()[piece] for piece in pieces]
    assert streamed(tokenizer, ids) == decode(tokenizer, ids)


@pytest.mark.parametrize("name", ["llama", "two_leading_spaces", "gemma", "metaspace_bytes"])
@pytest.mark.parametrize("begin", [["▁"], ["▁", "▁"], ["▁▁"], ["<0x20>"], ["▁", "<0x20>"], ["<0x20>", "▁"]])
def test_leading_spaces(name: str, begin: list[str]) -> None:
    """Bug: the first space is taken off a token instead of off a text that begins with tokens of space."""
    tokenizer = TOKENIZERS[name]
    vocab = tokenizer.get_vocab()
    first = next(i for piece, i in sorted(vocab.items()) if piece[0] == "▁" and piece[1:].isalpha())
    ids = [*(vocab[piece] for piece in begin), first, first]
    assert streamed(tokenizer, ids) == decode(tokenizer, ids)


def test_each_kind_has_its_engine() -> None:
    """Bug: a tokenizer falls back to the window silently, or pieces are decoded alone where others matter."""
    engines = {name: type(Detokeniser(tokenizer)._engine) for name, tokenizer in TOKENIZERS.items()}
    assert engines.pop("byte_level") is room._Bytes
    assert set(engines.values()) == {room._Pieces}
    assert type(Detokeniser(_wrapped(_llama(), Foreign))._engine) is room._Window
    later = (decoders.Replace("ab", "c"), decoders.Strip(" ", 0, 1), decoders.Metaspace())
    for decoder in (decoders.CTC(), *(decoders.Sequence([decoders.Fuse(), step]) for step in later)):
        assert type(Detokeniser(_wrapped(_byte_fallback(decoder)))._engine) is room._Window, decoder


@pytest.mark.parametrize("name", ["llama", "word_piece", "end_of_word"])
def test_work_per_token_is_bounded(name: str) -> None:
    """Guards against decoding the whole text again at every token (quadratic time in a long answer)."""
    detokeniser = Detokeniser(TOKENIZERS[name])
    engine: Any = detokeniser._engine
    inner, sizes = engine._decode, []

    def counting(pieces: list[str]) -> str:
        sizes.append(len(pieces))
        return inner(pieces)

    engine._decode = counting
    ids = TOKENIZERS[name]("The young hawk looks at the sky. " * 20)["input_ids"]
    for token_id in ids:
        detokeniser.feed(token_id)
    assert max(sizes) <= 3
    assert len(sizes) <= 4 * len(ids)


def test_window_work_is_bounded() -> None:
    """Guards against the same in the fallback, also when nothing but special tokens or broken characters come."""
    sizes: list[int] = []

    class Counting(Foreign):
        def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(token_ids))
            return super().decode(token_ids, *args, **kwargs)

    tokenizer = _wrapped(_byte_level(), Counting)
    detokeniser = Detokeniser(tokenizer)
    broken = tokenizer.get_vocab()["ł"]
    for token_id in [tokenizer.bos_token_id] * 50 + [broken] * 50 + tokenizer("hawk " * 50)["input_ids"]:
        detokeniser.feed(token_id)
    assert max(sizes) <= 34  # twice: eight without text, one, eight held back


# --- stop strings ----------------------------------------------------------------------------------------------------------------------


def naive(tokenizer: Any, ids: list[int], stops: list[str]) -> tuple[int, str, str | None]:
    """(tokens until the hit, text shown, stop string) by searching the whole text again after every token."""
    for n in range(len(ids) + 1):
        text = decode(tokenizer, ids[:n])
        for end in range(1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                stop = max(found, key=len)
                return n, text[: end - len(stop)], stop
    return len(ids), decode(tokenizer, ids), None


def stopped(tokenizer: Any, ids: list[int], stops: list[str]) -> tuple[int, str, str | None]:
    watcher, out = StopStrings(tokenizer, stops), ""
    for n, token_id in enumerate(ids, start=1):
        piece = watcher.feed(token_id)
        out += piece.text
        if piece.hit is not None:
            assert watcher.flush() == ""
            return n, out, piece.hit
    return len(ids), out + watcher.flush(), None


@pytest.mark.slow
@SETTINGS
@given(st.data(), KINDS)
def test_stops_where_a_search_would(data: st.DataObject, name: str) -> None:
    """Bug: a stop string is missed across tokens, found late, or shown in part; or text is lost."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    text = decode(tokenizer, ids)
    places = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 8))
    cut = places.map(lambda place: text[place[0] : place[0] + place[1]])
    stops = data.draw(st.lists(st.one_of(cut, st.text("ab <éu. ", max_size=3)).filter(bool), max_size=4))
    assert stopped(tokenizer, ids, stops) == naive(tokenizer, ids, stops)


@pytest.mark.parametrize(("stops", "says"), [
    ([""], "stop string 1 is empty"),
    (["a", ""], "stop string 2 is empty"),
    ("", "is empty"),
    ([3], "of type int"),
    (7, "of type int"),
    (b"a", "bytes"),
])  # fmt: skip
def test_bad_stops(stops: Any, says: str) -> None:
    """Bug: an empty stop string stops everything, or a number fails later with a traceback."""
    with pytest.raises(InputError, match=says):
        StopStrings(TOKENIZERS["llama"], stops)


# --- prompts and chats -----------------------------------------------------------------------------------------------------------------


def chatting() -> PreTrainedTokenizerFast:
    tokenizer = _wrapped(_byte_level())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_render_gives_the_templates_ids() -> None:
    """Bug: the dictionary of newer transformers, special tokens twice, or messages that a call changes."""
    tokenizer = chatting()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello 😀", "name": None}]
    before = copy.deepcopy(messages)
    ids = render(tokenizer, messages)
    assert messages == before
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<u>system: Be kind.</u><u>user: Hello 😀</u><a>"
    assert render(tokenizer, messages, add_generation_prompt=False) == ids[:-1]


HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
TEXT_ONLY = ": only parts of text are read here"


@pytest.mark.parametrize(("messages", "says"), [
    ([], "the list of messages is empty"),
    ("Hello", "must be a list"),
    ({"role": "user", "content": "Hello"}, "must be a list"),
    (["Hello"], "message 1 must be a dict"),
    ([{"content": "Hello"}], 'message 1 has no "role"'),
    ([{"role": "user"}], 'message 1 has no "content"'),
    ([{"role": "user", "content": None}], '"content" of message 1 must be a string, it is None'),
    ([{"role": "user", "content": ["Hello"]}], f"part 1 of message 1 is of type str without a type{TEXT_ONLY}"),
    ([{"role": "user", "content": [{"type": "text"}]}], 'part 1 of message 1 has no "text"'),
    ([{"role": "user", "content": IMAGE}], f"part 2 of message 1 is of type 'image_url'{TEXT_ONLY}"),
    ([{"role": "user", "content": []}], "the content of message 1 is empty"),
    ([*HELLO, {"role": "asistant", "content": "b"}], "message 2 .* 'asistant'; did you mean assistant"),
    ([{"role": 1, "content": "a"}], '"role" of message 1 must be a string'),
    ([{"role": "user", "content": "\ud800"}], "message 1 is not valid Unicode"),
])  # fmt: skip
def test_bad_messages(messages: Any, says: str) -> None:
    """Guards against a traceback, or a silently odd prompt, for a malformed chat."""
    with pytest.raises(InputError, match=says) as caught:
        render(chatting(), messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("template", "says"), [
    (None, "no chat template: pass a plain prompt or token ids"),
    ("{% for m in messages %}{{ m.content.missing() }}{% endfor %}", "chat template refuses"),
    ("{% if %}", "chat template refuses"),
    ("{# nothing #}", "makes no token"),
])  # fmt: skip
def test_broken_templates(template: str | None, says: str) -> None:
    """Guards against the tokenizer's own several-line error, one that escapes as a fault of ours, and an empty prompt."""
    tokenizer = chatting()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=says):
        render(tokenizer, HELLO)


@pytest.mark.parametrize(
    ("begin", "end"), [("", ""), ("<s>", ""), ("<s>", "</s>"), ("[gMASK]<sop>", ""), ("", "</s>")], ids=str
)
def test_special_tokens_are_added_once(begin: str, end: str) -> None:
    """Bug: a raw prompt that was rendered by hand begins with two <s>. What the text says itself stays."""
    words = ["<s>", "</s>", "[gMASK]", "<sop>", "user", "hello", "[UNK]"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:4])
    before, after = (re.findall(r"<.*?>|\[.*?\]", part) for part in (begin, end))
    single = [*before, "$A", *after]
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(word, words.index(word)) for word in {*before, *after}]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")

    def written(text: str) -> list[str]:
        return [words[token] for token in encode(tokenizer, text)]

    assert written("user hello") == [*before, "user", "hello", *after]
    assert written(f"{begin}user hello") == [*before, "user", "hello", *after]
    assert written(f"{begin}{begin}user") == ([*before, *before, "user", *after] if begin else ["user", *after])
    if begin:
        assert written(begin) == [*before, *after]
        assert written("</s>user") == [*before, "</s>", "user", *after]


# --- a trained chat model's tokenizer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*TOKENIZERS, "foreign"])
def test_stops_after_is_what_feed_will_say(kind: str) -> None:
    """Guards the question behind drafts: in the middle of a text it says what reading says then."""
    tokenizer = _wrapped(_llama(), Foreign) if kind == "foreign" else TOKENIZERS[kind]
    rng, hits = random.Random(kind), 0
    for _ in range(40):
        tokens = rng.choices(range(5, min(len(tokenizer), 300)), k=12)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        begin = rng.randrange(max(1, len(text) - 3))
        stops = [text[begin : begin + 3] or "a", "zzz"]
        reader, plain = TextReader(tokenizer, stops), TextReader(tokenizer, stops)
        read = rng.randrange(4)
        if any(plain.feed(token) | reader.feed(token) for token in tokens[:read]):
            continue
        length = next((n for n, token in enumerate(tokens[read:], start=1) if plain.feed(token)), None)
        asked = [reader.stops_after(tokens[read : read + n]) for n in range(1, (length or len(tokens) - read) + 1)]
        assert asked == [n == length for n in range(1, len(asked) + 1)]
        assert [reader.feed(token) for token in tokens[read : read + len(asked)]] == asked
        hits += length is not None
    assert hits > 5
    assert not TextReader(tokenizer).stops_after(tokens)
    assert not TextReader(None).stops_after(tokens)
