"""SafeAILab's own code among the engines of runs/peers.py, and the model and head in the form that
it reads.

Without a copy of their repository (REFERENCE=FOLDER) it is their package eagle-llm 1.2.1: EAGLE-1
with its static tree of 26 nodes, so it gets the embedded model's EAGLE-1 head. A copy of the
repository is EAGLE-3 and gets the same head as all others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas import tiny
from eyas.checkpoints import ExportTarget, load
from eyas_train.exports import export

TREE = (8, 4, 2)  # nodes, depth, branch: the best of those that were tried
PYTHON = Path(__file__).resolve().parents[1] / ".venv-reference/bin/python"


def ways(workshop: Path) -> dict[str, dict[str, Any]]:
    """Options of with_reference.py by the name that is shown.

    Args:
        workshop: the folder in which target and head are made.
    """
    folder = os.environ.get("REFERENCE", "")
    method = "eagle3" if folder else "eagle1"
    target = target_form(workshop)
    common = {"reference": folder, "target": target, "head": head_form(workshop, method, target), "tree": TREE}
    shown = f"EAGLE-3, {'/'.join(map(str, TREE))}" if folder else "EAGLE-1, static tree"
    return {"plain": {**common, "plain": True}, shown: {**common, "plain": False}}


def target_form(workshop: Path) -> Path:
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


def head_form(workshop: Path, method: str, target: Path) -> Path:
    """The head in its authors' format. Their EAGLE-1 reads the embedding from the head's own file,
    which is a pickle."""
    place = workshop / f"reference-{method}"
    if not place.exists():
        export(load(tiny.HEADS[method]), "safeailab", place, ExportTarget(str(target)))
        tensors = {name: tensor.float() for name, tensor in load_file(place / "model.safetensors").items()}
        if method == "eagle1":
            embedding = tiny.model().get_input_embeddings().weight.detach().float().clone()
            tensors.setdefault("embed_tokens.weight", embedding)
        torch.save(tensors, place / "pytorch_model.bin")
    return place
