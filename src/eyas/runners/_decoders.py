"""Decoder layers of a model as the CPU kernels read them.

FAMILIES is a table: each record says where a family differs from LLaMA. Sizes, biases, activations, windows and fused
matrices are read from the modules. A layer with modules that its record does not name is refused.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.core.target import Target
from eyas.errors import one_line
from eyas.kernels import HEAD_DIMS, LayerSizes, ThreadCount
from eyas.runners._comparison import UnsuitedError
from eyas.runners._layer_settings import layer_windows, norm_eps, rotary_name
from eyas.runners._packing import Packing
from eyas.runners.stored import StoredExperts, StoredKinds, StoredLinear

__all__ = ["FAMILIES", "angles", "final_norm", "packed_layers", "refuse", "sizes_of", "token_inputs"]


@dataclass(frozen=True)
class Decoder:
    """Where a family differs from LLaMA.

    Attributes:
        norms: names of the norms before attention, of its output, before the MLP, of its output; "": there is none.
        head_norms: names of the norms of queries and keys, of a layer that has them.
        head_norm: where these are (`LayerSizes`).
        mlp: names of the MLP's matrices; two: it has no gates, or "gate_up_proj" holds both. An MLP with experts has
            others (`Mixture`).
        centred: norms subtract the mean (LayerNorm).
        plus_one: norms multiply by 1 + weight.
        parallel: attention and MLP read the same input.
        interleaved: RoPE rotates neighbours, not halves.
        gated: q_proj also has a gate for each query. The output of attention is multiplied by the gates' sigmoids.
        state: name of the module that some layers have instead of attention; "": there is none.
        activation: of an MLP, or of experts, that have no module for it.
        sigmoids: weights of experts are sigmoids, and those with the biases `expert_bias` choose them.
        rotates: whether a layer with this attention rotates queries and keys.
        half_angles: the rotary module gives each angle once.
        scales_queries: by positions, as in Llama 4; all of a head is rotated.
    """

    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    head_norm: str = "before"
    output: str = "o_proj"
    mlp_name: str = "mlp"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    activation: str = ""
    final_norm: str = "norm"
    centred: bool = False
    plus_one: bool = False
    parallel: bool = False
    interleaved: bool = False
    gated: bool = False
    state: str = ""
    rotates: Callable[[Any], bool] = lambda attention: True
    half_angles: bool = False
    scales_queries: bool = False
    sigmoids: bool = False


GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")  # norms of outputs alone
GLM4 = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
ONE_NORM = ("input_layernorm", "", "", "")
FUSED = ("gate_up_proj", "down_proj")
LFM2 = Decoder(
    ("operator_norm", "", "ffn_norm", ""), head_norms=("q_layernorm", "k_layernorm"), output="out_proj", mlp_name="feed_forward",
    mlp=("w1", "w3", "w2"), activation="silu", final_norm="embedding_norm", state="conv",
)  # fmt: skip
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "granite", "seed_oss"), Decoder()),
    "arcee": Decoder(mlp=("up_proj", "down_proj")),
    "cohere": Decoder(ONE_NORM, centred=True, parallel=True, interleaved=True),
    "cohere2": Decoder(
        ONE_NORM, centred=True, parallel=True, interleaved=True, rotates=lambda attention: attention.sliding_window is not None
    ),
    "ernie4_5": Decoder(interleaved=True),
    "exaone4": Decoder(OLMO, rotates=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "gemma": Decoder(plus_one=True),
    "gemma2": Decoder(GEMMA, plus_one=True),
    "gemma3_text": Decoder(GEMMA, plus_one=True),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), Decoder(GEMMA)),
    "glm": Decoder(mlp=FUSED, interleaved=True),
    "glm4": Decoder(GLM4, mlp=FUSED, interleaved=True),
    "gpt_oss": Decoder(half_angles=True),
    "helium": Decoder(interleaved=True),
    "hunyuan_v1_dense": Decoder(head_norms=("query_layernorm", "key_layernorm"), head_norm="after"),
    "lfm2": LFM2,
    "lfm2_moe": replace(LFM2, sigmoids=True),
    "ministral3": Decoder(scales_queries=True),
    "nemotron": Decoder(mlp=("up_proj", "down_proj"), centred=True, plus_one=True),
    "olmo2": Decoder(OLMO, head_norm="whole"),
    "olmo3": Decoder(OLMO, head_norm="whole"),
    "olmoe": Decoder(head_norm="whole"),
    "phi": Decoder(
        ONE_NORM, output="dense", mlp=("fc1", "fc2"), final_norm="final_layernorm", centred=True, parallel=True
    ),
    "phi3": Decoder(mlp=FUSED),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), Decoder(plus_one=True, gated=True, state="linear_attn")
    ),
    "smollm3": Decoder(rotates=lambda attention: bool(attention.use_rope)),
    "stablelm": Decoder(centred=True),
    "starcoder2": Decoder(mlp=("c_fc", "c_proj"), centred=True),
}  # fmt: skip

MAX_TAPS = 8  # of a convolution, as in kernels/cpu/states.h
# kinds of RoPE whose frequencies do not change within the target's context (core/families.py)
ROPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu", "NewGELUActivation": "gelu",
    "ReLUSquaredActivation": "relu2",
}  # fmt: skip
CLAMP = (1.702, 7.0)  # of gpt-oss


class Part(NamedTuple):
    """Some rows of a linear layer, or all in another order."""

    module: Any
    rows: slice | Tensor = slice(None)

    @property
    def bias(self) -> Tensor | None:
        return None if self.module.bias is None else self.module.bias[self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.rows
        count = len(rows) if isinstance(rows, Tensor) else len(range(self.module.out_features)[rows])
        return count, self.module.in_features

    def packed_rows(self, pack: Packing) -> kernels.Rows:
        return pack.rows(self.module).take(self.rows)


class Mixture(NamedTuple):
    """The modules of an MLP with experts: gate_up_proj [E, 2 I, D] and down_proj [E, D, I] of `experts`.

    gpt-oss has biases, clamped gates, gate_up_proj [E, D, 2 I] and down_proj [E, I, D]. Its gates and ups take turns.
    """

    router: Any
    experts: Any
    bias: Any = None  # of sigmoids (`Decoder.sigmoids`); None: the weights are a softmax's

    @property
    def clamp(self) -> tuple[float, float] | None:
        """The numbers of clamped gates: the factor in the sigmoid and the limit; None for other gates."""
        experts = self.experts
        return (experts.alpha, experts.limit) if hasattr(experts, "limit") else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        router, experts = self.router.weight, self.experts
        if isinstance(experts, StoredExperts):
            count, (inner, D) = len(experts.gates), experts.gates[0].shape
            return tuple(router.shape), (count, 2 * inner, D), (count, D, inner)
        weights = experts.gate_up_proj, experts.down_proj
        if self.clamp is not None:
            weights = tuple(weight.mT for weight in weights)
        return tuple(tuple(x.shape) for x in (router, *weights))

    @property
    def biases(self) -> tuple[Any, ...]:
        """The biases of router, gate_up_proj and down_proj; None: there is none."""
        router, experts = self.router, self.experts
        return (
            getattr(router, "bias", None),
            getattr(experts, "gate_up_proj_bias", None),
            getattr(experts, "down_proj_bias", None),
        )

    def of_experts(self, inner: int) -> Iterator[Expert]:
        """Yield the matrices of each expert."""
        gates, ups = slice(0, inner), slice(inner, None)
        if self.clamp is not None:
            gates, ups = slice(0, None, 2), slice(1, None, 2)
        for e in range(self.shapes[0][0]):
            three = self._rows(e, gates, ups)
            if self.clamp is None:
                yield Expert(*three)
                continue
            _, of_both, of_down = self.biases
            yield Expert(*three, of_both[e, gates], of_both[e, ups], of_down[e])

    def _rows(self, e: int, gates: slice, ups: slice) -> tuple[kernels.Rows, kernels.Rows, kernels.Rows]:
        experts = self.experts
        if isinstance(experts, StoredExperts):
            return experts.gates[e], experts.ups[e], experts.downs[e]
        both, down = experts.gate_up_proj[e], experts.down_proj[e]
        if self.clamp is not None:
            both, down = both.T, down.T
        rows = kernels.Rows.of(both)
        return rows.take(gates), rows.take(ups), kernels.Rows.of(down)


class Expert(NamedTuple):
    """The matrices of an expert."""

    gate: kernels.Rows
    up: kernels.Rows
    down: kernels.Rows
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class State(NamedTuple):
    """The modules of a gated delta net, or of a short convolution.

    Attributes:
        inputs: the linear layers that read its input, in the order of `kernels.StateLayer`.
        gated_norm: of its outputs; None for a convolution.
    """

    module: Any
    inputs: tuple[Part, ...]
    conv: Any
    gated_norm: Any

    @classmethod
    def of(cls, module: Any) -> State:
        if hasattr(module, "in_proj"):
            return cls(module, (Part(module.in_proj),), module.conv, None)
        if hasattr(module, "in_proj_qkvz"):
            heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
            keys, values = module.head_k_dim, group * module.head_v_dim
            one = module.in_proj_qkvz
            is_sorted, order = isinstance(one, StoredKinds), _by_kind(heads, (keys, keys, values, values))
            parts = [Part(part) for part in one.parts] if is_sorted else [Part(one, order)]
            parts.append(Part(module.in_proj_ba, _by_kind(heads, (group, group))))
            return cls(module, tuple(parts), module.conv1d, module.norm)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return cls(module, tuple(Part(getattr(module, name)) for name in names), module.conv1d, module.norm)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of heads of keys and of values, and their widths; zeros for a convolution."""
        one = self.module
        if self.gated_norm is None:
            return 0, 0, 0, 0
        return one.num_k_heads, one.num_v_heads, one.head_k_dim, one.head_v_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        key_heads, value_heads, key_dim, value_dim = self.sizes
        return 2 * key_heads * key_dim + value_heads * value_dim or self.conv.in_channels

    @property
    def width(self) -> int:
        """The inputs of the output projection."""
        _, value_heads, _, value_dim = self.sizes
        return value_heads * value_dim or self.conv.in_channels

    def fault(self, size: LayerSizes) -> str:
        """Return the description of a part that has other sizes; "" for none."""
        key_heads, value_heads, key_dim, value_dim = self.sizes
        projected = self.channels + self.width + 2 * value_heads if value_heads else 3 * size.hidden
        faults = [_weight_fault(part, (part.shape[0], size.hidden)) for part in self.inputs]
        if sum(part.shape[0] for part in self.inputs) != projected:
            faults.append(f"a state's input projections do not have {projected} rows")
        if not _is_causal_conv(self.conv, self.channels):
            faults.append(one_line(self.conv, 120))
        if value_heads:
            faults.append(_norm_fault(self.gated_norm, (value_dim,), size.eps))
            vectors = (self.module.dt_bias, self.module.A_log)
            fits = all(x.shape == (value_heads,) and x.dtype == torch.float32 for x in vectors)
            odd = key_dim % 32 or value_dim % 32 or value_heads % key_heads or self.module.activation != "silu"
            faults.append("" if fits and not odd else f"heads of {key_dim} and {value_dim}, no multiples of 32")
        return next(filter(None, faults), "")


