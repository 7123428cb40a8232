"""Models on which somebody has called `compile`: torch does not notice hooks that come after it, which read features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import drafters
from eyas.api import LLM
from eyas.core.target import Target

IDS = torch.tensor([[5, 9, 23, 7, 5, 9]])


def by_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def by_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


WAYS: dict[str, Callable[[Any], object]] = {
    "model": lambda model: model.compile(backend="eager"),
    "base": lambda model: model.model.compile(backend="eager"),
    "layers": by_layers,
    "forward": by_forward,
}  # fmt: skip


def made() -> Any:
    return zoo.tiny("llama", hidden_size=64, head_dim=16, intermediate_size=96)  # sizes that the kernels suit


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_features_of_a_compiled_model(way: str) -> None:
    """Bug: KeyError 2. The first pass was compiled without the hook on layer 2."""
    model = made()
    with Target(model).tap((2, 4)) as features, torch.no_grad():
        model(IDS)
        wanted = features()
    WAYS[way](model)
    target = Target(model)
    with torch.no_grad():
        for layers, part in (((4,), wanted[..., 64:]), ((2,), wanted[..., :64]), ((2, 4), wanted)):
            with target.tap(layers) as features:
                model(IDS)
                torch.testing.assert_close(features(), part)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model runs by its own forward")
@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("way", WAYS)
def test_ids_of_a_compiled_model(way: str, kernels: str) -> None:
    """Bug: with kernels, a compiled model could not be loaded. A head reads features in each cycle."""
    wanted = made().generate(IDS, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)[0, 6:]
    model = made()
    WAYS[way](model)
    target = eyas.load(model, method="vanilla", kernels=kernels, tokenizer=False).target
    llm = LLM(target, drafters.find("eagle1").random(target), None)
    assert list(llm.generate(IDS[0].tolist(), max_new_tokens=12, ignore_eos=True).token_ids) == wanted.tolist()
