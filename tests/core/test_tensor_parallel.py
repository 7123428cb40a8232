"""Targets whose layers two processes share (`tp_plan`): both give the text of plain decoding, with every method."""

from pathlib import Path

import pytest

import zoo
from eyas.core.engine import Request
from eyas.core.target import Target
from eyas.targets.fingerprints import fingerprint
from reference import plain_decode
from split_models import loaded, texts
from train.together import together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    zoo.FAMILIES["llama"]().save_pretrained(path)
    return path


@pytest.mark.exhaustive
def test_every_process_gives_the_text_of_plain_decoding(folder: Path) -> None:
    """Bug: the processes decide differently and wait for ever, or a head reads its own part of the features."""
    first, second = together(texts, folder)
    assert first == second
    for name, (plain, drafted) in first.items():
        assert drafted == plain, name


@pytest.mark.slow
def test_eyas_loads_it(folder: Path) -> None:
    """No policy by the clock, no kernels of whole layers; heads of the whole model know the target."""
    whole = zoo.FAMILIES["llama"]()
    first, second = together(loaded, folder)
    assert first == second == (plain_decode(whole, Request((5, 9, 3), 8)), False, fingerprint(Target(whole)))
