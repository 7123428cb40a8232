"""Engines that were run with the vectors, a class each."""