class Shared(NamedTuple):
    """The modules of an expert that all tokens go through, times the sigmoid of `router`."""

    gate: Part
    up: Part
    down: Part
    router: Part


class Beside(NamedTuple):
    """The modules around experts where a layer has a dense MLP too, as in Gemma 4.

    Attributes:
        norms: of the experts' inputs, of their outputs, and of the MLP's.
    """

    router: Any
    norms: tuple[Any, ...]

    def fault(self, D: int, count: int, eps: float) -> str:
        """Return the description of a part that has other sizes; "" for none."""
        vectors = self.router.scale, self.router.per_expert_scale
        fits = [(x.shape, x.dtype) for x in vectors] == [((D,), torch.float32), ((count,), torch.float32)]
        if not fits or norm_eps(self.router.norm) != eps:
            return one_line(self.router, 120)
        return next(filter(None, (_norm_fault(norm, (D,), eps) for norm in self.norms)), "")


class OfTokens(NamedTuple):
    """The modules with which a layer reads its own numbers of each token (`kernels.TokenInput`)."""

    gate: Part
    projection: Part
    norm: Any
    activation: Any

    def fault(self, D: int, eps: float) -> str:
        """Return the description of a part that has other sizes; "" for none."""
        width = self.gate.shape[0]
        faults = (
            _weight_fault(self.gate, (width, D)),
            _weight_fault(self.projection, (D, width)),
            _norm_fault(self.norm, (D,), eps),
            "" if ACTIVATIONS.get(type(self.activation).__name__) == "gelu" else one_line(self.activation, 120),
            f"it reads {width} numbers of each token, no multiple of 32" if width % 32 else "",
        )
        return next(filter(None, faults), "")


