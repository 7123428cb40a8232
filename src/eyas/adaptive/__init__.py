"""Adaptive decoding (`--tree auto`): how large a tree to draft, and whether to draft at all.

cost.py        seconds of target passes and drafts on this machine, measured once and kept
goodput.py     accepted tokens that a tree of any size is expected to yield; the size with the most tokens a second
bandit.py      the way of decoding that makes most tokens a second, found at a bounded cost
controller.py  the policy (core/dormant.py) of the Decoder, made of these three
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.adaptive.controller import AdaptiveController, make_controller
from eyas.errors import OptionError, near

__all__ = ["MODES", "AdaptiveController", "make_controller", "mode_of"]

MODES = ("auto", "fixed")
SHAPED = ("tree", "dynamic", "depth")  # groups of options that describe a tree


def mode_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The mode of trees, auto or fixed, and the options of the method alone.

    `tree` with the name of a mode decides. Without it, trees are fixed where an option describes
    them, else auto. With tree=auto and such options, trees grow no larger than the options allow.

    Raises:
        OptionError: `tree` is another name.
    """
    mode = options.get("tree")
    if not isinstance(mode, str):
        shaped = any(name.partition(".")[0] in SHAPED for name in options)
        return "fixed" if shaped else "auto", dict(options)
    if mode not in MODES:
        raise OptionError(
            f"unknown tree {mode!r}; {near(mode, MODES)}; a tree's own options are --tree.nodes and others"
        )
    return mode, {name: value for name, value in options.items() if name != "tree"}
