"""Differences between model families: masks, scales, context length, and which models cannot be served.

`describe(model)` reads a loaded model and returns the facts that a caller needs to run it on a tree:

    mask_kinds   ()                                       one 4-D mask goes to every layer
                 ("full_attention", "sliding_attention")  a dict of 4-D masks, one per kind of layer, goes in
    window       where a window applies (every layer, or the layers of kind "sliding_attention"), a query at position i
                 sees a key at position j iff 0 <= i - j < window:

                                 key 0 1 2 3 4
                     query 3         . x x x .       window 3: itself and the two before it
                     query 4         . . x x x

    chunk        layers of kind "chunked_attention" (Llama 4): a query sees the earlier keys of its own chunk of positions,
                 i // chunk == j // chunk

    softcap, logit_scale, embed_scale   operations around the lm_head and the embedding (see `head` and `embed`)

Masks are additive floats: 0 where attention is allowed, the lowest number of the dtype elsewhere.
Both backends that eyas accepts take them ("eager" and "sdpa"; eager would read a boolean mask as
numbers). "flex_attention" has block masks of its own and flash attention has no arbitrary masks:
both are refused, with the backend to use instead.

Facts come from the configuration, from class attributes and from the names that the code of the
base model's forward uses. Facts that cannot be read there are in the tables below; no other module
asks for a family by its name. This module knows no tree, no cache and no drafter, and it runs
nothing: `Target` checks the facts with a forward when it is created.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

from eyas.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BACKENDS", "CHUNKED", "FULL", "SLIDING", "Family", "cache_argument_of", "describe", "embed", "head"]

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

# ---------------------------------------------------------------------------------------------- the tables

STATE = "its recurrent state lies inside of its modules or in a cache of its own, where it cannot be put back when a draft is rejected"
SPARSE = "its sparse attention chooses keys by an index of its own, which a tree's mask cannot change"
ALIBI = "its attention biases come from slot numbers (ALiBi), so position_ids cannot express a tree"
SLOTS = "it masks attention by slot numbers of its own, which a tree's mask cannot change"
CACHED_WINDOW = (
    "transformers gives it a sliding window in its cache only, not in its masks, "
    "so whole texts and single tokens see different keys"
)
NO_MASK = "its forward takes no 4-D mask, which a tree needs"

# Model types that are refused whatever their configuration says.
REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), STATE),
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    "gpt_neo": SLOTS,
    "moshi": CACHED_WINDOW,
    **dict.fromkeys(("openai-gpt", "xlm"), NO_MASK),
}
# Kinds of layers (entries of layer_types and layers_block_type) that are refused; a kind in no
# table is refused as unknown.
REFUSED_KINDS: Mapping[str, str] = {
    "recurrent": STATE,
    **dict.fromkeys(
        (
            "compressed_sparse_attention",
            "deepseek_sparse_attention",
            "heavily_compressed_attention",
            "indexed_attention",
            "minimax_m3_sparse",
            "qwen_sparse_attention",
        ),
        SPARSE,
    ),
}
SERVED_KINDS = (FULL, SLIDING, CHUNKED)
# layers with recurrent or convolutional state (targets/recurrent.py)
STATE_KINDS = ("conv", "hybrid", "linear_attention", "mamba", "mamba2")
MASKLESS_KINDS = ("mlp", "moe")  # layers that attend to nothing
KIND_LISTS = ("layer_types", "layers_block_type", "block_types")
KIND_ALIASES = {"attention": FULL}  # older names of kinds of layers

BACKENDS = ("eager", "sdpa")
# names of a forward's cache: of models with attention, of models without, and of all since transformers 5.24
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")
UNLIMITED = 2**20  # positions of a request in a model without positions, which has no limit of its own

# Fields of a configuration that hold a scale. 1: the model multiplies by it; -1: it divides.
# Gemma's factor sqrt(hidden size) is in no table: its embedding module applies it.
LOGIT_SCALES: Mapping[str, int] = {"logit_scale": 1, "logits_scaling": -1}
EMBED_SCALES: Mapping[str, int] = {"embedding_multiplier": 1}
WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the weights of an lm_head that is not quantised
# Model types that multiply by a field by which the other types divide.
MULTIPLIED: Mapping[str, str] = {"hyperclovax": "logits_scaling"}

# ---------------------------------------------------------------------------------------------- the record


@dataclass(frozen=True)
class Family:
    """Facts about one loaded model, filled by `describe`. The modules are the model's own, not copies."""

    model_type: str
    mask_kinds: tuple[str, ...]  # () = one mask; otherwise the keys of the dict of masks
    window: int | None  # positions that a windowed layer sees, the query's own included
    chunk: int | None  # positions of a chunk, if some layers see their own chunk only
    softcap: float | None  # logits become softcap * tanh(logits / softcap)
    logit_scale: float  # logits are multiplied by it before the softcap
    embed_scale: float  # the output of the embedding module is multiplied by it before the first layer
    layers: nn.ModuleList  # the decoder layers, in order
    base: nn.Module  # its output[0] is the last hidden state, after the final norm
    head: nn.Module  # hidden state -> logits before scale and softcap
    embedding: nn.Module  # token ids -> embeddings before embed_scale
    context: int  # positions that a request may use, prompt and new tokens together
    context_reason: str  # why `context` is smaller than what the model accepts; "" if it is not
    shares_keys: bool  # its last layers read the keys of earlier ones (Gemma 3n and 4)
    has_states: bool  # some layers have recurrent or convolutional state
    has_attention: bool  # some layers attend, so that masks and positions go in
    cache_argument: str  # the name under which its forward takes a cache
    takes_logits_to_keep: bool  # its forward can compute the logits of the last tokens alone


