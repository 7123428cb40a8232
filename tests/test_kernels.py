"""CPU kernels: lossless storage, and the same bits whatever else is computed.

Every test runs for each instruction set that this machine has, from the native one down to plain
vectors of four floats, and for AVX-VNNI, whose one instruction is replaced by what it computes if the machine lacks it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from eyas import kernels
from eyas.core.sampling import GumbelNoise
from eyas.kernels import _build
from eyas.runners.cpu_ops import CpuNoise
from eyas.runners.stored import MXFP4

needs = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tests" / "lesser"
EMULATED = {"x86-64-v3, VNNI emulated": ("-march=x86-64-v3", "-DEYAS_EMULATE_AVX_VNNI")}


def sets() -> Iterator[object]:
    """Yield each instruction set to test; all but the native one have to be compiled for the tests."""
    names = _build.runnable_isas()
    for name in names:
        if name == names[-1] == "x86-64-v3":  # the native one has nothing more
            continue
        yield pytest.param(
            (name, _build.ISAS[name][0]), id=name, marks=[] if name == _build.NATIVE else pytest.mark.slow
        )
    if "x86-64-v3" in names and "x86-64-v3+vnni" not in names:
        yield from (pytest.param(item, id=item[0], marks=pytest.mark.slow) for item in EMULATED.items())


@pytest.fixture(autouse=True, scope="module", params=sets())
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels as they are compiled for one instruction set."""
    name, flags = request.param
    if name == _build.NATIVE:
        yield
        return
    with built_with(*flags):
        yield


@pytest.fixture
def _dots(_kernels: None) -> None:
    """Skip where the instruction set has no integer dot products."""
    if not kernels.has_dots():
        pytest.skip("no integer dot products")


def stored(kind: torch.dtype, outputs: int = 70, inputs: int = 48) -> torch.Tensor:
    """A matrix that this type holds without loss, and no narrower one."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    if kind == torch.bfloat16:
        return weight.bfloat16().float()
    if kind == torch.int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    return weight


def form(matrix: kernels.Matrix) -> torch.dtype:
    """The type that it is stored in; int8 is uint8 for integer dot products."""
    return torch.int8 if matrix.kind == "int8_dot" else getattr(torch, matrix.kind)  # type: ignore[no-any-return]


@needs
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_is_kept_in_the_narrowest_form_that_holds_it(kind: torch.dtype, bias: bool) -> None:
    """Guards the form, whole panels (70 outputs), every size of tile and the remainder."""
    weight, more = stored(kind), torch.arange(70.0) if bias else None
    matrix = kernels.pack(weight, more)
    assert form(matrix) == kind
    for rows in (1, 2, 5, 12, 13, 25):
        x = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(rows))
        expected = nn.functional.linear(x, weight, more)
        torch.testing.assert_close(kernels.linear(matrix, x), expected, rtol=1e-5, atol=1e-4)


@needs
@pytest.mark.parametrize(
    "rounded", [kernels.WeightFormat(activations=name) for name in ("exact", "int16", "int8")], ids=str
)
@pytest.mark.parametrize("inputs", [48, 336, 512])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_has_the_same_bits_alone_and_among_others(
    kind: torch.dtype, inputs: int, rounded: kernels.WeightFormat
) -> None:
    """Guards the order of sums in tiles and threads; 336 inputs: sums in parts, 512: copied rows."""
    weight, bias = stored(kind, inputs=inputs), torch.linspace(-1, 1, 70)
    matrix, x = kernels.pack(weight, bias, rounded), torch.randn(37, inputs, generator=torch.Generator().manual_seed(1))
    together, threads = kernels.linear(matrix, x), torch.get_num_threads()
    for row in range(37):
        assert torch.equal(kernels.linear(matrix, x[row : row + 1])[0], together[row])
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernels.linear(matrix, x), together)
    finally:
        torch.set_num_threads(threads)


@needs
@pytest.mark.parametrize("inputs", [48, 1024])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_limbs_are_as_exact_as_float32(inputs: int, outlier: float) -> None:
    """Guards activations of any scale: exact to 2^-23 of the row's largest. NaN must not look like a number."""
    weight, generator = stored(torch.int8, 64, inputs), torch.Generator().manual_seed(2)
    x = torch.randn(40, inputs, generator=generator) * 10.0 ** torch.arange(-20, 20)[:, None]
    x[:, 3] *= outlier
    x[7] = 0
    y, exact = kernels.linear(kernels.pack(weight), x), x.double() @ weight.double().T
    largest = x.double().abs().amax(1, keepdim=True) * weight.double().abs().sum(1)
    assert ((y - exact).abs() <= 2.0**-23 * (largest + 2 * exact.abs()) + 1e-30).all()
    if outlier == 1.0 and kernels.has_dots():  # otherwise floats are summed in order
        rows = torch.arange(40) != 7
        error, usual = ((got - exact)[rows].norm(dim=1) for got in (y, (x @ weight.T)))
        assert (error / exact[rows].norm(dim=1)).mean() < 1.2 * (usual / exact[rows].norm(dim=1)).mean()
    for broken in (float("inf"), float("nan")):
        x[5, 1] = broken
        assert not kernels.linear(kernels.pack(weight), x)[5].isfinite().any()


