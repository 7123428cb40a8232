"""Small EAGLE-3 heads as each writer publishes them, by names that are written out: a swapped pair of the code shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.checkpoints import Weights, load
from eyas.errors import CheckpointError

Head = tuple[dict[str, Any], dict[str, Tensor]]

D, HEADS, KV, WIDTH, INNER, V = 8, 4, 2, 2, 12, 20
IDS = [0, 3, 4, 9, 10, 17, 18]  # the target's ids of the draft tokens

LAYER: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": D, "intermediate_size": INNER, "vocab_size": V, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "num_hidden_layers": 40,  # as published Vicuna heads have it: not to be trusted
}  # fmt: skip

IN_THE_LAYER = {
    "input_layernorm.weight": "layer.embed_norm.weight",
    "hidden_norm.weight": "layer.hidden_norm.weight",
    "post_attention_layernorm.weight": "layer.mlp_norm.weight",
    **{f"self_attn.{x}_proj.weight": f"layer.attention.{x}.weight" for x in "qkvo"},
    **{f"mlp.{x}_proj.weight": f"layer.mlp.{x}.weight" for x in ("gate", "up", "down")},
}
AROUND = {"fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.weight"}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64


def maps(ids: list[int] = IDS) -> dict[str, Tensor]:
    """d2t and t2d, by the book."""
    marks = torch.zeros(V, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": torch.tensor([full - draft for draft, full in enumerate(ids)]), "t2d": marks}


def tensors(layer: str = "midlayer", features: int = 3 * D, vocab: int = len(IDS)) -> dict[str, Tensor]:
    """Random weights of a head whose layer has this name, and the maps of a smaller vocabulary."""
    made = torch.Generator().manual_seed(0)
    rows = {"q": HEADS * WIDTH, "k": KV * WIDTH, "v": KV * WIDTH}
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (D, features), "norm.weight": (D,), "lm_head.weight": (vocab, D)}
    sizes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    sizes |= {f"{layer}.self_attn.{x}_proj.weight": (size, 2 * D) for x, size in rows.items()}
    sizes |= {f"{layer}.self_attn.o_proj.weight": (D, HEADS * WIDTH), f"{layer}.mlp.down_proj.weight": (D, INNER)}
    sizes |= {f"{layer}.mlp.{x}_proj.weight": (INNER, D) for x in ("gate", "up")}
    held = {name: torch.randn(size, generator=made) for name, size in sizes.items()}
    return held | (maps() if vocab == len(IDS) else {})


def without(held: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in names}


# Small heads as each writer publishes them.


def of_class(name: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [name], **LAYER, "draft_vocab_size": len(IDS), **changes}


def safeailab(**changes: Any) -> Head:
    return of_class("LlamaForCausalLM", **changes), tensors()


def specforge(**changes: Any) -> Head:
    return of_class("LlamaForCausalLMEagle3", **{"bias": False, **changes}), tensors()


def modelopt(ids: list[int] | None = None, **changes: Any) -> Head:
    flags = {
        "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
    }  # fmt: skip
    config = of_class("LlamaForCausalLMEagle3", mlp_bias=False, attention_bias=False)
    inner = {"eagle_aux_hidden_state_layer_ids": ids or [1, 5, 9], **flags}
    return {**config, "eagle_config": inner, **changes}, without(tensors("layers.0"), "t2d")


def vllm(**changes: Any) -> Head:
    return of_class("Eagle3LlamaForCausalLM", **changes), tensors("layers.0")


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> Head:
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/model"}},
        "transformer_layer_config": {"model_type": "llama", **LAYER, "head_dim": WIDTH, **(layer or {})},
        "draft_vocab_size": len(IDS),
        **dict.fromkeys(("target_hidden_size", "eagle_aux_hidden_state_layer_ids")),
        **dict.fromkeys(
            ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"), False
        ),
    }
    return {**config, **changes}, {**tensors("layers.0"), "embed_tokens.weight": torch.randn(V, D)}


FORMS = {"safeailab3": safeailab} | {make.__name__: make for make in (specforge, modelopt, vllm, speculators)}
FILES = {form: "eagle3" for form in FORMS} | {form: form for form in ("safeailab3", "speculators")}


def put(folder: Path, head: Head) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head[0]))
    save_file(head[1], folder / "model.safetensors")
    return folder


def read(folder: Path, head: Head, **held: Any) -> Weights:
    """The head as `load` gives it, with some tensors changed; None takes one away."""
    changed = {name: tensor for name, tensor in {**head[1], **held}.items() if tensor is not None}
    return load(put(folder, (head[0], changed)))


def refused(folder: Path, head: Head, says: str, **held: Any) -> str:
    with pytest.raises(CheckpointError, match=says) as caught:
        read(folder, head, **held)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def further(number: int) -> dict[str, Tensor]:
    """Random weights of a layer behind the first, with the norm over the hidden state that only vLLM's class has."""
    of_first = {name: value for name, value in tensors("layers.0").items() if name.startswith("layers.0.")}
    held = {name.replace("layers.0", f"layers.{number}"): torch.randn_like(value) for name, value in of_first.items()}
    for name in (f"layers.{number}.self_attn.{x}_proj.weight" for x in "qkv"):
        held[name] = torch.randn(held[name].shape[0], D)
    return held


def deep(form: str, count: int = 3, **changes: Any) -> Head:
    """A head of several layers."""
    config, held = FORMS[form]()
    sizes = {"num_hidden_layers": count, **changes}
    if form == "speculators":
        sizes = {"transformer_layer_config": {**config["transformer_layer_config"], **sizes}}
    config = {**config, **sizes}
    for number in range(1, count):
        more = further(number)
        held = held | (more if form == "vllm" else without(more, f"layers.{number}.hidden_norm.weight"))
    return config, held
