"""EAGLE-3 heads as SGLang serves them, also written by SpecForge, ModelOpt and others.

    config.json     architectures ["LlamaForCausalLMEagle3"], a LLaMA config, draft_vocab_size (null: the target's), `eagle_config` with
                    eagle_aux_hidden_state_layer_ids (the OUTPUT of layer i, so our i + 1; absent: inputs of 2, L//2, L-3) and ModelOpt's
                    flags; bias (of fc, false when absent), target_hidden_size, num_aux_hidden_states, norm_before_fc, norm_before_residual,
                    fc_norm (older: use_aux_norm), norm_output
    tensors         as in SafeAILab's EAGLE-3, or with layers.0 for midlayer; ModelOpt has no t2d; lm_head may be absent where the
                    vocabulary is the target's; fc_norm.i or aux_norm_{low,mid,high}; input_norm; all possibly prefixed with "model."

Heads of several layers are refused: a version of SGLang computes the layers
after the first without the residual of the one before and norms their input by hidden_norm, vLLM
computes them as plain LLaMA layers, and both know this architecture.

`norm_output` is refused until "eyas" in config.json says which state is carried; exports say it.
Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import IDS, SGLANG, architecture, is_parallel, read_flat
from eyas.checkpoints._llama import mapping
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]

_OLDER = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names SGLang's class."""
    return architecture(config) == SGLANG and "speculators_model_type" not in config and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    _refuse_two_meanings(config)
    inner = mapping(config, "eagle_config")
    meaning = "output" if inner.get(IDS) is not None else None
    return "eagle3", *read_flat(config, _rename(tensors), meaning, "raw", several=False)


def _refuse_two_meanings(config: Mapping[str, Any]) -> None:
    norm_output = config.get("norm_output") or mapping(config, "eagle_config").get("norm_output")
    if norm_output and mapping(config, "eyas").get("carries") is None:
        raise CheckpointError(
            "config.json has norm_output, which has two meanings: SpecForge trained with the state before the final norm carried on (until "
            "its pull request 879), SGLang and vLLM carry the normed one; say which by adding "
            '"eyas": {"carries": "raw"} or {"carries": "normed"}'
        )


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefix "model.", under the newer names."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix("model.")
        for older, newer in _OLDER.items():
            new = newer + new.removeprefix(older) if new.startswith(older) else new
        if new in out:
            raise CheckpointError(f"the file holds {new} under two names: remove one")
        out[new] = tensor
    return out
