"""Plugs this package into the socket "runner" (core/sockets.py)."""

from eyas.runners import warm_up, with_fastest_runner

__all__ = ["warm_up", "with_fastest_runner"]