class Parts(NamedTuple):
    """The modules of a layer. An MLP without gates has no `gate`, and one with experts is a `mixture`. A layer with a
    `state` has no attention, and `o` is the last projection of its state's module. A layer that reads an earlier one's
    keys and values has no `k` and `v`."""

    q: Part | None
    k: Part | None
    v: Part | None
    o: Part
    gate: Part | None
    up: Part | None
    down: Part | None
    mixture: Mixture | None
    norms: tuple[Any, ...]  # four, as in `Decoder.norms`; None for no norm
    head_norms: tuple[Any, Any]
    sinks: Any  # None: attention has none
    shared: Shared | None
    state: State | None = None
    v_norm: Any = None
    beside: Beside | None = None
    of_tokens: OfTokens | None = None
    factor: float = 1.0  # of the layer's output

    @property
    def linears(self) -> list[Part]:
        of_state = () if self.state is None else self.state.inputs
        of_tokens = () if self.of_tokens is None else self.of_tokens[:2]
        return [part for part in (*self[:7], *(self.shared or ()), *of_state, *of_tokens) if part is not None]

    @property
    def every_norm(self) -> tuple[Any, ...]:
        of_tokens = () if self.of_tokens is None else (self.of_tokens.norm,)
        return (*self.norms, *self.head_norms, *(self.beside.norms if self.beside else ()), *of_tokens)

    @property
    def inner(self) -> int:
        """The width of the MLP, or of an expert."""
        if self.mixture is not None:
            return self.mixture.shapes[2][2]
        assert self.up is not None
        return self.up.shape[0]

    @property
    def widest(self) -> int:
        """The width of the widest MLP of the layer, or of the numbers of tokens that it reads."""
        others = self.up, self.shared and self.shared.up, self.of_tokens and self.of_tokens.gate
        return max([self.inner, *(part.shape[0] for part in others if part is not None)])


def _decoder(target: Target) -> Decoder:
    return FAMILIES[target.family.model_type]


def _parts(layer: Any, decoder: Decoder, heads: int, kv_heads: int) -> Parts:
    """Return the modules of a layer. Raise AttributeError where one is missing."""
    mlp = getattr(layer, decoder.mlp_name)
    router = "gate" if hasattr(mlp, "gate") else "router"
    mixture = Mixture(getattr(mlp, router), mlp.experts) if hasattr(mlp, "experts") else None
    if decoder.sigmoids and mixture is not None:
        none = torch.zeros(mixture.shapes[0][0], dtype=torch.float32, device="cpu")
        mixture = mixture._replace(bias=getattr(mlp, "expert_bias", none))
    gate, up, down = (None, None, None) if mixture is not None else _dense(mlp, decoder)
    beside = of_tokens = shared = None
    if hasattr(layer, "experts"):
        mixture = Mixture(layer.router.proj, layer.experts)
        names = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
        beside = Beside(layer.router, tuple(getattr(layer, name) for name in names))
    if hasattr(layer, "per_layer_input_gate"):
        two = Part(layer.per_layer_input_gate), Part(layer.per_layer_projection)
        of_tokens = OfTokens(*two, layer.post_per_layer_input_norm, layer.act_fn)
    if hasattr(mlp, "shared_expert"):
        one = mlp.shared_expert
        shared = Shared(*map(Part, (one.gate_proj, one.up_proj, one.down_proj, mlp.shared_expert_gate)))
    norms = tuple(getattr(layer, name) if name else None for name in decoder.norms)
    if hasattr(layer, decoder.state):
        state = State.of(getattr(layer, decoder.state))
        output = Part(state.module.out_proj)
        return Parts(None, None, None, output, gate, up, down, mixture, norms, (None, None), None, shared, state)
    attention = layer.self_attn
    if hasattr(attention, "qkv_proj"):
        h = attention.head_dim
        ends = (0, heads * h, (heads + kv_heads) * h, (heads + 2 * kv_heads) * h)
        q, k, v = (Part(attention.qkv_proj, slice(*pair)) for pair in itertools.pairwise(ends))
    elif getattr(attention, "is_kv_shared_layer", False):
        q, k, v = Part(attention.q_proj), None, None
    else:
        q, k = Part(attention.q_proj), Part(attention.k_proj)
        v = k if attention.v_proj is None else Part(attention.v_proj)
    of_queries, of_keys = (getattr(attention, name, None) for name in decoder.head_norms)
    output, sinks = Part(getattr(attention, decoder.output)), getattr(attention, "sinks", None)
    v_norm = None if k is None else getattr(attention, "v_norm", None)
    return Parts(
        q, k, v, output, gate, up, down, mixture, norms, (of_queries, of_keys), sinks, shared, None, v_norm, beside, of_tokens,
        float(getattr(layer, "layer_scalar", 1.0)),
    )  # fmt: skip


