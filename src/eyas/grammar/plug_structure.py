"""Plugs this package into the socket "structure" (core/sockets.py)."""

from eyas.grammar import Grammars, json_rule, structure_of

__all__ = ["Grammars", "json_rule", "structure_of"]
