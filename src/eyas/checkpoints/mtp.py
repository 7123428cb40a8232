"""Multi-token-prediction modules that eyas trained, as heads of their own. Published modules are in the checkpoints of their
targets, where transformers' `MtpModel` reads them; this form is ours, with that class's names
(docs/reference/head_formats.md). Embeddings and lm_head are the target's.

Our config: target_model_type (of the target, whose layer class the module has), hidden_size, vocab_size, max_positions, and
eyas, the writer's record. Our tensors: the names of `drafters._mtp_net.Net`: module.* for layers.0.*, shared_norm.* for
shared_post_norm.*.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._llama import count, mapping, text
from eyas.checkpoints._weights import Published, refuse_dtypes
from eyas.errors import CheckpointError

__all__ = ["METHODS", "MODEL_TYPE", "read", "recognises", "write"]

METHODS = ("mtp",)
MODEL_TYPE = "eyas_mtp"
PREFIXES = {"layers.0.": "module.", "shared_post_norm.": "shared_norm."}  # theirs -> ours


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether eyas trained the MTP module that config.json describes."""
    return config.get("model_type") == MODEL_TYPE


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("mtp", our config, our tensors) of a head as it was written. A CheckpointError names all that does
    not fit."""
    refuse_dtypes(tensors)
    ours = {
        "target_model_type": text(config, "target_model_type"),
        "hidden_size": count(config, "hidden_size"),
        "vocab_size": count(config, "vocab_size"),
        "max_positions": count(config, "max_position_embeddings"),
        "eyas": mapping(config, "eyas"),
    }
    return "mtp", ours, _rename(tensors, PREFIXES)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors of an MTP module in eyas' own form."""
    assert method in METHODS, method
    published = {
        "model_type": MODEL_TYPE,
        "target_model_type": config["target_model_type"],
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_positions"],
        "eyas": config["eyas"],
    }
    return published, _rename(tensors, {ours: theirs for theirs, ours in PREFIXES.items()})


def _rename(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors under names with the other prefix; raise CheckpointError for a name with none of these
    prefixes."""
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            raise CheckpointError(f"unexpected tensor {name}: names begin with {' or '.join(prefixes)}")
        renamed[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return renamed
