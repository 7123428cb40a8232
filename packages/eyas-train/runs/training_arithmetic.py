"""Compute the memory and the tokens a second of each GPU that trains an EAGLE-3 head.

    python packages/eyas-train/runs/training_arithmetic.py --output docs/results/training_arithmetic.json

For targets of 8B and 70B parameters (Llama 3's dimensions) in bfloat16, and a head of one layer over 32,000 tokens: bytes
of features, bytes of the head's training state, and what a batch costs where the target's layers wait in the CPU's
memory (`--share-target`). Rates are assumptions for an H100: 0.4 of its 989 TFLOP/s, 55 GB/s over PCIe 5, 350 GB/s over
NVLink.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import parser, run, write

TARGETS = {
    "8B": {"hidden": 4096, "inner": 14336, "layers": 32, "kv": 1024, "vocabulary": 128256},
    "70B": {"hidden": 8192, "inner": 28672, "layers": 80, "kv": 1024, "vocabulary": 128256},
}
FLOPS, PCIE, NVLINK = 0.4 * 989e12, 55e9, 350e9
DRAFT_VOCABULARY, STEPS, READ_LAYERS = (
    32_000,
    7,
    4,
)  # of the head; of its training-time test; three fused ones and the last


def figures(name: str, processes: int, batch: int) -> dict[str, Any]:
    """Return the figures of one process of so many, each with batches of so many tokens."""
    D, inner, layers, kv, vocabulary = TARGETS[name].values()
    mlp, in_layers = 3 * D * inner, layers * (2 * D * D + 2 * D * kv + 3 * D * inner)
    outside = 2 * vocabulary * D
    fused, layer, logits = 3 * D * D, 2 * D * D + 4 * D * kv + D * D + mlp, DRAFT_VOCABULARY * D
    head = fused + layer + logits
    share = 2 * in_layers / processes
    seconds = {
        "target": 2 * in_layers * batch / FLOPS,
        "PCIe": share / PCIE,
        "NVLink": 2 * in_layers * (1 - 1 / processes) / NVLINK,
    }
    longest = max(seconds, key=seconds.__getitem__)
    trained = 6 * (fused + STEPS * (layer + logits)) + 2 * vocabulary * D  # the target's own logits too
    seconds["head"] = trained * batch / FLOPS
    features = {"bfloat16": 2 * READ_LAYERS * D, "float8_e4m3fn": READ_LAYERS * (D + 2)}
    return {
        "target": name,
        "processes": processes,
        "tokens of a batch": batch,
        "features, KiB a token": {kind: round(size / 1024, 1) for kind, size in features.items()},
        "head, M parameters": round(head / 1e6),
        "head's state, GB a process": {"fsdp": round(16 * head / processes / 1e9, 2), "ddp": round(16 * head / 1e9, 2)},
        "whole weights and gradients in a step with fsdp, GB": round(8 * head / 1e9, 1),
        "target, GB": {
            "whole on the GPU": round(2 * (in_layers + outside) / 1e9, 1),
            "shared, on the GPU": round(2 * (outside + 2 * in_layers / layers) / 1e9, 1),
            "shared, in the CPU's memory": round(share / 1e9, 1),
        },
        "seconds of a batch": {part: round(time, 2) for part, time in seconds.items()},
        "longest": longest,
        "tokens/s a process": round(batch / (seconds[longest] + seconds["head"])),
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    cases = [("8B", 1, 8192), ("8B", 8, 8192), ("70B", 1, 8192), ("70B", 8, 512), ("70B", 8, 2048), ("70B", 8, 8192)]
    write(options.output, {"cases": [figures(*case) for case in cases]})


if __name__ == "__main__":
    run(main)