def _dense(mlp: Any, decoder: Decoder) -> tuple[Part | None, Part, Part]:
    """Return gates (None: it has none), the other first matrix and the last one."""
    matrices = [Part(getattr(mlp, name)) for name in decoder.mlp]
    if len(matrices) == 3:
        return matrices[0], matrices[1], matrices[2]
    up, down = matrices
    if "gate_up_proj" not in decoder.mlp:
        return None, up, down
    half = up.module.out_features // 2
    return Part(up.module, slice(0, half)), Part(up.module, slice(half, 2 * half)), down


def _every(target: Target) -> Iterator[tuple[Any, Parts]]:
    """Yield layers and their modules."""
    decoder = _decoder(target)
    heads, kv_heads = _head_counts(target)
    layers: Any = target.family.layers
    for layer in layers:
        yield layer, _parts(layer, decoder, heads, kv_heads)


def _attending(target: Target) -> Any:
    """Return the first layer with attention."""
    layers: Any = target.family.layers
    return next((layer for layer in layers if hasattr(layer, "self_attn")), layers[0])


def _head_counts(target: Target) -> tuple[int, int]:
    """Return the numbers of heads of the first layer with attention, of queries and of keys."""
    attention, decoder = _attending(target).self_attn, _decoder(target)
    sizes = next((sizes for sizes in target.layout if sizes is not None), None)
    return getattr(attention, decoder.output).in_features // attention.head_dim, 0 if sizes is None else sizes[0]


class Place(NamedTuple):
    """A layer's sizes, the number of the cache that has its keys and values, and of the layer that has stored them, if it
    is another one."""

    sizes: LayerSizes
    store: int = 0
    lender: int | None = None


def _places(target: Target, size: LayerSizes) -> list[Place]:
    """Return the place of each layer. Caches are in the order of `core.cache.KVCache`."""
    places, layout = list[Place](), target.layout
    # by kind: the last layer that stores keys, and its place in the layout
    owners = dict[str | None, tuple[int, int]]()
    stores = list(dict.fromkeys(sizes for sizes in layout if sizes is not None))
    for number, (layer, parts) in enumerate(_every(target)):
        if parts.state is not None:
            places.append(Place(size))
            continue
        h, kind = layer.self_attn.head_dim, getattr(layer.self_attn, "layer_type", None)
        if parts.k is not None:  # layers keep their places when others are left out
            owners[kind] = number, getattr(layer.self_attn, "layer_idx", number)
        owner, at = owners.get(kind, (number, len(layout)))
        cached = layout[at] if at < len(layout) else None
        if cached is None or cached[1:] != (h, h):
            raise UnsuitedError(
                f"the kernels need keys and values of the width of heads, but layer {number} stores {cached}"
            )
        sizes = replace(size, kv_heads=cached[0], head_dim=h, rotary=min(size.rotary, h))
        places.append(Place(sizes, stores.index(cached), None if owner == number else owner))
    return places


def refuse(target: Target) -> None:
    """Raise UnsuitedError if the model needs something that the kernels do not compute."""
    config, family = target.model.config.get_text_config(decoder=True), target.family
    if target.device.type != "cpu" or target.dtype != torch.float32:
        raise UnsuitedError(f"the kernels work on a CPU in float32, this is {target.dtype} on {target.device}")
    if family.model_type not in FAMILIES:
        raise UnsuitedError(
            f"the kernels do not know the family {family.model_type}: docs/reference/supported.md lists those that they know"
        )
    if reason := target.own_forward_only("kernels"):
        raise UnsuitedError(reason)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [each for each in rope.values() if isinstance(each, dict)] or [rope]:
        if one.get("rope_type", "default") not in ROPES:
            raise UnsuitedError(f"the kernels do not know its rotary positions ({one.get('rope_type')})")
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsuitedError("the kernels do not clip queries, keys and values")
    if getattr(config, "use_parallel_residual", False):
        raise UnsuitedError("the kernels do not know parallel residual streams")
    decoder = _decoder(target)
    for k, layer in enumerate(family.layers):  # self-speculation leaves parts of layers out
        try:
            _parts(layer, decoder, 1, 1)
        except AttributeError:
            raise UnsuitedError(
                f"the kernels run whole layers, but layer {k} has no attention or no MLP of this family"
            ) from None
    size = sizes_of(target)
    places = _places(target, size)
    if other := next((place.sizes.head_dim for place in places if place.sizes.head_dim not in HEAD_DIMS), None):
        raise UnsuitedError(f"the kernels do not know heads of width {other}; known: {', '.join(map(str, HEAD_DIMS))}")
    if size.hidden % 32:
        raise UnsuitedError(f"the kernels need widths that are multiples of 32, but hidden states have {size.hidden}")
    for k, (layer, parts) in enumerate(_every(target)):
        if fault := _fault(layer, parts, places[k].sizes):
            raise UnsuitedError(f"the kernels run equal layers, but layer {k} is pruned or edited: {fault}")
    faults = (
        _weight_fault(Part(family.head), (target.vocab_size, size.hidden)),
        _norm_fault(_last_norm(target), (size.hidden,)),
    )
    if fault := next(filter(None, faults), ""):
        raise UnsuitedError(f"the kernels know a linear lm_head after a norm: {fault}")


