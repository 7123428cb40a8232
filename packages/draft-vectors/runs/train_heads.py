"""Train the tiny target and its heads, and write them into the package, in the files that engines read.

    python packages/draft-vectors/runs/train_heads.py            all of it, in a few minutes on one core
    python packages/draft-vectors/runs/train_heads.py eagle3     one head, for the target that is there

The text is the Apache licence, a byte is a token. Every weight is rounded to bfloat16 and stored as float32, so that an engine
has the same weights in both. Another processor trains other weights: run make_vectors.py afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import checkpoints
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch, find
from eyas.nn import Documents

PACKAGE = Path(__file__).resolve().parents[1]
DATA = PACKAGE / "src" / "draft_vectors" / "data"
VOCAB, LENGTH = 128, 96
# Seven layers are the fewest of which EAGLE-3's 2, L/2 and L-3 are three; vLLM's attention on CPUs wants heads of 32 or more.
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=0, rms_norm_eps=1e-5,
)  # fmt: skip
DRAFT_VOCAB = 56
# method -> (options of a new head, steps of its training)
HEADS: dict[str, tuple[dict[str, Any], int]] = {
    "eagle1": ({}, 500),
    "eagle3": ({"head.draft_vocab": DRAFT_VOCAB, "ttt.steps": 4}, 300),
    "mtp": ({"ttt.steps": 4}, 300),
    "dflash": ({"head.layers": "2,4,6", "head.depth": 1, "head.block": 5}, 500),
    "dspark": ({"head.layers": "2,4,6", "head.depth": 1, "head.block": 4, "head.markov_rank": 16}, 500),
    "peagle": ({"head.draft_vocab": DRAFT_VOCAB, "head.depth": 2, "head.levels": 4}, 400),
    "medusa": ({"head.count": 4}, 400),
}  # fmt: skip


def text() -> Tensor:
    """Return the licence as ids."""
    licence = re.sub(r"\s+", " ", (PACKAGE / "LICENSE").read_text())
    return torch.tensor([b for b in licence.encode("ascii") if b < VOCAB])


def rounded(module: torch.nn.Module) -> None:
    """Round all weights to bfloat16."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())


def make_target(steps: int = 700, batch: int = 24) -> LlamaForCausalLM:
    """Train the target and save it."""
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(CONFIG), text()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    for step in range(steps):
        begin = torch.randint(len(ids) - LENGTH, (batch,))
        rows = torch.stack([ids[b : b + LENGTH] for b in begin.tolist()])
        loss = model(rows, labels=rows).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"target, step {step + 1}: loss {float(loss):.3f}", flush=True)
    rounded(model)
    model.save_pretrained(DATA / "target")
    (DATA / "target" / "generation_config.json").unlink(missing_ok=True)
    return model.eval()


@torch.no_grad()
def own_texts(model: LlamaForCausalLM, count: int = 96) -> Tensor:
    """Return texts that the target continues by itself, from places all over the licence."""
    ids, prompt = text(), 16
    torch.manual_seed(1)
    begin = torch.arange(count) * (len(ids) - prompt) // count
    rows = torch.stack([ids[b : b + prompt] for b in begin.tolist()])
    sample: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    texts: Any = model.generate(rows, max_new_tokens=LENGTH - prompt, **sample)
    return texts


def make_head(name: str, target: Target, rows: Tensor) -> None:
    """Train a head and save it."""
    options, steps = HEADS[name]
    method = find(name)
    counts = torch.bincount(rows.flatten(), minlength=VOCAB)
    more = {"draft_ids_v": counts.topk(DRAFT_VOCAB).indices.sort().values} if name in ("eagle3", "peagle") else {}
    drafter = method.random(target, build_options(method.Options, options), 1, **more)
    if name == "eagle1":  # vLLM computes no bias of fc
        drafter.net.fc.bias = None
    layers = getattr(drafter, "train_feature_layers", drafter.feature_layers)
    weights = [weight.requires_grad_(True) for weight in drafter.net.parameters()]
    optimiser = torch.optim.AdamW(weights, 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps)
    features = target.encode(rows, layers)
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        some = torch.randperm(len(rows))[:12]
        lengths = (LENGTH,) * len(some)
        counted = torch.ones(len(some) * LENGTH, dtype=torch.bool)
        batch = Batch(rows[some].flatten(), features[some].flatten(0, 1), counted, Documents(lengths))
        loss = drafter.loss(batch, generator)
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            figures = float(loss.total / loss.count), float(loss.sums["accuracy"] / loss.count)
            print(f"{name}, step {step + 1}: loss {figures[0]:.3f}, accuracy {figures[1]:.2f}", flush=True)
    for weight in weights:
        weight.requires_grad_(False)
    rounded(drafter.net)
    made = drafter.weights()
    if name == "eagle1":
        made = replace(made, config={**made.config, "fc_bias": False})
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints.save(made, folder)
    print(name, json.loads((folder / "config.json").read_text()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", help="the heads to train; none: the target and all of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.heads:
        make_target()
    model = LlamaForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()
    target, rows = Target(model, "draft-vectors"), own_texts(model)
    for name in options.heads or HEADS:
        make_head(name, target, rows)


if __name__ == "__main__":
    main()
