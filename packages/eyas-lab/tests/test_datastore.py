"""The datastore: order of suffixes, looking up, building, and what it refuses."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from eyas.errors import InputError
from eyas_lab.datastore import DEPTH, Datastore, Manifest, Settings, Source, build, order_of

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
        places = [(d, i + length) for d in documents for i in range(len(d) - length + 1) if d[i : i + length] == end]
        if places:
            return length, sorted(tuple(document[at : at + depth]) for document, at in places)
    return 0, []


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


@pytest.mark.quick("3-0")
@pytest.mark.parametrize(("vocab", "shift"), [(3, 0), (12, 0), (12, 70_000)])
def test_look_up_is_what_looking_everywhere_finds(vocab: int, shift: int) -> None:
    """Guards the bisections, the order of bytes, the ends of documents (nothing matches across
    them), both widths of a token."""
    documents = [[token + shift for token in document] for document in made_of(vocab, vocab)]
    store, dice, lengths = Datastore.from_documents(documents, shift + VOCAB), random.Random(0), Counter[int]()
    for _ in range(300):
        context = [token + shift for token in dice.choices(IDS[:vocab], k=dice.randrange(0, 12))]
        shortest = dice.randrange(1, 4)
        length, expected = naive(documents, context, shortest, 9, 5)
        found = store.look_up(context, shortest, 9, 5, 10_000)
        lengths[length] += 1
        assert (found is None) == (not expected)
        if found is not None:
            assert (found.length, found.count) == (length, len(expected))
            rows = [(*row, store.separator) for row in found.following_SD.tolist()]
            assert sorted(row[: row.index(store.separator)] for row in rows) == expected
    assert len(lengths) > 3, "matches of many lengths must be among them"


def test_tokens_too_large_for_the_datastore_match_nothing() -> None:
    """Bug: a target whose vocabulary is padded beyond its tokenizer's, and so beyond 2^16, ended in
    an OverflowError as soon as such a token was in the text."""
    store = Datastore.from_documents([[1, 2, 3, 4]], 160)
    for context, length in (([70_000, 1, 2], 2), ([1, 70_000, 2], 1), ([1, 2, 70_000], 0)):
        found = store.look_up(context, 1, 3, 1, 10)
        assert (found is None) == (length == 0)
        assert found is None or (found.length, found.following_SD.tolist()) == (length, [[3]])


def test_few_stand_for_many() -> None:
    """Guards the sample of a frequent match: its shares are those of all matches, to within one in `most`."""
    dice = random.Random(2)
    documents = [[1, 2, dice.choices((3, 4, 5), (6, 3, 1))[0]] for _ in range(5000)]
    everything = Counter(document[2] for document in documents)
    found = Datastore.from_documents(documents, 160).look_up([1, 2], 2, 2, 1, 100)
    assert found is not None
    assert found.count == 5000
    assert len(found.following_SD) == 100
    for token, count in Counter(found.following_SD[:, 0].tolist()).items():
        assert abs(count - everything[token] / 50) <= 1


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


def make(folder: Path, *files: File, settings: Settings = SETTINGS) -> Manifest:
    return build(folder, settings, [file.source for file in files], {"eyas": "0"})


def test_a_folder_answers_as_a_store_in_memory(tmp_path: Path, files: list[File]) -> None:
    """Guards files, their dtypes and the manifest; nothing else stays in the folder or beside it. The same again reads
    nothing, in whatever order the files are named."""
    manifest = make(tmp_path / "s", *files, files[0])  # a file that is named twice counts once
    documents = [document for file in files for document in file.documents]
    store, expected, dice = Datastore.open(tmp_path / "s"), Datastore.from_documents(documents, VOCAB), random.Random(5)
    for _ in range(60):
        context = dice.choices(IDS[:9], k=6)
        mine, theirs = store.look_up(context, 1, 6, 3, 10_000), expected.look_up(context, 1, 6, 3, 10_000)
        assert mine is not None
        assert theirs is not None
        assert (mine.length, mine.count) == (theirs.length, theirs.count)
        assert mine.following_SD.tolist() == theirs.following_SD.tolist()
    assert sum(source["tokens"] for source in manifest.sources) == sum(map(len, documents))
    assert manifest.tokens == sum(map(len, documents)) + len(documents)
    assert manifest.largest_token == max(IDS[:9])
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["manifest.json", "suffixes.npy", "tokens.npy"]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    times = [file.times for file in files]
    assert make(tmp_path / "s", *reversed(files)) == Manifest.read(tmp_path / "s")
    assert [file.times for file in files] == times


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, files: list[File]) -> None:
    """Half a datastore must never be opened."""
    files[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "s", *files)
    assert not list(tmp_path.iterdir())
    files[1].error = None
    (tmp_path / "s").mkdir()  # an empty folder may be there
    assert make(tmp_path / "s", *files).tokens


def test_refusals(tmp_path: Path, files: list[File]) -> None:
    """Guards against mixing what does not belong together, with a sentence that says what to do."""
    a, b, _ = files
    with pytest.raises(InputError, match=r"a.txt has token \d+, the vocabulary is 0..7"):
        make(tmp_path / "t", a, settings=Settings({}, "words", 8))
    with pytest.raises(InputError, match="empty has no tokens"):
        make(tmp_path / "t", File("empty", []))
    make(tmp_path / "s", a)
    other = Settings({"vocabulary": "w", "chat template": "c"}, "others", VOCAB)
    for settings, file in ((SETTINGS, b), (other, a)):
        with pytest.raises(InputError, match=r"holds a datastore of a.txt \(words\): use another folder"):
            make(tmp_path / "s", file, settings=settings)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        make(tmp_path / "file" / "s", a)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds no datastore"):
        make(tmp_path / "mine", a)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_damage_is_seen(tmp_path: Path, files: list[File]) -> None:
    """Guards against drafting from half a file, and against believing a manifest that is damaged, older or newer."""
    with pytest.raises(InputError, match="make one with `eyas datastore build`"):
        Datastore.open(tmp_path)
    make(tmp_path / "s", files[0])
    suffixes, manifest = tmp_path / "s" / "suffixes.npy", tmp_path / "s" / "manifest.json"
    held = json.loads(manifest.read_text())
    assert held["sorted_to"] == DEPTH
    older = {key: value for key, value in held.items() if key != "tokens"}
    for content, said in (
        (json.dumps({**held, "version": 99}), "a newer eyas may read it"), (json.dumps(older), "KeyError"),
        ("[]", "TypeError"), ("{", "is damaged"), ("[" * 60_000, "is damaged"),
    ):  # fmt: skip
        manifest.write_text(content)
        with pytest.raises(InputError, match=said):
            Datastore.open(tmp_path / "s")
    manifest.write_text(json.dumps(held))
    suffixes.write_bytes(suffixes.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"is damaged \(no whole array\)"):
        Datastore.open(tmp_path / "s")
    np.save(suffixes, np.zeros(5, "<u4"))
    with pytest.raises(InputError, match=r"is damaged \(it holds something else\)"):
        Datastore.open(tmp_path / "s")
    suffixes.unlink()
    with pytest.raises(InputError, match=r"is damaged \(missing\)"):
        Datastore.open(tmp_path / "s")


def test_a_damaged_token_is_never_drafted(tmp_path: Path) -> None:
    """A token that no vocabulary has would be a crash in the target: it counts as the end of its document."""
    make(tmp_path / "s", File("a", [[1, 2, 3]] * 20))
    tokens = tmp_path / "s" / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes().replace(b"\x00\x03", b"\x80\x03"))
    found = Datastore.open(tmp_path / "s").look_up([1, 2], 1, 2, 1, 100)
    assert found is not None
    assert set(found.following_SD.ravel().tolist()) == {65535}
