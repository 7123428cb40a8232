"""What authors of formats use, besides `Weights`, `ExportTarget` and `Format` of `eyas.checkpoints`.

A format is a module with the functions that `Format` describes (docs/reference/head_formats.md); a distribution names it as an
entry point of the group "eyas.formats". `formats` yields all that are installed.

Everything else in modules that begin with an underscore may change.
"""

from __future__ import annotations

from eyas.checkpoints._files import read_config, write
from eyas.checkpoints._hub import fetch_model
from eyas.checkpoints._llama import Shape, count, flag, layer_names, mapping, text
from eyas.checkpoints._weights import Published, differences, formats, refuse_dtypes

__all__ = [
    "Published", "Shape", "count", "differences", "fetch_model", "flag", "formats", "layer_names", "mapping", "read_config",
    "refuse_dtypes", "text", "write",
]  # fmt: skip
