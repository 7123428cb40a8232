"""Fields of configurations that change what `model.generate` answers: the same ids, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import eyas
import zoo
from eyas.errors import EyasError, FitError, ModelError
from reference import generated

KERNEL_SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # which the kernels suit
WINDOW = 16
NEW = 12  # tokens of an answer
HALVES = ["sliding_attention", "full_attention"] * (zoo.LAYERS // 2)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FIELDS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": WINDOW},
    "chunk": {"attention_chunk_size": WINDOW},
    "kinds": {"sliding_window": WINDOW, "layer_types": HALVES},
    "unused-window": {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 2},
    "used-window": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "both-ways": {"is_causal": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "dropout": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "yarn": {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}},
    "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "scales": {"logit_scale": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "softcaps": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "activation": {"hidden_act": "gelu", "rms_norm_eps": 0.5},
    "no-rope": {"no_rope_layers": [0, 1] * (zoo.LAYERS // 2), "no_rope_layer_interval": 2},
    "tied": {"tie_word_embeddings": True, "use_cache": False},
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "phi3", "gpt2", "gpt_neox")


def prompt_of(length: int) -> list[int]:
    drawn_T = torch.randint(3, zoo.VOCAB, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in drawn_T]


def differs(model: PreTrainedModel, kernels: str) -> list[str]:
    """Return what differs from `model.generate`, or an empty list where the model is refused."""
    faults = []
    for prompt in (prompt_of(6), prompt_of(2 * WINDOW)):
        try:
            llm = eyas.load(model, method="suffix", kernels=kernels)
            ours = list(llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids)
        except EyasError:
            continue
        if ours != (theirs := generated(model, prompt, NEW)):
            faults.append(f"{len(prompt)} tokens, {llm.target.runner.name}: {ours}, and generate answers {theirs}")
    return faults


@pytest.mark.cover
@pytest.mark.filterwarnings("ignore:the model runs by its own forward")
@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_change_both_or_are_refused(family: str, fields: str, kernels: str) -> None:
    """Guards against a field that transformers reads and eyas does not: another text without a word."""
    sizes = KERNEL_SIZES if family in ("llama", "mistral", "qwen2", "qwen3") else {}
    options = {**zoo.FAMILIES[family].keywords, **sizes} if family in zoo.FAMILIES else sizes
    try:
        model = zoo.tiny(family, **{**options, **FIELDS[fields]})
    except (TypeError, ValueError, KeyError) as error:
        pytest.skip(f"transformers does not make it: {error}")
    assert not differs(model, kernels)


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_of_the_cache_alone(field: str) -> None:
    """Guards a window that transformers' cache has and its masks lack: equal up to it, then refused."""
    model, plain = zoo.tiny("llama", **{field: WINDOW}), zoo.tiny("llama")
    llm = eyas.load(model, method="suffix")
    assert llm.target.context == WINDOW
    for length in range(1, WINDOW):
        result = llm.generate(prompt_of(length), max_new_tokens=WINDOW - length, ignore_eos=True)
        assert list(result.token_ids) == generated(model, prompt_of(length), WINDOW - length)
    with pytest.raises(FitError, match=f"context of {WINDOW} .*sliding window in its cache only"):
        llm.generate(prompt_of(6), max_new_tokens=WINDOW)
    assert generated(model, prompt_of(6), 40) != generated(plain, prompt_of(6), 40)


def edit_configuration(model: PreTrainedModel) -> None:
    model.config.is_causal = False


def edit_a_layer(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


@pytest.mark.parametrize("edit", [edit_configuration, edit_a_layer])
def test_models_that_read_both_ways(edit: Callable[[Any], None]) -> None:
    """Guards embedding models that somebody loads as language models: the prompt's tokens see later ones."""
    model = zoo.tiny("llama")
    causal = generated(model, prompt_of(6), NEW)
    edit(model)
    assert generated(model, prompt_of(6), NEW) != causal
    with pytest.raises(ModelError, match="bidirectional"):
        eyas.load(model)
