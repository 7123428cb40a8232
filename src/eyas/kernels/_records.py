"""The structures that kernels take, field by field as in cpu/records.h and cpu/grow.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

__all__ = [
    "KINDS", "Experts", "Grown", "KVCache", "Layer", "LayerSizes", "Matrix", "Net", "Pass", "StateLayer", "States", "TokenInput",
    "TreeOptions", "address", "flags", "floats", "longs",
]  # fmt: skip

# of matrices, as in cpu/records.h
KINDS = (
    "float32", "bfloat16", "float16", "int8", "int8_dot", "nibbles", "nibbles_min", "codes", "bytes32", "bytes32_min", "bytes16",
)  # fmt: skip


def address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Return where the tensor's data begins; None for no tensor. Kernels trust this address, so a tensor of another
    dtype or device, such as torch.set_default_dtype makes, must not come here."""
    if tensor is None:
        return None
    assert tensor.dtype is dtype, f"the kernels take {dtype}, not {tensor.dtype}"
    assert tensor.is_cpu, f"the kernels take tensors on a CPU, not on {tensor.device}"
    return tensor.data_ptr()


def floats(*shape: int) -> Tensor:
    """Return memory for kernels to write float32 to, for any default dtype and device of torch."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def longs(*shape: int) -> Tensor:
    """Return memory for int64."""
    return torch.empty(*shape, dtype=torch.long, device="cpu")


def flags(*shape: int) -> Tensor:
    """Return memory for bool."""
    return torch.empty(*shape, dtype=torch.bool, device="cpu")


class Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "scale", "bias")),
        *((name, c_int64) for name in ("kind", "limbs", "inputs", "outputs", "scales", "zero", "panel_bytes")),
        ("codes", c_void_p),
    )


class StateLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "channels", "taps")),
        *((name, c_void_p) for name in ("conv", "conv_bias", "rate", "step_bias", "norm")),
        ("tiled", c_int64),
    )


class TokenInput(ctypes.Structure):
    _fields_ = (("gate", Matrix), ("projection", Matrix), ("norm", c_void_p), ("begin", c_int64))


class LayerSizes(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "residual")),
        *((name, c_int64) for name in ("rotary", "activation", "centred", "parallel", "head_norm", "query_table")),
        *((name, c_int64) for name in ("gated", "stride")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("shape", LayerSizes),
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down", "k", "v")),
        *((name, c_void_p) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", c_int64),
        *((name, c_void_p) for name in ("norm_bias", "mlp_norm_bias", "attention_norm", "output_norm")),
        ("rope", c_int64),
        *((name, c_void_p) for name in ("experts", "sinks")),
        ("state", StateLayer),
        *((name, c_int64) for name in ("store", "place", "borrows")),
        ("v_norm", c_void_p),
        ("shared_gate_up", Matrix),
        ("shared_down", Matrix),
        ("shared_gate", c_void_p),
        ("input", TokenInput),
        ("factor", c_float),
    )


class Experts(ctypes.Structure):
    _fields_ = (
        ("router", Matrix),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        *((name, c_int64) for name in ("count", "top", "normed")),
        *((name, c_void_p) for name in ("bias", "norm", "router_norm", "output_norm", "dense_norm", "factors")),
    )


class KVCache(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("row", c_void_p),
        *((name, c_int64) for name in ("layer", "head", "slot", "type")),
    )


class States(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("state", "nodes", "path", "pending", "row")),
        *((name, c_int64) for name in ("state_row", "state_layer", "node_row", "node_layer", "node", "longest_path")),
        ("commits", c_int64),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "queries", "nodes")),
        *(
            (name, c_void_p)
            for name in ("begin", "length", "position", "visible", "visible_in_window", "cosine", "sine")
        ),
        *((name, c_int64) for name in ("table", "angles")),
        ("inputs", c_void_p),
        *((name, c_int64) for name in ("token_inputs", "score_stride")),
        *((name, c_void_p) for name in ("normed", "qkv", "context", "inner", "scores", "branch", "routed", "routes")),
        ("threads", c_int64),
    )


class Net(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("paired", "residual_normed", "norm_output")),
        *((name, Matrix) for name in ("fuse", "fc", "head")),
        *((name, c_void_p) for name in ("embeddings", "embed_norm", "hidden_norm", "input_norm", "norm", "ids")),
        ("vocabulary", c_int64),
    )


class TreeOptions(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("depth", "branch", "nodes", "by_confidence", "rerank")),
        ("log_stop", c_float),
        ("inverse_temperature", c_float),
        ("noise", c_void_p),
        ("temperature", c_void_p),
    )


class Grown(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "parents", "depths", "scores", "values", "candidates")),
        *((name, c_void_p) for name in ("mask", "drafted_parents", "drafted_values")),
    )