@pytest.mark.usefixtures("_dots")
@pytest.mark.parametrize(("activations", "largest"), [("int16", 127 * 257), ("int8", 127)])
def test_rounded_activations(activations: Literal["int16", "int8"], largest: int) -> None:
    """Guards `WeightFormat.activations`: multiples of a row's largest, and products without further loss."""
    weight, x = stored(torch.int8), torch.randn(37, 48, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    matrix = kernels.pack(weight, weight_format=kernels.WeightFormat(activations=activations))
    together = kernels.linear(matrix, x)
    top = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    # a number over a tensor would be the product of its inverse
    whole = (x * (torch.full_like(top, largest) / top)).round().double()
    torch.testing.assert_close(together, (whole * (top / largest) @ weight.double().T).float(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(kernels.linear(matrix, x[row : row + 1])[0], together[row]) for row in range(37))


def unpacked(matrix: kernels.Matrix) -> torch.Tensor:
    """Returns the weights of an int4 matrix, [O, I]."""
    # side by side: dots of pairs are for two limbs alone, as others are summed in 16 bits
    panel, inputs = 2 * kernels.lanes(), kernels.library().eyas_dot_inputs() if matrix.limbs == 2 else 4
    data = matrix.data.unflatten(1, (-1, 18 * panel))  # panel, group
    bytes_PGsOd = data[:, :, : 16 * panel].unflatten(2, (-1, panel, inputs))
    scale = data[:, :, 16 * panel :].contiguous().view(torch.bfloat16).float()
    # panel, group, step, nibble, output, input
    nibbles = torch.stack([bytes_PGsOd & 15, bytes_PGsOd >> 4], 3).float() - 8
    whole_POGg = nibbles.permute(0, 4, 1, 2, 3, 5).flatten(3)
    return (whole_POGg * scale.transpose(1, 2)[..., None]).flatten(2).flatten(0, 1)[: matrix.outputs]


@pytest.mark.usefixtures("_dots")
@pytest.mark.parametrize("activations", ["exact", "int16", "int8"])
def test_int4(activations: Literal["exact", "int16", "int8"]) -> None:
    """Guards groups, nibbles and scales: products of the stored numbers, in tiles, padding, bias; near the weights."""
    weight, bias = torch.randn(70, 96, generator=torch.Generator().manual_seed(4)), torch.arange(70.0)
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(1))
    matrix = kernels.pack(weight, bias, kernels.WeightFormat("int4", activations))
    assert (matrix.kind, matrix.data.numel()) == ("nibbles", matrix.padded * 3 * 18)
    kept, largest = unpacked(matrix), {"exact": 8355584, "int16": 127 * 257, "int8": 127}[activations]
    step = x.abs().amax(1, keepdim=True) / largest
    together, exact = kernels.linear(matrix, x), x.double() @ kept.double().T + bias
    assert ((together - exact).abs() <= 0.51 * step * kept.abs().sum(1) + 1e-4).all()
    assert all(torch.equal(kernels.linear(matrix, x[row : row + 1])[0], together[row]) for row in range(37))
    assert float((kept - weight).norm() / weight.norm()) < 0.09
    zero = kernels.pack(torch.zeros(32, 32), weight_format=kernels.WeightFormat("int4"))
    assert not kernels.linear(zero, x[:, :32]).any()
    weight[3, 40] = torch.nan
    x[5, 7] = torch.inf
    broken = kernels.linear(kernels.pack(weight, bias, kernels.WeightFormat("int4", activations)), x)
    assert broken[:, 3].isnan().all()
    assert not broken[5].isfinite().any()
    assert broken[:5, :3].isfinite().all(), "neither spreads"


BLOCKS = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "F16",
    "BF16",
    "F32",
]
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}  # float16


