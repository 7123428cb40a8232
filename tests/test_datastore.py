"""The datastore: order of suffixes, looking up, building, appending, merging, and what it refuses."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from eyas import datastore
from eyas.datastore import Datastore, Manifest, Settings, Source, build
from eyas.datastore._manifest import DEPTH, MANIFEST_FILE
from eyas.datastore._suffixes import order_of
from eyas.errors import InputError
from eyas.files import locked_output

Documents = list[list[int]]

IDS = [3, 300, 257, 1, 256, 515, 2, 770, 512, 4, 259, 513]  # whose order is another one when the low byte is read first
VOCAB = 1000


def made_of(seed: int, vocab: int, count: int = 30, longest: int = 40) -> Documents:
    dice = random.Random(seed)
    return [dice.choices(IDS[:vocab], k=dice.randrange(1, longest)) for _ in range(count)]


def naive(
    documents: Documents, context: Sequence[int], shortest: int, longest: int, depth: int
) -> tuple[int, list[tuple[int, ...]]]:
    """(length of the longest match, its continuations cut at the end of their document, sorted), by
    looking everywhere."""
    for length in range(min(longest, len(context)), shortest - 1, -1):
        end = list(context[len(context) - length :])
        found = [
            tuple(document[i + length : i + length + depth])
            for document in documents
            for i in range(len(document) - length + 1)
            if document[i : i + length] == end
        ]
        if found:
            return length, sorted(found)
    return 0, []


# --- suffixes


@pytest.mark.parametrize("dtype", ["<u2", ">u2", ">u4"])
@pytest.mark.parametrize("vocab", [1, 2, 5, 40000])
def test_the_order_of_suffixes(dtype: str, vocab: int) -> None:
    """Guards prefix doubling: the order must be that of a plain sort by the first `depth` tokens at
    least; ties keep their places.

    A text of one token, and one that repeats itself, tie everywhere."""
    dice = np.random.default_rng(vocab)
    texts = [dice.integers(0, vocab, size) for size in (1, 2, 3, 50, 400)]
    texts.append(np.tile(dice.integers(0, vocab, 13), 30))
    for text in texts:
        tokens = np.append(text, np.iinfo(dtype).max).astype(dtype)
        order = order_of(tokens, 64)
        assert sorted(order.tolist()) == list(range(len(tokens)))
        keys = [tuple(tokens[i : i + 64].tolist()) for i in order.tolist()]
        assert keys == sorted(keys)


# --- looking up


def ended(store: Datastore, rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Continuations, cut where their documents end."""
    return [tuple(row[: row.index(store.separator)] if store.separator in row else row) for row in rows]


@pytest.mark.quick("3-0")
@pytest.mark.parametrize(("vocab", "shift"), [(3, 0), (12, 0), (12, 70_000)])
def test_look_up_is_what_looking_everywhere_finds(vocab: int, shift: int) -> None:
    """Guards the bisections, the order of bytes, the ends of documents (nothing matches across
    them), both widths of a token."""
    documents = [[token + shift for token in document] for document in made_of(vocab, vocab)]
    store, dice, lengths = Datastore.of(documents, shift + VOCAB), random.Random(0), Counter[int]()
    for _ in range(300):
        context = [token + shift for token in dice.choices(IDS[:vocab], k=dice.randrange(0, 12))]
        shortest = dice.randrange(1, 4)
        length, expected = naive(documents, context, shortest, 9, 5)
        found = store.look_up(context, shortest, 9, 5, 10_000)
        lengths[length] += 1
        assert (found is None) == (not expected)
        if found is not None:
            assert (found.length, found.count) == (length, len(expected))
            assert sorted(ended(store, found.following_SD.tolist())) == expected
    assert len(lengths) > 3, "matches of many lengths must be among them"


