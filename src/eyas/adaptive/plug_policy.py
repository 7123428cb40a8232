"""Plugs this package into the socket "policy" (core/sockets.py)."""

from __future__ import annotations

import logging

from eyas.adaptive import controller
from eyas.core.drafter import Drafter
from eyas.targets.placement import is_tensor_parallel

__all__ = ["make_controller"]

log = logging.getLogger(__name__)  # the command line shows its messages


def make_controller(
    drafter: Drafter, fallback: bool = True, compared: bool = False
) -> controller.AdaptiveController | None:
    """Return the controller of a drafter; None where the processes of a target would decide differently."""
    if is_tensor_parallel(drafter.target.model):
        log.info("tree auto is fixed here: it decides by the clock, and the clocks of the target's processes differ")
        return None
    return controller.make_controller(drafter, fallback, compared)
