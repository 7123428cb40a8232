"""EAGLE-3 heads in the forms of SGLang (SpecForge, ModelOpt), vLLM and DeepSpec, known by their architecture.

docs/reference/head_formats.md lists the contents of config.json and the tensors. Our config and our tensor
names: see `_eagle3`.

Heads of several layers are refused in SGLang's form, because engines disagree about this architecture. A
version of SGLang computes the layers after the first without the residual of the preceding layer and norms
their input by hidden_norm. vLLM computes them as plain LLaMA layers. In DeepSpec's form each layer reads the
embedding again, which is not computed here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import (
    DEEPSPEC,
    IDS,
    SGLANG,
    VLLM,
    architecture,
    assemble,
    is_parallel,
    layer_ids,
    read_flat,
)
from eyas.checkpoints._llama import flag, mapping
from eyas.errors import CheckpointError

__all__ = ["read", "read_vllm", "recognises", "vllm_settings"]

_OLDER = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
_Head = tuple[dict[str, Any], dict[str, Tensor]]


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names one of the three classes."""
    is_library = "speculators_model_type" in config or is_parallel(config, names)
    return architecture(config) in _READERS and not is_library


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return method, config and tensors of an EAGLE-3 head, by the class that its config names."""
    return "eagle3", *_READERS[architecture(config)](config, tensors)


def _read_sglang(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    inner = mapping(config, "eagle_config")
    if (config.get("norm_output") or inner.get("norm_output")) and mapping(config, "eyas").get("carries") is None:
        raise CheckpointError(
            "config.json has norm_output, which has two meanings. SpecForge trained with the state before the final norm carried on (until "
            "its pull request 879), but SGLang and vLLM carry the normed one. Say which by adding "
            '"eyas": {"carries": "raw"} or {"carries": "normed"}'
        )
    meaning = "output" if inner.get(IDS) is not None else None
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix("model.")
        for older, newer in _OLDER.items():
            new = newer + new.removeprefix(older) if new.startswith(older) else new
        if new in renamed:
            raise CheckpointError(f"the file holds {new} under two names: remove one")
        renamed[new] = tensor
    return read_flat(config, renamed, meaning, "raw", several=False)


def read_vllm(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    """Return our config and our tensors of a head in vLLM's form."""
    normed = flag(config, "norm_output", False) or flag(mapping(config, "eagle_config"), "norm_output", False)
    unused = re.compile(
        r"layers\.[1-9]\d*\.hidden_norm\.weight"
    )  # loaded by vLLM's class for later layers, and not used
    used = {name: tensor for name, tensor in tensors.items() if not unused.fullmatch(name)}
    return read_flat(config, used, "input", "normed" if normed else "raw")


def _read_deepspec(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    if config.get("target_layer_ids") is None:
        raise CheckpointError("config.json has no target_layer_ids, the layers whose outputs the head reads")
    settings = {**layer_ids(config, config["target_layer_ids"], "output"), "qk_norm": True}
    return assemble(config, tensors, settings, ("layers.0",), mapping(config, "eyas"), several=False)


_READERS = {SGLANG: _read_sglang, VLLM: read_vllm, DEEPSPEC: _read_deepspec}


def vllm_settings(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys by which vLLM's form differs from a LLaMA config.json, for our complete config."""
    found: dict[str, Any] = {key: True for key in ("norm_before_fc", "fc_norm", "norm_before_residual") if ours[key]}
    if ours["carries"] == "normed":
        found["norm_output"] = True
    if ours["target_hidden_size"] != ours["hidden_size"]:
        found["target_hidden_size"] = ours["target_hidden_size"]
    if ours["feature_layers"]:
        found |= {IDS: list(ours["feature_layers"]), "num_aux_hidden_states": ours["num_features"]}
    return {"architectures": [VLLM], "draft_vocab_size": ours["draft_vocab_size"], **found}
