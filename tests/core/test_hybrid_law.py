"""The joint law of several tokens over several cycles of a hybrid target, a tiny LFM2 of three tokens: a wrong state
after an accepted path of the drawn tree changes the law of what follows."""

import itertools

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from core.test_joint_law import deviations
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import find
from eyas.targets.recurrent import RowStates
from reference import run

V, T, COUNT, ROWS = 3, 4, 1000, 100
PROMPT = (0, 2, 1)


def model() -> PreTrainedModel:
    return zoo.tiny("lfm2", vocab_size=V, layer_types=["conv", "conv", "full_attention", "conv"], seed=4)


@torch.no_grad()
def exact(model: PreTrainedModel) -> torch.Tensor:
    """[V ** T]: the probability of each text of T tokens after the prompt."""
    texts = list(itertools.product(range(V), repeat=T))
    logits = model(torch.tensor([[*PROMPT, *text] for text in texts]), use_cache=False).logits.double().log_softmax(-1)
    new_XTV = logits[:, len(PROMPT) - 1 : -1]
    return new_XTV.gather(2, torch.tensor(texts)[..., None]).sum((1, 2)).exp()


def surprise(model: PreTrainedModel) -> float:
    """z of the chi-square of decoded texts against their probabilities."""
    target, small = Target(model), find("small_model")
    drafter = small.random(target, build_options(small.Options, {"depth": 2, "net.layers": 1, "net.width": 32}), seed=2)
    requests = [Request(PROMPT, T, Sampling(1.0, seed=seed)) for seed in range(COUNT)]
    tokens, steps = run(Decoder(target, drafter, ROWS), requests)
    assert sum(step.accepted for step in steps) > COUNT, "drafts must be accepted, or this proves little"
    weights = V ** torch.arange(T - 1, -1, -1)
    counts = torch.bincount((torch.tensor(tokens) * weights).sum(1), minlength=V**T).double()
    return deviations(counts, exact(model) * COUNT)


@pytest.mark.slow
def test_joint_law() -> None:
    assert abs(surprise(model())) < 4


@pytest.mark.exhaustive
def test_the_test_has_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that stay as they were after the prompt."""
    monkeypatch.setattr(RowStates, "commit", lambda self, *rest: None)
    assert surprise(model()) > 20
