"""The socket of target extensions: found by folder and by entry point, named nowhere in the core."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import zoo
from eyas import drafters, runners
from eyas.core import extensions
from eyas.core.engine import Decoder, Request
from eyas.core.extensions import TargetExtension, TargetState
from eyas.core.target import ForwardInput, Target, TargetSession
from eyas.errors import InputError, ModelError
from eyas.targets.media import Extension as Media
from eyas_gpu import runner
from reference import plain_decode, run

REQUEST = Request((5, 9, 3, 7), 6)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The search is done once in a process: afterwards it is forgotten."""
    extensions.known_extensions.cache_clear()
    yield monkeypatch
    extensions.known_extensions.cache_clear()


class CountedState(TargetState):
    """Notes what happens to the rows of a session."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    @contextmanager
    def reading(self, inputs: ForwardInput, length_B: Tensor, fresh: bool) -> Iterator[None]:
        self.calls.append(f"reads {'a prompt' if inputs.prompt else 'a tree'}{', fresh' if fresh else ''}")
        yield

    def prompt_read(self, row: int, length: int) -> None:
        self.calls.append(f"row {row} has {length}")

    def commit(self, length_B: Tensor, path_BP: Tensor, count_B: Tensor, active_B: Tensor) -> None:
        self.calls.append(f"commits after {int(length_B[0])}")


class Counted(TargetExtension):
    order = 25
    own_forward_only = {"kernels": "calls are counted", "graphs": "no CUDA graphs: calls are counted"}  # noqa: RUF012
    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def applies(cls, model: PreTrainedModel) -> bool:
        return model.config.model_type == "llama"

    def open(self, session: TargetSession) -> TargetState:
        return CountedState(self.calls)


def offer(search: pytest.MonkeyPatch, value: str) -> None:
    """Let an installed package offer this extension."""
    points = [EntryPoint("counted", value, "eyas.target_extensions")]
    search.setattr("eyas.core.extensions.entry_points", lambda group: [p for p in points if p.group == group])


def test_the_folders_extensions_in_their_order() -> None:
    """Guards the search: a module of eyas/targets with an `Extension` is found without being listed."""
    found = [extension.__module__.removeprefix("eyas.targets.") for extension in extensions.known_extensions()]
    assert found == ["placement", "quantised", "adapters", "recurrent", "media", "hooked"]


def test_an_installed_package_adds_an_extension(search: pytest.MonkeyPatch) -> None:
    """Guards the entry point, the calls that a state gets, and that its reason keeps kernels away."""
    module: Any = ModuleType("package_of_somebody")
    module.Counted = Counted
    search.setitem(sys.modules, module.__name__, module)
    offer(search, "package_of_somebody:Counted")
    plain = plain_decode(zoo.FAMILIES["llama"](), REQUEST)
    Counted.calls.clear()
    target = Target(zoo.FAMILIES["llama"]())
    assert [type(one) for one in target.extensions] == [Counted, Media]
    assert run(Decoder(target, drafters.find("vanilla").random(target), 1), [REQUEST])[0] == [plain]
    commits = [call for n in range(5) for call in ("reads a tree", f"commits after {4 + n}")]
    assert Counted.calls == ["reads a prompt, fresh", "row 0 has 4", *commits]
    with pytest.raises(runners.UnsuitedError, match="calls are counted"):
        runners.make_cpu_runner(target)
    with pytest.warns(UserWarning, match="no CUDA graphs: calls are counted"):
        assert runner.with_graphs(target, "on", own=True) is target
    assert Target(zoo.FAMILIES["gpt2"]()).open(1).states == ()


def test_a_package_that_cannot_be_loaded(search: pytest.MonkeyPatch) -> None:
    """Bug guarded: another package's mistake ends in a traceback that names neither."""
    offer(search, "eyas_package_that_is_not_there:Extension")
    with pytest.raises(ModelError, match="extension eyas_package_that_is_not_there:Extension cannot be loaded"):
        Target(zoo.FAMILIES["llama"]())


def test_the_core_alone(search: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the ring: without the folder plain models decode, and what needs an extension is refused in words."""
    plain = plain_decode(zoo.FAMILIES["llama"](), REQUEST)
    search.setattr(extensions, "FOLDER", tmp_path / "targets")
    extensions.known_extensions.cache_clear()
    target = Target(zoo.FAMILIES["llama"]())
    assert target.extensions == ()
    decoder = Decoder(target, drafters.find("vanilla").random(target), 1)
    assert run(decoder, [REQUEST])[0] == [plain]
    with pytest.raises(ModelError, match="lfm2 cannot be served: it has recurrent state, but no target extension"):
        Target(zoo.HYBRIDS["lfm2"]())
    with pytest.raises(InputError, match="pixel_values: no target extension reads more than tokens"):
        decoder.add(Request((5,), 3, media={"pixel_values": torch.zeros(1)}))