def blocks(kind: str, outputs: int, inputs: int) -> tuple[kernels.Rows, torch.Tensor]:
    """Random rows of a type of GGUF files, and what the package gguf makes of them."""
    gguf = pytest.importorskip("gguf", reason="needs gguf (the extra quantised)")
    form, generator = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    if kind in ("F16", "BF16", "F32"):
        plain = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
        kept = plain.to({"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[kind])
        return kernels.Rows.of(kept), kept.float()
    size, count = gguf.GGML_QUANT_SIZES[form]
    data = generator.integers(0, 256, (outputs, inputs // size, count), np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scale = generator.uniform(-0.02, 0.02, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = generator.integers(0, 130, data.shape[:2])  # exponents, the least ones included
    data = data.reshape(outputs, -1)
    expected, kept = torch.from_numpy(gguf.quants.dequantize(data, form).astype(np.float32)), torch.from_numpy(data)
    return kernels.Rows.at(kept.data_ptr(), int(form), outputs, inputs, kept), expected


@needs
@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_of_gguf_files(kind: str) -> None:
    """Guards every type of blocks: gguf's numbers to the bit, exact products, rows alone and in any order."""
    rows, weight = blocks(kind, 70, 512)
    assert torch.equal(rows.read(), weight)
    x, bias = torch.randn(37, 512, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 70)
    matrix = kernels.pack(rows, bias)
    together, exact = kernels.linear(matrix, x), x.double() @ weight.double().T + bias
    assert ((together - exact).abs() <= 1e-5 * (x.double().abs() @ weight.double().abs().T + 1)).all()
    assert float((together - exact).norm() / exact.norm()) < 2e-6
    assert all(torch.equal(kernels.linear(matrix, x[row : row + 1])[0], together[row]) for row in range(37))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kernels.linear(kernels.pack(rows.take(order), bias[order]), x), together[:, order])
    if kernels.has_dots() and kind not in ("F16", "BF16", "F32"):
        assert matrix.bytes < weight[:1].numel() * matrix.padded * 9.1 / 8, "no wider than its own integers and scales"
        int4 = (kernels.linear(kernels.pack(one, bias, kernels.WeightFormat("int4")), x) for one in (rows, weight))
        assert torch.equal(*int4), "blocks that are rounded again"
        for activations, error in (("int16", 1e-4), ("int8", 2e-2)):
            rounded = kernels.linear(kernels.pack(rows, bias, kernels.WeightFormat("exact", activations)), x)  # type: ignore[arg-type]
            assert 0 < float((rounded - exact).norm() / exact.norm()) < error


@needs
def test_rows_whose_scales_lie_apart() -> None:
    """Guards MXFP4 as gpt-oss has it in safetensors: scales in a tensor of their own, neighbours in a byte."""
    rows, weight = blocks("MXFP4", 70, 512)
    data = rows.owner.view(70, 16, 17)
    low, high = data[..., 1:] & 15, data[..., 1:] >> 4
    in_order = torch.cat([low, high], -1)
    nibbles, scales = in_order[..., ::2] | in_order[..., 1::2] << 4, data[..., 0].contiguous()
    row = torch.arange(70)
    pairs = torch.stack((nibbles.data_ptr() + 256 * row, scales.data_ptr() + 16 * row), 1)
    apart = kernels.Rows(MXFP4, pairs.data_ptr() + 16 * row, 512, (pairs, nibbles, scales))
    assert torch.equal(apart.read(), weight)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    for weights in ("exact", "int4") if kernels.has_dots() else ("exact",):
        form = kernels.WeightFormat(weights)  # type: ignore[arg-type]
        assert torch.equal(*(kernels.linear(kernels.pack(one, None, form), x) for one in (rows, apart)))


@contextmanager
def built_with(*flags: str) -> Iterator[None]:
    """Compile the kernels with more flags, kept for all sessions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        patch.setattr(_build, "FLAGS", (*_build.FLAGS, *flags))
        _build.outcome.cache_clear()
        try:
            yield
        finally:
            _build.outcome.cache_clear()


# around every number of rows and groups
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 11, 15, 16, 17, 21, 24, 31, 32, 33, 48, 49, 64, 65, 130)


@pytest.fixture
def _bfloat16_dots(_kernels: None) -> None:
    """Skip where the instruction set has no dot products of bfloat16."""
    if not kernels.has_avx512_bf16():
        pytest.skip("no AVX-512 BF16")


@pytest.fixture
def _amx(_kernels: None) -> None:
    """Skip where there is no AMX."""
    if not kernels.has_amx():
        pytest.skip("no AMX")


@needs
@pytest.mark.usefixtures("_bfloat16_dots")
@pytest.mark.parametrize("inputs", [16, 32, 48, 96, 1024, 2816])
def test_products_of_bfloat16(inputs: int) -> None:
    """Guards rounded activations: as exact as float32's sums, one row's bits everywhere; NaN stays in its row."""
    weight, bias = stored(torch.bfloat16, 70, inputs), torch.linspace(-1, 1, 70)
    rounded = kernels.WeightFormat(activations="bfloat16")
    matrix, generator = kernels.pack(weight, bias, rounded), torch.Generator().manual_seed(5)
    assert (matrix.kind, matrix.limbs) == ("bfloat16", 1)
    x = torch.randn(130, inputs, generator=generator) * 10.0 ** torch.linspace(-15, 15, 130)[:, None]
    x[3] = 0
    alone = torch.cat([kernels.linear(matrix, row[None]) for row in x])
    for M in SIZES:
        assert torch.equal(kernels.linear(matrix, x[:M]), alone[:M])
    near = x.bfloat16().double() @ weight.double().T
    largest = x.abs().double() @ weight.abs().double().T
    assert ((alone - bias - near).abs() <= 2e-6 * largest + 2e-7 * (1 + near.abs())).all()
    assert (kernels.linear(kernels.pack(weight, bias), x) - alone)[65:].abs().amax(1).min() > 0, "another target"
    x[5, 1], x[6, 2] = torch.inf, torch.nan
    assert kernels.linear(matrix, x).isfinite().all(1).tolist() == [row not in (5, 6) for row in range(130)]


@pytest.mark.slow
@needs
@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize("inputs", [64, 448, 1024])
@pytest.mark.parametrize(
    "rounded", [kernels.WeightFormat(activations=name) for name in ("exact", "int16", "int8")], ids=str
)
def test_amx_gives_the_same_bits(inputs: int, rounded: kernels.WeightFormat) -> None:
    """Guards limbs and sums: AMX and VNNI give one result for any rows; what is not finite stays in its row."""
    weight, bias = stored(torch.int8, inputs=inputs), torch.linspace(-1, 1, 70)
    matrix, generator = kernels.pack(weight, bias, rounded), torch.Generator().manual_seed(3)
    rows = {M: torch.randn(M, inputs, generator=generator) * 10.0 ** torch.linspace(-18, 18, M)[:, None] for M in SIZES}
    rows[24][5], rows[33][7, 3], rows[33][9, 2], rows[48][4] = 0, torch.inf, torch.nan, torch.inf
    found = {M: kernels.linear(matrix, x) for M, x in rows.items()}
    with built_with("-mno-amx-int8"):
        assert kernels.has_dots()
        assert not kernels.has_amx()
        for M, x in rows.items():
            torch.testing.assert_close(found[M], kernels.linear(matrix, x), rtol=0, atol=0, equal_nan=True)
    assert found[33].isfinite().all(1).tolist() == [row not in (7, 9) for row in range(33)]


@needs
@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize("inputs", [32, 96, 1024, 2816])
def test_three_parts_are_as_exact_as_float32(inputs: int) -> None:
    """Guards AMX's bfloat16 weights: no more is lost than by float32, one row's bits everywhere."""
    weight, generator = stored(torch.bfloat16, 70, inputs), torch.Generator().manual_seed(5)
    matrix = kernels.pack(weight)
    assert matrix.kind == "bfloat16"
    x = torch.randn(130, inputs, generator=generator) * 10.0 ** torch.linspace(-15, 15, 130)[:, None]
    alone = torch.cat([kernels.linear(matrix, row[None]) for row in x])
    for M in SIZES:
        assert torch.equal(kernels.linear(matrix, x[:M]), alone[:M])
    exact = x.double() @ weight.double().T
    error, usual = (((y - exact).norm(dim=1) / exact.norm(dim=1)).mean() for y in (alone, x @ weight.T))
    assert error < 1.2 * usual
    x[5, 1], x[6, 2] = torch.inf, torch.nan
    assert kernels.linear(matrix, x).isfinite().all(1).tolist() == [row not in (5, 6) for row in range(130)]


@needs
def test_noise_is_that_of_torchs_operations() -> None:
    """Guards the second writing of the noise, to the last digit: vocabularies, some ids, seeds, greedy rows."""
    seed_B, greedy_B = torch.tensor([0, 2**62 + 5, 7]), torch.tensor([False, False, True])
    position_BN = torch.tensor([[1, 2, 500], [9, 4, 0], [1, 2, 3]])
    ids = torch.tensor([5, 0, 7999, 123, 4, 4, 90, 17, 3])
    for case in ((vocab, stream) for vocab in (8001, ids) for stream in (0, 2)):
        ours, torchs = (kind(seed_B, greedy_B).gumbel(position_BN, *case) for kind in (CpuNoise, GumbelNoise))
        torch.testing.assert_close(ours, torchs, rtol=2e-7, atol=2e-7)
        assert (ours == torchs).float().mean() > 0.999


@needs
@pytest.mark.parametrize("vocab", [1, 7, 8001])
@pytest.mark.parametrize("scale", [0.0, 0.5, 20.0])
def test_draws_are_those_of_all_noise(vocab: int, scale: float) -> None:
    """Guards what is left out: tokens without noise must lose, in flat laws, sharp ones, ties, greedy rows."""
    seeds = torch.tensor([0, 3, 2**62 + 5])
    noise, position_B = CpuNoise(seeds, torch.tensor([False, False, True])), torch.tensor([5, 0, 90])
    for turn in range(20):
        generator = torch.Generator().manual_seed(turn)
        scores_BNV = scale * torch.randn(3, 6, vocab, generator=generator)
        if turn % 2 and vocab > 1:
            scores_BNV[torch.rand(scores_BNV.shape, generator=generator) < 0.9] = -torch.inf
            scores_BNV[..., -1] = 0.0
        depth_BN = torch.tensor([0, 1, 1, 2, 2, 3]).expand(3, 6)
        every_BN = torch.ones_like(depth_BN, dtype=torch.bool)
        drawn_BN, has_nan_B = kernels.draw(
            scores_BNV, depth_BN, every_BN, position_B, noise.seed_B, noise.greedy_B, noise.TARGET
        )
        gumbel_BNV = noise.gumbel(position_B[:, None] + depth_BN + 1, vocab)
        key_BNV = (scores_BNV - scores_BNV.amax(-1, keepdim=True)) + gumbel_BNV
        assert torch.equal(drawn_BN, key_BNV.argmax(-1))
        assert not has_nan_B.any()


@needs
def test_nothing_at_all() -> None:
    """Bug: without rows the kernels filled memory at address null (found by -fsanitize=undefined)."""
    L, B = torch.long, torch.bool
    for rows, nodes in ((0, 3), (2, 0)):
        row = {dtype: torch.zeros(rows, dtype=dtype) for dtype in (L, B)}
        node = {dtype: torch.zeros(rows, nodes, dtype=dtype) for dtype in (L, B)}
        drawn_BN, has_nan_B = kernels.draw(torch.zeros(rows, nodes, 37), node[L], node[B], row[L], row[L], row[B], 0)
        assert (drawn_BN.shape, has_nan_B.tolist()) == ((rows, nodes), [False] * rows)
        assert kernels.gumbel(row[L], ~row[B], 0, node[L], 11).shape == (rows, nodes, 11)
    assert kernels.gumbel(row[L], ~row[B], 0, torch.zeros(2, 3, dtype=L), torch.zeros(0, dtype=L)).shape == (2, 3, 0)
    none_03 = torch.zeros(0, 3, dtype=L)
    path_BP, *_ = kernels.follow(none_03, none_03, none_03.bool(), none_03, 4)
    assert path_BP.shape == (0, 4)
    kernels.commit(torch.zeros(4, 0, 2, 8, 16), torch.zeros(0, dtype=L), none_03)
    for weights in ("exact", "int8", "int4", "bfloat16"):
        assert kernels.linear(
            kernels.pack(torch.randn(64, 64), weight_format=kernels.WeightFormat(weights)), torch.zeros(0, 64)
        ).shape == (0, 64)
    assert kernels.rms_norm(torch.zeros(0, 64), torch.zeros(64), 1e-5).shape == (0, 64)
