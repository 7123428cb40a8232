"""Tools for authors of formats, in addition to `Weights`, `ExportTarget` and `Format` of `eyas.checkpoints`.

A format is a module with the functions that `Format` describes (docs/reference/head_formats.md); a distribution names it as an
entry point of the group "eyas.formats". `formats` yields all that are installed. Names of keys and tensors that reading
and writing share are here too.

Everything else in modules that begin with an underscore may change.
"""

from __future__ import annotations

from eyas.checkpoints import _gguf_names as gguf_names
from eyas.checkpoints._block import DFLASH, DFLASH2, DSPARK, SECOND_PARTS, SLIDING, block_names, block_shapes
from eyas.checkpoints._eagle3 import IDS, MASK, SGLANG, layer_config, publish_tensors
from eyas.checkpoints._files import hub_refusal, read_config, write
from eyas.checkpoints._llama import Shape, count, flag, layer_names, mapping, text, write_layer
from eyas.checkpoints._weights import Published, differences, formats, refuse_dtypes
from eyas.checkpoints.gguf import ARCHITECTURE, File

__all__ = [
    "ARCHITECTURE", "DFLASH", "DFLASH2", "DSPARK", "IDS", "MASK", "SECOND_PARTS", "SGLANG", "SLIDING", "File", "Published", "Shape",
    "block_names", "block_shapes", "count", "differences", "flag", "formats", "gguf_names", "hub_refusal", "layer_config",
    "layer_names", "mapping", "publish_tensors", "read_config", "refuse_dtypes", "text", "write", "write_layer",
]  # fmt: skip
