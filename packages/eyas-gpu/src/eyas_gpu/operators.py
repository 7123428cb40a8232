"""The GPU kernels as operators of torch: by Triton on CUDA, in torch (`_reference.py`) on a CPU. The operators
of verification run by Triton alone; their reference is in `eyas.core`.

As operators they have shapes without being run, so torch.compile and tests on fake tensors see
through them. This module knows no model and no cache.
Letters: R rows, Q new nodes, T nodes in slots, H heads, K key-value heads, W slots, h head size; in verification B rows,
N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from eyas_gpu import _reference

__all__ = [
    "KERNELS", "add_norm", "attention", "available", "choose", "commit", "draw", "filtered", "given_path", "join_norms",
    "quantise", "rms_norm", "rotate_and_store", "swiglu",
]  # fmt: skip

KERNELS = {"draw": 2, "choose": 2}  # operators of more than one kernel
CAPABILITY = (8, 0)  # the least CUDA compute capability: bfloat16 in matrix products
PARTS_PER_PROCESSOR = 2  # blocks of the attention kernel that a streaming multiprocessor should have
MIN_PART_KEYS = 64  # the least number of keys of a part
MAX_PARTS = 64


@cache
def available(device: torch.device) -> bool:
    """Return whether the kernels run on this device; on a CPU their references do, for tests."""
    if device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def kernels(name: str) -> ModuleType:
    """Return the module of Triton kernels with this name. It can be imported on a GPU only."""
    return import_module(f"eyas_gpu._{name}_kernels")


def operator(
    run: str | Callable[..., None], cpu: Callable[..., Any] | None = None, changes: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make an operator of torch of a function that returns the operator's results, not yet filled.

    Args:
        run: fills the results. It is called with the operator's arguments and then with the results. Or the name
            of the module (`kernels`) that has a function of the operator's name for this.
        cpu: returns the results on a CPU; None: `run` does it there, too.
        changes: the names of arguments that are written to.
    """

    def decorate(empty: Callable[..., Any]) -> CustomOpDef:
        name = empty.__name__.lstrip("_")

        def compute(*arguments: Any) -> Any:
            results = empty(*arguments)
            fill = getattr(kernels(run), name) if isinstance(run, str) else run
            fill(*arguments, *(results if isinstance(results, tuple) else () if results is None else (results,)))
            return results

        schema = torch.library.infer_schema(empty, mutates_args=changes)
        made = torch.library.custom_op(f"eyas::{name}", compute, mutates_args=changes, schema=schema)
        made.register_fake(empty)
        if cpu is not None:
            made.register_kernel("cpu")(cpu)
        return made

    return decorate


