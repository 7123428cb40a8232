"""Files in GGUF format: read once, to the bit as transformers reads them, and kept."""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import eyas
from eyas.targets import gguf_files
from gguf_models import write_gguf
from quantised_models import quiet

gguf = pytest.importorskip("gguf", reason="needs gguf (the extra quantised)")

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", *ALPHABET, "ĠĠ", "ab"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are converted from now on."""
    done: list[Path] = []
    convert = gguf_files._convert

    def counted(path: Path, folder: Path, weights: bool) -> None:
        done.append(path)
        convert(path, folder, weights)

    monkeypatch.setattr(gguf_files, "_convert", counted)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_a_folder_holds_the_weights_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    """Guards the whole way: names, the order of heads, shapes, dtypes; to the bit."""
    write_gguf(tmp_path / "model.gguf", kind)
    with quiet():
        keywords = {"gguf_file": "model.gguf", **gguf_files.plain_weights()}
        own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **keywords)
        kept = AutoModelForCausalLM.from_pretrained(gguf_files.kept_folder(tmp_path / "model.gguf"), dtype="auto")
    ours, theirs = kept.state_dict(), own.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name].view(torch.int32), tensor.float().view(torch.int32)), name


def test_a_file_is_converted_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cache: the second load converts nothing, the same bytes elsewhere are the same
    file, and other bytes at the same place are another one."""
    done = conversions(monkeypatch)
    first = gguf_files.kept_folder(file)
    other = file.with_name("copy.gguf")
    other.write_bytes(file.read_bytes())
    assert gguf_files.kept_folder(file) == gguf_files.kept_folder(other) == first
    assert done == [file]
    write_gguf(file, seed=1)
    assert gguf_files.kept_folder(file) != first
    assert done == [file, file]


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_folder_is_made_again(damage: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against weights that another program, or a full disk, has spoilt."""
    folder = gguf_files.kept_folder(file)
    weights = folder / "model.safetensors"
    intact = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(intact[:-4] + b"\x00\x00\x80\x7f" if damage == "changed" else intact[:-4])
    done = conversions(monkeypatch)
    assert gguf_files.kept_folder(file) == folder
    assert (done, weights.read_bytes()) == ([file], intact)


def test_an_interrupted_conversion_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a half-written folder that looks whole, and against its rubbish: also what a
    killed process left is gone after the next conversion."""

    def interrupted(path: Path, folder: Path, weights: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf_files.kept_folder(file)
    cached = gguf_files._cache()
    assert [path for path in cached.iterdir() if path.is_dir()] == []
    (cached / f".{gguf_files._key(file)}.killed.tmp").mkdir()
    folder = gguf_files.kept_folder(file)
    assert [path for path in cached.iterdir() if path.is_dir()] == [folder]


def test_the_least_recently_used_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limit: the oldest use goes first, the one that is being loaded never, nor one that
    another process took a moment ago."""
    folders = []
    for number in range(4):
        write_gguf(tmp_path / "model.gguf", seed=number)
        folders.append(gguf_files.kept_folder(tmp_path / "model.gguf"))
    now = folders[3].stat().st_mtime
    for folder, age in zip(folders, (30, 90_000, 40_000, 0), strict=True):
        os.utime(folder, (now - age, now - age))
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    monkeypatch.setenv("EYAS_GGUF_CACHE_GB", str(3.5 * size / 1e9))
    gguf_files._remove_unused(folders[3])
    assert [folder.exists() for folder in folders] == [True, False, True, True]
    monkeypatch.setenv("EYAS_GGUF_CACHE_GB", "0")
    gguf_files._remove_unused(folders[3])
    assert [folder.exists() for folder in folders] == [True, False, False, True]


def test_the_tokenizer_splits_digits_and_knows_the_context(tmp_path: Path) -> None:
    """Guards a tokenizer that takes other ids than the published one: llama.cpp splits the digits of
    such a vocabulary first, so that the two spaces before one are a token; transformers did not."""
    write_gguf(tmp_path / "model.gguf", tokens=TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(gguf_files.kept_folder(tmp_path / "model.gguf"))
    assert tokenizer.tokenize("ab  12") == ["ab", "ĠĠ", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)
    assert tokenizer.model_max_length == 512
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    llm = eyas.load(tmp_path / "model.gguf", "vanilla")
    assert llm.target.name == str(tmp_path / "model.gguf")
    assert llm.ids("ab  1", raw=True) == tuple(TOKENS.index(token) for token in ("ab", "ĠĠ", "1"))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [({}, [0]), ({"eot": 5}, [0, 5]), ({"eot": 5, "eom": 9}, [0, 5, 9]), ({"eot": 0, "eom": 10**6}, [0])],
)
def test_answers_end_with_a_turn(ends: dict[str, int], expected: list[int], tmp_path: Path) -> None:
    """Guards chat models whose turns end with a token of their own, as Llama 3's and Gemma's: transformers takes the end of
    a text alone, and the answer ran on to its length."""
    write_gguf(tmp_path / "model.gguf", tokens=TOKENS, ends=ends)
    llm = eyas.load(tmp_path / "model.gguf", "vanilla")
    assert sorted(llm.eos) == expected
    last = expected[-1]
    bias = {last: 100.0}
    assert llm.generate([7, 8, 9], max_new_tokens=6, logit_bias=bias).token_ids == (last,)
