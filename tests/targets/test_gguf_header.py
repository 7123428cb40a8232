"""The head of a file in GGUF format, next to the reader of the package gguf, and what transformers makes of it."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from eyas.errors import ModelError
from eyas.targets.gguf_files import kept_folder
from eyas.targets.gguf_header import read_header
from gguf_models import TOKENS, write_gguf
from quantised_models import quiet

gguf = pytest.importorskip("gguf", reason="needs gguf (the extra quantised)")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", "Q4_0", tokens=TOKENS)
    return tmp_path / "model.gguf"


def test_settings_and_tensors(file: Path) -> None:
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    assert ours.values == {name: theirs.get_field(name).contents() for name in ours.values}
    assert {name for name in theirs.fields if not name.startswith("GGUF.")} == {*ours.values}
    expected = [(t.name, t.tensor_type, tuple(reversed(t.shape)), t.data_offset) for t in theirs.tensors]
    assert [tuple(tensor) for tensor in ours.tensors] == expected


def test_configuration_and_tokenizer_are_those_of_transformers(file: Path) -> None:
    """Guards the copy without tokens, from which the configuration is read, and the tokenizer's class."""
    with quiet():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        folder = kept_folder(file, weights=False)
        kept = AutoTokenizer.from_pretrained(folder)
    expected, ours = config.to_dict(), json.loads((folder / "config.json").read_text())
    assert {name: value for name, value in ours.items() if expected.get(name) != value} == {}
    assert type(kept) is type(tokenizer)
    assert kept.get_vocab() == tokenizer.get_vocab()
    assert kept.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize("length", [0, 3, 20, 200, 2000, -64])
def test_damaged_files(length: int, file: Path) -> None:
    """Guards a bus error, too: a tensor whose end is missing would be read from the mapped file."""
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        kept_folder(file, weights=False)
    assert "\n" not in str(caught.value)