def sizes_of(target: Target) -> LayerSizes:
    """Return the sizes of the decoder layers: of the first of them, but for the width of the widest MLP."""
    decoder, (heads, kv_heads) = _decoder(target), _head_counts(target)
    first, parts = next(_every(target))
    attention, D = _attending(target).self_attn, target.hidden_size
    named = ("act_fn", "activation_fn", "act")
    mlp = getattr(first, decoder.mlp_name) if parts.mixture is None else parts.mixture.experts
    activation = next((getattr(mlp, name) for name in named if hasattr(mlp, name)), None)
    kind = ACTIVATIONS.get(type(activation).__name__, decoder.activation)
    if parts.mixture is not None and (clamp := parts.mixture.clamp) is not None:
        if clamp != CLAMP:
            raise UnsuitedError(
                f"the kernels know gates that are clamped by {CLAMP}, but this MLP's are clamped by {clamp}"
            )
        kind = "clamped"
    name = kind if parts.gate is None and parts.mixture is None else f"{kind}_gated"
    if name not in kernels.ACTIVATIONS:
        raise UnsuitedError(f"the kernels do not know the activation {type(activation).__name__} of this MLP")
    cap = getattr(attention, "attn_logit_softcapping", None) or 0.0
    if target.model.config._attn_implementation != "eager":  # the others of transformers leave it out
        cap = 0.0
    return LayerSizes(
        D, heads, kv_heads, int(attention.head_dim), max(parts.widest for _, parts in _every(target)),
        norm_eps(next(norm for norm in parts.norms if norm is not None)), float(attention.scaling),
        rotary=angles(target, 1)[0].shape[-1], softcap=float(cap),
        residual=float(getattr(first, "residual_multiplier", 1.0)), activation=name,
        centred=decoder.centred, parallel=decoder.parallel, head_norm=decoder.head_norm,
        query_table=decoder.scales_queries, gated=decoder.gated,
    )  # fmt: skip


def _fault(layer: Any, parts: Parts, size: LayerSizes) -> str:
    """Return which part of a layer has other sizes or settings, or another kind of module; "" for none. The kernels would
    read past its weights."""
    D, h, whole = size.hidden, size.head_dim, size.head_norm == "whole"
    inner, queries, keys = parts.inner, size.heads * size.head_dim, size.kv_heads * size.head_dim
    wide = inner if parts.up is None else parts.up.shape[0]
    projected, context = 2 * queries if size.gated else queries, queries if parts.state is None else parts.state.width
    shapes = ((projected, D), (keys, D), (keys, D), (D, context), (wide, D), (wide, D), (D, wide))
    faults = [_weight_fault(part, shape) for part, shape in zip(parts[:7], shapes, strict=True) if part is not None]
    if parts.mixture is not None:
        faults.append(_mixture_fault(parts.mixture, D, inner))
    faults += [_norm_fault(norm, (D,), size.eps) for norm in parts.norms if norm is not None]
    widths = (queries, keys) if whole else (h, h)
    faults += [
        _norm_fault(norm, (width,), size.eps) for norm, width in zip(parts.head_norms, widths, strict=True) if norm
    ]
    of_state = () if parts.state is None else parts.state.inputs
    of_mlp = (parts.gate, parts.up), parts.shared[:2] if parts.shared else ()
    groups = [[part for part in group if part is not None] for group in (parts[:3], of_state, *of_mlp)]
    if any(len({part.module.bias is None for part in group}) > 1 for group in groups):
        faults.append("some of its matrices have biases, and some none")
    if parts.shared is not None:
        width = parts.shared.up.shape[0]
        expected = ((width, D), (width, D), (D, width), (1, D))
        faults += [_weight_fault(part, shape) for part, shape in zip(parts.shared, expected, strict=True)]
        faults.append(f"its shared expert has {width} inner units, no multiple of 32" if width % 32 else "")
    if parts.beside is not None and parts.mixture is not None:
        faults.append(parts.beside.fault(D, parts.mixture.shapes[0][0], size.eps))
    if parts.of_tokens is not None:
        faults.append(parts.of_tokens.fault(D, size.eps))
    if parts.v_norm is not None and norm_eps(parts.v_norm) != size.eps:
        faults.append(one_line(parts.v_norm, 120))
    if parts.state is not None:
        faults.append(parts.state.fault(size))
    elif (layer.self_attn.head_dim, layer.self_attn.scaling) != (h, size.scale):
        faults.append("its heads have another width or scale")
    if getattr(layer, "residual_multiplier", 1.0) != size.residual:
        faults.append("its residual stream has another factor")
    if parts.sinks is not None and (parts.sinks.shape, parts.sinks.dtype) != ((size.heads,), torch.float32):
        faults.append("its attention has another number of sinks")
    matrices = (part.module for part in parts.linears)
    others = (*(parts.mixture or ())[:2], *(parts.state or ()), parts.beside and parts.beside.router)
    read = {id(module) for module in (*matrices, *parts.every_norm, *others)}
    for name, module in layer.named_modules():
        is_weight = isinstance(module, nn.Linear) or any(
            parameter is not parts.sinks for parameter in module.parameters(recurse=False)
        )
        if is_weight and id(module) not in read:
            faults.append(f"{name} is not in the kernels' table")
    odd = next((width for width in (inner, wide) if width % 32), 0)
    return next(filter(None, faults), f"its MLP has {odd} inner units, no multiple of 32" if odd else "")


