"""DSpark heads as DeepSpec publishes them (deepseek-ai), and as vLLM and SGLang read them.

    config.json     architectures ["Qwen3DSparkModel"], a Qwen3 config, block_size, mask_token_id, target_layer_ids (the OUTPUT of layer i;
                    -1: the embeddings), markov_rank, markov_head_type, enable_confidence_head, confidence_head_with_markov. Older heads
                    have the class DSparkDraftModel and these keys in `dflash_config`; heads for LFM2.5 have Lfm2DSparkDraftModel
                    and "rope_is_neox_style": false
    tensors         those of DFlash heads (`dflash`); markov_head.markov_w1 and markov_w2 [V, r], if markov_rank; confidence_head.proj;
                    embed_tokens and lm_head, copies of the target's, which may be absent

Slot i of a block predicts the next token: DeepSpec's code knows no other way. For another class
config.json must say so with "sample_from_anchor". Gated and recurrent Markov heads, and layers
other than Qwen3's, are refused by name. Our config and our tensor names: see `_block`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._block import is_block_head, read_common, read_tensors
from eyas.checkpoints._eagle3 import architecture
from eyas.checkpoints._llama import flag, mapping
from eyas.core.params import is_whole
from eyas.errors import CheckpointError

__all__ = ["looks_like_dspark", "read", "recognises"]


def looks_like_dspark(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a block head has DSpark's class or DSpark's parts."""
    return "DSpark" in architecture(config) or any(
        name.startswith(("markov_head.", "confidence_head.")) for name in names
    )


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a block head with DSpark's parts."""
    return is_block_head(config, names) and looks_like_dspark(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("dspark", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    inner = mapping(config, "dflash_config")
    merged = {**config, **inner}
    rank = merged.get("markov_rank", 0)
    if not is_whole(rank) or not 0 <= rank < 2**31:
        raise CheckpointError(f"config.json has markov_rank {rank!r}; it must be a whole number, 0 or more")
    if rank and merged.get("markov_head_type") != "vanilla":
        raise CheckpointError(
            f"config.json has markov_head_type {merged.get('markov_head_type')!r}; those of type 'vanilla' are read"
        )
    confident = flag(merged, "enable_confidence_head", False)
    with_markov = confident and flag(merged, "confidence_head_with_markov", False)
    if with_markov and not rank:
        raise CheckpointError("config.json has a confidence head that reads the Markov head, and markov_rank 0")
    ours = {**read_common(config, inner), "markov_rank": rank}
    ours["confidence"] = "none" if not confident else "hidden+markov" if with_markov else "hidden"
    return "dspark", ours, read_tensors(ours, tensors, True, merged)
