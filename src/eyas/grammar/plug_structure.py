"""Plugs this package into the socket "structure" (core/sockets.py)."""

from eyas.grammar import Grammars, structure_of

__all__ = ["Grammars", "structure_of"]
