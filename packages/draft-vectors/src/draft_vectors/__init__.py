"""Conformance vectors for speculative decoding: a tiny target, heads of nine methods, their numbers, and a runner."""

__version__ = "0.1.0"
