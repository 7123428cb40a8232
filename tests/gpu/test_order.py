"""The Triton kernels whose sums have one order, by Triton's interpreter: a token has the same bits alone, as plain decoding
reads it, and in a tree, in a batch or in a prompt.

What the interpreter cannot show is that the rows of a matrix unit's tile are computed alike; no GPU has run this yet.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from eyas.core.cache import slot_mask
from eyas.core.tree import Tree
from eyas.gpu import _order_ops, fixed_attention, fixed_product, paths

pytest.importorskip("triton")
from interpreted import interpreted

KERNELS, LAYERS, SPLIT = (interpreted(f"eyas.gpu._{name}_kernels") for name in ("order", "layer", "attention"))
PART_KEYS, HEADS, KV_HEADS, WIDTH, SLOTS = 64, 4, 2, 32, 200


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_kernels(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    path: Tensor,
    depth: Tensor,
    window: int = 0,
    slots: int = SLOTS,
) -> Tensor:
    """Return the attention of the nodes, with as many parts as the slots need."""
    parts = torch.full((-(-slots // PART_KEYS), *q.shape), math.nan)
    lse, out = torch.full(parts.shape[:4], math.nan), torch.empty_like(q)
    KERNELS.parts(q, key, value, length, path, depth, q.shape[3] ** -0.5, window, PART_KEYS, parts, lse)
    KERNELS.combine(parts, lse, out)
    return out


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def tree_of(nodes: int, rng: random.Random) -> Tree:
    parents = [-1, *(rng.randrange(max(0, n - 4), n) for n in range(1, nodes))]
    return Tree.build(torch.tensor([parents]), nodes)


# Where a text ends matters for the borders of blocks and parts; a window adds its own border once, within a part or not.
@pytest.mark.cover(length=1)
@pytest.mark.slow
@pytest.mark.parametrize(("window", "length"), [(0, 0), (0, 61), (0, 64), (20, 31), (20, 100)])
def test_a_node_attends_by_the_bits_of_plain_decoding(window: int, length: int) -> None:
    """Guards the order of keys: each node of a tree, whose ancestors lie among other nodes and on both sides of the
    borders of blocks and parts, has the bits that it has when its path is committed and it comes alone. Slots that are
    not in use hold NaN."""
    nodes = 36
    tree = tree_of(nodes, random.Random(length))
    q, fresh = randn(1, nodes, HEADS, WIDTH), randn(2, 1, KV_HEADS, length + nodes, WIDTH, seed=1)
    store = torch.full((2, 1, KV_HEADS, SLOTS, WIDTH), math.nan)
    store[:, :, :, : length + nodes] = fresh
    lengths = torch.tensor([length])
    together = by_kernels(q, *store, lengths, paths(tree.mask_BNN, tree.depth_BN), tree.depth_BN, window)
    for node in (0, 1, 6, 17, 35):
        path = tree.mask_BNN[0, node].nonzero()[:, 0]
        plain = torch.full_like(store, math.nan)
        plain[:, :, :, :length] = store[:, :, :, :length]
        plain[:, :, :, length : length + len(path)] = store[:, :, :, length + path]
        end = torch.tensor([length + len(path) - 1])
        alone = by_kernels(
            q[:, node : node + 1], *plain, end, torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long),
            window, slots=length + len(path),
        )  # fmt: skip
        assert torch.equal(bits(alone[0, 0]), bits(together[0, node])), f"node {node}"


@pytest.mark.slow
def test_rows_of_a_batch_and_the_numbers_themselves() -> None:
    """Guards rows of unlike lengths beside one another, and what is computed: torch's attention with a mask, by the
    kernels and by what runs in their place on a CPU."""
    rng, lengths, nodes = random.Random(0), torch.tensor([70, 3, 130]), 12
    trees = [tree_of(nodes, rng) for _ in lengths]
    tree = Tree.build(torch.cat([each.parents_BN for each in trees]), nodes)
    q, store = randn(3, nodes, HEADS, WIDTH), randn(2, 3, KV_HEADS, SLOTS, WIDTH, seed=1)
    path = paths(tree.mask_BNN, tree.depth_BN)
    together = by_kernels(q, *store, lengths, path, tree.depth_BN)
    for row in range(3):
        one = slice(row, row + 1)
        alone = by_kernels(q[one], *store[:, one], lengths[one], path[one], tree.depth_BN[one])
        assert torch.equal(bits(alone[0]), bits(together[row]))
    allowed = slot_mask(lengths, tree.mask_BNN, SLOTS)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in store)
    exact = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), key, value, attn_mask=allowed[:, None])
    for found in (together, fixed_attention(q, *store, lengths, path, tree.depth_BN, WIDTH**-0.5, 0)):
        torch.testing.assert_close(found, exact.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_keys_that_are_split_by_the_pass_have_other_bits() -> None:
    """Guards the comparison: the fast attention kernel, which splits keys by the number of nodes and reads them by slot,
    does not pass it."""
    nodes, length = 9, 61
    tree = tree_of(nodes, random.Random(length))
    q, store = randn(1, nodes, HEADS, WIDTH), randn(2, 1, KV_HEADS, SLOTS, WIDTH, seed=1)

    def split(q: Tensor, store: Tensor, length: int, visible: Tensor) -> Tensor:
        parts = torch.full((3, *q.shape), math.nan)
        lse, out = torch.full(parts.shape[:4], math.nan), torch.empty_like(q)
        position = torch.zeros(1, q.shape[1], dtype=torch.long)
        SPLIT.parts(q, *store, torch.tensor([length]), visible, position, WIDTH**-0.5, 0, 0, parts, lse)
        SPLIT.combine(parts, lse, out)
        return out

    together = split(q, store, length, tree.mask_BNN)
    other = 0
    for node in range(1, nodes):
        path = tree.mask_BNN[0, node].nonzero()[:, 0]
        plain = store.clone()
        plain[:, :, :, length : length + len(path)] = store[:, :, :, length + path]
        alone = split(q[:, node : node + 1], plain, length + len(path) - 1, torch.ones(1, 1, 1, dtype=torch.bool))
        torch.testing.assert_close(alone[0, 0], together[0, node], rtol=1e-5, atol=1e-5)
        other += not torch.equal(bits(alone[0, 0]), bits(together[0, node]))
    assert other > 2


@pytest.mark.quick("False")
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_has_the_same_bits_alone_and_among_others(bias: bool) -> None:
    """Guards the order of a product's sums, and sizes that fill no tile."""
    x, weight, more = randn(131, 150), randn(70, 150, seed=1), randn(70, seed=2) if bias else None

    def product(x_MI: Tensor) -> Tensor:
        out = torch.full((len(x_MI), 70), math.nan)
        KERNELS.product(x_MI, weight, more, out)
        return out

    together = product(x)
    for found in (together, fixed_product(x, weight, more)):
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, more), rtol=1e-5, atol=1e-4)
    for row in (0, 1, 63, 64, 130):
        assert torch.equal(bits(product(x[row : row + 1])[0]), bits(together[row]))
    for count in (2, 9, 60, 65):
        assert torch.equal(bits(product(x[:count])), bits(together[:count]))


