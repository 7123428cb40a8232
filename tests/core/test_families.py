"""Every fact that `describe` returns about a family is checked by a forward of the model itself: a wrong scale, mask or
window moves logits by 0.01 and more, a hundred times the tolerance."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import zoo
from eyas.core.families import CHUNKED, FULL, SLIDING, Family, cache_argument_of, describe, embed, head
from eyas.errors import ModelError

LENGTH = 40  # longer than two windows
PREFIX = 24
# A tree after the prefix; -1 is the prefix's last token. Two branches, one of which forks late:
# leaves 4, 7 and 10.
#
#     prefix - 0 - 1 - 2 - 3 - 4
#            |         ` 8 - 9 - 10
#            ` 5 - 6 - 7
PARENTS = [-1, 0, 1, 2, 3, -1, 5, 6, 2, 8, 9]


@functools.cache
def served(name: str) -> tuple[PreTrainedModel, Family]:
    model = (zoo.FAMILIES | zoo.SWITCHING)[name]()
    return model, describe(model)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, zoo.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def masks(
    family: Family, allowed_NN: torch.Tensor, positions_N: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The attention_mask that this family takes, from which token attends to which and from the positions."""
    full = additive(allowed_NN)
    windowed = full
    if family.window is not None:
        windowed = additive(allowed_NN & (positions_N[:, None] - positions_N[None, :] < family.window))
    if not family.mask_kinds:
        return windowed
    of_kind = {FULL: full, SLIDING: windowed}
    if family.chunk is not None:
        of_kind[CHUNKED] = additive(
            allowed_NN & (positions_N[:, None] // family.chunk == positions_N[None, :] // family.chunk)
        )
    return {kind: of_kind[kind] for kind in family.mask_kinds}


def additive(allowed_NN: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed_NN.shape).masked_fill(~allowed_NN, torch.finfo(torch.float32).min)[None, None]


def paths(parents: list[int]) -> list[list[int]]:
    """For every node the nodes from the first one after the prefix down to itself."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@torch.no_grad()
def head_gap(model: PreTrainedModel, family: Family) -> float:
    out = model(tokens(2, LENGTH), use_cache=False, output_hidden_states=True)
    return gap(head(family, out.hidden_states[-1]), out.logits)


@torch.no_grad()
def plain_gap(model: PreTrainedModel, family: Family) -> float:
    ids = tokens(1, LENGTH)
    positions = torch.arange(LENGTH)
    mask = masks(family, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), positions)
    ours = model(ids, attention_mask=mask, position_ids=positions[None], use_cache=False).logits
    return gap(ours, model(ids, use_cache=False).logits)


@torch.no_grad()
def tree_gap(model: PreTrainedModel, family: Family) -> float:
    """The largest difference between nodes' logits in one forward over the tree and in forwards over their paths."""
    total = PREFIX + len(PARENTS)
    ids = tokens(1, total, seed=1)
    allowed = torch.ones(total, total, dtype=torch.bool).tril()
    allowed[PREFIX:, PREFIX:] = False
    positions = torch.arange(total)
    for node, path in enumerate(paths(PARENTS)):
        allowed[PREFIX + node, PREFIX + torch.tensor(path)] = True
        positions[PREFIX + node] = PREFIX + len(path) - 1
    seen = model(
        ids, attention_mask=masks(family, allowed, positions), position_ids=positions[None], use_cache=False
    ).logits
    gaps = [gap(seen[:, :PREFIX], model(ids[:, :PREFIX], use_cache=False).logits)]
    for path in paths(PARENTS):
        slots = [*range(PREFIX), *(PREFIX + node for node in path)]
        gaps.append(gap(seen[:, slots[-1]], model(ids[:, slots], use_cache=False).logits[:, -1]))
    return max(gaps)


@pytest.mark.parametrize("name", zoo.FAMILIES)
class TestServed:
    @pytest.mark.quick("qwen3")
    def test_head(self, name: str) -> None:
        """A softcap or a logit scale forgotten: losslessness would not notice, only bad acceptance would."""
        assert head_gap(*served(name)) < 1e-5

    @torch.no_grad()
    def test_embed(self, name: str) -> None:
        """An embedding scale forgotten, or applied twice. GPT-2's positions are in hidden_states[0], not in embed."""
        model, family = served(name)
        ids = tokens(2, LENGTH)
        first = model(ids, use_cache=False, output_hidden_states=True).hidden_states[0]
        if name == "gpt2":
            first = first - model.transformer.wpe(torch.arange(LENGTH))
        assert gap(embed(family, ids), first) < 1e-5

    @torch.no_grad()
    def test_modules(self, name: str) -> None:
        """A list of experts or heads taken for the layers; a base that stops before the final norm."""
        model, family = served(name)
        states: list[Any] = []
        hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in family.layers]
        try:
            out = model(tokens(1, 8), use_cache=False, output_hidden_states=True)
        finally:
            for hook in hooks:
                hook.remove()
        assert len(family.layers) == zoo.LAYERS
        assert [gap(seen, said) for seen, said in zip(states, out.hidden_states, strict=False)] == [0.0] * zoo.LAYERS
        assert gap(family.base(tokens(1, 8), use_cache=False)[0], out.hidden_states[-1]) == 0.0

    def test_masks_of_a_plain_sequence(self, name: str) -> None:
        """One mask where a dict is wanted, the window off by one, a window on the wrong layers."""
        assert plain_gap(*served(name)) < 1e-5

    @pytest.mark.quick("phi3")
    def test_tree(self, name: str) -> None:
        """Positions or masks of a tree that the model does not follow, the window across the fork included."""
        assert tree_gap(*served(name)) < 1e-4