def _is_causal_conv(conv: Any, channels: int) -> bool:
    """Return whether each channel has a convolution of its own, whose taps the kernels can hold."""
    taps = conv.kernel_size[0]
    fits = conv.weight.shape == (channels, 1, taps) and conv.weight.dtype == torch.float32
    return bool(fits and conv.groups == channels and 1 < taps <= MAX_TAPS and not channels % 32)


def _mixture_fault(mixture: Mixture, D: int, inner: int) -> str:
    """Return the description of experts that do not have these sizes."""
    count = mixture.shapes[0][0]
    fits = mixture.shapes == ((count, D), (count, 2 * inner, D), (count, D, inner))
    weights = [x for module in mixture[:2] for x in module.parameters()]
    expected = 2 * (not isinstance(mixture.experts, StoredExperts)) + (not isinstance(mixture.router, StoredLinear))
    if mixture.clamp is not None:
        expected += 3  # biases
        shapes = [getattr(bias, "shape", None) for bias in mixture.biases]
        fits &= shapes == [(count,), (count, 2 * inner), (count, D)]
        fits &= mixture.clamp == CLAMP
    if mixture.bias is not None:
        fits &= mixture.bias.shape == (count,) and mixture.bias.dtype == torch.float32
    is_known = len(weights) == expected and {x.dtype for x in weights} <= {torch.float32}
    return "" if fits and is_known else one_line(mixture, 120)


def _weight_fault(part: Part, shape: tuple[int, int]) -> str:
    """Return the description of a linear layer if it does not have this shape."""
    module = part.module
    if isinstance(module, StoredLinear):
        return "" if part.shape == shape else one_line(module, 120)
    if not isinstance(module, nn.Linear) or module.weight.dtype != torch.float32:
        return one_line(module, 120)
    return "" if part.shape == shape == module.weight[part.rows].shape else one_line(module, 120)


def _norm_fault(norm: Any, shape: tuple[int, ...], eps: float | None = None) -> str:
    """Return the description of a norm if it does not have this shape (and epsilon)."""
    weight = getattr(norm, "weight", None)
    fits = isinstance(weight, Tensor) and weight.dtype == torch.float32 and weight.shape == shape
    return "" if fits and eps in (None, norm_eps(norm)) else one_line(norm, 120)


def final_norm(target: Target) -> Callable[..., Tensor | None]:
    """Return a function (x [M, D], output, normed [M, D], threads) that computes the norm before the lm_head, and logits
    as `kernels.head` does."""
    decoder, norm = _decoder(target), _last_norm(target)
    weight_D, bias_D = _norm_weights(norm, decoder)
    eps = norm_eps(norm)

    def compute(x_MD: Tensor, output: kernels.Matrix | None, normed_MD: Tensor, threads: ThreadCount) -> Tensor | None:
        assert weight_D is not None
        return kernels.head(x_MD, weight_D, eps, output, normed_MD, threads, bias_D, decoder.centred)

    return compute


def _last_norm(target: Target) -> Any:
    return getattr(target.family.base, _decoder(target).final_norm)


def _norm_weights(norm: Any, decoder: Decoder) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a norm in float32; None where it has none."""
    if norm is None:
        return None, None
    weight: Tensor = norm.weight.detach().float()
    bias = getattr(norm, "bias", None)
    return (weight + decoder.plus_one).contiguous(), None if bias is None else bias.detach().float().contiguous()


def angles(target: Target, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tables, positions, h] in the order of halves, by the model's own rotary module; one table
    for each of `_angle_kinds`, the numbers of narrower heads first. Queries that are scaled have another."""
    rotary: Any = getattr(target.family.base, rotary_name(target.family.base))
    at = kernels.floats(1, 1, 1), torch.arange(positions, device="cpu")[None]
    pairs: list[tuple[Tensor, Tensor]] = [rotary(*at, *kind) for kind in _angle_kinds(target)]
    pairs = [_in_halves(pair, _decoder(target).half_angles) for pair in pairs]
    widest = max(table.shape[-1] for table, _ in pairs)
    padded = ([nn.functional.pad(table, (0, widest - table.shape[-1])) for table in pair] for pair in pairs)
    cosine, sine = (torch.cat(tables).float() for tables in zip(*padded, strict=True))
    if _decoder(target).scales_queries:
        scale_P1 = _query_scales(target, positions)
        cosine, sine = (torch.cat([table, table * scale_P1]) for table in (cosine, sine))
    return cosine.contiguous(), sine.contiguous()


