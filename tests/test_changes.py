"""Models that change under an LLM or a chat: the changed model's answer, or an error that says to load it again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import eyas
import zoo
from eyas.errors import ModelError
from reference import generated
from toy_tokenizer import VOCAB, byte_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": VOCAB}
PROMPT = list(range(30, 51))
ASKED: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
PATCH = pytest.MonkeyPatch


def make() -> PreTrainedModel:
    return zoo.tiny("llama", **SIZES, seed=1)


def ids_of(model: PreTrainedModel, **options: Any) -> tuple[int, ...]:
    """The ids of an LLM that is loaded now."""
    llm = eyas.load(model, "suffix", tokenizer=False, kernels="off", **options)
    return tuple(llm.generate(PROMPT, **ASKED).token_ids)


def with_kernels(model: PreTrainedModel) -> eyas.LLM:
    pytest.importorskip("eyas.kernels")
    llm = eyas.load(model, "suffix", tokenizer=False, kernels="on")
    assert llm.target.runner.name == "kernels"
    return llm


def shifted(module: Any, args: Any, output: Any) -> Any:
    return output + torch.linspace(-3, 3, 64)


def written(model: Any, patch: PATCH) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)


def loaded(model: Any, patch: PATCH) -> None:
    model.load_state_dict(zoo.tiny("llama", **SIZES, seed=2).state_dict())


def replaced(model: Any, patch: PATCH) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(-model.model.layers[0].mlp.up_proj.weight)


def other_data(model: Any, patch: PATCH) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def other_module(model: Any, patch: PATCH) -> None:
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.mul_(-1)


def other_frequencies(model: Any, patch: PATCH) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def other_scale(model: Any, patch: PATCH) -> None:
    model.model.layers[1].self_attn.scaling *= 9


def other_epsilon(model: Any, patch: PATCH) -> None:
    model.model.norm.variance_epsilon = model.model.layers[1].input_layernorm.variance_epsilon = 1e3


def hook(model: Any, patch: PATCH) -> None:
    model.model.layers[0].register_forward_hook(shifted)


def hook_before(model: Any, patch: PATCH) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + torch.linspace(-9, 9, 64),))


def forward(model: Any, patch: PATCH) -> None:
    own = model.model.layers[2].mlp.forward
    model.model.layers[2].mlp.forward = lambda x: shifted(None, None, own(x))


def forward_of_the_class(model: Any, patch: PATCH) -> None:
    own = LlamaMLP.forward
    patch.setattr(LlamaMLP, "forward", lambda self, x: shifted(None, None, own(self, x)))


def hook_everywhere(model: Any, patch: PATCH) -> None:
    def changed(module: nn.Module, args: Any, output: Any) -> Any:
        return shifted(module, args, output) if isinstance(module, LlamaMLP) else None

    HANDLES.append(nn.modules.module.register_module_forward_hook(changed))


HANDLES: list[Any] = []
WARNED = ("hook", "forward", "scale", "epsilon")  # in names of changes that the kernels do not run
CHANGES: list[Callable[[Any, PATCH], None]] = [
    written, loaded, replaced, other_data, other_module, other_frequencies, other_scale, other_epsilon,
    hook, hook_before, forward, forward_of_the_class, hook_everywhere,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Any:
    yield
    while HANDLES:
        HANDLES.pop().remove()


@pytest.mark.slow
@pytest.mark.quick("written", "hook")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_llm_after_a_change(change: Callable[[Any, PATCH], None], monkeypatch: PATCH) -> None:
    """Kernels keep a copy of the weights and run no hooks: they answered as the model of before."""
    model = make()
    own, before = eyas.load(model, "suffix", tokenizer=False, kernels="off"), ids_of(model)
    kernels = with_kernels(model)
    attached = eyas.attach(model, "suffix", kernels="on")
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 0}
    prompt = torch.tensor([PROMPT])
    assert kernels.generate(PROMPT, **ASKED).token_ids == own.generate(PROMPT, **ASKED).token_ids == before
    model.generate(prompt, **asked)
    change(model, monkeypatch)
    after = ids_of(copy.deepcopy(model))
    assert after != before, "the change shows in the text"
    assert own.generate(PROMPT, **ASKED).token_ids == after
    for ask in (kernels.generate, kernels.stream):
        with pytest.raises(ModelError, match="have changed since it was loaded: load it again") as caught:
            ask(PROMPT, **ASKED)
        assert "\n" not in str(caught.value)
    warned = pytest.warns() if any(word in change.__name__ for word in WARNED) else monkeypatch.context()
    with attached, warned:
        found = model.generate(prompt, **asked)
    assert found.tolist() == model.generate(prompt, **asked).tolist()


def test_hooks_that_record_outputs_change_nothing() -> None:
    """Guards transformers' own hooks, which stay after a call that asked for hidden states: the kernels were refused then."""
    model = make()
    llm = with_kernels(model)
    before = llm.generate(PROMPT, **ASKED).token_ids
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()), "this transformers sets none: the test is void"
    assert llm.generate(PROMPT, **ASKED).token_ids == before
    assert with_kernels(model).target.runner.name == "kernels"


