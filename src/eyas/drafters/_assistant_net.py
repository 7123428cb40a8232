"""The net of `gemma4_assistant`: a small Gemma 4 whose layers have no keys and values of their own.

    [embedding of the token by the target, hidden of the token before] -> pre_projection -> layers, each of which attends to the keys and
    values of the target's last layer of its kind -> norm -> `hidden` -> LM head, of all tokens or of those in the most likely clusters
                                                                    -> post_projection -> the hidden that the next step reads

The layers are transformers' own. This module knows no session.

Letters: B rows, Q nodes, D hidden of the target, d hidden of the assistant, W slots, V vocabulary,
C clusters, c clusters in use, M tokens of a cluster, H heads.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas.checkpoints import Weights, expect
from eyas.core.families import FULL, SLIDING
from eyas.core.target import Target
from eyas.drafters._nets import init_matrices, place_net, seeded
from eyas.errors import CheckpointError, EyasError, ModelError, one_line
from eyas.targets.placement import is_tensor_parallel

__all__ = ["Net", "SharedKeysValues", "load_net", "random_net", "source_layers"]

# fields of a text_config that are not passed on
UNREAD = ("model_type", "architectures", "num_kv_shared_layers", "output_hidden_states", "output_attentions")


class SharedKeysValues(NamedTuple):
    """Keys, values and mask for the layers of one kind of attention."""

    key_BHWw: Tensor
    value_BHWw: Tensor
    mask_B1QW: Tensor  # additive


class Net(nn.Module):
    """An assistant; the names of its weights are the published ones."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        # the 12B model uses the gemma4_unified classes
        kind = "gemma4_unified" if "unified" in str(config.get("model_type", "")) else "gemma4"
        self.text = _text_config(kind, config["text_config"])
        self.model: Any = _gemma4(kind, "modeling")(self.text)
        width, vocab, target_width = self.text.hidden_size, self.text.vocab_size, int(config["backbone_hidden_size"])
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.tied = bool(config.get("tie_word_embeddings", True))
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.pre_projection = nn.Linear(2 * target_width, width, bias=False)
        self.post_projection = nn.Linear(width, target_width, bias=False)
        self.masked_embedding = _Clusters(config, width, vocab) if config.get("use_ordered_embeddings") else None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.text.layer_types)

    def forward(
        self, hidden_BQD: Tensor, embeddings_BQD: Tensor, position_BQ: Tensor, seen: Mapping[str, SharedKeysValues]
    ) -> Tensor:
        """Return `hidden` [B, Q, d] of nodes with these tokens."""
        output = self.model(
            inputs_embeds=self.pre_projection(torch.cat([embeddings_BQD, hidden_BQD], dim=-1)),
            position_ids=position_BQ,
            attention_mask={kind: each.mask_B1QW for kind, each in seen.items()},
            shared_kv_states={kind: (each.key_BHWw, each.value_BHWw) for kind, each in seen.items()},
            use_cache=False,
            # a number, the default too, makes transformers 5.23 leave nodes out; of a tensor it reads nothing
            logits_to_keep=position_BQ,
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def next_hidden(self, hidden: Tensor) -> Tensor:
        """Return the net's input at a node's children, [..., D], for the node's hidden [..., d]."""
        return self.post_projection(hidden)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden [..., d]; -inf outside the most likely clusters."""
        if self.masked_embedding is None:
            return self.lm_head(hidden)  # type: ignore[no-any-return]
        return self.masked_embedding(hidden, self.lm_head.weight)  # type: ignore[no-any-return]

    def placed_for(self, target: Target) -> Net:
        """Return the net on the target's device, in its dtype; angles stay float32."""
        place_net(self, target)
        rotary: Any = type(self.model.rotary_emb)
        with target.device:
            self.model.rotary_emb = rotary(self.text)
        return self


class _Clusters(nn.Module):
    """The LM head over the tokens of the most likely clusters only."""

    token_ordering: Tensor

    def __init__(self, config: Mapping[str, Any], width: int, vocab: int) -> None:
        super().__init__()
        clusters, self.used = int(config.get("num_centroids", 2048)), int(config.get("centroid_intermediate_top_k", 32))
        if clusters < 1 or vocab % clusters or not 1 <= self.used <= clusters:
            raise CheckpointError(
                f"{clusters} clusters, of which {self.used} are used, do not divide a vocabulary of {vocab}: is config.json damaged?"
            )
        self.centroids = nn.Linear(width, clusters, bias=False)
        self.register_buffer("token_ordering", torch.arange(vocab))

    def forward(self, hidden: Tensor, weight_Vd: Tensor) -> Tensor:
        tokens_CM = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = tokens_CM[self.centroids(hidden).topk(self.used).indices].flatten(-2)  # [..., c M]
        found = (weight_Vd[tokens] @ hidden[..., None])[..., 0]
        return found.new_full((*hidden.shape[:-1], len(weight_Vd)), -math.inf).scatter(-1, tokens, found)


def source_layers(target: Target) -> dict[str, int]:
    """Return, for each kind of attention, the target's last layer of that kind with keys and values of its own."""
    if is_tensor_parallel(target.model):
        why = "processes share the target's layers, and each has the keys of its own heads only"
        raise ModelError(f"{why}: choose a method that does not read the target's keys")
    config: Any = target.model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [FULL] * len(target.layout)
    layers = {
        kind: k
        for k, (kind, sizes) in enumerate(zip(kinds, target.layout, strict=False))
        if sizes and sizes[1] == sizes[2]
    }
    if not layers:
        raise ModelError(
            f"a {target.family.model_type} has no layers whose keys a draft could read: choose another method"
        )
    return layers


def load_net(weights: Weights, target: Target) -> Net:
    """Return the net of a published assistant; raise CheckpointError if it does not fit the target."""
    config, source = weights.config, weights.source
    text = config["text_config"]
    pairs = {"hidden size": (config["backbone_hidden_size"], target.hidden_size)}
    pairs["vocabulary size"] = (text.get("vocab_size"), target.vocab_size)
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise CheckpointError(
                f"{source}: the assistant is for a target of {name} {theirs}, but this target's is {ours}: choose the target's own"
            )
    stored = len({name.split(".")[2] for name in weights.tensors if name.startswith("model.layers.")})
    if text.get("num_hidden_layers") != stored:
        raise CheckpointError(
            f"{source}: config.json counts {text.get('num_hidden_layers')} layers, but the weights have {stored}"
        )
    with torch.device("meta"):  # sizes are compared before memory is taken
        meta_net = _made(config, source)
    _check_layers(meta_net, target, source)
    tied = {"lm_head.weight"} if meta_net.tied else set()
    expect(weights, {name: tuple(tensor.shape) for name, tensor in meta_net.state_dict().items()}, tied)
    with seeded(0, torch.device("cpu")):
        net = _made(config, source)
    net.load_state_dict(weights.tensors, strict=False)  # `expect` has named every difference but a tied lm_head
    return net.placed_for(target)


def _made(config: Mapping[str, Any], source: str) -> Net:
    """Return the net of this configuration; raise CheckpointError if transformers refuses it."""
    try:
        return Net(config)
    except EyasError:
        raise
    except Exception as error:  # the libraries raise errors of many kinds for settings of wrong types
        reason = one_line(error, 120)
        what = f"{source}: transformers makes no assistant from its config.json"
        raise CheckpointError(f"{what} ({type(error).__name__}: {reason})") from error


def _check_layers(net: Net, target: Target, source: str) -> None:
    """Raise CheckpointError unless each layer finds keys of its size in the target."""
    layers = source_layers(target)
    for number, (kind, layer) in enumerate(zip(net.kinds, net.model.layers, strict=True)):
        if kind not in layers:
            raise CheckpointError(
                f"{source}: layer {number} reads keys of {kind}, but no layer of the target has any: it was made for another model"
            )
        sizes = target.layout[layers[kind]]
        assert sizes is not None
        attention = layer.self_attn
        groups = attention.num_key_value_groups  # 0: a damaged config.json
        heads = net.text.num_attention_heads / groups if groups else 0
        if (heads, attention.head_dim) != sizes[:2]:
            raise CheckpointError(
                f"{source}: layer {number} reads {heads:g} heads of {attention.head_dim} numbers, the target's {kind} has {sizes[0]} of "
                f"{sizes[1]}: it was made for another model"
            )


def random_net(target: Target, seed: int) -> Net:
    """Return an assistant with random weights, a layer for each kind of attention that it knows: sliding windows, and
    everything else."""
    layers = source_layers(target)
    full = layers.get(FULL, max(layers.values()))
    window = target.family.window if SLIDING in layers and layers[SLIDING] != full else None
    near = layers[SLIDING] if window else full
    (heads, size, _), (near_heads, near_size, _) = target.layout[full], target.layout[near]  # type: ignore[misc]
    config: Any = target.model.config.get_text_config(decoder=True)
    sizes = {
        "vocab_size": target.vocab_size, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0,
        "num_hidden_layers": 2 if window else 1, "layer_types": [SLIDING, FULL] if window else [FULL], "sliding_window": window or 1,
        "num_attention_heads": math.lcm(heads, near_heads), "head_dim": near_size, "global_head_dim": size,
        "num_key_value_heads": near_heads, "num_global_key_value_heads": heads, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": target.context,
    }  # fmt: skip
    if config.model_type.startswith("gemma4"):
        sizes["rope_parameters"] = config.rope_parameters
    with seeded(seed, target.device):
        family = "gemma4_unified_assistant" if "unified" in config.model_type else "gemma4_assistant"
        net = Net({"model_type": family, "text_config": sizes, "backbone_hidden_size": target.hidden_size})
        init_matrices(net)
    return net.placed_for(target)


def _gemma4(family: str, part: str) -> Any:
    """Return a class of transformers for texts: `family` is "gemma4" or "gemma4_unified", `part` "modeling" or
    "configuration"."""
    name = {"gemma4": "Gemma4Text", "gemma4_unified": "Gemma4UnifiedText"}[family]
    try:
        module = importlib.import_module(f"transformers.models.{family}.{part}_{family}")
    except ImportError as error:
        raise ModelError(
            f"this version of transformers has no {family}: install a newer one, or choose another method"
        ) from error
    return getattr(module, name + {"modeling": "Model", "configuration": "Config"}[part])


def _text_config(family: str, values: Mapping[str, Any]) -> Any:
    """Return the configuration of a Gemma 4 in which all layers read keys of others.

    transformers 5.23 refuses such a model, as no layer of it produces the keys (`kv_sharing_modes`).
    """
    published: Any = _gemma4(family, "configuration")
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    assistant: Any = type(f"Assistant{published.__name__}", (published,), {"kv_sharing_modes": modes})
    given = {name: value for name, value in values.items() if name not in UNREAD}
    config = assistant(**given, num_kv_shared_layers=given["num_hidden_layers"])
    config._attn_implementation = "sdpa"
    return config
