"""The format in which the authors of Medusa publish their heads (and TGI, Axolotl and TensorRT-LLM read or write them).

    config.json     medusa_num_heads, medusa_num_layers (residual blocks of a head), base_model_name_or_path
    file            medusa_lm_head.safetensors or medusa_lm_head.pt: the heads alone, not the model below them
    tensors         {head}.{block}.linear.weight [D, D] and .bias [D]; {head}.{medusa_num_layers}.weight [V, D], the head's own lm_head.
                    TGI's "version 2" has no such lm_heads: all heads speak through the target's

The number of heads is that of the file: published Vicuna heads hold five, and their config.json says two. A config that says more than
the file holds is refused. The width and the vocabulary stand nowhere but in the tensors' shapes.

Our config, which `read` makes and `write` takes:

    heads, blocks      int: heads, and residual blocks of each
    hidden_size        int
    vocab_size         int, or None where the file cannot tell: no lm_head of its own
    output             "own" or "target": whose lm_head the heads speak through
    base_model         str, "" when absent: the target's name where the head was made; not checked
    eyas               only in heads that we wrote: a dict with what the writer recorded

Models that were fine-tuned together with their heads (Medusa-2) are whole models and are refused: their text is not the base model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._llama import count
from eyas.checkpoints._weights import Shape, differences
from eyas.errors import CheckpointError

__all__ = ["FILE", "METHODS", "read", "recognises", "shapes", "write"]

METHODS = ("medusa",)
FILE = "medusa_lm_head.safetensors"

_HEAD = re.compile(r"(\d+)\.\d+\.(linear\.)?(weight|bias)")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether config.json counts Medusa heads."""
    return "medusa_num_heads" in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("medusa", our config, our tensors); CheckpointError names all that is not as the format says."""
    if any(name.startswith(("model.", "lm_head.", "medusa_head.", "base_model.")) for name in tensors):
        raise CheckpointError(
            "this file holds a whole model with its heads (Medusa-2), or the heads under other names; "
            f"give the heads alone, as {FILE} with names like 0.0.linear.weight"
        )
    ours = _read_config(config, tensors)
    names = _names(ours)
    wanted = {published: shapes(ours)[name] for published, name in names.items()}
    found = differences(tensors, wanted)
    if found:
        raise CheckpointError(f"the tensors are not what config.json says: {found}")
    integer = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if integer:
        raise CheckpointError(f"tensors that are not floating point: {', '.join(integer)}; quantised heads are not read")
    return "medusa", ours, {names[published]: tensor for published, tensor in tensors.items()}


def _read_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    said, blocks = count(config, "medusa_num_heads"), count(config, "medusa_num_layers")
    heads = 1 + max((int(found[1]) for name in tensors if (found := _HEAD.fullmatch(name))), default=-1)
    if heads < said:
        raise CheckpointError(f"config.json says medusa_num_heads {said}, the file holds {heads}")
    first, output = tensors.get("0.0.linear.weight"), tensors.get(f"0.{blocks}.weight")
    if first is None or first.ndim != 2:
        raise CheckpointError("there is no matrix 0.0.linear.weight, from which the width of the heads would be told")
    base = config.get("base_model_name_or_path") or ""
    if not isinstance(base, str):
        raise CheckpointError(f"config.json has base_model_name_or_path {base!r}; it must be a name")
    ours = {
        "heads": heads, "blocks": blocks, "hidden_size": first.shape[0], "vocab_size": None if output is None else output.shape[0],
        "output": "target" if output is None else "own", "base_model": base,
    }  # fmt: skip
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our config and tensors -> config.json and tensors as published."""
    assert method in METHODS, method
    found = differences(tensors, shapes(config))
    assert not found, found
    published = {
        "medusa_num_heads": config["heads"], "medusa_num_layers": config["blocks"], "base_model_name_or_path": config["base_model"],
    }  # fmt: skip
    if config["output"] == "target":
        published["version"] = "2"
    if "eyas" in config:
        published["eyas"] = config["eyas"]
    return published, {name: tensors[ours] for name, ours in _names(config).items()}


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Our tensor names and their shapes, from our config."""
    D, out = config["hidden_size"], dict[str, Shape]()
    for k in range(config["heads"]):
        for j in range(config["blocks"]):
            out |= {f"blocks.{k}.{j}.weight": (D, D), f"blocks.{k}.{j}.bias": (D,)}
        if config["output"] == "own":
            out[f"lm_head.{k}.weight"] = (config["vocab_size"], D)
    return out


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Published tensor name -> ours."""
    names = {}
    for ours in shapes(config):
        part, k, *rest = ours.split(".")
        published = f"{k}.{rest[0]}.linear.{rest[1]}" if part == "blocks" else f"{k}.{config['blocks']}.weight"
        names[published] = ours
    return names
