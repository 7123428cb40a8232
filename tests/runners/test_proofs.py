"""What was found out about a model is kept, and is forgotten as soon as anything has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from eyas import kernels
from eyas.core.target import Target
from eyas.runners import UnsuitedError, _proofs
from eyas.runners import cpu as cpu_runner
from eyas.runners._proofs import digest_of
from eyas.runners.cpu import make_cpu_runner

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """An empty cache, with the kernels; and the targets whose numbers are compared from now on."""
    library = kernels.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "library", lambda: library)
    compared: list[Target] = []
    pairs = cpu_runner.output_pairs

    def counted(target: Target, runner: Any) -> Any:
        compared.append(target)
        return pairs(target, runner)

    monkeypatch.setattr(cpu_runner, "output_pairs", counted)
    return compared


def model(**options: Any) -> PreTrainedModel:
    return zoo.tiny("llama", **SIZES, **options)


def bit(changed: PreTrainedModel) -> None:
    weight = changed.model.layers[1].mlp.up_proj.weight.data.view(torch.int32)
    weight[3, 7] ^= 1


def rows(changed: PreTrainedModel) -> None:
    weight = changed.model.layers[0].self_attn.q_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def test_a_model_is_compared_once(comparisons: list[Target]) -> None:
    """Guards the time of loading; and models of the caller, which may have been changed in ways that
    no key holds: they are compared every time."""
    for _ in range(2):
        make_cpu_runner(Target(model()), own=True)
    assert len(comparisons) == 1
    for _ in range(2):
        make_cpu_runner(Target(model()))
    assert len(comparisons) == 3
    rounded = make_cpu_runner(Target(model()), kernels.WeightFormat("int8"), own=True)
    assert len(comparisons) == 3
    assert rounded.weight_format.weights == "int8"


@pytest.mark.parametrize("change", [bit, rows])
def test_changed_weights_are_compared_again(
    change: Callable[[PreTrainedModel], None], comparisons: list[Target]
) -> None:
    """Guards against weights that hold NaN, or anything else, since they were compared: one bit, and
    two rows that changed places, make another model."""
    make_cpu_runner(Target(model()), own=True)
    changed = model()
    change(changed)
    assert digest_of(changed) != digest_of(model()) == digest_of(model())
    make_cpu_runner(Target(changed), own=True)
    assert len(comparisons) == 2


def test_another_configuration_or_machine_is_compared_again(
    comparisons: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards everything else that the numbers depend on: the same weights with other rotary
    positions, other modules, sources, processors, versions."""
    make_cpu_runner(Target(model()), own=True)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    make_cpu_runner(Target(model(**rope)), own=True)
    for number, (name, value) in enumerate({"_sources": "new", "cpu_name": "new", "versions": {}}.items(), start=3):
        monkeypatch.setattr(_proofs, name, lambda value=value: value)
        make_cpu_runner(Target(model()), own=True)
        assert len(comparisons) == number


def test_a_failure_is_not_kept(comparisons: list[Target]) -> None:
    """Guards a model that calls itself llama and computes something else: it is refused at every
    load, also when the unchanged one was found right before."""
    make_cpu_runner(Target(model()), own=True)
    for _ in range(2):
        changed = model()
        changed.model.layers[1].mlp.act_fn = torch.nn.GELU()
        with pytest.raises(UnsuitedError, match="gives other numbers"):
            make_cpu_runner(Target(changed), own=True)
    assert len(comparisons) == 3
