"""A mixture of experts: what verifying costs, how many experts a pass touches, and c at the published acceptance (EAGLE-1, table 3).

    python runs/experts.py --output docs/results/experts.json

The target has Mixtral's shape at a smaller width (8 experts, two a token, feed-forward 3.5 times the hidden size, grouped-query attention)
and random weights: times and touched experts are real, the text means nothing, so which draft tokens are accepted is drawn by the rates
that EAGLE-1 publishes for Mixtral 8x7B. A dense target with as many parameters a token is measured beside it. Random weights route almost
uniformly; a trained router's choices are correlated, so real passes touch fewer experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _command import command, machine, run
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from eyas.adaptive.cost import verify_cost
from eyas.bench.simulate import expected_tau, simulated
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.drafters import find

RATES = (0.67, 0.62, 0.61, 0.64, 0.63)  # EAGLE-1, table 3: n-alpha of Mixtral 8x7B; published speed-up 1.50x, tau 3.25
PUBLISHED = {"speedup": 1.50, "tau": 3.25}
NODES = (1, 2, 4, 6, 8, 16, 26, 32, 64)


def target_of(kind: str, hidden: int, layers: int) -> Target:
    """Random weights; the dense one's feed-forward is as wide as two experts, what a token costs in the other."""
    shared: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256), "max_position_embeddings": 4096,
    }  # fmt: skip
    wide = hidden * 7 // 2
    config = MixtralConfig(**shared, intermediate_size=wide) if kind == "experts" else LlamaConfig(**shared, intermediate_size=2 * wide)
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).eval())


class Touched:
    """Counts the experts that a pass touches, by hooks on the routers."""

    def __init__(self, target: Target) -> None:
        self.seen: list[int] = []
        routers = [m for name, m in target.model.named_modules() if name.endswith((".mlp.gate", ".block_sparse_moe.gate"))]
        assert routers, "no router was found"
        for router in routers:
            router.register_forward_hook(self._look)

    def _look(self, router: torch.nn.Module, given: object, found: Any) -> None:
        logits = found[0] if isinstance(found, tuple) else found
        self.seen.append(int(logits.topk(2, dim=-1).indices.unique().numel()))


@torch.inference_mode()
def touched(target: Target, passes: int) -> list[dict[str, float]]:
    """Mean number of experts a layer touches in one verification of n nodes."""
    counter, session = Touched(target), target.open(1)
    session.prefill(0, torch.randint(target.vocab_size, (256,)).tolist())
    found = []
    for nodes in NODES:
        counter.seen.clear()
        for _ in range(passes):
            session.forward(torch.randint(target.vocab_size, (1, nodes)), Tree.chain(1, nodes))
        found.append({"nodes": nodes, "experts": round(statistics.mean(counter.seen), 2)})
    return found


def cycles(target: Target, method: str, options: dict[str, object], tau: float, new: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a cycle and of a vanilla step, interleaved; the speed-up that this c gives at that tau."""
    kind = find(method)
    drafters = {
        "vanilla": (find("vanilla")(target), {}),
        method: (kind.random(target, build_options(kind.Options, options)), {"verify": simulated(RATES)}),
    }
    prompt = tuple(torch.randint(target.vocab_size, (256,), generator=torch.Generator().manual_seed(1)).tolist())
    times: dict[str, list[float]] = {name: [] for name in drafters}
    for turn in range(rounds + 1):
        for name, (drafter, more) in drafters.items():
            decoder = Decoder(target, drafter, **more)
            decoder.add(Request(prompt, new))
            decoder.step()
            while not decoder.finished:
                began = time.perf_counter()
                decoder.step()
                if turn:  # the first round is the warm-up
                    times[name].append(time.perf_counter() - began)
    cycle, step = (statistics.median(times[name]) for name in (method, "vanilla"))
    return {
        "cycle_ms": round(1e3 * cycle, 2), "vanilla_ms": round(1e3 * step, 2), "c": round(cycle / step, 3),
        "speedup_at": {f"{tau:.2f}": round(tau * step / cycle, 3)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/experts.json"))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--passes", type=int, default=20)
    args = parser.parse_args()
    before, result = machine(), {}
    for kind in ("experts", "dense"):
        target = target_of(kind, args.hidden, args.layers)
        entry: dict[str, Any] = {
            "parameters_M": round(sum(p.numel() for p in target.model.parameters()) / 1e6),
            "verify_ms": [{k: round(v, 2) for k, v in row.items()} for row in verify_cost(target)],
            "eagle1 chain of 5": cycles(
                target, "eagle1", {"tree.choices": "chain-5"}, expected_tau(RATES, 5), args.new_tokens, args.rounds
            ),
            "eagle1 tree of 26": cycles(target, "eagle1", {"tree.choices": "reference"}, PUBLISHED["tau"], args.new_tokens, args.rounds),
        }
        if kind == "experts":
            entry["experts_touched"] = touched(target, args.passes)
        result[kind] = entry
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    told = {
        "command": command("experts.py"), "machine": before, "load_after": machine()["load_1min"], "settings": settings, "rates": RATES,
        "tau_of_these_rates": round(expected_tau(RATES, 5), 2), "published": PUBLISHED, **result,
    }  # fmt: skip
    args.output.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main)
