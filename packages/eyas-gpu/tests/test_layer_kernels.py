"""The Triton kernels between a layer's matrix products, by Triton's interpreter, against their
references and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from eyas_gpu import _reference
from eyas_gpu.operators import add_norm, join_norms, quantise, rms_norm, rotate_and_store, swiglu

pytest.importorskip("triton")
from interpreted import interpreted

KERNELS = interpreted("eyas_gpu._layer_kernels")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to another order of sums; in bfloat16 up to one step of rounding."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("adds", [True, False])
def test_norm_of_a_sum(adds: bool, dtype: torch.dtype) -> None:
    """Guards widths that are no power of two, inputs whose tokens lie apart, and the layer before
    which nothing is added."""
    x, residual = random(2, 3, 90, dtype=dtype)[..., :80], random(2, 3, 80, seed=1, dtype=dtype)
    weight = random(80, seed=2, dtype=dtype)
    added = residual if adds else None
    summed, normed = (torch.empty(2, 3, 80, dtype=dtype) for _ in range(2))
    KERNELS.add_norm(x, added, weight, 1e-6, summed, normed)
    model_norm = LlamaRMSNorm(80, 1e-6)
    model_norm.weight.data = weight
    for found_sum, found_norm in ((summed, normed), add_norm(x, added, weight, 1e-6)):
        close(found_sum, x + residual if adds else x)  # the interpreter cuts bfloat16 off, a GPU rounds it
        close(found_norm, model_norm(found_sum))


@pytest.mark.cover
@pytest.mark.quick("False-False-float32")
@DTYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("unrotated", [False, True])
def test_heads_are_rotated_and_stored(normed: bool, unrotated: bool, dtype: torch.dtype) -> None:
    """Guards slots behind each row's own length and behind earlier nodes, the norms of heads, keys
    kept unrotated, and that no other slot is written to. Queries, keys and values are parts of one
    matrix, rows are part of a larger cache."""
    R, Q, H, K, h, W, first = 2, 3, 4, 2, 24, 40, 5
    qkv = random(R, Q, (H + 2 * K) * h, dtype=dtype)
    q, k, v = qkv.split([H * h, K * h, K * h], -1)
    length, position = torch.tensor([7, 20]), torch.tensor([[9, 10, 10], [30, 31, 2]])
    angle = torch.arange(50)[:, None] * 10000 ** -(torch.arange(0, h, 2) / h)
    tables = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = (random(h, seed=3, dtype=dtype), random(h, seed=4, dtype=dtype)) if normed else (None, None)

    def caches() -> list[Tensor]:
        return list(torch.full((3, 4, K, W, h), math.nan, dtype=dtype)[:, 1:3])

    def arguments(stores: list[Tensor]) -> tuple[object, ...]:
        return (q, k, v, *tables, position, length, first, *stores[:2], *norms, 1e-6, stores[2] if unrotated else None)

    by_kernel, by_reference, by_operator, out = caches(), caches(), caches(), torch.empty(R, Q, H, h, dtype=dtype)
    KERNELS.rotate_and_store(*arguments(by_kernel), out)
    expected = _reference.rotate_and_store(*arguments(by_reference))
    close(out, expected)
    assert torch.equal(rotate_and_store(*arguments(by_operator)), expected)
    for found, operator, wanted in zip(by_kernel, by_operator, by_reference, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        close(found.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(operator.nan_to_num(), wanted.nan_to_num())
    q_RHQh, k_RKQh = (x.unflatten(2, (-1, h)).transpose(1, 2) for x in (q, k))
    if normed:
        q_RHQh, k_RKQh = (_reference.rms_norm(x, w, 1e-6) for x, w in ((q_RHQh, norms[0]), (k_RKQh, norms[1])))
    cosine, sine = (table[position].repeat(1, 1, 2) for table in tables)
    q_model, k_model = apply_rotary_pos_emb(q_RHQh, k_RKQh, cosine, sine)
    torch.testing.assert_close(out.transpose(1, 2), q_model, rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(by_kernel[0][1, :, 25:28], k_model[1], rtol=4e-2, atol=4e-2)
    assert torch.equal(by_kernel[1][0, :, 12:15], v.unflatten(2, (-1, h))[0].transpose(0, 1))


@DTYPES
def test_gated_mlp(dtype: torch.dtype) -> None:
    """Guards both halves of one matrix, and widths beyond a block."""
    both = 4 * random(2, 3, 2 * 1100, dtype=dtype)
    gate, up = both.chunk(2, -1)
    out = torch.empty(2, 3, 1100, dtype=dtype)
    KERNELS.swiglu(gate, up, out)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, expected, rtol=3e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(swiglu(gate, up), expected)


@DTYPES
def test_two_norms_side_by_side(dtype: torch.dtype) -> None:
    """Guards EAGLE-3's input: which norm is whose, and inputs that are parts of wider tensors."""
    a, b = random(2, 3, 90, dtype=dtype)[..., :80], random(2, 3, 80, seed=1, dtype=dtype)
    weights = random(80, seed=2, dtype=dtype), random(80, seed=3, dtype=dtype)
    out, alone = torch.empty(2, 3, 160, dtype=dtype), torch.empty(2, 3, 80, dtype=dtype)
    KERNELS.join_norms(a, b, *weights, 1e-5, out)
    expected = torch.cat([_reference.rms_norm(a, weights[0], 1e-5), _reference.rms_norm(b, weights[1], 1e-5)], -1)
    close(out, expected)
    assert torch.equal(join_norms(a, b, *weights, 1e-5), expected)
    KERNELS.add_norm(a, None, weights[0], 1e-5, None, alone)
    close(alone, expected[..., :80])
    assert torch.equal(rms_norm(a, weights[0], 1e-5), expected[..., :80])


def test_rounding_to_fp8() -> None:
    """Guards scales: each row's largest number is e4m3's largest, and a row of zeros stays one. The numbers need no
    rounding, as the interpreter rounds 124.7 to 64 where a GPU gives 128, and knows no subnormal ones."""
    exact = (random(5, 300, seed=1) * 40).to(torch.float8_e4m3fn).float()
    exact = torch.where(exact.abs() < 2**-6, 0.0, exact)
    exact[:, 7] = 448.0
    x = exact * torch.tensor([1.0, 2**-9, 2**13, 0.0, 4.0])[:, None]
    rounded, scale = torch.empty(5, 300, dtype=torch.float8_e4m3fn), torch.empty(5, 1)
    KERNELS.quantise(x, rounded, scale)
    assert torch.equal(rounded.float() * scale, x)
    for found, expected in zip(quantise(x), (rounded, scale), strict=True):
        assert torch.equal(found.float(), expected.float())
