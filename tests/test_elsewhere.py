"""Without a distribution, whoever asks for its commands, methods, heads and parts reads in one line what to install."""

import sys
from collections.abc import Callable
from importlib import import_module
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
    """Return whether a message is one line with the command that installs the extra."""
    lab = "./packages/eyas-lab " if extra == "train" else ""
    return "\n" not in message and f"pip install {lab}./packages/eyas-{extra} in a clone of eyas" in message


@pytest.mark.parametrize(("extra", "name"), NAMES["commands"])
def test_a_command_is_missing(extra: str, name: str) -> None:
    done = invoke([name, "--help"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert says(done.stderr.rstrip("\n"), extra)


def load_head(key: str, folder: Path) -> None:
    (folder / "config.json").write_text(f'{{"{key}": 2}}')
    save_file({"0.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    checkpoints.load(folder)


ASKED: dict[str, Callable[[str, Path], object]] = {
    "methods": lambda name, _: drafters.find(name),
    "heads": load_head,
    "saves": lambda name, folder: checkpoints.save(checkpoints.Weights(name, {}, {}, "memory"), folder),
    "parts": lambda name, _: elsewhere.part(name, "--workers"),
}


@pytest.mark.parametrize(("kind", "extra", "name"), [(kind, *asked) for kind in ASKED for asked in NAMES[kind]])
def test_what_is_missing(kind: str, extra: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as told:
        ASKED[kind](name, tmp_path)
    assert says(str(told.value), extra)
    assert kind != "parts" or "--workers" in str(told.value)
    assert kind != "methods" or name not in drafters.names()


def test_training_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards programs with `import eyas.train`, the earlier name of eyas-train: they read what to install."""
    monkeypatch.delitem(sys.modules, "eyas.train", raising=False)
    elsewhere.part.cache_clear()
    with pytest.raises(OptionError, match=r"^eyas\.train needs") as told:
        import_module("eyas.train")
    assert says(str(told.value), "train")


def test_other_names_are_unknown() -> None:
    """Guards the message for a name that no distribution brings."""
    assert "unknown command 'trian'" in invoke(["trian"]).stderr
    with pytest.raises(OptionError, match="unknown method 'medussa'"):
        drafters.find("medussa")
