"""Clients that others have written, in an environment of their own, against a server of the
embedded model.

`make clients` makes that environment (.venv-clients) and runs these tests; elsewhere they are
skipped. A client is a process that knows nothing of eyas but the server's address.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
import processes
from eyas import tiny
from serving import Running, running, small_llm

VARIABLE = "EYAS_CLIENTS"  # the folder of the clients' programs
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the clients' programs."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"real clients are not installed here ({VARIABLE} is not set): make clients")
    return Path(folder)


@pytest.fixture(scope="session")
def llm(programs: Path) -> eyas.LLM:
    """The embedded model."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return small_llm()


@pytest.fixture(scope="session")
def server(llm: eyas.LLM) -> Iterator[Running]:
    """A server of it."""
    with running(llm, rows=4) as one:
        yield one


@pytest.fixture(scope="session")
def folder(llm: eyas.LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as transformers saves it."""
    made = tmp_path_factory.mktemp("embedded")
    tiny.model().save_pretrained(made)
    tiny.tokenizer().save_pretrained(made)
    return made


@pytest.fixture
def run(programs: Path, tmp_path: Path) -> Run:
    """Runs a client's program in an empty folder, without a network beyond the loopback, and
    expects it to succeed."""
    outside = {name: value for name, value in processes.environment().items() if name != "PYTHONPATH"}
    own = {
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_DATASETS_OFFLINE": "1",
        "LANGSMITH_TRACING": "false",
        "LLM_USER_PATH": str(tmp_path),
        "COLUMNS": "200",
    }

    def made(program: str, *arguments: Any) -> CompletedProcess[str]:
        done = processes.run([programs / program, *arguments], cwd=tmp_path, env={**outside, **own})
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return made
