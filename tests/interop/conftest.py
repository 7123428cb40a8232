"""Engines of others, in environments of their own, with heads that `eyas export` wrote for them.

`make interop` makes the environments (.venv-interop: vLLM's CPU build and speculators; .venv-openvino) and runs these tests. Elsewhere
they are skipped, and so is each engine that cannot be installed. llama.cpp is compiled, which takes long: LLAMA_CPP names a folder with
its sources, whose build is there too. An engine is a process that knows nothing of eyas but the folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eyas
from eyas import checkpoints, tiny
from eyas.bench import tasks
from interop_engines import VARIABLE, python_of


@pytest.fixture(scope="session", autouse=True)
def asked_for() -> None:
    """Skips everything, before anything is loaded, unless `make interop` runs these tests."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"other engines are not installed here ({VARIABLE} is not set): make interop")


@pytest.fixture(scope="session")
def interop() -> Path:
    """Python with vLLM and speculators."""
    return python_of(".venv-interop")


@pytest.fixture(scope="session")
def llm() -> eyas.LLM:
    """The embedded model, decoding plainly."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return eyas.load(method="vanilla", kernels="off")


@pytest.fixture(scope="session")
def folder(llm: eyas.LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as transformers saves it."""
    made: Path = tmp_path_factory.mktemp("embedded")
    llm.target.model.save_pretrained(made)
    assert llm.tokenizer is not None
    llm.tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def prompts(llm: eyas.LLM) -> list[list[int]]:
    """The first turns of the bundled prompts, as ids."""
    return [list(llm.ids(prompt.turns[0])) for prompt in tasks.load("bundled")]


@pytest.fixture(scope="session")
def known(llm: eyas.LLM, folder: Path) -> checkpoints.ExportTarget:
    """The properties of the embedded model that an export may ask for."""
    every_V = torch.arange(llm.target.vocab_size)
    return checkpoints.ExportTarget(str(folder), ("LlamaForCausalLM",), lambda: llm.target.embed(every_V))


@pytest.fixture(scope="session")
def exported(known: checkpoints.ExportTarget, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of an embedded head in a format."""

    def made(method: str, name: str) -> Path:
        place = tmp_path_factory.mktemp("heads") / f"{method}-{name}"
        checkpoints.export(checkpoints.load(tiny.HEADS[method]), name, place, known)
        return place

    return made
