"""The kernels compiled to machine code for GPUs that are not there: Triton brings its own assembler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow

BF16, F32, I64 = "*bf16", "*fp32", "*i64"
STRIDES = "q_r q_n q_h k_r k_k k_s v_r v_k v_s"
FLOATS = ("scale", "eps", "temperature", "rest", "min_p")
MOST_SHARED = 99 * 1024  # bytes that a block may have on the smallest of these GPUs


class Kernel(NamedTuple):
    module: str
    name: str
    pointers: dict[str, str]
    scalars: str  # names of int32
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


def attention(block_m: int, single: bool, windowed: bool) -> Kernel:
    pointers = (
        dict.fromkeys(["q", "key", "value"], BF16) | dict.fromkeys(["length", "position"], I64) | {"visible": "*u8"}
    )
    blocks = {"GROUP": 4, "HEADS": 32, "WIDTH": 128, "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_H": 128}
    return Kernel(
        "_attention_kernels", "_parts_kernel", pointers | {"out": BF16 if single else F32, "lse": F32},
        f"Q T splits window {STRIDES} m_r m_q m_t", blocks | {"SINGLE": single, "WINDOWED": windowed},
        8 if single else 4, 3 if block_m == 16 else 2,
    )  # fmt: skip


KERNELS = {
    "one node": attention(16, False, False),
    "sixty nodes": attention(64, False, False),
    "a prompt": attention(64, True, False),
    "one node, a window": attention(16, False, True),
    "a prompt, a window": attention(64, True, True),
    "parts": Kernel(
        "_attention_kernels", "_combine_kernel", {"parts": "*fp32", "lse": "*fp32", "out": BF16}, "queries splits",
        {"WIDTH": 128, "BLOCK_S": 64, "BLOCK_H": 128},
    ),
    "norm": Kernel(
        "_layer_kernels", "_add_norm_kernel", dict.fromkeys(["x", "residual", "weight", "summed", "normed"], BF16), "D x_m r_m",
        {"ADDS": True, "KEEPS": True, "BLOCK": 4096}, 8,
    ),
    "rotation": Kernel(
        "_layer_kernels", "_rotate_kernel",
        dict.fromkeys(["q", "k", "v", "cosine", "sine", "q_norm", "k_norm", "q_out", "key", "value", "unrotated"], BF16)
        | {"position": "*i64", "length": "*i64"},
        "Q first q_m k_m v_m k_r k_k k_s v_r v_k v_s u_r u_k u_s",
        {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "Q_NORM": True, "K_NORM": True, "UNROTATED": True, "BLOCK": 64}, 1,
    ),
    "two norms": Kernel(
        "_layer_kernels", "_join_norms_kernel", dict.fromkeys(["a", "b", "weight_a", "weight_b", "out"], BF16), "D a_m b_m",
        {"BLOCK": 4096}, 8,
    ),
    "rounding": Kernel(
        "_layer_kernels", "_quantise_kernel", {"x": BF16, "out": "*fp8e4nv", "scale": "*fp32"}, "width x_m",
        {"LARGEST": 448.0, "BLOCK": 16384}, 8,
    ),
    "draws": Kernel(
        "_cycle_kernels", "_draw_parts_kernel",
        {"scores": "*fp32", "depth": I64, "position": I64, "seed": I64, "greedy": "*u8", "best": "*fp64", "token": I64, "broken": "*i32"},
        "N V parts", {"NOISY": True, "BLOCK": 2048}, 8,
    ),
    "draws from logits": Kernel(
        "_cycle_kernels", "_draw_parts_kernel",
        {"scores": BF16, "depth": I64, "position": I64, "seed": I64, "greedy": "*u8", "best": "*fp64", "token": I64, "broken": "*i32"},
        "N V parts", {"NOISY": True, "BLOCK": 2048}, 8,
    ),
    "draws of all parts": Kernel(
        "_cycle_kernels", "_draw_merge_kernel",
        {"best": "*fp64", "token": I64, "broken": "*i32", "drawn": I64, "is_broken": "*u8"}, "parts", {"BLOCK": 64}, 1,
    ),
    "paths": Kernel(
        "_cycle_kernels", "_choose_kernel",
        {"best": "*fp64", "token": I64, "broken": "*i32", "candidate": "*u8"} | dict.fromkeys(["tokens", "parents", "columns"], I64),
        "N P parts", {"BLOCK": 64, "BLOCK_P": 16},
    ),
    "paths by lot": Kernel(
        "_cycle_kernels", "_given_path_kernel",
        dict.fromkeys(["tokens", "parents", "depth", "position", "bonus", "broken", "columns"], I64)
        | {"candidate": "*u8", "rates": "*fp64"},
        "N P seed stride", {"BLOCK": 64}, 1,
    ),
    "filters": Kernel(
        "_score_kernels", "_filter_kernel", {"logits": BF16, "scores": F32}, "V top_k turns_k turns_p", {"BITS": 16, "BLOCK": 2048}, 8
    ),
    "filters of float32": Kernel(
        "_score_kernels", "_filter_kernel", {"logits": F32, "scores": F32}, "V top_k turns_k turns_p", {"BITS": 32, "BLOCK": 2048}, 8
    ),
    "commit": Kernel(
        "_cycle_kernels", "_commit_kernel", {"store": BF16, "length": I64, "path": I64}, "P p_b s_e s_b s_k s_s",
        {"WIDTH": 128, "BLOCK": 128}, 1,
    ),
    "gate": Kernel("_layer_kernels", "_swiglu_kernel", dict.fromkeys(["gate", "up", "out"], BF16), "width g_m u_m", {"BLOCK": 1024}),
}  # fmt: skip


# Products of matrices, and fp8, are other instructions on each of the two; the rest is compiled for
# one of them, by turns.
TARGETS = [
    (name, capability)
    for turn, (name, kernel) in enumerate(KERNELS.items())
    for capability in (
        (80, 90) if kernel.module == "_attention_kernels" else (90,) if name == "rounding" else ((80, 90)[turn % 2],)
    )
]


@pytest.mark.cover(name=6)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("name", "capability"), TARGETS)
def test_kernels_compile(name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what the interpreter lets pass: types within loops, shapes of blocks, shared memory,
    and registers that do not suffice."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = KERNELS[name]
    function = getattr(import_module(f"eyas_gpu.{kernel.module}"), kernel.name)
    names, floats = function.arg_names, dict.fromkeys(FLOATS, "fp32")
    types = floats | kernel.pointers | dict.fromkeys(kernel.scalars.split(), "i32")
    types |= dict.fromkeys(kernel.constants, "constexpr")
    strides = STRIDES.split()
    aligned = [*kernel.pointers, *(name for name in kernel.scalars.split() if name in strides)]
    source = ASTSource(
        function,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in kernel.constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= MOST_SHARED
    assert spilled_bytes(compiled.asm["cubin"], tmp_path) <= 64


def spilled_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of stack for each thread: registers that did not suffice. 0 without the tool that knows."""
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(beside) if beside.exists() else shutil.which("cuobjdump")
    if tool is None:
        return 0
    (file := folder / "kernel.cubin").write_bytes(cubin)
    usage = subprocess.run([tool, "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[-1].split()[0])
