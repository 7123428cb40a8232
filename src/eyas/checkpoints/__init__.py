"""Draft heads on disk and on the hub: `load` and `save` turn a folder or a hub id into `Weights` and back, whatever its format.

One file of this folder is one published format: which tensor names it uses, and what its config.json says. A new format is a new file
(see `Format` in `_weights.py`); there is no list of formats. This room knows no network and no model: what a drafter does with the
tensors, and which shapes it wants, it says itself through `expect`.
"""

from eyas.checkpoints._weights import Format, Weights, expect, load, save

__all__ = ["Format", "Weights", "expect", "load", "save"]
