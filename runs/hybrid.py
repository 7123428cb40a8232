"""Measure what a cycle over a chain or a tree costs on targets with recurrent or convolutional
state, against one token.

    python runs/hybrid.py --output docs/results/hybrid.json

The models have the shapes of hybrids and random weights: the time of a pass does not depend on what
is accepted. Each row reads a prompt; then passes of all kinds are timed in turns, round after
round: the forward over the trees and the commit of a longest path. "transformers" is the model's
own step of one token, with transformers' cache. Milliseconds: medians with quartiles; ratios to the
pass of one node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import machine, parser, quantiles, run, words, write
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from eyas.core.target import Target, TargetSession
from eyas.core.tree import Tree, Verdict
from eyas.targets.recurrent import RowStates, state_modules

SCHEMA = "eyas.hybrid/1"
COMMON = {"vocab_size": 16_384, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
LAYERS = 12
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {"intermediate_size": 2048, "layer_types": ["conv", "conv", "full_attention"] * 4},
    "qwen3_next": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "falcon_h1": {
        "intermediate_size": 1536, "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
}  # fmt: skip
# Parents of the nodes of each pass. The tree has the nodes of chain 8 and the depth of chain 4.
CHAIN = {f"chain of {drafts}": list(range(-1, drafts)) for drafts in (4, 8)}
PASSES = {"one token": [-1], **CHAIN, "tree of 8, depth 4": [-1, 0, 0, 1, 1, 2, 3, 4, 6]}


def random_model(model_type: str) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, num_hidden_layers=LAYERS, **COMMON, **SHAPES[model_type])
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM
    model: PreTrainedModel = build.from_config(config, dtype=torch.float32)
    return model.eval()


class Passes:
    """The timed passes of one model, with so many rows."""

    def __init__(self, target: Target, rows: int, prompt: int) -> None:
        self.target, self.rows, self.session = target, rows, target.open(rows)
        tokens = torch.randint(target.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(1))
        for row in range(rows):
            self.session.prefill(row, tokens[row].tolist())
        self.cache = DynamicCache(config=target.model.config)
        with torch.inference_mode():
            target.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        self.kinds: dict[str, Callable[[], None]] = {"transformers": self.own_step}
        self.kinds |= {name: lambda parents=parents: self.verify(parents) for name, parents in PASSES.items()}

    @torch.inference_mode()
    def own_step(self) -> None:
        self.target.model(
            input_ids=torch.zeros(self.rows, 1, dtype=torch.long), past_key_values=self.cache, use_cache=True
        )

    def verify(self, parents: list[int]) -> None:
        tree = tree_of(parents, self.rows)
        self.session.forward(torch.zeros(self.rows, len(parents), dtype=torch.long), tree)
        commit_deepest(self.session, tree)


def tree_of(parents: list[int], rows: int) -> Tree:
    return Tree.build(torch.tensor([parents]), len(parents) - 1).for_rows(rows)


def commit_deepest(session: TargetSession, tree: Tree) -> None:
    """Accept the path to the deepest node, in all rows."""
    depth = int(tree.depth_BN[0].max())
    path_P = tree.mask_BNN[0, int(tree.depth_BN[0].argmax())].nonzero()[:, 0]
    path_BP = path_P.expand(session.rows, -1)
    length_B = torch.full((session.rows,), depth + 1)
    session.commit(
        Verdict(path_BP, torch.zeros_like(path_BP), length_B, length_B), torch.ones(session.rows, dtype=torch.bool)
    )
    session.set_host_lengths([length + depth + 1 for length in session.lengths])


def measure(model_type: str, rows: int, prompt: int, rounds: int) -> dict[str, Any]:
    target = Target(random_model(model_type))
    passes = Passes(target, rows, prompt)
    ms: dict[str, list[float]] = {name: [] for name in passes.kinds}
    for turn in track(range(rounds + 2), description=f"{model_type}, {rows} rows"):
        for name, one in passes.kinds.items():
            began = time.perf_counter()
            one()
            if turn >= 2:  # the first ones warm up
                ms[name].append(1e3 * (time.perf_counter() - began))
    base = float(np.median(ms["one token"]))
    held = [state.committed for state in passes.session.states if isinstance(state, RowStates)]
    state_bytes = sum(tensor.nbytes for rows in held for tensors in rows for tensor in tensors.values())
    return {
        "parameters": sum(weight.numel() for weight in target.model.parameters()),
        "parameters_of_state_modules": sum(
            weight.numel() for one in state_modules(target) for weight in one.module.parameters()
        ),
        "state_bytes_per_row": state_bytes // rows,
        "ms": {name: quantiles(values, 0.25, 0.5, 0.75, digits=2) for name, values in ms.items()},
        "over_one_token": {name: round(float(np.median(values)) / base, 2) for name, values in ms.items()},
    }


def main() -> None:
    args = parser(__doc__, rows="1,4", prompt=64, rounds=20, models=",".join(SHAPES)).parse_args()
    before = machine()
    results = {
        name: {rows: measure(name, int(rows), args.prompt, args.rounds) for rows in words(args.rows)}
        for name in words(args.models)
    }
    write(args.output, {"schema": SCHEMA, "models": results}, before)


if __name__ == "__main__":
    run(main)
