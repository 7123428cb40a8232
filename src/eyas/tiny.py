"""The embedded model: a 28M-parameter LLaMA chat model, its tokenizer and its draft heads.

Matrices are stored as int8 with one float32 scale per output channel and dequantised when loaded; the
dequantised model is the target that the heads were trained on. The files are the package eyas_tiny, a
distribution of its own (the folder tiny/ of a clone), whose README.md says how they were made. This
module only knows where they are and how to unpack them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ModelError, one_line
from eyas.files import from_int8, is_altered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "BEST",
    "FOLDER",
    "HEADS",
    "MISSING",
    "PACKED",
    "model",
    "tokenizer",
]

PACKAGE = "eyas_tiny"
MISSING = "the embedded model is not installed: pip install ./tiny in a clone of eyas, or name a target"


def _folder() -> Path:
    """Return the files of the embedded model: in the clone that this file belongs to, else the
    installed ones; they may not exist."""
    clone = Path(__file__).parents[2] / "tiny" / PACKAGE
    installed = None if clone.is_dir() else find_spec(PACKAGE)
    return (Path(installed.origin).parent if installed and installed.origin else clone) / "weights"


FOLDER = _folder()
HEADS = {name: FOLDER / name for name in ("eagle1", "eagle3", "mtp")}  # by the kind of head that a method reads
# The fastest method on this model with every tree measured (docs/lab/results.md, "The embedded MTP module"):
# 4 to 7 % more tokens/s than eagle3, 2 to 10 % more than eagle2.
BEST = "mtp"
PACKED = "model.int8.safetensors"


def model(folder: Path = FOLDER) -> PreTrainedModel:
    """Return the embedded model in float32, in eval mode, on the CPU. ModelError when its files are
    missing, altered or broken."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    _check(folder, PACKED, "config.json", "generation_config.json")
    try:
        tensors = from_int8(load_file(folder / PACKED))
        config = LlamaConfig.from_pretrained(folder)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(
            f"the embedded model is missing or broken ({one_line(error, 200)}): install eyas-tiny again"
        ) from error
    logging: Any = transformers_logging
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        net: PreTrainedModel = LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32
        )
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    net.generation_config = GenerationConfig.from_pretrained(folder)
    net.train(False)
    return net


def tokenizer(folder: Path = FOLDER) -> PreTrainedTokenizerBase:
    """Return the embedded model's tokenizer. ModelError when its files are missing, altered or broken."""
    from transformers import AutoTokenizer

    _check(folder, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the embedded model's tokenizer is missing or broken ({one_line(error, 200)}): install eyas-tiny again"
        ) from error
    return loaded


def _check(folder: Path, *names: str) -> None:
    """Raise ModelError without the files, and for those that are not as checksums.json has them."""
    if not folder.is_dir():
        raise ModelError(MISSING)
    altered = [name for name in names if is_altered(folder / name)]
    if altered:
        raise ModelError(
            f"the embedded model's {' and '.join(altered)} changed on the disk (another SHA-256): install eyas-tiny again"
        )
