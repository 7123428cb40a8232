"""How large a tree to draft, and whether to draft at all: Policies for the Decoder.

    cost.py       seconds of passes and drafts on this machine, measured once
    plan.py       what trees of any size are expected to yield, and the one that yields most tokens a second
    governor.py   the policy: plans, watches, falls back to plain decoding and returns
"""

from eyas.tune.governor import Governor, auto

__all__ = ["Governor", "auto"]
