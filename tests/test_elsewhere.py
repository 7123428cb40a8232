"""Without a distribution, whoever asks for its commands, methods, heads and parts reads in one line what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command_line import invoke
from eyas import checkpoints, drafters, elsewhere
from eyas.cli import _app
from eyas.errors import OptionError

NAMES = {
    kind: [(extra, name) for extra, kinds in elsewhere.DISTRIBUTIONS.items() for name in kinds.get(kind, ())]
    for kind in ("commands", "methods", "heads", "parts", "saves")
}


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every entry point, and forget what was found before."""
    modules = ("eyas.cli._app", "eyas.drafters", "eyas.checkpoints._weights", "eyas.elsewhere")
    for module in modules:
        monkeypatch.setattr(f"{module}.entry_points", lambda **_: ())
    for cached in (_app, drafters):
        monkeypatch.setattr(cached, "_modules", cached._modules.__wrapped__)


def says(message: str, extra: str) -> bool:
    """Return whether a message is one line with both commands that install the extra."""
    lab = "./packages/eyas-lab " if extra == "train" else ""
    commands = (f"pip install 'eyas[{extra}]'", f"in a clone: pip install {lab}./packages/eyas-{extra})")
    return "\n" not in message and all(command in message for command in commands)


@pytest.mark.parametrize(("extra", "name"), NAMES["commands"])
def test_a_command_is_missing(extra: str, name: str) -> None:
    done = invoke([name, "--help"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert says(done.stderr.rstrip("\n"), extra)


@pytest.mark.parametrize(("extra", "name"), NAMES["methods"])
def test_a_method_is_missing(extra: str, name: str) -> None:
    with pytest.raises(OptionError) as told:
        drafters.find(name)
    assert says(str(told.value), extra)
    assert name not in drafters.names()


@pytest.mark.parametrize(("extra", "key"), NAMES["heads"])
def test_the_format_of_a_head_is_missing(extra: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"{key}": 2}}')
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(OptionError) as told:
        checkpoints.load(tmp_path)
    assert says(str(told.value), extra)


@pytest.mark.parametrize(("extra", "name"), NAMES["saves"])
def test_the_writer_of_a_head_is_missing(extra: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as told:
        checkpoints.save(checkpoints.Weights(name, {}, {}, "memory"), tmp_path)
    assert says(str(told.value), extra)


@pytest.mark.parametrize(("extra", "name"), NAMES["parts"])
def test_a_part_is_missing(extra: str, name: str) -> None:
    with pytest.raises(OptionError, match="--workers") as told:
        elsewhere.part(name, "--workers")
    assert says(str(told.value), extra)


def test_other_names_are_unknown() -> None:
    """Guards the message for a name that no distribution brings."""
    assert "unknown command 'trian'" in invoke(["trian"]).stderr
    with pytest.raises(OptionError, match="unknown method 'medussa'"):
        drafters.find("medussa")
