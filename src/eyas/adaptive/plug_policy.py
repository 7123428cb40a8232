"""Plugs this package into the socket "policy" (core/sockets.py)."""

from eyas.adaptive.controller import make_controller

__all__ = ["make_controller"]
