"""DFlash heads as z-lab publishes them, and as vLLM and SGLang read them.

    config.json     architectures ["DFlashDraftModel"], a Qwen3 config, block_size, num_target_layers; `dflash_config` with mask_token_id
                    and target_layer_ids (the OUTPUT of layer i; -1: the embeddings), and in some heads block_size
    tensors         fc, hidden_norm, layers.i.* with q_norm and k_norm, norm; no embeddings and no lm_head: the target's are used

DFlash 2 has the architecture ["DFlash2DraftModel"], conv_kernel_size, conv_group_size, selector_rank and selector_top_k, and
the tensors layers.i.{attention,mlp}_conv.* and candidate_selector.*. Layers may have sliding windows; embeddings and logits may
be scaled (input_embedding_scale, output_multiplier, final_logit_softcapping).

Slot i of a block predicts the token at its own place, unless config.json has "sample_from_anchor":
true. Our config and our tensor names: see `_block`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._block import CLASSES, DFLASH, DFLASH2, is_block_head, read_common, read_tensors
from eyas.checkpoints._eagle3 import architecture
from eyas.checkpoints._llama import mapping
from eyas.checkpoints.dspark import looks_like_dspark
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a block head without DSpark's parts."""
    return is_block_head(config, names) and not looks_like_dspark(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("dflash" or "dflash2", our config, our tensors) of a published head. A CheckpointError names all that does
    not fit."""
    inner, name = mapping(config, "dflash_config"), architecture(config)
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
    named = {name.removesuffix(".weight") if name.endswith(suffix) else name: value for name, value in tensors.items()}
    return method, ours, read_tensors(ours, named, False, {**config, **inner})
