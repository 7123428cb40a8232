"""Kernels for CPUs in C++: linear layers, decoder layers, draft trees and the operations of a
decoding cycle.

    matrix = pack(weight_OI)      in the narrowest format without loss, or rounded
    y_MO = linear(matrix, x_MI)   float32

cpu/kernels.cpp describes how they compute. The result for a row is the same to the last bit, with any other
rows and any number of threads. Letters as everywhere: M tokens, I inputs, O outputs, R rows, Q new nodes, T
nodes in slots. This package knows no model and no method.
"""

from __future__ import annotations

from pathlib import Path

from eyas.formats import EXACT, ThreadCount, WeightFormat
from eyas.kernels._build import UnavailableError, library, outcome
from eyas.kernels._cycle import commit, draw, follow, gumbel
from eyas.kernels._grow import Grown, Net, Pending, TreeOptions, grow
from eyas.kernels._layers import (
    ACTIVATIONS,
    HEAD_DIMS,
    Experts,
    Layer,
    Layers,
    LayerSizes,
    Pass,
    StateLayer,
    States,
    TokenInput,
)
from eyas.kernels._linear import (
    Matrix,
    has_amx,
    has_avx512_bf16,
    has_dots,
    head,
    lanes,
    linear,
    panel,
    rms_norm,
    scale_logits,
)
from eyas.kernels._memory import huge_pages
from eyas.kernels._pack import Memory, draft_format, pack, pack_gated, packed_bytes
from eyas.kernels._records import floats
from eyas.kernels._rows import Rows, block_type, joined

__all__ = [
    "ACTIVATIONS",
    "EXACT",
    "HEAD_DIMS",
    "Experts",
    "Grown",
    "Layer",
    "LayerSizes",
    "Layers",
    "Matrix",
    "Memory",
    "Net",
    "Pass",
    "Pending",
    "Rows",
    "StateLayer",
    "States",
    "ThreadCount",
    "TokenInput",
    "TreeOptions",
    "UnavailableError",
    "WeightFormat",
    "available",
    "block_type",
    "build_name",
    "commit",
    "draft_format",
    "draw",
    "floats",
    "follow",
    "grow",
    "gumbel",
    "has_amx",
    "has_avx512_bf16",
    "has_dots",
    "head",
    "huge_pages",
    "joined",
    "lanes",
    "library",
    "linear",
    "pack",
    "pack_gated",
    "packed_bytes",
    "panel",
    "rms_norm",
    "scale_logits",
    "why_not",
]  # fmt: skip


def why_not() -> str | None:
    """Return the reason why there are no kernels on this machine; None if there are."""
    result = outcome()
    return result if isinstance(result, str) else None


def build_name() -> str:
    """Return the name of the compiled library, which tells apart sources, flags and instruction sets;
    "" if there are no kernels."""
    return Path(library()._name).stem if available() else ""


def available() -> bool:
    """Return whether there are kernels on this machine. They are built if necessary."""
    return not isinstance(outcome(), str)
