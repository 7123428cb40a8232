"""Expected times of a 70B target split over several GPUs that are not there, by arithmetic: the
table "Several GPUs" of docs/gpu.md.

    python runs/gpu_parallel.py

Kernels and bytes as in gpu_estimate.py, each GPU with its share of the heads, of the inner width
and of the vocabulary. Two sums over all GPUs a layer, after the output matrix and after the MLP, in
the target and in the draft; one gathering of the logits a pass, one of the best children a level. A
collective takes COLLECTIVE_US and the time of its bytes over the links. Shapes are Llama-3.1-70B's
in bfloat16, one row behind 1,024 tokens, an EAGLE-3 head of the same layer shape with 32,000 draft
tokens in fp8, 60 nodes, 6 levels. Nothing of it has been measured.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass

from gpu_estimate import BOUND_BYTES_PER_US, BRANCH, NODES, PENDING, SMALL_US, product, small

COLLECTIVE_US = 12.0  # a small sum over the GPUs of one host, within a recorded graph
LINK_BYTES_PER_US = 3.5e5  # of one GPU, in each direction, that collectives reach (NVLink of Hopper: 450 GB/s)
PROCESSORS = 132
TOKENS = 1024
GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """The shape of a target, and of its head's one layer."""

    hidden: int = 8192
    inner: int = 28_672
    heads: int = 64
    kv_heads: int = 8
    width: int = 128
    layers: int = 80
    vocab: int = 128_256
    draft_vocab: int = 32_000

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's layers and head, in bfloat16."""
        qkv = (self.heads + 2 * self.kv_heads) * self.width
        return 2 * (
            self.layers * self.hidden * (qkv + self.heads * self.width + 3 * self.inner) + self.vocab * self.hidden
        )

    @property
    def key_bytes(self) -> int:
        """Keys and values of one token."""
        return 4 * self.layers * self.kv_heads * self.width


def summed(size: float, gpus: int) -> float:
    """Microseconds of a sum over all GPUs: each sends and receives 2 (n - 1) / n of the bytes."""
    return 0.0 if gpus == 1 else COLLECTIVE_US + 2 * (gpus - 1) / gpus * size / LINK_BYTES_PER_US


def gathered(size: float, gpus: int) -> float:
    """Microseconds until every GPU has all parts of so many bytes."""
    return 0.0 if gpus == 1 else COLLECTIVE_US + (gpus - 1) / gpus * size / LINK_BYTES_PER_US


def layer(sizes: Sizes, gpus: int, nodes: int, tokens: int, weight_bytes: int, inputs: int) -> float:
    """Microseconds of one GPU's share of a layer, and of its two sums."""
    D, heads, kv_heads, inner = sizes.hidden, sizes.heads // gpus, max(1, sizes.kv_heads // gpus), sizes.inner // gpus
    qkv = (heads + 2 * kv_heads) * sizes.width
    matrices = ((qkv, inputs), (D, heads * sizes.width), (2 * inner, D), (D, inner))
    products = sum(product(weight_bytes * o * i + 2 * nodes * (o + i)) for o, i in matrices) + (
        4 * SMALL_US if weight_bytes == 1 else 0
    )
    blocks = kv_heads * -(-nodes * heads // kv_heads // 64)
    splits = max(1, min(2 * PROCESSORS // blocks, -(-tokens // 64)))
    queries = 2 * nodes * heads * sizes.width
    parts = 2 * queries * splits
    attention = product(4 * kv_heads * sizes.width * tokens + queries + parts) + small(parts + queries)
    around = 2 * small(8 * nodes * D) + small(6 * nodes * inner) + small(4 * nodes * qkv)
    return products + attention + around + 2 * summed(2 * nodes * D, gpus)


def target_pass(sizes: Sizes, gpus: int, nodes: int, tokens: int = TOKENS) -> float:
    """Microseconds of a pass. The logits of all parts of the vocabulary are gathered: every GPU
    verifies, with the same bits."""
    head = product((2 * sizes.vocab * sizes.hidden + 2 * nodes * sizes.vocab) / gpus) + gathered(
        2 * nodes * sizes.vocab, gpus
    )
    return sizes.layers * layer(sizes, gpus, nodes, tokens, 2, sizes.hidden) + head + 4 * SMALL_US


def draft(sizes: Sizes, gpus: int, levels: int, weight_bytes: int, tokens: int = TOKENS) -> float:
    """Microseconds of a draft whose layer and head are split like the target's."""
    D = sizes.hidden
    time = product(weight_bytes * 3 * D * D / gpus) + summed(2 * PENDING * D, gpus) + 18 * SMALL_US
    for level in range(levels):
        time += layer(sizes, gpus, BRANCH if level else PENDING, tokens, weight_bytes, 2 * D)
        time += product(weight_bytes * sizes.draft_vocab * D / gpus) + (9 if weight_bytes == 1 else 8) * SMALL_US
        time += gathered(8 * BRANCH * BRANCH * gpus, gpus)  # the best children of every part of the vocabulary
    return time


def cycle(sizes: Sizes, gpus: int, levels: int, weight_bytes: int) -> float:
    """Microseconds of a cycle: draft, pass, verification and commit."""
    around = small(2 * NODES * sizes.vocab) + 13 * SMALL_US
    return target_pass(sizes, gpus, NODES) + around + draft(sizes, gpus, levels, weight_bytes)


def plain(sizes: Sizes, gpus: int) -> float:
    """Microseconds of a plain step."""
    return target_pass(sizes, gpus, 1) + small(2 * sizes.vocab) + 2 * SMALL_US


def collectives(sizes: Sizes, levels: int) -> tuple[int, int]:
    """How many collectives a plain step and a cycle have."""
    step = 2 * sizes.layers + 1
    return step, step + 1 + 3 * levels


def table(sizes: Sizes | None = None) -> str:
    """The table of docs/gpu.md."""
    sizes = sizes or Sizes()
    heads = ("GPUs", "GB of weights each", "bound, ms", "vanilla, ms", "share of the bound", "60 nodes, ms", "draft, ms", "c",
             "tokens/s at tau 4")  # fmt: skip
    lines = [" | ".join(heads), " | ".join(["---:"] * len(heads))]
    for gpus in GPUS:
        bound = (sizes.weight_bytes + sizes.key_bytes * TOKENS) / gpus / BOUND_BYTES_PER_US
        step, whole, tree = plain(sizes, gpus), cycle(sizes, gpus, 6, 1), target_pass(sizes, gpus, NODES)
        numbers = (
            sizes.weight_bytes / gpus / 1e9,
            bound / 1e3,
            step / 1e3,
            bound / step,
            tree / 1e3,
            draft(sizes, gpus, 6, 1) / 1e3,
            whole / step,
        )
        lines.append(f"{gpus} | " + " | ".join(f"{number:.2f}" for number in numbers) + f" | {4e6 / whole:.0f}")
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(table())


if __name__ == "__main__":
    main()
