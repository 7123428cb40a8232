"""How large a tree to draft, and whether to draft at all: Policies for the Decoder.

cost.py       seconds of passes and drafts on this machine, measured once
plan.py       what trees of any size are expected to yield, and the one that yields most tokens a second
governor.py   the policy: plans, watches, falls back to plain decoding and returns
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.adaptive.controller import AdaptiveController, auto
from eyas.errors import OptionError, near

__all__ = ["MODES", "AdaptiveController", "auto", "mode_of"]

MODES = ("auto", "fixed")
SHAPED = ("tree", "dynamic", "depth")  # options that say what a tree is like


def mode_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(auto or fixed, the method's own options) of what was asked for.

    `tree` with the name of a mode says it; else trees are fixed when any option of theirs is given, and auto otherwise.
    With both, auto grows trees no larger than the options say. OptionError for another name.
    """
    mode = options.get("tree")
    if not isinstance(mode, str):
        shaped = any(name.partition(".")[0] in SHAPED for name in options)
        return "fixed" if shaped else "auto", dict(options)
    if mode not in MODES:
        raise OptionError(f"unknown tree {mode!r}; {near(mode, MODES)}; a tree's own options are --tree.nodes and others")
    return mode, {name: value for name, value in options.items() if name != "tree"}