def head(family: Family, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [..., V] of hidden states [..., D] taken after the final norm, as the model itself computes
    them; on the device of the hidden states."""
    stays_in_file = hasattr(family.head, "stored_rows")  # its weight would be read to be looked at
    weight = None if stays_in_file else getattr(family.head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype in WIDE_DTYPES:
        hidden = hidden.to(dtype=weight.dtype)  # Mamba's are float32 in every model (residual_in_fp32)
    logits: torch.Tensor = family.head(hidden).to(hidden.device)
    if family.logit_scale != 1.0:
        logits = logits * family.logit_scale
    if family.softcap is not None:
        logits = torch.tanh(logits / family.softcap) * family.softcap
    return logits


def embed(family: Family, ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [..., D] of token ids [...], scaled as the first layer reads them, without positions
    (GPT-2 adds those later); on the device of the ids."""
    embeddings: torch.Tensor = family.embedding(ids).to(ids.device)
    return embeddings if family.embed_scale == 1.0 else embeddings * family.embed_scale


def has_states(model: PreTrainedModel) -> bool:
    """Return whether some layers of the model have recurrent or convolutional state."""
    kinds = _kinds(model.config.get_text_config(decoder=True))
    return bool(getattr(model, "_is_stateful", False)) or any(kind in STATE_KINDS for kind in kinds)


def describe(model: PreTrainedModel) -> Family:
    """Read the facts about a loaded model, which is not changed.

    Raises:
        ModelError: the model cannot be served; one line with the model type and the reason.
    """
    _refuse_whole_model(model)
    untyped: Any = model  # get_output_embeddings and get_input_embeddings are untyped
    config = model.config.get_text_config(decoder=True)
    base = _decoder(model)
    code = _names(base)
    kinds = tuple(kind for kind in _kinds(config) if kind not in (*STATE_KINDS, *MASKLESS_KINDS))
    cache_argument = cache_argument_of(base)
    has_attention = cache_argument != "cache_params"
    for kind in kinds:
        if kind not in SERVED_KINDS:
            raise _refusal(config, REFUSED_KINDS.get(kind, f"eyas has no mask for layers of kind {kind}"))
    layers = _layers(config, base)
    if len(layers) == 0:
        raise _refusal(config, "its configuration asks for no layers: repair num_hidden_layers in config.json")
    if has_attention:
        _refuse_positions(config, base, layers)
    stateful = has_states(model)
    if stateful and len(kinds) <= 1:
        kinds = ()  # one mask for all layers that attend; the model makes none for the other layers then
    # the code tests `isinstance(mask, dict)`: it takes one mask for each kind of layer
    mask_kinds = kinds if {"isinstance", "dict", "layer_types"} <= code else ()
    if not mask_kinds and len(kinds) > 1 and "create_sliding_window_causal_mask" in code:
        raise _refusal(config, "it mixes windowed and full layers but builds their masks itself")
    has_window = SLIDING in mask_kinds if mask_kinds else "create_sliding_window_causal_mask" in code
    window = getattr(config, "sliding_window", None) if has_window else None
    chunk = getattr(config, "attention_chunk_size", None) if CHUNKED in mask_kinds else None
    shown = {SLIDING: window, CHUNKED: chunk} if mask_kinds else dict.fromkeys((FULL, SLIDING, CHUNKED), window)
    context, reason = _context(config, has_attention)
    kept = _kept_positions(config, shown) if has_attention else None
    if kept is not None and kept < context:
        context, reason = kept, f"past {kept} positions its text depends on the cache: {CACHED_WINDOW}"
    return Family(
        model_type=config.model_type,
        mask_kinds=mask_kinds,
        window=window,
        chunk=chunk,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=_scale(config, LOGIT_SCALES),
        embed_scale=_scale(config, EMBED_SCALES),
        layers=layers,
        base=base,
        head=untyped.get_output_embeddings(),
        embedding=untyped.get_input_embeddings(),
        context=context,
        context_reason=reason,
        shares_keys=bool(getattr(config, "num_kv_shared_layers", 0)),
        has_states=stateful,
        has_attention=has_attention,
        cache_argument=cache_argument,
        takes_logits_to_keep="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


# ---------------------------------------------------------------------------------------------- refusals


def _refusal(config: Any, reason: str) -> ModelError:
    return ModelError(f"a model of type {config.model_type} cannot be served: {reason}")


def _refuse_whole_model(model: Any) -> None:
    config = model.config
    text = config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)
    for model_type in (config.model_type, text.model_type):
        if model_type in REFUSED_TYPES:
            raise _refusal(config, REFUSED_TYPES[model_type])
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "it is an encoder-decoder model; eyas serves causal language models")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise _refusal(
            config, f"{type(model).__name__} is not a causal language model; load it with AutoModelForCausalLM"
        )
    backend = getattr(text, "_attn_implementation", None)
    if backend is not None and backend not in BACKENDS:
        by_sdpa = getattr(model, "_supports_sdpa", True) and getattr(text, "attn_logit_softcapping", None) is None
        way_out = "sdpa" if by_sdpa else "eager"
        raise _refusal(
            config, f'{backend} cannot take the mask of a tree; load it with attn_implementation="{way_out}"'
        )


