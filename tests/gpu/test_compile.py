"""The kernels compiled to machine code for GPUs that are not there: Triton brings its own assembler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow

BF16 = "*bf16"
STRIDES = "q_r q_n q_h k_r k_k k_s v_r v_k v_s"
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
    return Kernel(
        "_attention_kernels",
        "_parts_kernel",
        {"q": BF16, "key": BF16, "value": BF16, "length": "*i64", "visible": "*u8", "position": "*i64", "out": BF16 if single else "*fp32"}
        | {"lse": "*fp32"},
        f"Q T splits window sink {STRIDES} m_r m_q m_t",
        {"GROUP": 4, "HEADS": 32, "WIDTH": 128, "SINGLE": single, "WINDOWED": windowed, "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_H": 128},
        8 if single else 4,
        3 if block_m == 16 else 2,
    )


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
        {"ADDS": True, "BLOCK": 4096}, 8,
    ),
    "rotation": Kernel(
        "_layer_kernels", "_rotate_kernel",
        dict.fromkeys(["q", "k", "v", "cosine", "sine", "q_norm", "k_norm", "q_out", "key", "value", "unrotated"], BF16)
        | {"position": "*i64", "length": "*i64"},
        "Q first q_m k_m v_m k_r k_k k_s v_r v_k v_s u_r u_k u_s",
        {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "Q_NORM": True, "K_NORM": True, "UNROTATED": True, "BLOCK": 64}, 1,
    ),
    "gate": Kernel("_layer_kernels", "_swiglu_kernel", dict.fromkeys(["gate", "up", "out"], BF16), "width g_m u_m", {"BLOCK": 1024}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what the interpreter lets pass: types within loops, shapes of blocks, shared memory, and registers that do not suffice."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = KERNELS[name]
    function = getattr(import_module(f"eyas.gpu.{kernel.module}"), kernel.name)
    names, floats = function.arg_names, {"scale": "fp32", "eps": "fp32"}
    types = kernel.pointers | dict.fromkeys(kernel.scalars.split(), "i32") | floats | dict.fromkeys(kernel.constants, "constexpr")
    aligned = [*kernel.pointers, *(name for name in kernel.scalars.split() if name in STRIDES.split())]
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
