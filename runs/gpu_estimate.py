"""Expected times of a cycle on a GPU that is not there, by arithmetic: the table "Expected times"
of docs/gpu.md.

A small kernel takes 2 us or the time of its bytes, a product or attention at least 3.5 us; bytes
come at 3.6 TB/s. The bound reads weights and keys once at 4.0 TB/s. Shapes are Llama-3.1-8B's, one
row, an EAGLE-3 head with 32,000 draft tokens and trees of 60 nodes. No clock of any GPU has
confirmed these figures.

    python runs/gpu_estimate.py
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, LAYERS, VOCAB, DRAFT_VOCAB = 4096, 14336, 32, 8, 128, 32, 128_256, 32_000
SMALL_US, PRODUCT_US, BYTES_PER_US, BOUND_BYTES_PER_US = 2.0, 3.5, 3.6e6, 4.0e6
NODES, BRANCH, PENDING = 60, 10, 9
QKV = (HEADS + 2 * KV_HEADS) * WIDTH


def small(size: float) -> float:
    """Microseconds of a small kernel that moves so many bytes."""
    return max(SMALL_US, size / BYTES_PER_US)


def product(size: float) -> float:
    """Microseconds of a matrix product, or of attention."""
    return max(PRODUCT_US, size / BYTES_PER_US)


def layer(nodes: int, tokens: int, weight_bytes: int, inputs: int = HIDDEN) -> float:
    """Microseconds of a layer's ten kernels, and of one more for each product in fp8."""
    sizes = ((QKV, inputs), (HIDDEN, HEADS * WIDTH), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    products = sum(product(weight_bytes * o * i + 2 * nodes * (o + i)) for o, i in sizes) + (
        4 * SMALL_US if weight_bytes == 1 else 0
    )
    blocks = KV_HEADS * -(-nodes * HEADS // KV_HEADS // 64)
    splits = max(1, min(264 // blocks, -(-tokens // 64)))
    queries, parts = 2 * nodes * HEADS * WIDTH, 4 * nodes * HEADS * WIDTH * splits
    attention = product(4 * KV_HEADS * WIDTH * tokens + queries + parts) + small(parts + queries)
    return products + attention + 2 * small(8 * nodes * HIDDEN) + small(6 * nodes * INNER) + small(4 * nodes * QKV)


def target_pass(nodes: int, tokens: int) -> float:
    """All layers and the head; positions, embeddings, the last norm, and the new lengths."""
    return LAYERS * layer(nodes, tokens, 2) + product(2 * VOCAB * HIDDEN + 2 * nodes * VOCAB) + 4 * SMALL_US


def verification(nodes: int) -> float:
    """Draws from the logits and their path, and the commit: of lengths, in a tree also of keys,
    features and the draft's state."""
    return small(2 * nodes * VOCAB) + (2 if nodes == 1 else 13) * SMALL_US


def draft(levels: int, tokens: int, weight_bytes: int) -> float:
    """Microseconds of the pending pairs (the first level), the other levels, and the tree's last
    three kernels."""
    time = product(weight_bytes * 3 * HIDDEN * HIDDEN) + 18 * SMALL_US
    for level in range(levels):
        time += layer(BRANCH if level else PENDING, tokens, weight_bytes, 2 * HIDDEN)
        time += product(weight_bytes * DRAFT_VOCAB * HIDDEN) + (9 if weight_bytes == 1 else 8) * SMALL_US
    return time


def table() -> str:
    """The table of docs/gpu.md."""
    lines = [
        "| tokens | bound, ms | vanilla, ms | share of the bound | 60 nodes, ms | c: fp8, 6 levels | c: bf16, 8 levels |"
    ]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    weights = 2 * (LAYERS * HIDDEN * (QKV + HEADS * WIDTH + 3 * INNER) + VOCAB * HIDDEN)
    for tokens in (1_024, 16_384):
        bound = (weights + LAYERS * 4 * KV_HEADS * WIDTH * tokens) / BOUND_BYTES_PER_US
        vanilla, tree = target_pass(1, tokens) + verification(1), target_pass(NODES, tokens)
        c = [(tree + verification(NODES) + draft(levels, tokens, size)) / vanilla for levels, size in ((6, 1), (8, 2))]
        numbers = bound / 1e3, vanilla / 1e3, bound / vanilla, tree / 1e3, *c
        lines.append(f"| {tokens:,} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(table())


if __name__ == "__main__":
    main()