def attention(
    q_RQHh: Tensor, key_RKWh: Tensor, value_RKWh: Tensor, length_R: Tensor, visible_RQT: Tensor, position_RQ: Tensor, scale: float,
    window: int = 0,
) -> Tensor:  # fmt: skip
    """Attention [R, Q, H, h] of nodes to the committed slots of their rows and to the nodes that
    they see (`_reference.attention_parts`).

    W bounds the slots in use; how many they are is read on the device. One kernel for many queries,
    two for few: the keys are split.
    """
    (R, Q, H, _), (K, W) = q_RQHh.shape, key_RKWh.shape[1:3]
    splits = splits_of(R * K * -(-Q * (H // K) // 64), W, q_RQHh.device)
    if splits == 1:
        return _attention_whole(q_RQHh, key_RKWh, value_RKWh, length_R, visible_RQT, position_RQ, scale, window)
    parts_SRQHh, lse_SRQH = _attention_parts(
        q_RQHh, key_RKWh, value_RKWh, length_R, visible_RQT, position_RQ, scale, window, splits
    )  # fmt: skip
    return _attention_combine(parts_SRQHh, lse_SRQH, q_RQHh)


def splits_of(blocks: int, width: int, device: torch.device) -> int:
    """Into how many parts the keys are split, where there are `blocks` blocks of queries."""
    wanted = PARTS_PER_PROCESSOR * _processors(device) // max(1, blocks)
    return max(1, min(wanted, -(-width // MIN_PART_KEYS), MAX_PARTS))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132  # an H100 or H200; tests on a CPU split in the same way
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _whole(*arguments: Any) -> Tensor:
    parts, lse = _reference.attention_parts(*(*arguments, 1))
    return _reference.attention_combine(parts, lse, arguments[0].dtype)


@operator(lambda *x: kernels("attention").parts(*x[:-3], *x[-2:]), _reference.attention_parts)
def _attention_parts(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor,
    scale: float, window: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out_SRQHh = q.new_empty((splits, *q.shape), dtype=torch.float32)
    return out_SRQHh, out_SRQHh.new_empty(out_SRQHh.shape[:4])


@operator(
    lambda parts, lse, _, out: kernels("attention").combine(parts, lse, out),
    lambda parts, lse, like: _reference.attention_combine(parts, lse, like.dtype),
)
def _attention_combine(parts: Tensor, lse: Tensor, like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


@operator(lambda *x: kernels("attention").parts(*x[:-1], x[-1][None], None), _whole)
def _attention_whole(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor, scale: float, window: int
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


@operator("layer", _reference.add_norm)
def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Declare the shapes of `add_norm`."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator(
    lambda x, weight, eps, normed: kernels("layer").add_norm(x, None, weight, eps, None, normed), _reference.rms_norm
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Declare the shape of `rms_norm`."""
    return x.new_empty(x.shape)


@operator("layer", _reference.join_norms)
def join_norms(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    """Declare the shape of `join_norms`."""
    return a.new_empty((*a.shape[:-1], 2 * a.shape[-1]))


def _quantise(x: Tensor, out: Tensor, scale: Tensor) -> None:
    if available(x.device):
        kernels("layer").quantise(x, out, scale)
        return
    for empty, filled in zip((out, scale), _reference.quantise(x), strict=True):
        empty.copy_(filled)


@operator(_quantise, _reference.quantise)
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Declare the shapes of `quantise`."""
    tokens = x.numel() // x.shape[-1]
    return x.new_empty((tokens, x.shape[-1]), dtype=torch.float8_e4m3fn), x.new_empty((tokens, 1), dtype=torch.float32)


@operator("layer", _reference.rotate_and_store, ("key", "value", "unrotated"))
def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, length: Tensor, first: int,
    key: Tensor, value: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, unrotated: Tensor | None,
) -> Tensor:  # fmt: skip
    """Declare the shape of `rotate_and_store`."""
    h = key.shape[-1]
    return q.new_empty((*q.shape[:2], q.shape[2] // h, h))


@operator("layer", _reference.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Declare the shape of `swiglu`."""
    return gate.new_empty(gate.shape)


@operator("cycle")
def draw(
    scores_BNV: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor, greedy_B: Tensor, noisy: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the largest score + noise at each node, int64 [B, N]; which nodes have NaN among their
    scores. noisy: not all rows are greedy."""
    shape = scores_BNV.shape[:2]
    return scores_BNV.new_empty(shape, dtype=torch.int64), scores_BNV.new_empty(shape, dtype=torch.bool)


@operator(lambda *x: kernels("cycle").choose(*x[:-2], x[-1]))
def choose(
    scores_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor,
    greedy_B: Tensor, noisy: bool, longest: int,
) -> Tensor:  # fmt: skip
    """`draw` at every node, then the path of the nodes that were drawn at their parents:
    `core.cycle.Cycle.host_result_BX`."""
    return tokens_BN.new_empty(tokens_BN.shape[0], 3 + 2 * longest)


@operator("cycle")
def given_path(
    tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, bonus_B: Tensor, has_nan_B: Tensor,
    rates_D: Tensor, seed: int, stride: int,
) -> Tensor:  # fmt: skip
    """Return the path to a deepest candidate, cut where a test with the rate of its depth fails, as
    `Cycle.host_result_BX` (`eyas_lab.bench.simulate`)."""
    return tokens_BN.new_empty(tokens_BN.shape[0], 5 + 2 * rates_D.shape[0])


@operator("score")
def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Steps 6 to 9 of `core.sampling.apply_sampling`: float32 scores, -inf for excluded tokens."""
    return logits.new_empty(logits.shape, dtype=torch.float32)


@operator("cycle", changes=("store",))
def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """See `core.cache.commit_path`."""
    return
