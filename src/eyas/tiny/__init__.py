"""The embedded model: a 28M-parameter LLaMA chat model of our own, its tokenizer and its draft heads.

Matrices are stored as int8 with one float32 scale per output channel and dequantised when loaded; the dequantised model *is* the target,
the heads were trained on it. How it was made: runs/make_tiny.py and weights/README.md. This module knows where the files are and how to
unpack them, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["BEST", "FOLDER", "HEADS", "PACKED", "SMALL_TREE", "dequantise", "model", "quantise", "tokenizer", "with_small_tree"]

FOLDER = Path(__file__).parent / "weights"
HEADS = {"eagle1": FOLDER / "eagle1", "eagle3": FOLDER / "eagle3"}  # by what a method reads
BEST = "eagle2"  # the method that drafts best on it: runs/acceptance.py
# The fastest static one of runs/speed.py: on a CPU in float32 every verified node costs time. What grows is as large as pays (eyas.adaptive).
SMALL_TREE = {"tree.choices": "chain-3"}
PACKED = "model.int8.safetensors"
SCALE = ".scale"  # the tensor `x.scale` [rows] belongs to the int8 matrix `x` [rows, columns]


def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """int8 matrices with one scale per output channel (row); everything else as it is, in float32."""
    import torch

    packed = {}
    for name, value in tensors.items():
        wide = value.float()
        if wide.ndim != 2:
            packed[name] = wide
            continue
        scale = wide.abs().amax(1).clamp(min=1e-12) / 127
        packed[name] = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def dequantise(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 tensors that `quantise` stands for."""
    return {
        name: value.float() * packed[name + SCALE][:, None] if name + SCALE in packed else value.float()
        for name, value in packed.items()
        if not name.endswith(SCALE)
    }


def model(folder: Path = FOLDER) -> PreTrainedModel:
    """The embedded model in float32, in eval mode, on the CPU. ModelError when its files are missing or broken."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    try:
        tensors = dequantise(load_file(folder / PACKED))
        config = LlamaConfig.from_pretrained(folder)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"the embedded model is missing or broken ({' '.join(str(error).split())[:200]}): install eyas again") from error
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        net: PreTrainedModel = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    net.generation_config = GenerationConfig.from_pretrained(folder)
    net.train(False)
    return net


def tokenizer(folder: Path = FOLDER) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the embedded model's tokenizer is missing or broken ({' '.join(str(error).split())[:200]}): install eyas again"
        ) from error
    return found


def with_small_tree(asked: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of a method with a static tree, with the small one where nothing was said of it.

    usual: the method's options and their defaults.
    """
    if asked.keys() & {*SMALL_TREE, "tree.nodes", "tree.depth", "tree.branch", "depth", "dynamic.nodes"}:
        return dict(asked)
    return {**{name: value for name, value in SMALL_TREE.items() if name in usual}, **asked}