def _in_halves(pair: tuple[Tensor, Tensor], half_angles: bool) -> tuple[Tensor, Tensor]:
    cosine, sine = pair
    if half_angles:
        return cosine.repeat(1, 1, 2), sine.repeat(1, 1, 2)
    half = cosine.shape[-1] // 2
    if cosine.shape[1] > 1 and not torch.equal(cosine[..., :half], cosine[..., half:]):  # Cohere's are side by side
        return cosine[..., ::2].repeat(1, 1, 2), sine[..., ::2].repeat(1, 1, 2)
    return pair


def _query_scales(target: Target, positions: int) -> Tensor:
    """Return the factors [P, 1] of queries, which grow at each multiple of the length of the first training."""
    rope: Any = target.model.config.get_text_config(decoder=True).rope_parameters
    times = torch.arange(positions, device="cpu") // rope["original_max_position_embeddings"]
    scale_P: Tensor = 1 + rope["llama_4_scaling_beta"] * (1 + times).double().log()
    return scale_P.float()[:, None]


def _angle_kinds(target: Target) -> list[tuple[str, ...]]:
    """Return the arguments by which the rotary module makes its tables: kinds of layers, if it knows several."""
    rotary: Any = getattr(target.family.base, rotary_name(target.family.base))
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [()]
    return [(kind,) for kind in sorted(set(target.model.config.get_text_config(decoder=True).layer_types))]


def packed_layers(target: Target, size: LayerSizes, pack: Packing) -> list[kernels.Layer]:
    """Return the decoder layers, packed."""
    decoder, kinds = _decoder(target), _angle_kinds(target)
    types = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
    layers = []
    places, windows = _places(target, size), layer_windows(target)
    for number, ((layer, parts), place, window) in enumerate(zip(_every(target), places, windows, strict=True)):
        table = kinds.index((types[number],)) if types and len(kinds) > 1 else 0
        rope = table if parts.state is not None or decoder.rotates(layer.self_attn) else -1
        made = _layer(parts, decoder, place, window, rope, pack)
        if parts.of_tokens is not None:
            made = replace(made, input=_token_input(parts.of_tokens, number, pack))
        layers.append(made)
    return layers


def _token_input(of_tokens: OfTokens, number: int, pack: Packing) -> kernels.TokenInput:
    """Return how the layer with this number reads its part of a token's numbers."""
    gate, projection = (pack(part.packed_rows(pack), part.bias) for part in of_tokens[:2])
    return kernels.TokenInput(
        gate, projection, of_tokens.norm.weight.detach().contiguous(), number * of_tokens.gate.shape[0]
    )


def token_inputs(target: Target, pack: Packing) -> Callable[[Tensor, Tensor, ThreadCount], Tensor] | None:
    """Return a function (tokens [M], embeddings [M, D], threads) that computes the numbers that tokens have for layers
    [M, X]; None for a model without such numbers."""
    base: Any = target.family.base
    if not getattr(base, "hidden_size_per_layer_input", 0):
        return None
    projection, norm = base.per_layer_model_projection, base.per_layer_projection_norm
    matrix = pack(pack.rows(projection), projection.bias)
    weight, eps = norm.weight.detach().float().contiguous(), norm_eps(norm)

    def compute(tokens_M: Tensor, x_MD: Tensor, threads: ThreadCount) -> Tensor:
        projected_MX = kernels.linear(matrix, x_MD, threads) * base.per_layer_model_projection_scale
        normed_MX = kernels.rms_norm(projected_MX.unflatten(1, (-1, len(weight))), weight, eps, threads).flatten(1)
        own_MX: Tensor = base.embed_tokens_per_layer(tokens_M)
        return (normed_MX + own_MX) * float(base.per_layer_input_scale)

    return compute


def _layer(parts: Parts, decoder: Decoder, place: Place, window: int, rope: int, pack: Packing) -> kernels.Layer:
    size = place.sizes
    qkv, k, v = _projections(parts, decoder, size, pack)
    norms = [_norm_weights(norm, decoder) for norm in parts.norms]
    q_norm, k_norm = (_norm_weights(norm, decoder)[0] for norm in parts.head_norms)
    # a state's kernel sorts its outputs as the file does
    o_rows = parts.o.packed_rows(pack) if parts.state is None else replace(parts.o.packed_rows(pack), column_I=None)
    o = pack(o_rows, parts.o.bias)
    gate_up, down, experts = _mlp(parts, pack)
    return kernels.Layer(
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        experts=experts,
        norm=norms[0][0],
        norm_bias=norms[0][1],
        attention_norm=norms[1][0],
        mlp_norm=norms[2][0],
        mlp_norm_bias=norms[2][1],
        output_norm=norms[3][0],
        q_norm=q_norm,
        k_norm=k_norm,
        window=window,
        rope=rope,
        k=k,
        v=v,
        sinks=None if parts.sinks is None else parts.sinks.detach().contiguous(),
        state=None if parts.state is None else _state(parts.state),
        shared=None if parts.shared is None else _dense_matrices(*parts.shared[:3], pack),
        shared_gate_D=None if parts.shared is None else parts.shared.router.module.weight.detach()[0].contiguous(),
        sizes=size,
        store=place.store,
        lender=place.lender,
        v_norm=None if parts.v_norm is None else torch.ones(size.head_dim, dtype=torch.float32, device="cpu"),
        factor=parts.factor,
    )