def test_a_hook_that_waits() -> None:
    """A hook that does nothing while the kernels are compared with the model's own forward, and is switched on later."""
    pytest.importorskip("eyas.kernels")
    model, strength = make(), [0.0]
    before = ids_of(model)
    ramp = torch.linspace(-3, 3, 64)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + strength[0] * ramp)
    with pytest.warns(UserWarning, match="leave out the hooks"):
        llm = eyas.load(model, "suffix", tokenizer=False, kernels="on")
    assert llm.generate(PROMPT, **ASKED).token_ids == before
    strength[0] = 1.0
    assert llm.generate(PROMPT, **ASKED).token_ids == ids_of(model) != before


@pytest.mark.slow
@pytest.mark.parametrize("change", [written, loaded, other_data, other_scale, hook, forward_of_the_class])
def test_a_chat_after_a_change(change: Callable[[Any, PATCH], None], monkeypatch: PATCH) -> None:
    """Keys and values of the old weights were used again."""
    model = make()
    llm = eyas.load(model, "suffix", tokenizer=byte_tokenizer(), kernels="off")
    chat = llm.chat()
    chat.send("Hello?", **ASKED)
    kept = chat.send("And?", **ASKED).stats.cached_tokens
    assert kept >= 8
    change(model, monkeypatch)
    messages = [*chat.messages, {"role": "user", "content": "Well?"}]
    assert chat.send("Well?", **ASKED).token_ids == llm.generate(messages, **ASKED).token_ids
    assert chat.send("So?", **ASKED).stats.cached_tokens >= 8


def repeated(model: PreTrainedModel, at: int, copied: bool = True) -> PreTrainedModel:
    """The model with one of its layers twice in a row."""
    edited: Any = model
    layers = list(edited.model.layers)
    layers.insert(at + 1, copy.deepcopy(layers[at]) if copied else layers[at])
    edited.model.layers = nn.ModuleList(layers)
    edited.config.num_hidden_layers += 1
    if getattr(edited.config, "layer_types", None):
        kinds = list(edited.config.layer_types)
        edited.config.layer_types = [*kinds[: at + 1], kinds[at], *kinds[at + 1 :]]
    return model


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("copied", [True, False])
def test_layers_that_are_there_twice(kernels: str, copied: bool) -> None:
    """Bug: both write into one layer of the cache: other ids, or a crash; with own numbers they are like others."""
    with pytest.raises(ModelError, match="write into layer 1 of the cache"):
        eyas.load(repeated(make(), 1, copied), tokenizer=False, kernels=kernels)
    if copied:
        model: Any = repeated(make(), 1)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = number
        llm = eyas.load(model, "suffix", tokenizer=False, kernels=kernels)
        assert list(llm.generate(PROMPT, **ASKED).token_ids) == generated(model, PROMPT, 12)


def test_layers_and_modes_that_change_after_loading() -> None:
    """Cache and taps are those of the layers that were there; dropout is not the model's text."""
    model: Any = make()
    llm = eyas.load(model, "suffix", tokenizer=False, kernels="off")
    layers = model.model.layers
    for edited in (layers[:-1], nn.ModuleList([*layers, copy.deepcopy(layers[-1])])):
        model.model.layers = edited
        with pytest.raises(ModelError, match=r"layers.*have changed since it was loaded"):
            llm.generate(PROMPT, **ASKED)
    model.model.layers = layers
    model.bfloat16()
    with pytest.raises(ModelError, match="dtype"):
        llm.generate(PROMPT, **ASKED)
    model.float()
    model.load_state_dict(make().state_dict())
    model.config._attn_implementation = "flex_attention"  # given the mask of a tree, it writes past its memory
    with pytest.raises(ModelError, match="have changed"):
        llm.generate(PROMPT, **ASKED)
    model.config._attn_implementation = "sdpa"
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        llm.generate(PROMPT, **ASKED)
    model.eval()
    assert llm.generate(PROMPT, **ASKED).token_ids == ids_of(model)
