"""Draft heads on disk and on the hub. `load` and `save` convert between a folder or hub id and `Weights`, in
any format. `eyas_train.exports` (eyas-train) writes the formats of other engines.

One module of this package is one published format: its tensor names and the meaning of its
config.json. A new format is a new module (see `Format` in `_weights.py`); there is no list of
formats. This package knows no network and no model: a drafter checks names and shapes with
`expect`.
"""

from eyas.checkpoints._weights import ExportTarget, Format, Weights, expect, load, save

__all__ = ["ExportTarget", "Format", "Weights", "expect", "load", "save"]
