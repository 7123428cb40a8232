"""Heads with random weights, with which real sizes are measured: they look like published ones."""

import pytest
import torch

import zoo
from eyas import drafters
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import eagle3
from eyas.drafters._nets import seeded

OPTIONS = {"head.layers": "0,1,2"}


def test_a_random_eagle3_drafts_as_many_tokens_as_published_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a head over the whole vocabulary, four times the bytes of a published one, is timed."""
    target, kind = Target(zoo.FAMILIES["llama"]()), drafters.find("eagle3")
    own = build_options(kind.Options, OPTIONS)
    assert kind.random(target, own).draft_ids_v is None, "a small vocabulary is drafted whole"
    monkeypatch.setattr(eagle3, "MAX_DRAFT_VOCABULARY", 32)
    for options, size in ((OPTIONS, 32), ({**OPTIONS, "head.draft_vocab": 50}, 50)):
        head = kind.random(target, build_options(kind.Options, options))
        ids = head.draft_ids_v.tolist()
        assert head.net.head.out_features == len(set(ids)) == size
        assert ids == sorted(ids)
        assert ids[-1] >= zoo.VOCAB - zoo.VOCAB / size - 1, "spread over the vocabulary"
    assert kind.random(target, own, draft_ids_v=torch.tensor([3, 5])).net.head.out_features == 2
    assert kind.init_for_training(target, own).draft_ids_v is None, "a new head's tokens come from data"


def test_weights_are_made_on_the_device() -> None:
    """Bug: a billion random numbers by the CPU while the GPU waits; "meta" is a device that is always there."""
    with seeded(3, torch.device("meta")):
        assert torch.nn.Linear(2, 3).weight.device.type == "meta"
    before = torch.random.get_rng_state()
    with seeded(3, torch.device("cpu")):
        first = torch.rand(4)
    with seeded(3, torch.device("cpu")):
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.random.get_rng_state(), before)