def test_segments_are_one_store() -> None:
    """Guards the look-up over several segments: the longest match of all, and every continuation of
    it, in order."""
    documents, dice = made_of(1, 6, 60), random.Random(1)
    whole = Datastore.of(documents, VOCAB)
    divided = Datastore(
        [Datastore.of(documents[a:b], VOCAB).segments[0] for a, b in ((0, 7), (7, 40), (40, 60))], VOCAB
    )
    for _ in range(200):
        context = dice.choices(IDS[:6], k=8)
        one, several = whole.look_up(context, 1, 8, 4, 10_000), divided.look_up(context, 1, 8, 4, 10_000)
        assert one is not None
        assert several is not None
        assert (one.length, one.count) == (several.length, several.count)
        assert ended(whole, one.following_SD.tolist()) == ended(whole, several.following_SD.tolist())


def test_tokens_too_large_for_the_datastore_match_nothing() -> None:
    """Bug: a target whose vocabulary is padded beyond its tokenizer's, and so beyond 2^16, ended in
    an OverflowError as soon as such a token was in the text."""
    store = Datastore.of([[1, 2, 3, 4]], 160)
    for context, length in (([70_000, 1, 2], 2), ([1, 70_000, 2], 1), ([1, 2, 70_000], 0)):
        found = store.look_up(context, 1, 3, 1, 10)
        assert (found is None) == (length == 0)
        assert found is None or (found.length, found.following_SD.tolist()) == (length, [[3]])


def test_few_stand_for_many() -> None:
    """Guards the sample of a frequent match: its shares are those of all matches, to within one in `most`."""
    dice = random.Random(2)
    documents = [[1, 2, dice.choices((3, 4, 5), (6, 3, 1))[0]] for _ in range(5000)]
    everything = Counter(document[2] for document in documents)
    found = Datastore.of(documents, 160).look_up([1, 2], 2, 2, 1, 100)
    assert found is not None
    assert found.count == 5000
    assert len(found.following_SD) == 100
    for token, count in Counter(found.following_SD[:, 0].tolist()).items():
        assert abs(count - everything[token] / 50) <= 1


# --- building

SETTINGS = Settings({"vocabulary": "v", "chat template": "c"}, "words", VOCAB)


class File:
    """Documents under a name; counts how often it is read."""

    def __init__(self, name: str, documents: Documents, error: BaseException | None = None) -> None:
        self.name, self.documents, self.error, self.times = name, documents, error, 0

    def __call__(self) -> Iterator[Sequence[int]]:
        self.times += 1
        yield from self.documents
        if self.error is not None:
            raise self.error

    @property
    def source(self) -> Source:
        return Source(self.name, f"sha of {self.name}", self)


@pytest.fixture
def files() -> list[File]:
    return [File(name, made_of(seed, 9)) for seed, name in enumerate(("a.txt", "b.txt", "c.txt"))]


def make(
    folder: Path, *files: File, settings: Settings = SETTINGS, append: bool = False, merge: bool = False
) -> Manifest:
    return build(folder, settings, [file.source for file in files], {"eyas": "0"}, append=append, merge=merge)


def same(folder: Path, documents: Documents) -> None:
    """The folder answers as a store of these documents in memory does, and holds nothing else than
    its manifest names."""
    manifest, expected, dice = Manifest.read(folder), Datastore.of(documents, VOCAB), random.Random(5)
    manifest.check(folder, lambda _: None)
    store = Datastore.open(folder)
    for _ in range(60):
        context = dice.choices(IDS[:9], k=6)
        mine, theirs = store.look_up(context, 1, 6, 3, 10_000), expected.look_up(context, 1, 6, 3, 10_000)
        assert mine is not None
        assert theirs is not None
        assert (mine.length, mine.count) == (theirs.length, theirs.count)
    assert sum(source.tokens for source in manifest.sources) == sum(map(len, documents)) == manifest.tokens
    assert len(list(folder.glob("[!.]*"))) == 1 + 2 * len(manifest.segments)


