"""Medusa heads as their authors publish them, and as TGI, Axolotl and TensorRT-LLM read or write them.

    config.json     medusa_num_heads, medusa_num_layers (residual blocks of a head), base_model_name_or_path
    file            medusa_lm_head.safetensors or medusa_lm_head.pt: the heads alone, not the model below them
    tensors         {head}.{block}.linear.weight [D, D] and .bias [D]; {head}.{medusa_num_layers}.weight [V, D], the head's own lm_head.
                    TGI's "version 2" has no such lm_heads: all heads use the target's

Heads are counted in the file: published Vicuna heads hold five, and their config.json says two. A
config that says more than the file holds is refused. The width and the vocabulary are read off the
tensors' shapes, as config.json does not have them.

Our config, which `read` returns and `write` takes:

    heads, blocks      int: heads, and residual blocks of each
    hidden_size        int
    vocab_size         int; None where the file has no lm_head that tells it
    output             "own" or "target": whose lm_head gives the heads' logits
    base_model         str, "" when absent: the target's name where the head was trained; not checked
    eyas               only in heads written by eyas: the writer's record

Models that were fine-tuned together with their heads (Medusa-2) are whole models and are refused:
their text is not the base model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published, Shape, count, differences, refuse_dtypes, text
from eyas.errors import CheckpointError

__all__ = ["EXPORTS", "FILE", "METHODS", "NAME", "export", "read", "recognises", "shapes", "usage", "write"]

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

METHODS = EXPORTS = ("medusa",)
NAME = "medusa"
FILE = "medusa_lm_head.safetensors"

_HEAD = re.compile(r"(\d{1,6})\.\d+\.(linear\.)?(weight|bias)")


def recognises(config: Config, names: Collection[str]) -> bool:
    """Return whether config.json counts Medusa heads."""
    return "medusa_num_heads" in config


def read(config: Config, tensors: Tensors) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("medusa", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    if any(name.startswith(("model.", "lm_head.", "medusa_head.", "base_model.")) for name in tensors):
        raise CheckpointError(
            "this file holds a whole model with its heads (Medusa-2), or the heads under other names; "
            f"give the heads alone, as {FILE} with names like 0.0.linear.weight"
        )
    ours = _read_config(config, tensors)
    names, our_shapes = _names(ours), shapes(ours)
    faults = differences(tensors, {published: our_shapes[name] for published, name in names.items()})
    if faults:
        raise CheckpointError(f"the tensors differ from config.json: {faults}")
    refuse_dtypes(tensors)
    return "medusa", ours, {names[published]: tensor for published, tensor in tensors.items()}


def _read_config(config: Config, tensors: Tensors) -> dict[str, Any]:
    promised, blocks = count(config, "medusa_num_heads"), count(config, "medusa_num_layers")
    heads = 1 + max((int(match[1]) for name in tensors if (match := _HEAD.fullmatch(name))), default=-1)
    if heads < promised:
        raise CheckpointError(f"config.json says medusa_num_heads {promised}, the file holds {heads}")
    if heads * blocks > len(tensors):
        raise CheckpointError(f"the file holds {len(tensors)} tensors, too few for {heads} heads of {blocks} blocks")
    first, output = tensors.get("0.0.linear.weight"), tensors.get(f"0.{blocks}.weight")
    if first is None or first.ndim != 2:
        raise CheckpointError("there is no matrix 0.0.linear.weight, which tells the width of the heads")
    ours = {
        "heads": heads,
        "blocks": blocks,
        "hidden_size": first.shape[0],
        "vocab_size": None if output is None or not output.ndim else output.shape[0],
        "output": "target" if output is None else "own",
        "base_model": text(config, "base_model_name_or_path"),
    }
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write(method: str, config: Config, tensors: Tensors) -> Published:
    """Return config.json and the tensors as published."""
    assert method in METHODS, method
    faults = differences(tensors, shapes(config))
    assert not faults, faults
    published = {
        "medusa_num_heads": config["heads"],
        "medusa_num_layers": config["blocks"],
        "base_model_name_or_path": config["base_model"],
    }
    if config["output"] == "target":
        published["version"] = "2"
    if "eyas" in config:
        published["eyas"] = config["eyas"]
    return published, {name: tensors[ours] for name, ours in _names(config).items()}


def export(method: str, config: Config, tensors: Tensors, target: ExportTarget) -> Published:
    """Return the result of `write`; the target's name is added where it was not recorded."""
    return write(method, {**config, "base_model": target.name or config["base_model"]}, tensors)


def usage(method: str, config: Config, folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which other engines run the head."""
    return [
        f'MedusaModel.from_pretrained("{folder}")  # the authors\' code',
        f"text-generation-launcher --model-id {folder}",
    ]


def shapes(config: Config) -> dict[str, Shape]:
    """Return our tensor names and their shapes, from our config."""
    D = config["hidden_size"]
    out: dict[str, Shape] = {}
    for k in range(config["heads"]):
        for j in range(config["blocks"]):
            out |= {f"blocks.{k}.{j}.weight": (D, D), f"blocks.{k}.{j}.bias": (D,)}
        if config["output"] == "own":
            out[f"lm_head.{k}.weight"] = (config["vocab_size"], D)
    return out


def _names(config: Config) -> dict[str, str]:
    """Return our name of each published tensor."""
    names = {}
    for ours in shapes(config):
        part, k, *rest = ours.split(".")
        published = f"{k}.{rest[0]}.linear.{rest[1]}" if part == "blocks" else f"{k}.{config['blocks']}.weight"
        names[published] = ours
    return names
