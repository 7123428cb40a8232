"""Bytes and operations of a pass of the target, from its config.json.

transformers builds the model on the device "meta", where tensors have shapes and no content. So the counts are
exact for every architecture that it knows, and no weights are read.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from eyas.core.cache import layout_of
from eyas.core.sockets import TARGET
from eyas.errors import InputError, ModelError, one_line
from eyas.targets.pretrained import REASON_LENGTH, check_config

__all__ = ["WEIGHT_BYTES", "Model", "model_of", "read_config", "read_model"]

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.625}  # int4: a float32 scale for 32 weights
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # in configurations of transformers


@dataclass(frozen=True)
class Model:
    """The sizes of a target. Numbers of weights count each weight that a pass reads, so an embedding table
    only where it is the output matrix too."""

    name: str
    model_type: str
    dtype: str  # of the checkpoint
    hidden: int
    inner: int
    vocab: int
    layers: int
    heads: int  # of the queries
    kv_heads: int
    width: int  # of a head
    dense: int  # weights that every pass reads
    experts: int  # of a layer; 0: it has none
    chosen: int  # experts for a token
    expert: int  # weights of one expert, in all layers together
    stored: float  # numbers of keys and values that a token leaves in layers which see all tokens
    windowed: float  # the same in layers with a window
    window: int

    @property
    def weights(self) -> int:
        """Weights of all experts and all else."""
        return self.dense + self.experts * self.expert

    def read(self, tokens: float) -> float:
        """Return how many weights a pass over so many tokens reads, each token's experts drawn independently."""
        if not self.experts:
            return float(self.dense)
        missed = math.pow(1 - self.chosen / self.experts, tokens)
        return self.dense + self.expert * self.experts * (1 - missed)

    def keys(self, context: float) -> float:
        """Return the numbers of keys and values that a row reads after so many tokens."""
        return self.stored * context + self.windowed * min(context, self.window)

    def flops(self, tokens: float, context: float) -> float:
        """Return the floating-point operations of a pass: two for each weight and token, and in attention two for
        each query head and each number of its keys and values."""
        scored = self.heads / self.kv_heads * self.keys(context)
        return 2 * tokens * (self.dense + self.chosen * self.expert + scored)


def read_model(source: str) -> Model:
    """Return the sizes of a model by its name, folder, hub id or config.json.

    Raises:
        InputError, ModelError: one line that names the mistake in the configuration.
    """
    return model_of(read_config(source), source)


def read_config(source: str) -> PreTrainedConfig:
    """Return the configuration of a model by its name, folder, hub id or config.json."""
    path = Path(source).expanduser()
    if path.is_file():
        return _config_of_file(path)
    for plug in TARGET.plugs:
        if not path.is_dir() and (known := plug.find_target(source, None, True)) is not None:
            with known.open(False) as opened:
                made = isinstance(opened.place, PreTrainedModel)
                return opened.place.config if made else check_config(opened.place)
    return check_config(source)


def _config_of_file(path: Path) -> PreTrainedConfig:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        config: PreTrainedConfig = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers refuses values by exceptions of many kinds
        reason = one_line(error, REASON_LENGTH) or type(error).__name__
        raise InputError(f"{path} is not the config.json of a model that transformers knows: {reason}") from error
    return config


def model_of(config: PreTrainedConfig, name: str) -> Model:
    """Return the sizes of the model that transformers makes of a configuration."""
    try:
        with torch.device("meta"), torch.no_grad():
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(deepcopy(config), dtype=torch.bfloat16).eval()  # products of experts take no other
            cache = DynamicCache(config=model.config)
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    except Exception as error:  # the model's own code, with the values of a configuration that may be broken
        raise ModelError(f"{name}: no such model can be made: {one_line(error, REASON_LENGTH)}") from error
    text: Any = config.get_text_config()
    layout = [shape or (0, 0, 0) for shape in layout_of(cache)]
    kinds = getattr(text, "layer_types", None) or [_every_layer(text)] * len(layout)
    stored = [float(heads * sum(widths)) for heads, *widths in layout]
    slides = ["sliding" in kind for kind in kinds]
    experts = next((int(n) for field in EXPERTS if (n := getattr(text, field, None))), 0)
    of_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) if experts else 0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    others = sum(p.numel() for p in model.parameters() if p is head or p is not embedding)
    kv_heads = max(heads for heads, *_ in layout) or 1
    queries = int(text.num_attention_heads)
    return Model(
        name=name,
        model_type=str(config.model_type),
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
        hidden=int(text.hidden_size),
        inner=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        vocab=head.shape[0],
        layers=len(layout),
        heads=queries,
        kv_heads=kv_heads,
        width=max(widths[0] for _, *widths in layout) or int(text.hidden_size) // queries,
        dense=others - of_experts,
        experts=experts,
        chosen=int(getattr(text, "num_experts_per_tok", None) or 0) if experts else 0,
        expert=of_experts // experts if experts else 0,
        stored=sum(n for n, slide in zip(stored, slides, strict=False) if not slide),
        windowed=sum(n for n, slide in zip(stored, slides, strict=False) if slide),
        window=int(getattr(text, "sliding_window", None) or 0),
    )


def _every_layer(text: Any) -> str:
    return "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
