"""Block heads in their authors' forms: z-lab's of DFlash and DFlash 2, DeepSpec's of DSpark; vLLM and SGLang read them too.

docs/reference/head_formats.md lists the contents of config.json and the tensors. Our config and our tensor
names: see `_block`.

Slot i of a DFlash block predicts the token at its own place unless config.json has "sample_from_anchor": true.
A slot of a DSpark block predicts the next token, as in DeepSpec's code. For another class config.json must say
so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._block import (
    CLASSES,
    DFLASH,
    DFLASH2,
    dspark_parts,
    is_block_head,
    read_common,
    read_tensors,
)
from eyas.checkpoints._eagle3 import architecture
from eyas.checkpoints._llama import mapping
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]

_NO_DSPARK = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a block head of an author's."""
    return is_block_head(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return method, config and tensors of a published block head (z-lab's forms). Raise CheckpointError for other
    classes."""
    inner, name = mapping(config, "dflash_config"), architecture(config)
    merged = {**config, **inner}
    if "DSpark" in name or any(part.startswith(("markov_head.", "confidence_head.")) for part in tensors):
        parts = dspark_parts(merged, _NO_DSPARK)
        ours = read_common(config, inner) | parts
        return "dspark", ours, read_tensors(ours, tensors, True, merged)
    if name in CLASSES and name not in (DFLASH, DFLASH2):
        raise CheckpointError(
            f"this is a head of the class {name}; of DFlash's kind, heads of {DFLASH} and {DFLASH2} are read"
        )
    if inner.get("projector_type") not in (None, "dflash"):
        raise CheckpointError(
            f"config.json has projector_type {inner['projector_type']!r}, and its part of the net is not computed here"
        )
    ours = read_common(config, inner)
    method = "dflash2" if name == DFLASH2 else "dflash"
    second = bool(ours["taps"] and ours["selector_rank"])
    if second != (method == "dflash2"):
        raise CheckpointError(
            f"config.json has the class {name}, and {'' if second else 'not '}the convolutions and the selector of {DFLASH2}"
        )
    suffix = "_codebook.weight"  # transformers saves the tables of the selector under this name
    named = {part.removesuffix(".weight") if part.endswith(suffix) else part: value for part, value in tensors.items()}
    return method, ours, read_tensors(ours, named, False, merged)
