"""The net of `mtp`: one multi-token-prediction module, as transformers builds it
(`transformers.modeling_layers.MtpLayer`).

    [norm(embedding of token t+1), norm(feature of token t)] -> eh_proj -> a decoder layer of the target's own class -> norm

The result has the place of the target's feature after the final norm: the target's lm_head reads
it, and so does the module itself in the next step. `LlamaNet` gives the same numbers by eyas' own layer, which kernels
compute, for modules whose layer is LLaMA's. This module knows no session.

Letters: R rows of a forward, N pairs, D hidden, W width of the cache in use.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_layers import MtpLayer, MtpModel

from eyas.core.cache import KVCache, Layout, additive_mask, layout_of
from eyas.core.families import FULL, SLIDING, cache_argument_of
from eyas.core.target import Target
from eyas.drafters._nets import place_net, seeded
from eyas.errors import CheckpointError, EyasError, ModelError, one_line
from eyas.nn import DecoderLayer, DraftKVCache, LayerShape, RMSNorm, join_normed

__all__ = ["LayoutCache", "LlamaNet", "Net", "llama_net", "load_net", "random_net"]


# a config's names for the number of modules
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


class LayoutCache(DraftKVCache):
    """A cache without a window, for a layer whose keys and values may differ in width (multi-head latent attention)."""

    def __init__(self, layout: Layout, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        KVCache.__init__(self, layout, rows, dtype, device)
        self.window = None
        self.set_mask(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, 1, dtype=torch.bool))


class Net(nn.Module):
    """One MTP module with the interface of an EAGLE net (`_eagle.EagleNet`).

    Args:
        module: of class MtpLayer, or of the same interface.
        rotary: the target's rotary embedding, which is not part of the net; None: the target has none.
        shared_norm: the norm after a module that has none of its own; None: there is no such norm.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module | None, shared_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.module, self.shared_norm = module, shared_norm
        self.cache_argument = cache_argument_of(module)
        self.rotary = [rotary]  # in a list, so that it is not registered
        self.config: Any = module.config
        kinds = getattr(self.config, "layer_types", None)
        self.kind = kinds[0] if kinds else FULL

    def joined(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of eh_proj [..., 2D]."""
        module: Any = self.module
        both = module.enorm(embeddings), module.hnorm(features)
        return torch.cat(both[::-1] if getattr(module.config, "mtp_hidden_states_first", False) else both, dim=-1)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's features after the final norm [..., D], unchanged."""
        return features

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> None:
        """Store the keys and values of consecutive pairs of a prompt; see `EagleNet.store_kv`."""
        N = position_RN.shape[1]
        causal_NN = torch.ones(N, N, dtype=torch.bool, device=hidden_RND.device).tril()
        cache.set_mask(position_RN[:, 0], causal_NN.expand(len(position_RN), N, N))
        self(hidden_RND, embeddings_RND, position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> Tensor:
        slot_W = torch.arange(cache.mask_R1NW.shape[-1], device=position_RN.device)
        mask = self.mask(cache.mask_R1NW, slot_W, position_RN, hidden_RND.dtype)
        return self.run(hidden_RND, embeddings_RND, position_RN, cache, mask)

    def layout(self, dtype: torch.dtype, device: torch.device) -> Layout:
        """Return the sizes that the module's layer caches, found by running it on one pair of zeros."""
        cache, zeros_11D = DynamicCache(), torch.zeros(1, 1, self.config.hidden_size, dtype=dtype, device=device)
        with torch.no_grad():
            self.run(zeros_11D, zeros_11D, torch.zeros(1, 1, dtype=torch.long, device=device), cache, None)
        return layout_of(cache)

    def run(
        self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        token_RN = position_RN + 1  # transformers counts a pair at the position of its second token
        (rotary,), angles = self.rotary, None
        if rotary is not None:
            by_kind = len(self.config.nested_rope_parameter_keys(self.config.rope_parameters)) > 0
            angles = rotary(embeddings_RND, position_ids=token_RN, **({"layer_type": self.kind} if by_kind else {}))
            angles = _moved(angles, hidden_RND.device)  # the target's module may be on another device
        output: Tensor = self.module(
            embeddings_RND,
            hidden_RND,
            position_embeddings=angles,
            attention_mask=mask,
            position_ids=token_RN,
            **{self.cache_argument: cache},
        )
        return output if self.shared_norm is None else self.shared_norm(output)

    def mask(self, allowed_R1NW: Tensor, key_position_W: Tensor, position_RN: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, 1, N, W]. A sliding window hides committed slots only: a tree is
        never as deep as a window."""
        window = getattr(self.config, "sliding_window", None) if self.kind == SLIDING else None
        if window is not None:
            allowed_R1NW = allowed_R1NW & (key_position_W > position_RN[..., None] - window)[:, None]
        return additive_mask(allowed_R1NW, dtype)


def _moved(angles: Any, device: torch.device) -> Any:
    return angles.to(device) if isinstance(angles, Tensor) else tuple(part.to(device) for part in angles)


def random_net(target: Target, seed: int) -> Net:
    """Return a module with random weights, shaped by the target's last layer; raise ModelError if transformers has
    none for such layers."""
    try:
        net = _random_net(target, seed)
        # some layers can be made, and fail when they run or store no keys
        if not net.layout(target.dtype, target.device):
            raise TypeError("its layer does not store keys in the cache that it is given")
    except EyasError:
        raise
    except Exception as error:  # classes of transformers that modules were never made of raise errors of any kind
        reason = one_line(error, 80)
        raise ModelError(
            f"transformers makes no MTP module for a {target.family.model_type} ({reason}): choose another method than mtp"
        ) from error
    return net


def _random_net(target: Target, seed: int) -> Net:
    model: Any = target.model
    decoder = model.get_decoder()
    twin, layer = _twin(target, target.name), decoder.layers[-1]
    norm: Any = next((type(part) for name, part in layer.named_modules() if "norm" in name), None)
    if norm is None:
        raise ModelError(
            f"transformers makes no MTP module for a {target.family.model_type}: choose another method than mtp"
        )
    config: Any = twin.config.get_mtp_config()
    if not hasattr(config, "rms_norm_eps"):  # another name for it, like LFM2's
        config.rms_norm_eps = getattr(config, "norm_eps", 1e-6)
    shares_norm: bool | None = getattr(config, "chain_hidden_post_norm", None)  # None: the module has a norm of its own
    with seeded(seed, target.device):
        module = MtpLayer(config, type(layer), norm, 0, use_post_norm=shares_norm is None)
        shared_norm: nn.Module | None = norm(config.hidden_size, eps=config.rms_norm_eps) if shares_norm else None
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            elif "norm" not in name:
                nn.init.zeros_(weight)
    return place_net(Net(module, getattr(decoder, "rotary_emb", None), shared_norm), target)


def load_net(target: Target, folder: str | Path) -> Net:
    """Return the first MTP module in the target's checkpoint."""
    twin = _twin(target, str(folder))
    try:
        model = MtpModel.from_pretrained(twin)
    except (RuntimeError, ValueError, OSError, AttributeError, StopIteration) as error:
        reason = one_line(error, 80)
        raise CheckpointError(
            f"{folder}: no weights of multi-token-prediction modules for a {target.family.model_type} are there "
            f"({reason}): choose another method than mtp"
        ) from error
    shared_norm = model.shared_post_norm if model.use_shared_post_norm else None
    return place_net(Net(model.layers[0], model.rotary_emb, shared_norm), target)


def _twin(target: Target, folder: str) -> Any:
    """Return the target's model with a configuration of its own that names its MTP modules; the model
    itself is not changed.

    Published configurations of some families (Qwen3-Next, Qwen3.5) have other names for settings of
    transformers' class, or lack them: their modules have full attention.
    """
    twin: Any = copy.copy(target.model)
    twin.__dict__ = dict(vars(target.model))
    config = twin.__dict__["config"] = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    count = next((found for name in COUNTS if (found := getattr(text, name, None))), 1)
    text.num_mtp_layers = count
    if getattr(text, "layer_types", None) is not None and getattr(text, "mtp_layer_types", None) is None:
        text.mtp_layer_types = [FULL] * count
    mlp_kinds = getattr(text, "mlp_layer_types", None)
    if mlp_kinds is not None and getattr(text, "mtp_mlp_layer_types", None) is None:
        text.mtp_mlp_layer_types = [mlp_kinds[-1]] * count
    config.name_or_path, config.dtype = folder, target.dtype
    first = text.num_hidden_layers  # DeepSeek-V3 and GLM give their modules the numbers after the layers'
    numbered = [rf"layers\.{first + k}\." for k in range(count)]
    twin.__dict__["_keys_to_ignore_on_load_unexpected"] = [
        *(target.model._keys_to_ignore_on_load_unexpected or ()),
        *numbered,
    ]
    return twin


# transformers' layer classes that compute the same
CLASSES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
NAMES = {  # ours -> those of transformers' module
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "fc": "eh_proj",
    "input_norm": "mtp_block.input_layernorm",
    **{f"layer.attention.{x}": f"mtp_block.self_attn.{x}_proj" for x in "qkvo"},
    "layer.mlp_norm": "mtp_block.post_attention_layernorm",
    **{f"layer.mlp.{x}": f"mtp_block.mlp.{x}_proj" for x in ("gate", "up", "down")},
    "norm": "post_norm",
}


class LlamaNet(nn.Module):
    """An MTP module with a LLaMA layer, as an `_eagle.EagleNet`."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        D = shape.hidden_size
        self.embed_norm, self.hidden_norm, self.input_norm, self.norm = (RMSNorm(D, shape.rms_eps) for _ in range(4))
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layer = DecoderLayer(shape)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's features after the final norm [..., D], unchanged."""
        return features

    def join(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the layer [..., D]."""
        joined: Tensor = self.fc(join_normed(self.embed_norm, embeddings, self.hidden_norm, hidden))
        return joined

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> None:
        self.layer.attention.store(self.input_norm(self.join(hidden_RND, embeddings_RND)), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> Tensor:
        """See `EagleNet.__call__`. Positions count from 0 at the first pair, and from 1 in
        transformers: RoPE reads differences only."""
        x_RND = self.join(hidden_RND, embeddings_RND)
        output: Tensor = self.norm(self.layer.decode(self.input_norm(x_RND), x_RND, position_RN, cache))
        return output


def llama_net(net: Net) -> LlamaNet | None:
    """Return the same module by eyas' own layer, with copies of its weights; None for one whose layer
    computes something else."""
    module: Any = net.module
    config = net.config
    rope = getattr(config, "rope_parameters", None) or {}
    is_llama = (
        type(module.mtp_block).__name__ in CLASSES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in ("default", "llama3")
    )
    changed = (
        getattr(config, "mtp_hidden_states_first", False) or net.shared_norm is not None or module.post_norm is None
    )
    if not is_llama or changed or net.kind == SLIDING:
        return None
    attention = module.mtp_block.self_attn
    if attention.o_proj.bias is not None or module.mtp_block.mlp.up_proj.bias is not None:
        return None
    weight = module.eh_proj.weight
    shape = LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rms_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        qkv_bias=attention.q_proj.bias is not None,
    )
    with torch.device(weight.device):
        own = LlamaNet(shape).to(weight.dtype)
    theirs = module.state_dict()
    own.load_state_dict({name: theirs[_published(name)] for name in own.state_dict()})
    return own.eval()


def _published(name: str) -> str:
    part, _, kind = name.rpartition(".")
    return f"{NAMES[part]}.{kind}"
