"""Faster ways to run the same forward.

`prepared` gives a target the best of them that suits it and the machine. `cpu`: compiled kernels for families that it knows. `graphs`: the
model's own forward as CUDA graphs.
"""

from __future__ import annotations

import warnings
from typing import Literal

from eyas.errors import OptionError, near
from eyas.fast.cpu import UnsuitedError, runner
from eyas.fast.graphs import GraphRunner
from eyas.target import Target

__all__ = ["Kernels", "UnsuitedError", "prepared", "runner", "runs_by"]

Kernels = Literal["auto", "on", "off"]


def prepared(target: Target, kernels: str = "auto", own: bool = True) -> Target:
    """The target with its fastest runner.

    Args:
        kernels: auto: compiled kernels where they suit; on: a warning says why they do not, and CUDA graphs on a GPU; off: the model's own
            forward.
        own: eyas loaded the model, so nobody else changes its weights; else auto is off, as kernels keep a copy of them.

    Raises:
        OptionError: another word.
    """
    if kernels not in ("auto", "on", "off"):
        raise OptionError(f"unknown kernels {kernels!r}; {near(kernels, ('auto', 'on', 'off'))}")
    if kernels == "off" or (kernels == "auto" and not own):
        return target
    if target.device.type == "cuda":  # not yet run on one, so only where it is asked for
        return target.run_with(GraphRunner(target)) if kernels == "on" else target
    try:
        return target.run_with(runner(target))
    except UnsuitedError as why:
        if kernels == "on":
            warnings.warn(f"the model runs by its own forward: {why}", stacklevel=3)
        return target


def runs_by(target: Target) -> str:
    """What a target's forwards are run by: kernels, graphs, or model."""
    return target.run.name