def test_built_appended_merged(tmp_path: Path, files: list[File]) -> None:
    """The life of a datastore: each step holds what it should, and no file is left of the step before."""
    a, b, c = files
    assert len(make(tmp_path / "s", a).segments) == 1
    same(tmp_path / "s", a.documents)
    assert len(make(tmp_path / "s", b, c, append=True).segments) == 2
    same(tmp_path / "s", [*a.documents, *b.documents, *c.documents])
    merged = make(tmp_path / "s", merge=True)
    assert len(merged.segments) == 1
    same(tmp_path / "s", [*a.documents, *b.documents, *c.documents])
    assert merged.segments == make(tmp_path / "t", a, b, c).segments  # files are named by what is in them
    assert [file.times for file in files] == [2, 2, 2]


def test_the_same_again_does_nothing(tmp_path: Path, files: list[File]) -> None:
    """Guards against reading everything again, and against the same data standing there twice."""
    first = make(tmp_path / "s", *files)
    assert make(tmp_path / "s", *files) == first
    assert make(tmp_path / "s", files[1], append=True) == first
    assert make(tmp_path / "s", merge=True) == first
    assert make(tmp_path / "t", files[0], files[0]).tokens == sum(map(len, files[0].documents))
    assert files[1].times == 1


@pytest.mark.parametrize("where", ["reading", "sorting"])
def test_an_interrupted_build_goes_on(
    tmp_path: Path, files: list[File], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what was read before an interrupt; no manifest names what is not whole, and the old
    store stays usable until the new is."""
    a, b, c = files
    make(tmp_path / "s", a)
    if where == "reading":
        c.error = KeyboardInterrupt()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "sorting":
            patch.setattr(datastore._build, "order_of", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "s", b, c, append=True)
    assert len(Manifest.read(tmp_path / "s").sources) == 1
    assert Datastore.open(tmp_path / "s").look_up(a.documents[0], 1, 4, 2, 10) is not None
    c.error = None
    make(tmp_path / "s", b, c, append=True)
    assert (b.times, c.times) == (1, 2 if where == "reading" else 1)
    same(tmp_path / "s", [*a.documents, *b.documents, *c.documents])


def test_segments_of_bounded_size(tmp_path: Path) -> None:
    """Guards the bound of memory: documents are packed up to the limit, and one that alone is
    longer is cut."""
    file = File("a", [[1] * 10, [2] * 10, [3] * 70, [4] * 3])
    manifest = make(tmp_path, file, settings=Settings({"vocabulary": "v"}, "words", VOCAB, segment_tokens=25))
    assert [stored.tokens for stored in manifest.segments] == [22, 25, 25, 23, 4]
    store = Datastore.open(tmp_path)
    held = Counter(t for segment in store.segments for t in segment.tokens_T.tolist() if t != store.separator)
    assert held == {1: 10, 2: 10, 3: 70, 4: 3}
    assert make(tmp_path, file, settings=Settings({"vocabulary": "v"}, "words", VOCAB)) == manifest


def test_refusals(tmp_path: Path, files: list[File]) -> None:
    """Guards against mixing what does not belong together, with a sentence that says what to do."""
    a, b, _ = files
    with pytest.raises(InputError, match="holds no datastore to append to"):
        make(tmp_path / "s", merge=True)
    with pytest.raises(InputError, match=r"a.txt has token \d+, the vocabulary is 0..7"):
        make(tmp_path / "t", a, settings=Settings({}, "words", 8))
    with pytest.raises(InputError, match="empty has no tokens"):
        make(tmp_path / "t", File("empty", []))
    make(tmp_path / "s", a)
    with pytest.raises(InputError, match=r"holds other data \(a.txt\): append to it"):
        make(tmp_path / "s", b)
    other = Settings({"vocabulary": "w", "chat template": "c"}, "others", VOCAB)
    with pytest.raises(InputError, match=r"another tokenizer \('words'; its vocabulary differs\)"):
        make(tmp_path / "s", b, settings=other, append=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        make(tmp_path / "file" / "s", a)


def test_damage_is_seen(tmp_path: Path, files: list[File]) -> None:
    """Guards against drafting from half a file: sizes are compared when it is opened, checksums
    when asked."""
    with pytest.raises(InputError, match="make one with `eyas datastore build`"):
        Datastore.open(tmp_path)
    manifest = make(tmp_path, files[0])
    suffixes = manifest.segments[0].paths(tmp_path)[1]
    whole = suffixes.read_bytes()
    suffixes.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    Datastore.open(tmp_path)
    with pytest.raises(InputError, match="its checksum is another"):
        manifest.check(tmp_path, lambda _: None)
    suffixes.write_bytes(whole[:-4])
    with pytest.raises(InputError, match=r"is damaged \(.* bytes instead of"):
        Datastore.open(tmp_path)
    suffixes.unlink()
    with pytest.raises(InputError, match=r"is damaged \(missing\)"):
        Datastore.open(tmp_path)


def test_a_manifest_that_was_changed(tmp_path: Path, files: list[File]) -> None:
    """Guards against believing a manifest that is damaged, edited, newer, or names files elsewhere."""
    make(tmp_path, files[0])
    held = json.loads((tmp_path / MANIFEST_FILE).read_text())
    assert held["sorted_to"] == DEPTH
    broken = [
        ({**held, "largest_token": 3}, "changed after it was written"),
        ({**held, "version": 99}, "a newer eyas may read it"),
        ({key: value for key, value in held.items() if key != "segments"}, "KeyError"),
        ([], "TypeError"),
    ]
    for content, said in broken:
        (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
        with pytest.raises(InputError, match=said):
            Datastore.open(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        Datastore.open(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("[" * 60_000)
    with pytest.raises(InputError, match="is damaged"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize("suffix", ["*.npy", "*.json"])
def test_a_part_that_was_damaged_is_made_again(
    tmp_path: Path, files: list[File], suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that an interrupted build left were used again without a look at them: one bit, and
    another text was looked up for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(datastore._build, "order_of", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "s", files[0])
    (part,) = (tmp_path / "s" / "parts").glob(suffix)
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    make(tmp_path / "s", files[0])
    assert files[0].times == 2
    same(tmp_path / "s", files[0].documents)


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_damage_is_not_merged(tmp_path: Path, files: list[File]) -> None:
    """Sorted together with others, a damaged segment would get a right checksum."""
    make(tmp_path, files[0])
    manifest = make(tmp_path, files[1], append=True)
    tokens = manifest.segments[1].paths(tmp_path)[0]
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="its checksum is another"):
        make(tmp_path, merge=True)
    assert Manifest.read(tmp_path) == manifest


def test_a_damaged_token_is_never_drafted(tmp_path: Path) -> None:
    """Checksums of large files are compared on request only. A token that no vocabulary has would
    be a crash in the target: it counts as the end of its document."""
    make(tmp_path, File("a", [[1, 2, 3]] * 20))
    (tokens,) = tmp_path.glob("*.tokens.npy")
    content = tokens.read_bytes()
    tokens.write_bytes(content.replace(b"\x00\x03", b"\x80\x03"))
    found = Datastore.open(tmp_path).look_up([1, 2], 1, 2, 1, 100)
    assert found is not None
    assert set(found.following_SD.ravel().tolist()) == {65535}


def test_a_second_build_is_refused(tmp_path: Path, files: list[File]) -> None:
    """It removed the parts of the first one."""
    make(tmp_path, files[0])
    with locked_output(tmp_path), pytest.raises(InputError, match=f"process {os.getpid()} "):
        make(tmp_path, files[1], append=True)
    assert make(tmp_path, files[0]).tokens  # nothing to write, so nothing to wait for
    assert len(make(tmp_path, files[1], append=True).sources) == 2
