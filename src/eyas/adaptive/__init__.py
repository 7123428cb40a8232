"""Adaptive decoding (`--tree auto`): how large a tree to draft, and whether to draft at all.

cost.py         seconds of target passes and drafts on this machine, measured once and kept
goodput.py      accepted tokens that a tree of any size is expected to yield; the size with the most tokens a second
nodes.py        how many guesses from the text a pass verifies
bandit.py       the way of decoding that makes most tokens a second, found at a bounded cost
memory.py       what is known about a head before it drafts here
controller.py   the policy (core/dormant.py) of the Decoder, made of these
"""

from eyas.adaptive.controller import AdaptiveController, make_controller

__all__ = ["AdaptiveController", "make_controller"]