def test_what_is_between_the_products_is_computed_by_token() -> None:
    """Guards the other kernels of a layer, which have one program for a token or a head: norms of sums, and SwiGLU."""
    x, residual, weight = randn(37, 90), randn(37, 90, seed=1), randn(90, seed=2)

    def layer(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        summed, normed, gated = (torch.empty(len(x[rows]), 90) for _ in range(3))
        LAYERS.add_norm(x[rows], residual[rows], weight, 1e-6, summed, normed)
        LAYERS.swiglu(x[rows], residual[rows], gated)
        return summed, normed, gated

    together = layer(slice(None))
    for row in (0, 5, 36):
        for alone, all_rows in zip(layer(slice(row, row + 1)), together, strict=True):
            assert torch.equal(bits(alone[0]), bits(all_rows[row]))


def test_paths() -> None:
    """Guards the table of ancestors, for nodes of earlier passes too: the slots that plain decoding would fill in
    order."""
    visible = torch.tensor([[[True, False, True, False], [True, True, False, True]]])  # the nodes 2 and 3 of four
    assert paths(visible, torch.tensor([[0, 1, 1, 2]])).tolist() == [[[0, 2, -1, -1], [0, 1, 3, -1]]]
    assert _order_ops.PART_KEYS % 64 == 0