BOTH = (FULL, SLIDING)
FACTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window": zoo.WINDOW},
    "mixtral": {"window": zoo.WINDOW},
    "qwen2": {"mask_kinds": BOTH, "window": zoo.WINDOW},
    "qwen3": {"mask_kinds": (FULL,)},
    "qwen3_moe": {},
    "gemma2": {"mask_kinds": BOTH, "window": zoo.WINDOW, "softcap": 4.0},
    "gemma3": {"mask_kinds": BOTH, "window": zoo.WINDOW},
    "phi3": {"window": zoo.WINDOW},
    "olmo2": {},
    "granite": {"embed_scale": 3.0, "logit_scale": pytest.approx(1 / 0.7)},
    "cohere2": {"mask_kinds": BOTH, "window": zoo.WINDOW, "logit_scale": 0.4},
    "gpt_neox": {},
    "gpt2": {},
    "gpt_oss": {"mask_kinds": BOTH, "window": zoo.WINDOW},
    "gemma4": {"mask_kinds": BOTH, "window": zoo.WINDOW, "softcap": 4.0, "shares_keys": True},
    "llama4": {"mask_kinds": (CHUNKED, FULL), "chunk": zoo.WINDOW},
    "deepseek_v3": {},
}


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_facts(name: str) -> None:
    """The zoo must keep exercising every fact: a release that drops an option silently would leave its test empty."""
    _, family = served(name)
    plain = {"mask_kinds": (), "window": None, "chunk": None, "shares_keys": False, "softcap": None}
    plain |= {"logit_scale": 1.0, "embed_scale": 1.0}
    assert {fact: getattr(family, fact) for fact in plain} == plain | FACTS[name]
    assert (family.context, family.context_reason) == (zoo.CONTEXT, "")


CLASSIFIER = AutoModelForSequenceClassification
SDPA = 'load it with attn_implementation="sdpa"'
LOCAL = {"num_heads": 4, "attention_types": [[["global", "local"], 2]]}
NO_MODEL = "LlamaModel is not a causal language model"


@pytest.mark.quick("gemma4", "gemma2", "phi3", "mistral", "qwen2", "cohere2")
@pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if "window" in FACTS[name]])
def test_window_matters(name: str) -> None:
    """Guards the tests of masks: a window one too wide or one too narrow, or none, must show."""
    model, family = served(name)
    for wrong in (zoo.WINDOW - 1, zoo.WINDOW + 1, None):
        assert plain_gap(model, dataclasses.replace(family, window=wrong)) > 1e-3


def test_chunk_matters() -> None:
    """Guards the tests of masks: another size of chunks, or none, must show."""
    model, family = served("llama4")
    for wrong in (zoo.WINDOW - 1, zoo.WINDOW + 1, 512):
        assert plain_gap(model, dataclasses.replace(family, chunk=wrong)) > 1e-3


LLAMA4 = {"layer_types": ["chunked_attention", "full_attention"] * 2, "interleave_moe_layer_step": 2}


def test_context_of_queries_that_are_scaled_by_slots() -> None:
    """Llama 4 scales the queries of layers without RoPE from position `floor_scale` - 1 on, by slot numbers."""
    family = describe(zoo.tiny("llama4_text", floor_scale=100, intermediate_size_mlp=40, **LLAMA4))
    assert (family.context, "slot numbers" in family.context_reason) == (99, True)


@pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.SWITCHING])
def test_describe_changes_nothing(name: str) -> None:
    model = (zoo.FAMILIES | zoo.SWITCHING)[name]()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    config = copy.deepcopy(model.config.to_dict())
    modules = [(key, id(module)) for key, module in model.named_modules()]
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    describe(model)
    assert model.config.to_dict() == config
    assert [(key, id(module)) for key, module in model.named_modules()] == modules
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())


