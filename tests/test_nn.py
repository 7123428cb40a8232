"""The parts of draft nets: packed attention against its definition, its gradient and memory; rotary positions."""

import pytest
import torch
from torch import Tensor

from eyas.nn import Documents, LayerShape, rope, rope_frequencies
from eyas_train import packed
from eyas_train.packed import QueryRows, attention_of, packed_attention


def plain(q: Tensor, k: Tensor, v: Tensor, later: tuple[Tensor, Tensor], rows: list[int], begins: list[int]) -> Tensor:
    """Row by row, head by head."""
    M, H, h = q.shape
    group, outs = H // k.shape[1], []
    for m, t in enumerate(rows):
        for head in range(H):
            j = head // group
            keys = torch.cat([k[begins[t] : t + 1, j], later[0][:, m, j]])
            values = torch.cat([v[begins[t] : t + 1, j], later[1][:, m, j]])
            outs.append(((keys @ q[m, head]) * h**-0.5).softmax(0) @ values)
    return torch.stack(outs).view(M, H, h)


@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.parametrize("steps", [0, 3])
def test_packed_attention(block: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the mask, diagonals, grouped heads, blocks, and every gradient, in float64."""
    monkeypatch.setattr(packed, "BLOCK", block)
    documents, rows = Documents((5, 1, 7)), [0, 2, 3, 5, 7, 8, 9, 10, 12]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, later = draw(9, 4, 3), draw(13, 2, 3), draw(13, 2, 3), (draw(steps, 9, 2, 3), draw(steps, 9, 2, 3))
    rows_M = torch.tensor(rows)
    mine = packed_attention(q, k, v, QueryRows(rows_M, documents.lengths), later if steps else None)
    theirs = plain(q, k, v, later, rows, documents.begin_N().tolist())
    torch.testing.assert_close(mine, theirs)
    outer, inputs = torch.randn_like(mine), (q, k, v, *(later if steps else ()))
    for one, other in zip(
        torch.autograd.grad(mine, inputs, outer), torch.autograd.grad(theirs, inputs, outer), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("steps", [0, 3])
def test_flash_attention_says_the_same(steps: int) -> None:
    """Guards CUDA's way, by its kernels' twins: places, grouped heads, denominators and gradients, in float64."""
    generator, documents = torch.Generator().manual_seed(1), Documents((5, 1, 7))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows = QueryRows(torch.tensor([0, 2, 3, 5, 7, 8, 9, 10, 12]), documents.lengths)
    q, k, v = draw(9, 4, 16), draw(13, 2, 16), draw(13, 2, 16)
    later = (draw(steps, 9, 2, 16), draw(steps, 9, 2, 16))
    mine = attention_of(rows.lengths, rows.rows_M)(q, k, v, later)
    expected = packed_attention(q, k, v, rows, later)
    torch.testing.assert_close(mine, expected)
    outer, inputs = torch.randn_like(mine), (q, k, v, *(later if steps else ()))
    for one, other in zip(
        torch.autograd.grad(mine, inputs, outer), torch.autograd.grad(expected, inputs, outer), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_rope_far_out() -> None:
    """Positions past 2,048 stay distinct in half precision: the angle is computed in float32."""
    frequency = rope_frequencies(LayerShape(8, 8, 1, 1, 8), torch.device("cpu"))
    x = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    near, next_to_it = (rope(x, torch.tensor([[p]]), frequency) for p in (100_000, 100_001))
    assert not torch.equal(near, next_to_it)