def _refuse_positions(config: Any, base: nn.Module, layers: nn.ModuleList) -> None:
    if getattr(config, "alibi", False):
        raise _refusal(config, ALIBI)
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        raise _refusal(config, "its forward takes no position_ids, which a tree's depths need")
    reads_both_ways = getattr(config, "is_decoder", True) is False and "is_decoder" in _names(base, every_method=True)
    reads_both_ways |= getattr(config, "use_bidirectional_attention", None) in (True, "all")
    reads_both_ways |= getattr(config, "is_causal", True) is False  # what transformers' masks are made by
    causal = (getattr(one, "is_causal", True) or getattr(one, "is_cross_attention", False) for one in layers.modules())
    reads_both_ways |= not all(causal)
    if reads_both_ways:
        raise _refusal(
            config, "its attention is bidirectional as it is configured, so it is not a causal language model"
        )


def cache_argument_of(module: nn.Module) -> str:
    """Return the name under which the module's forward takes a cache."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[0])


# ---------------------------------------------------------------------------------------------- masks


def _kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of layers that this configuration names, each once, sorted by name."""
    kinds: set[str] = set()
    for name in KIND_LISTS:
        kinds |= {KIND_ALIASES.get(kind, kind) for kind in getattr(config, name, None) or ()}
    return tuple(sorted(kinds))