@pytest.mark.parametrize("name", zoo.SWITCHING)
@torch.no_grad()
def test_context_ends_at_the_switch(name: str) -> None:
    """Up to `context` positions early tokens keep their frequencies; one more position and all of them change."""
    model, family = served(name)
    ids = tokens(1, zoo.SWITCH + 1)
    short, fits, over = (
        model(ids[:, :length], use_cache=False).logits[:, :8] for length in (16, family.context, family.context + 1)
    )
    assert family.context == zoo.SWITCH
    assert "frequencies" in family.context_reason
    assert gap(short, fits) < 1e-5
    assert gap(short, over) > 1e-3


def altered(model_type: str, reason: str, **options: Any) -> tuple[Callable[[], PreTrainedModel], str, str]:
    return functools.partial(zoo.tiny, model_type, **options), model_type, reason


def with_backend(backend: str, name: str = "llama") -> PreTrainedModel:
    """A model that says it was loaded with this attention; no such kernel is needed to read that."""
    model = zoo.FAMILIES[name]()
    model.config._attn_implementation = backend
    return model


def of_class(auto: Any, model_type: str, **options: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **options)
    model: PreTrainedModel = auto.from_config(config)
    return model


T5 = {"vocab_size": zoo.VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
# Case -> how to build the model, the type that the message names, what else the message says.
CASES: dict[str, tuple[Callable[[], PreTrainedModel], str, str]] = {
    **{name: (make, name, "where it cannot be put back") for name, make in zoo.REFUSED.items()},
    "alibi in the code": altered("bloom", "ALiBi", eager=True, n_head=4),
    "alibi in the options": altered("falcon", "ALiBi", eager=True, alibi=True),
    "own slot mask": altered("gpt_neo", "slot numbers", eager=True, **LOCAL),
    "no positions": altered("roformer", "position_ids", eager=True, is_decoder=True),
    "an encoder": altered("bert", "bidirectional"),
    "a bidirectional decoder": altered("gemma3_text", "bidirectional", use_bidirectional_attention=True),
    "encoder and decoder": (functools.partial(of_class, AutoModelForSeq2SeqLM, "t5", **T5), "t5", "encoder-decoder"),
    "no head": (functools.partial(of_class, AutoModel, "llama", **zoo.COMMON), "llama", NO_MODEL),
    "a classifier": (functools.partial(of_class, CLASSIFIER, "llama", **zoo.COMMON), "llama", "not a causal"),
    "flash 2": (functools.partial(with_backend, "flash_attention_2"), "llama", SDPA),
    "flash 3": (functools.partial(with_backend, "flash_attention_3"), "llama", SDPA),
    "flash, softcapped": (functools.partial(with_backend, "flash_attention_2", "gemma2"), "gemma2", 'ation="eager"'),
    "flex": (functools.partial(with_backend, "flex_attention"), "llama", SDPA),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    """One line that names the model type and the reason, and whatever can be done about it."""
    make, model_type, reason = CASES[case]
    with pytest.raises(ModelError) as caught:
        describe(make())
    assert str(caught.value).startswith(f"a model of type {model_type} cannot be served: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_kind_of_layer_is_refused() -> None:
    model = zoo.FAMILIES["qwen2"]()
    model.config.layer_types = ["full_attention", "spiral_attention"] * 2
    with pytest.raises(ModelError, match=r"qwen2 .*eyas has no mask for layers of kind spiral_attention"):
        describe(model)


def test_language_model_inside_a_multimodal_one() -> None:
    """The 4B and larger Gemma 3 checkpoints load as image-and-text models, with the decoder one level deeper."""
    text = zoo.FAMILIES["gemma3"]().config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": zoo.LAYERS, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    family = describe(model)
    assert (family.mask_kinds, family.window, len(family.layers)) == (BOTH, zoo.WINDOW, zoo.LAYERS)
    assert family.layers is model.get_decoder().layers
    assert max(head_gap(model, family), plain_gap(model, family)) < 1e-5
    assert tree_gap(model, family) < 1e-4


def test_eager_takes_the_same_masks() -> None:
    """Both backends read additive masks; a boolean one would be silently wrong in eager attention."""
    model = zoo.tiny("mistral", eager=True, sliding_window=zoo.WINDOW)
    assert plain_gap(model, describe(model)) < 1e-5


@pytest.mark.parametrize("name", ["past_key_values", "cache_params", "cache"])
def test_the_name_of_a_forwards_cache(name: str) -> None:
    """Bug: transformers 5.24 calls a cache `cache`, and warned of the older name at every load."""
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, input_ids, {name}=None): ...", namespace)
    module = type("Base", (torch.nn.Module,), {"forward": namespace["forward"]})()
    assert cache_argument_of(module) == name