def _state(state: State) -> kernels.StateLayer:
    conv_Ct, bias_C = state.conv.weight.detach()[:, 0], state.conv.bias
    conv_tC, conv_bias_C = conv_Ct.T.contiguous(), None if bias_C is None else bias_C.detach().contiguous()
    if state.gated_norm is None:
        return kernels.StateLayer(conv_tC, conv_bias_C)
    rate_H, step_bias_H = -state.module.A_log.detach().exp(), state.module.dt_bias.detach().contiguous()
    norm_v = state.gated_norm.weight.detach().contiguous()
    tiled = getattr(getattr(state.module.out_proj, "stored_rows", None), "column_I", None) is not None
    return kernels.StateLayer(conv_tC, conv_bias_C, *state.sizes, rate_H, step_bias_H, norm_v, tiled)


def _projections(
    parts: Parts, decoder: Decoder, size: LayerSizes, pack: Packing
) -> tuple[kernels.Matrix, kernels.Matrix | None, kernels.Matrix | None]:
    """Return the matrices that read the input of attention or of a state's module."""
    if parts.state is None:
        orders = [_halves(size, heads) if decoder.interleaved else None for heads in (size.heads, size.kv_heads)]
        if decoder.gated:
            orders[0] = _by_kind(size.heads, (size.head_dim, size.head_dim))
        three = [part for part in parts[:3] if part is not None]
        return _by_type(three, [*orders, None], pack)
    return _by_type(parts.state.inputs, [None] * len(parts.state.inputs), pack)


def _mlp(parts: Parts, pack: Packing) -> tuple[kernels.Matrix | None, kernels.Matrix | None, kernels.Experts | None]:
    """Return both matrices of an MLP, its experts, or all of these."""
    experts = None if parts.mixture is None else _experts(parts.mixture, parts.inner, pack, parts.beside)
    if parts.up is None or parts.down is None:
        return None, None, experts
    return *_dense_matrices(parts.gate, parts.up, parts.down, pack), experts


def _dense_matrices(gate: Part | None, up: Part, down: Part, pack: Packing) -> tuple[kernels.Matrix, kernels.Matrix]:
    """Return both matrices of an MLP, packed."""
    last = pack(down.packed_rows(pack), down.bias)
    if gate is None:
        return pack(up.packed_rows(pack), up.bias), last
    return pack.gated(gate.packed_rows(pack), up.packed_rows(pack), (gate.bias, up.bias)), last


def _experts(mixture: Mixture, inner: int, pack: Packing, beside: Beside | None) -> kernels.Experts:
    """Return the experts, packed. The router stays exact: by rounded scores a token would go through other experts."""
    router = mixture.router
    gate_ups, downs = [], []
    for expert in mixture.of_experts(inner):
        gate_ups.append(pack.gated(expert.gate, expert.up, (expert.gate_bias, expert.up_bias)))
        downs.append(pack(expert.down, expert.down_bias))
    made = kernels.Experts(
        router=pack(kernels.Rows.of(router.weight), mixture.biases[0], kernels.EXACT),
        gate_up=tuple(gate_ups),
        down=tuple(downs),
        top=int(router.top_k if beside is None else beside.router.config.top_k_experts),
        normed=bool(getattr(router, "norm_topk_prob", True)),
    )
    if mixture.bias is not None:
        factor_E = torch.full_like(mixture.bias, router.routed_scaling_factor)
        return replace(made, bias_E=mixture.bias.detach().contiguous(), factor_E=factor_E)
    if beside is None:
        return made
    own = beside.router
    before, after, of_dense = (norm.weight.detach().contiguous() for norm in beside.norms)
    norms = before, own.scale.detach() * own.scalar_root_size, after, of_dense
    return replace(made, norms=norms, factor_E=own.per_expert_scale.detach().contiguous())


def _halves(size: LayerSizes, heads: int) -> Tensor:
    """Return the order of rows in which neighbours that RoPE rotates are halves of a head. Queries and keys in the same
    order have the same products."""
    rotated = torch.arange(size.rotary, device="cpu").view(-1, 2).T.flatten()
    of_head = torch.cat([rotated, torch.arange(size.rotary, size.head_dim, device="cpu")])
    return (size.head_dim * torch.arange(heads, device="cpu")[:, None] + of_head).flatten()


def _by_kind(heads: int, widths: Sequence[int]) -> Tensor:
    """Return the order of rows in which all heads' first kind comes first, of rows that are sorted by heads."""
    rows = torch.arange(heads * sum(widths), device="cpu").view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(widths), 1)])


def _by_type(
    inputs: Sequence[Part], orders: Sequence[Tensor | None], pack: Packing
) -> tuple[kernels.Matrix, kernels.Matrix | None, kernels.Matrix | None]:
    """Return matrices that read one input: neighbours that a file has in one type as one, and three at most."""
    rows, biases = [part.packed_rows(pack) for part in inputs], [part.bias for part in inputs]
    for i, order in enumerate(orders):
        if order is not None:
            rows[i] = rows[i].take(order)
            biases[i] = None if (bias := biases[i]) is None else bias[order]
    # a matrix begins with a panel
    while others := [i for i in range(1, len(rows)) if rows[i].type != rows[i - 1].type]:
        odd = [i for i in others if sum(map(len, rows[:i])) % kernels.panel()]
        if not odd and len(others) < 3:
            break
        for i in odd or others[-1:]:
            rows[i - 1 : i + 1] = [kernels.Rows.of(one.read()) for one in rows[i - 1 : i + 1]]
    matrices = list[kernels.Matrix]()
    for begin, end in itertools.pairwise([0, *others, len(rows)]):
        joined, some = kernels.joined(rows[begin:end]), [bias for bias in biases[begin:end] if bias is not None]
        assert joined is not None
        matrices.append(pack(joined, torch.cat(some) if some else None))
    first, *rest = matrices
    second, third = [*rest, None, None][:2]
    return first, second, third
