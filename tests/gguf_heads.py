"""Published heads as llama.cpp's converter writes them into GGUF files; tests/interop compares with it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import zoo
from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.checkpoints._files import read_config, read_tensors
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import find
from reference import plain_decode, run

LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}, **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection": "ffn_conv_proj",
    "mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{shared}.{x}_proj": f"ffn_{x}_shexp" for shared in ("shared_expert", "shared_experts") for x in ("gate", "up", "down")},
}  # fmt: skip
OUTER = {
    "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "confidence_head.proj": "conf_proj",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "head_dim": "attention.key_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "vocab_size": "vocab_size",
}  # fmt: skip
NUMBERS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
Parts = tuple[dict[str, Tensor], dict[str, Any]]


def write(
    path: Path, architecture: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], quantised: tuple[str, ...] = ()
) -> Path:  # fmt: skip
    """Write a file. Keys of settings that have no dot belong to the architecture; `quantised` tensors get eight bits."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        add(writer, key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.detach().numpy())
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(data.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all heads have, from a LLaMA config.json."""
    found = {theirs: config[ours] for ours, theirs in SIZES.items() if ours in config}
    found |= {theirs: float(config[ours]) for ours, theirs in NUMBERS.items() if ours in config}
    return {"block_count": config.get("num_hidden_layers", 1), **found}


def eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: list[int]) -> Parts:
    """An EAGLE-3 head in vLLM's form -> tensors and settings of a file; `layers` as the converter has them, inputs."""
    settings = {**sizes(config), "target_layers": layers, "target_hidden_size": config["hidden_size"]}
    settings |= {key: config.get(key, False) for key in ("norm_before_residual", "norm_before_fc")}
    made = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name == "d2t":
            made["d2t"] = tensor + torch.arange(len(tensor))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            made[renamed(name, "post_attention_layernorm", "ffn_norm")] = in_pairs(tensor, heads)
        elif name != "t2d":
            theirs = name.replace("input_norm", "enc.output_norm")
            made[renamed(theirs, "post_attention_layernorm", "ffn_norm")] = tensor
    return made, settings


def block(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A block head in z-lab's or DeepSpec's form -> tensors and settings of a file."""
    merged = {**config, **config.get("dflash_config", {})}
    settings = {**sizes(config), "block_size": merged["block_size"]}
    settings["tokenizer.ggml.mask_token_id"] = merged["mask_token_id"]
    settings["target_layers"] = [layer + 1 for layer in merged["target_layer_ids"]]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        settings |= {key: merged[key]} if key in merged else {}
    if merged.get("use_sliding_window"):
        settings["attention.sliding_window"] = merged["sliding_window"]
        settings["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in merged["layer_types"]]
    if merged.get("is_causal") is not None:
        settings["attention.causal"] = merged["is_causal"]
    if "markov_head.markov_w1.weight" in tensors:
        settings["sample_from_anchor"] = merged["sample_from_anchor"]
    made = {
        renamed("enc.output_norm.weight" if name == "hidden_norm.weight" else name, "post_attention_layernorm", "ffn_norm"): tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    return made, settings


def module(architecture: str, tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """An MTP module as eyas writes it (layers.0.*) -> the tensors behind a target's layers in a file."""
    made = dict[str, Tensor]()
    for name, tensor in tensors.items():
        inner = name.removeprefix("layers.0.")
        value = tensor + 1 if architecture != "glm4moe" and name.endswith("norm.weight") else tensor
        part = inner.removeprefix("mtp_block.")
        if part == "mlp.experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            made |= {f"blk.{layers}.ffn_gate_exps.weight": gate, f"blk.{layers}.ffn_up_exps.weight": up}
        elif part == inner:
            made[f"blk.{layers}.nextn.{inner.replace('post_norm', 'shared_head_norm')}"] = value
        else:
            made[renamed(f"layers.{layers}.{part}", "post_attention_layernorm", "post_attention_norm")] = value
    return made


def in_a_fork(parts: Parts, architecture: str) -> Parts:
    """The same head as forks of llama.cpp write it: no tokens, other names, layers as outputs."""
    fork, inner = ("dspark.", "dspark") if architecture == "dspark" else ("dflash_", "dflash")
    changed = {"fc.": f"{fork}fc.", "enc.output_norm.": f"{fork}hidden_norm."}
    if architecture == "dspark":
        changed |= {"markov_w1.": "dspark.markov_head_a.", "markov_w2.": "dspark.markov_head_b."}
        changed |= {"conf_proj.": "dspark.confidence_head."}
    else:
        changed |= {".ffn_norm.": ".post_attention_norm."}
    tensors, settings = dict[str, Tensor](), dict(parts[1])
    for name, tensor in parts[0].items():
        before = next((part for part in changed if name.startswith(part) or (part[0] == "." and part in name)), "")
        tensors[name.replace(before, changed[before]) if before else name] = tensor
    for name in ("vocab_size", "context_length", "sample_from_anchor"):
        settings.pop(name, None)
    settings[f"{inner}.mask_token_id"] = settings.pop("tokenizer.ggml.mask_token_id")
    settings[f"{inner}.block_size"] = settings.pop("block_size")
    told = f"{inner}.target_layers" if architecture == "dspark" else f"{inner}.target_layer_ids"
    settings[told] = [layer - 1 for layer in settings.pop("target_layers")]
    return tensors, settings


def renamed(name: str, after: str, norm: str) -> str:
    """Return the name that llama.cpp gives to a published tensor; the norm called `after` becomes `norm`."""
    stem, _, kind = name.rpartition(".")
    table = {**LAYER, after: norm}
    if stem.startswith("layers."):
        _, number, rest = (stem if kind in ("weight", "bias") else name).split(".", 2)
        short = table[rest]
        return f"blk.{number}.{short}.{kind}" if kind in ("weight", "bias") else f"blk.{number}.{short}"
    return f"{OUTER.get(stem, stem)}.{kind}" if kind in ("weight", "bias") else OUTER.get(name, name)


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows for a RoPE that turns neighbouring channels, by the converter's words: reshape, swap, reshape."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


# --- heads of tests, and what they are compared by --------------------------------------------------

SMALL = {"head.layers": "1,2", "head.depth": 2, "head.block": 5}
SECOND = {"head.taps": 3, "head.channels": 8, "head.selector_rank": 6, "head.candidates": 5}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", SMALL, {}),
    "windows": ("dflash", SMALL, {"windows": (None, 7), "causal": (False, True)}),
    "windows both ways": ("dflash", SMALL, {"windows": (None, 7), "causal": ()}),
    "dflash2": ("dflash2", {**SMALL, **SECOND}, {}),
    "dspark": ("dspark", {**SMALL, "head.markov_rank": 8}, {}),
}
MODULES = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe", "qwen3next": "qwen3_next", "glm4moe": "glm4_moe"}


def eagle3_of(target: Target, **changes: Any) -> Weights:
    kind = find("eagle3")
    options = build_options(kind.Options, {"head.layers": "0,1,3", "head.draft_vocab": 40})
    made = kind.random(target, options, seed=1).weights()
    return dataclasses.replace(made, config={**made.config, **changes})


def block_parts(target: Target, folder: Path, name: str) -> tuple[Weights, Parts]:
    """A head in a folder, and its parts for a file."""
    method, options, changes = BLOCKS[name]
    kind = find(method)
    made = kind.random(target, build_options(kind.Options, options), seed=1).weights()
    made.config.update({"embed_scale": 1.0, "logit_scale": 1.0, **changes})
    checkpoints.save(made, folder)
    return checkpoints.load(folder), block(read_config(folder), read_tensors(folder))


def assert_same(read: Weights, made: Weights, atol: float = 0.0) -> None:
    assert read.method == made.method
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        torch.testing.assert_close(read.tensors[name], tensor, rtol=0, atol=atol, msg=name)


def texts(target: Target, draft: Path, method: str) -> tuple[Any, Any]:
    """Return the texts and what each step accepted, after comparing the texts with plain decoding."""
    laws = (Sampling(), Sampling(1.0, seed=3))
    requests = [Request(tuple(range(5, 5 + n)), 14, law) for n, law in zip((4, 21), laws, strict=True)]
    drafter = find(method).from_pretrained(draft, target)
    tokens, steps = run(Decoder(target, drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]
    return tokens, [(step.request_id, step.tokens, step.path) for step in steps]


def family_of(name: str) -> Any:
    if name == "glm4_moe":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        return zoo.tiny(name, first_k_dense_replace=1, **experts)
    return zoo.HYBRIDS[name]()
