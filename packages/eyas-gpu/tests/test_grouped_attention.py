"""Attention without copies of keys and values: the numbers of sdpa, for every family, and a model
that is put back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zoo
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas_gpu.grouped_attention import NAME, grouped_attention_enabled

GROUPED = ("llama", "mistral", "qwen3", "gemma3", "phi3", "olmo2", "granite", "cohere2", "mixtral")


@pytest.mark.quick("llama", "gpt2")
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_the_numbers_of_sdpa(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order of heads within their groups, masks and windows, rows of different ages; and that it is used at
    all where heads share keys, with no more key-value heads than the model has."""
    target = Target(zoo.FAMILIES[family]())
    session = target.open(2, (1,))
    session.prefill(0, list(range(5, 25)))
    session.prefill(1, list(range(5, 12)))
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1, 2]] * 2), 2)
    tokens_BN = torch.randint(3, zoo.VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    usual, sdpa, queries = session.forward(tokens_BN, tree), nn.functional.scaled_dot_product_attention, list[int]()

    def spy(query: Tensor, *args: Tensor, **more: object) -> Tensor:
        queries.append(query.shape[2])
        return sdpa(query, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    with grouped_attention_enabled(target.family.layers):
        ours = session.forward(tokens_BN, tree)
    torch.testing.assert_close(ours.logits_BNV, usual.logits_BNV, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.features_BNF, usual.features_BNF, rtol=1e-5, atol=1e-5)
    if family in GROUPED:
        assert len(queries) == target.num_layers
        assert min(queries) > 5


def test_a_model_is_put_back_as_it_was() -> None:
    """Guards users' models: neither a fault inside nor another kind of attention changes what they
    were loaded with."""
    for family, before in (("llama", "sdpa"), ("gemma2", "eager")):
        target = Target(zoo.FAMILIES[family]())
        config = target.model.config

        def broken(target: Target = target) -> None:
            with grouped_attention_enabled(target.family.layers):
                assert (target.model.config._attn_implementation == NAME) == (target.family.model_type == "llama")
                raise KeyError

        with pytest.raises(KeyError):
            broken()
        assert config._attn_implementation == before
