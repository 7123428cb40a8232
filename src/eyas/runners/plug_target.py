"""Plugs models whose weights stay in their files into the socket "target" (core/sockets.py)."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from eyas import kernels
from eyas.core.sockets import KnownHead, KnownTarget, Source
from eyas.core.target import Target
from eyas.runners._decoders import FAMILIES
from eyas.runners.stored import (
    INDEX,
    Checkpoint,
    Entry,
    MappedFile,
    few_outputs,
    open_safetensors,
    settings_of,
    shards_of,
)
from eyas.targets.gguf_files import TENSORS, as_folder, split_gguf
from eyas.targets.pretrained import has_tokenizer, is_missing_path

__all__ = ["find_target", "heads_for"]

log = logging.getLogger(__name__)  # the command line shows its messages

# Bytes of a checkpoint from which on its weights stay in the files. Smaller models are loaded by transformers, and their
# own forward is fast, too.
LARGE = 1 << 30
# Checkpoints with images. AutoModelForCausalLM makes the text model alone of Qwen3.5's. Gemma 4's text models are too large
# to be loaded beside their packed weights.
WITH_IMAGES = ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_unified")
ROPE_FACTORS = "rope_freqs.weight"  # in GGUF files: what frequencies are divided by


def find_target(target: Any, gguf_file: str | None, cache: bool, stored: bool = False) -> KnownTarget | None:
    """Return the model in a file in GGUF format or in a large checkpoint, if the kernels can pack its weights from there."""
    if not stored or not isinstance(target, str | Path) or not kernels.available():
        return None
    source, file = split_gguf(target, gguf_file)
    if file is not None:
        if not (Path(source) / file).is_file():
            return None
        return KnownTarget(partial(_open_gguf, Path(source), file, cache), takes_file=True)
    checkpoint = _checkpoint_of(source)
    return None if checkpoint is None else KnownTarget(partial(_open_folder, checkpoint, str(source)))


def _checkpoint_of(source: str | Path) -> Checkpoint | None:
    """Return a large checkpoint of a family that the kernels know. A hub id is fetched. None: it is another source, or lacks
    a file, and the later load names the fault."""
    if is_missing_path(source):
        return None
    fetch: Any = partial(cached_file, str(source), _raise_exceptions_for_missing_entries=False)
    with suppress(Exception):  # a broken file raises errors of many kinds
        about = json.loads(Path(fetch("config.json")).read_text(encoding="utf-8"))
        kind, quantised = about.get("model_type"), about.get("quantization_config", {}).get("quant_method")
        # gpt-oss's experts that are not quantised lie in columns
        if kind not in (*FAMILIES, *WITH_IMAGES) or quantised != ("mxfp4" if kind == "gpt_oss" else None):
            return None
        fetch("generation_config.json")
        paths = [Path(fetch(name)) for name in shards_of(Path(fetch(INDEX) or ""))]
        size = sum(path.stat().st_size for path in paths)
        if size >= LARGE:
            return open_safetensors(paths[0].parent)
    return None


def heads_for(target: Target) -> list[KnownHead]:
    """Return none: a file comes without heads."""
    return []


@contextmanager
def _open_folder(checkpoint: Checkpoint, name: str, tokenizer: Any) -> Iterator[Source]:
    model = checkpoint.model()
    with few_outputs(model):
        yield Source(model, name, name if tokenizer is None else tokenizer)


@contextmanager
def _open_gguf(source: Path, file: str, cache: bool, tokenizer: Any) -> Iterator[Source]:
    with as_folder(source, file, cache, weights=False) as folder:
        checkpoint = _gguf_checkpoint(source / file, folder)
        if tokenizer is None and (place := next(filter(has_tokenizer, (source, folder)), None)) is not None:
            tokenizer = place
        elif tokenizer is None:
            warnings.warn(f"no tokenizer in {file}: name one (tokenizer=..., --tokenizer)", stacklevel=5)
            tokenizer = False
        if checkpoint is not None:
            model = checkpoint.model()
            with few_outputs(model):
                yield Source(model, f"{source}/{file}", tokenizer)
            return
    with as_folder(source, file, cache) as folder:
        yield Source(folder, f"{source}/{file}", tokenizer)


def _gguf_checkpoint(path: Path, folder: Path) -> Checkpoint | None:
    """Return the model in a file; None, with a logged line, where the kernels do not know its family or its types."""
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = about.get("model_type")
    if kind not in FAMILIES:
        log.info("%s is converted: the kernels read no files of the family %s", path.name, kind)
        return None
    listed = json.loads((folder / TENSORS).read_text(encoding="utf-8"))
    tensors = {
        name: Entry(0, number, tuple(shape), offset, tuple(order), columns, change)
        for name, (number, shape, offset, order, columns, change) in listed.items()
    }
    plain = (0, 1, 30)
    if other := sorted(
        {entry.type for entry in tensors.values() if entry.type not in plain and kernels.block_type(entry.type) is None}
    ):
        log.info(
            "%s is converted: the kernels do not know its types of weights %s", path.name, ", ".join(map(str, other))
        )
        return None
    checkpoint = Checkpoint(*settings_of(folder), [MappedFile(path)], tensors)
    if ROPE_FACTORS not in tensors or kind == "gemma4_text":  # its configuration has them
        return checkpoint
    return replace(checkpoint, frequency_factors=checkpoint.tensor(ROPE_FACTORS, tensors[ROPE_FACTORS].shape))
