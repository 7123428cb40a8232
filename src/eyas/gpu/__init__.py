"""Kernels for GPUs, in Triton: attention of tree nodes split over the keys, and what is computed
between a layer's matrix products.

    _reference.py           what each kernel computes, in torch
    _ops.py                 the kernels as operators of torch, and into how many parts keys are split
    _attention_kernels.py   Triton: attention over parts of the keys, and their combination
    _order_ops.py           a product and attention whose sums have one order, as operators
    _order_kernels.py       Triton: the same
    _layer_kernels.py       Triton: residual and norm, rotation and cache, SwiGLU, rounding to fp8
    _cycle_ops.py           the kernels of drafts and verification as operators
    _score_kernels.py       Triton: scores by temperature, top-k, top-p and min-p
    _cycle_kernels.py       Triton: draws with noise, the accepted path, its commit
    _growth_kernels.py      Triton: dynamic trees
    _tables.py              cosines and sines by position

Triton is imported on a GPU only. This package knows no model and no cache. Triton's
interpreter runs the kernels' tests on a CPU.
"""

from eyas.gpu._cycle_ops import (
    KERNELS,
    best_children,
    build_tree,
    choose,
    commit,
    draw,
    filtered,
    given_path,
    grow_step,
    keep_best,
)
from eyas.gpu._ops import add_norm, attention, available, join_norms, quantise, rms_norm, rotate_and_store, swiglu
from eyas.gpu._order_ops import fixed_attention, fixed_product, paths
from eyas.gpu._tables import RotaryTables

__all__ = [
    "KERNELS",
    "RotaryTables",
    "add_norm",
    "attention",
    "available",
    "best_children",
    "build_tree",
    "choose",
    "commit",
    "draw",
    "filtered",
    "fixed_attention",
    "fixed_product",
    "given_path",
    "grow_step",
    "join_norms",
    "keep_best",
    "paths",
    "quantise",
    "rms_norm",
    "rotate_and_store",
    "swiglu",
]
