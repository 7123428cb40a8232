"""Triton kernels on a CPU, by Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["interpreted"]


def _drop_triton() -> dict[str, ModuleType]:
    """Forget the modules of Triton, but for its compiled ones, which are loaded once, and the
    modules of kernels. Returns Triton's."""
    for name in [name for name in sys.modules if name.startswith("eyas_gpu._") and name.endswith("_kernels")]:
        package, _, leaf = name.rpartition(".")
        vars(sys.modules[package]).pop(leaf, None)
        del sys.modules[name]
    names = [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]
    return {name: sys.modules.pop(name) for name in names}


def interpreted(kernels: str) -> ModuleType:
    """The module of kernels with this name, for CPU tensors.

    Triton decides when its own functions are defined whether they are compiled or interpreted. So it is imported anew
    here, for this module alone; afterwards everybody finds the Triton that was there before.
    """
    before, variable = _drop_triton(), os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        module = importlib.import_module(kernels)
        _mend_products(sys.modules["triton.runtime.interpreter"])
        return module
    finally:
        _drop_triton()
        sys.modules.update(before)
        if variable is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = variable


def _mend_products(interpreter: Any) -> None:
    """The interpreter keeps bfloat16 as 16-bit words and multiplies these as whole numbers; the
    product takes their values here. And NumPy's product of matrices rounds a row by its place in
    the matrix, which matrix units do not: each row is multiplied on its own."""
    builder, bfloat16 = interpreter.InterpreterBuilder, interpreter.tl.bfloat16
    product = builder.create_dot

    def values(x: Any) -> Any:
        if x.dtype.scalar != bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, total: Any, *more: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return product(self, a, b, total, *more)
        rows, matrix = (values(x).data.astype(total.data.dtype) for x in (a, b))
        products = np.stack([row @ matrix for row in rows])
        return interpreter.TensorHandle(products + total.data, total.dtype.scalar)

    builder.create_dot = create_dot
