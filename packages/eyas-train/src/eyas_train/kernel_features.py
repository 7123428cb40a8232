"""The target's features of whole texts by the CPU kernels, for training: 2.5 times as fast as the model's own forward.

Weights are rounded to int8 and activations to int16, so features differ from the exact ones by 1 to 4 %, about as much as
with bfloat16. A head that learns from them is served with exact ones.

Letters: R texts, T tokens of the longest, M tokens of all, D hidden, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from eyas import kernels
from eyas.core.target import Target
from eyas.kernels import Pass
from eyas.runners.cpu import CpuRunner, make_cpu_runner
from eyas.runners.tools import UnsuitedError

ROUNDED = kernels.WeightFormat("int8", "int16")


def feature_reader(target: Target) -> Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] | None:
    """Return the function from tokens [M], the texts' lengths [R] and feature layers, ascending, to features [M, F]; None
    where the kernels do not suit the target or this machine."""
    if target.family.window is not None:
        return None
    try:
        runner = make_cpu_runner(target, ROUNDED, own=True)
    except UnsuitedError:
        return None

    return torch.no_grad()(partial(_features, runner))


def _features(runner: CpuRunner, tokens_M: Tensor, lengths: Sequence[int], feature_layers: Sequence[int]) -> Tensor:
    target, shape, threads = runner.target, runner.shape, torch.get_num_threads()
    R, T, M, D, L = len(lengths), max(lengths), len(tokens_M), shape.hidden, target.num_layers
    inner = [k for k in feature_layers if k < L]
    features_MF = kernels.floats(M, D * len(feature_layers))
    x_MD = target.embed(tokens_M).clone()  # the kernels overwrite it
    causal_RTT = torch.ones(T, T, dtype=torch.bool).tril().expand(R, T, T).contiguous()
    store = kernels.floats(2 * L, R, shape.kv_heads, T, shape.head_dim)
    cosine, sine = runner.tables(T)
    attention_pass = Pass(
        torch.zeros(R, dtype=torch.long), torch.arange(T).expand(R, T).contiguous(), causal_RTT, causal_RTT, cosine, sine,
        store, range(R), tuple(lengths) if R * T > M else (),
    )  # fmt: skip
    runner.layers.threads = threads
    runner.layers(x_MD, attention_pass, inner, features_MF)
    if L in feature_layers:
        runner.norm(x_MD, None, features_MF[:, D * len(inner) :], threads)
    return features_MF
