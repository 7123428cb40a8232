"""The embedded model and its EAGLE-1 head in the form that SafeAILab's package eagle-llm 1.2.1 reads, for runs/peers.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from eyas import tiny
from eyas.checkpoints import ExportTarget, load
from eyas_train.exports import export


def reference_target(workshop: Path) -> Path:
    """The target as transformers of 2024 saved it: in shards with an index, `rope_theta` beside the
    other settings, merges as strings."""
    place = workshop / "reference-target"
    if not (place / "model.safetensors.index.json").exists():
        tiny.model().save_pretrained(place, max_shard_size="20MB")
        tiny.tokenizer().save_pretrained(place)
        config = json.loads((place / "config.json").read_text())
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        (place / "config.json").write_text(json.dumps(config))
        settings = json.loads((place / "tokenizer_config.json").read_text())
        known = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "model_max_length")}
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
        (place / "tokenizer_config.json").write_text(json.dumps(known))
        tokenizer = json.loads((place / "tokenizer.json").read_text())
        # as tokenizers wrote them before 0.20
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


def reference_head(workshop: Path) -> Path:
    """The head in its authors' format. Their EAGLE-1 reads the embedding from the head's own file,
    which is a pickle."""
    place = workshop / "reference-eagle1"
    if not place.exists():
        export(load(tiny.HEADS["eagle1"]), "safeailab", place, ExportTarget(str(reference_target(workshop))))
        tensors = {name: tensor.float() for name, tensor in load_file(place / "model.safetensors").items()}
        embedding = tiny.model().get_input_embeddings().weight.detach().float().clone()
        tensors.setdefault("embed_tokens.weight", embedding)
        torch.save(tensors, place / "pytorch_model.bin")
    return place