def _kept_positions(config: Any, shown: Mapping[str, int | None]) -> int | None:
    """Return how many positions a text may have before transformers' cache drops keys that the masks show, so that plain
    decoding has another text; None if it drops none. `shown` is the window of each kind of layer in the masks."""
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    kinds = getattr(config, "layer_types", None) or [FULL] * len(windows)
    kept = [(window, shown.get(kind)) for kind, window in zip(kinds, windows, strict=False) if window is not None]
    if least := [window for window, _ in kept if window < 2]:
        raise _refusal(config, f"its sliding window has {least[0]} positions, for which caches of transformers fail")
    return min((window for window, seen in kept if seen is None or window < seen), default=None)


def _names(module: nn.Module, every_method: bool = False) -> frozenset[str]:
    """Return the names that the code of a module's forward (or of every method of its class) uses:
    globals, attributes, nested functions.
    """
    functions = vars(type(module)).values() if every_method else [type(module).forward]
    return frozenset(
        name for function in functions for name in _names_of(getattr(inspect.unwrap(function), "__code__", None))
    )


def _names_of(code: CodeType | None) -> Iterator[str]:
    if code is None:
        return
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


# ---------------------------------------------------------------------------------------------- modules, scales, context


def _decoder(model: Any) -> nn.Module:
    """Return the text decoder: the base model, or the language model inside of a multi-modal one."""
    decoder: Any = model.get_decoder()
    if decoder is None or decoder is model:
        decoder = model.base_model
    has_head = getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    # Llama 4's own methods return the model with its head
    base: nn.Module = getattr(decoder, "model", decoder) if has_head else decoder
    return base


def _layers(config: Any, base: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the outermost list with as many modules as the configuration has layers."""
    count = config.num_hidden_layers
    # LongCat's configuration counts its attentions, two in each layer
    counts = (count, getattr(config, "num_layers", count))
    lists = [(name.count("."), module) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    for _, module in sorted(lists, key=lambda pair: pair[0]):
        if len(module) in counts:
            return module
    raise _refusal(config, f"no list of its {count} decoder layers was found in {type(base).__name__}")


def _scale(config: Any, table: Mapping[str, int]) -> float:
    """Return the product of the scales in this table that the configuration sets."""
    scale = 1.0
    for name, power in table.items():
        value = getattr(config, name, None)
        if value is not None:
            scale *= float(value) ** (1 if MULTIPLIED.get(config.model_type) == name else power)
    return scale


def _context(config: Any, has_attention: bool) -> tuple[int, str]:
    """Return (positions that a request may use, why they are fewer than the model accepts)."""
    context = getattr(config, "max_position_embeddings", None if has_attention else UNLIMITED)
    if not isinstance(context, int) or context < 1:
        raise _refusal(
            config, f"max_position_embeddings in its configuration must be a whole number, 1 or more; it is {context!r}"
        )
    scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if scale and scale - 1 < context:
        return int(scale) - 1, f"from position {scale - 1} on, layers without RoPE scale their queries by slot numbers"
    changes = "changes the frequencies of all keys, also of those in the cache"
    for rope in _ropes(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if "dynamic" in kind:
            return context, f"past {context} positions dynamic NTK {changes}"
        name = "original_max_position_embeddings"
        original = rope.get(name) or getattr(config, name, None)
        if kind == "longrope" and original is not None and original < context:
            return original, f"past {original} positions longrope {changes}"
    return context, ""


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters: one set, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or vars(config).get("rope_scaling") or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    yield from nested or [rope]
