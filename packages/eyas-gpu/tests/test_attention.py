"""The Triton attention kernels by Triton's interpreter, and their reference, both against torch's
attention with a mask."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.core.cache import slot_mask
from eyas_gpu import _reference
from eyas_gpu.operators import attention, splits_of

pytest.importorskip("triton")
from interpreted import interpreted

KERNELS = interpreted("eyas_gpu._attention_kernels")


class Case(NamedTuple):
    lengths: tuple[int, ...] = (70, 3)
    nodes: int = 5
    earlier: int = 0  # nodes in slots before the new ones
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    window: int = 0
    splits: int = 3
    dtype: torch.dtype = torch.float32


class Inputs(NamedTuple):
    q: Tensor
    key: Tensor
    value: Tensor
    length: Tensor
    visible: Tensor
    position: Tensor


def inputs(case: Case) -> Inputs:
    """Random heads; nodes that see themselves and, by lot, nodes before them. The slots behind a
    row's nodes hold NaN."""
    die = torch.Generator().manual_seed(sum(case.lengths) + case.nodes + case.width)
    R, T = len(case.lengths), case.nodes + case.earlier
    W = max(case.lengths) + T + 9
    q = torch.randn(R, case.nodes, case.heads, case.width, generator=die)
    store = torch.randn(2, R, case.kv_heads, W, case.width, generator=die)
    length = torch.tensor(case.lengths)
    for row, used in enumerate(case.lengths):
        store[:, row, :, used + T :] = math.nan
    visible = (torch.rand(R, T, T, generator=die) < 0.4).tril() | torch.eye(T, dtype=torch.bool)
    depth = torch.arange(T).expand(R, T)
    position = length[:, None] + depth
    return Inputs(
        q.to(case.dtype), *store.to(case.dtype), length, visible[:, case.earlier :], position[:, case.earlier :].contiguous()
    )  # fmt: skip


def by_torch(case: Case, x: Inputs) -> Tensor:
    """[R, Q, H, h] by scaled_dot_product_attention with a mask, in float64."""
    W = x.key.shape[2]
    allowed = slot_mask(x.length, x.visible, W)
    if case.window:
        slot = torch.arange(W)
        near = (x.position[..., None] - slot < case.window) | (slot >= x.length[:, None, None])
        allowed = allowed & near
    key, value = (y.double().nan_to_num().repeat_interleave(case.heads // case.kv_heads, 1) for y in (x.key, x.value))
    return F.scaled_dot_product_attention(
        x.q.double().transpose(1, 2), key, value, attn_mask=allowed[:, None]
    ).transpose(1, 2)


def by_kernels(case: Case, x: Inputs) -> Tensor:
    out, scale = torch.empty_like(x.q), case.width**-0.5
    if case.splits == 1:
        KERNELS.parts(*x, scale, case.window, out[None], None)
        return out
    parts = torch.full((case.splits, *x.q.shape), math.nan)
    lse = torch.full((case.splits, *x.q.shape[:3]), math.nan)
    KERNELS.parts(*x, scale, case.window, parts, lse)
    KERNELS.combine(parts, lse, out)
    return out


CASES = {
    "one node": Case(nodes=1),
    "one node, one part": Case(nodes=1, splits=1),
    "more parts than keys need": Case(lengths=(1, 2), nodes=1, splits=7),
    "nothing committed": Case(lengths=(0, 33), nodes=3),
    "blocks filled to the last slot": Case(lengths=(123, 59), nodes=5, splits=2),
    "sixty nodes": Case(lengths=(150, 65), nodes=60),
    "a level of a draft, behind earlier ones": Case(nodes=10, earlier=20),
    "a prompt": Case(lengths=(40,), nodes=90, splits=1),
    "heads of 80": Case(width=80),
    "heads of 96": Case(width=96),
    "heads of 128": Case(width=128, nodes=1),
    "heads of 12": Case(width=12),
    "no groups": Case(kv_heads=4),
    "groups of eight": Case(heads=8, kv_heads=1, nodes=9),
    "groups of three": Case(heads=6, kv_heads=2),
    "a window": Case(lengths=(200, 20), window=40),
    "a window, many nodes": Case(lengths=(150, 7), nodes=60, window=70),
    "a window smaller than a block": Case(lengths=(300,), nodes=2, window=3, splits=4),
}


IN_BFLOAT16 = ("one node", "nothing committed", "sixty nodes", "a prompt", "heads of 96", "groups of eight", "a window")


@pytest.mark.cover(name=5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
     for dtype, names in ((torch.float32, CASES), (torch.bfloat16, IN_BFLOAT16)) for name in names],
)  # fmt: skip
def test_kernels_are_attention(name: str, dtype: torch.dtype) -> None:
    """Guards the ends of rows, blocks and parts, the tree's mask, groups of heads and windows. Slots that are not in
    use hold NaN, so one that is read shows. bfloat16 rounds weights and results to 8 bits."""
    case = CASES[name]._replace(dtype=dtype)
    x = inputs(case)
    if dtype == torch.bfloat16:
        x = x._replace(key=x.key.nan_to_num(), value=x.value.nan_to_num())
    found, exact = by_kernels(case, x), by_torch(case, x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_reference_is_attention(name: str) -> None:
    """Guards the reference, which runs in the kernels' place on a CPU, at any number of parts."""
    case = CASES[name]
    x = inputs(case)
    x = x._replace(key=x.key.nan_to_num(), value=x.value.nan_to_num())
    found = _reference.attention_combine(
        *_reference.attention_parts(*x, case.width**-0.5, case.window, case.splits), torch.float32
    )  # fmt: skip
    torch.testing.assert_close(found.double(), by_torch(case, x), rtol=1e-5, atol=1e-5)
    operator = attention(*x, case.width**-0.5, case.window)
    torch.testing.assert_close(operator.double(), by_torch(case, x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_views_of_a_cache_are_read_in_place() -> None:
    """Guards strides: queries that are part of a wider matrix, keys that are a layer's part of a
    cache of several rows."""
    case = Case(lengths=(70, 3, 40))
    x = inputs(case)
    wide_q = torch.randn(3, case.nodes, case.heads * case.width + 32)
    wide_q[..., : case.heads * case.width] = x.q.flatten(2)
    q = wide_q[..., : case.heads * case.width].unflatten(2, (case.heads, case.width))
    store = torch.full((4, 5, case.kv_heads, x.key.shape[2] + 20, case.width), math.nan)
    store[2, 1:4, :, : x.key.shape[2]], store[3, 1:4, :, : x.key.shape[2]] = x.key, x.value
    visible = x.visible[:1].expand(3, -1, -1)
    key, value = (store[entry, 1:4, :, : x.key.shape[2]] for entry in (2, 3))
    found = by_kernels(case, x._replace(q=q, key=key, value=value, visible=visible))
    torch.testing.assert_close(found.double(), by_torch(case, x._replace(visible=visible)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "width", "parts"), [(8, 1024, 16), (8, 16384, 33), (32, 1024, 8), (32, 64, 1), (256, 4096, 1)]
)
def test_parts_fill_the_processors(blocks: int, width: int, parts: int) -> None:
    """Guards the number of parts: about two blocks for each of 132 processors, none shorter than 64 keys."""
    assert splits_of(blocks, width, torch.device("cpu")) == parts
