"""Times of a cycle on GPUs that are not there, by arithmetic: for gpu_estimate.py and gpu_parallel.py.

A small kernel takes 2 us or the time of its bytes, a product or attention at least 3.5 us; bytes
come at 3.6 TB/s. The bound reads weights and keys once at 4.0 TB/s. A collective over the GPUs of
one host takes 12 us and the time of its bytes over the links. All times are microseconds of one
row with an EAGLE-3 head of one layer and trees of 60 nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL_US, PRODUCT_US, BYTES_PER_US, BOUND_BYTES_PER_US = 2.0, 3.5, 3.6e6, 4.0e6
COLLECTIVE_US = 12.0  # a small sum over the GPUs of one host, within a recorded graph
LINK_BYTES_PER_US = 3.5e5  # of one GPU, in each direction, that collectives reach (NVLink of Hopper: 450 GB/s)
PROCESSORS = 132
NODES, BRANCH, PENDING = 60, 10, 9


@dataclass(frozen=True)
class Sizes:
    """The shape of a target in bfloat16, and of its head's one layer: Llama-3.1-8B's."""

    hidden: int = 4096
    inner: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    layers: int = 32
    vocab: int = 128_256
    draft_vocab: int = 32_000

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's layers and head."""
        inputs = (self.heads + 2 * self.kv_heads) * self.width
        layer = self.hidden * (inputs + self.heads * self.width + 3 * self.inner)
        return 2 * (self.layers * layer + self.vocab * self.hidden)

    def bound(self, tokens: int, gpus: int = 1) -> float:
        """The time in which weights, keys and values are read once."""
        key_bytes = 4 * self.layers * self.kv_heads * self.width * tokens
        return (self.weight_bytes + key_bytes) / gpus / BOUND_BYTES_PER_US


def small(size: float) -> float:
    """A small kernel that moves so many bytes."""
    return max(SMALL_US, size / BYTES_PER_US)


def product(size: float) -> float:
    """A matrix product, or attention."""
    return max(PRODUCT_US, size / BYTES_PER_US)


def summed(size: float, gpus: int) -> float:
    """A sum over all GPUs: each sends and receives 2 (n - 1) / n of the bytes."""
    return 0.0 if gpus == 1 else COLLECTIVE_US + 2 * (gpus - 1) / gpus * size / LINK_BYTES_PER_US


def gathered(size: float, gpus: int) -> float:
    """The time until every GPU has all parts of so many bytes."""
    return 0.0 if gpus == 1 else COLLECTIVE_US + (gpus - 1) / gpus * size / LINK_BYTES_PER_US


def layer(sizes: Sizes, gpus: int, nodes: int, tokens: int, weight_bytes: int, inputs: int) -> float:
    """One GPU's share of a layer: its ten kernels, one more for each product in fp8, two sums."""
    D, heads, kv_heads, inner = sizes.hidden, sizes.heads // gpus, max(1, sizes.kv_heads // gpus), sizes.inner // gpus
    qkv = (heads + 2 * kv_heads) * sizes.width
    matrices = ((qkv, inputs), (D, heads * sizes.width), (2 * inner, D), (D, inner))
    products = sum(product(weight_bytes * o * i + 2 * nodes * (o + i)) for o, i in matrices)
    products += 4 * SMALL_US if weight_bytes == 1 else 0
    blocks = kv_heads * -(-nodes * heads // kv_heads // 64)
    splits = max(1, min(2 * PROCESSORS // blocks, -(-tokens // 64)))
    queries = 2 * nodes * heads * sizes.width
    parts = 2 * queries * splits
    attention = product(4 * kv_heads * sizes.width * tokens + queries + parts) + small(parts + queries)
    around = 2 * small(8 * nodes * D) + small(6 * nodes * inner) + small(4 * nodes * qkv)
    return products + attention + around + 2 * summed(2 * nodes * D, gpus)


def target_pass(sizes: Sizes, gpus: int, nodes: int, tokens: int) -> float:
    """All layers and the head; positions, embeddings, the last norm, and the new lengths. The
    logits of all parts of the vocabulary are gathered: every GPU verifies, with the same bits."""
    head = product((2 * sizes.vocab * sizes.hidden + 2 * nodes * sizes.vocab) / gpus)
    head += gathered(2 * nodes * sizes.vocab, gpus)
    return sizes.layers * layer(sizes, gpus, nodes, tokens, 2, sizes.hidden) + head + 4 * SMALL_US


def verification(sizes: Sizes, nodes: int) -> float:
    """Draws from the logits and their path, and the commit: of lengths, in a tree also of keys,
    features and the draft's state."""
    return small(2 * nodes * sizes.vocab) + (2 if nodes == 1 else 13) * SMALL_US


def draft(sizes: Sizes, gpus: int, levels: int, weight_bytes: int, tokens: int) -> float:
    """The pending pairs (the first level) and the other levels, whose children torch chooses without noise;
    layer and head are split like the target's."""
    D = sizes.hidden
    time = product(weight_bytes * 3 * D * D / gpus) + summed(2 * PENDING * D, gpus) + 18 * SMALL_US
    for level in range(levels):
        time += layer(sizes, gpus, BRANCH if level else PENDING, tokens, weight_bytes, 2 * D)
        time += product(weight_bytes * sizes.draft_vocab * D / gpus) + (44 if weight_bytes == 1 else 43) * SMALL_US
        time += gathered(8 * BRANCH * BRANCH * gpus, gpus)  # the best children of every part of the vocabulary
    return time


def plain_step(sizes: Sizes, gpus: int, tokens: int) -> float:
    """A step of plain decoding."""
    return target_pass(sizes, gpus, 1, tokens) + verification(sizes, 1)


def cycle(sizes: Sizes, gpus: int, levels: int, weight_bytes: int, tokens: int) -> float:
    """A cycle: draft, pass, verification and commit."""
    passes = target_pass(sizes, gpus, NODES, tokens) + verification(sizes, NODES)
    return passes + draft(sizes, gpus, levels, weight_bytes, tokens)
