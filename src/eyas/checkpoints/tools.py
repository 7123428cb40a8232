"""Tools for authors of formats, in addition to `Weights`, `ExportTarget` and `Format` of `eyas.checkpoints`.

A format is a module with the functions that `Format` describes (docs/reference/head_formats.md); a distribution names it as an
entry point of the group "eyas.formats". `formats` yields all that are installed. Names of keys and tensors that reading
and writing share are here too, and the two halves of `checkpoints.load`.

Everything else in modules that begin with an underscore may change.
"""

from __future__ import annotations

from eyas.checkpoints import _gguf_names as gguf_names
from eyas.checkpoints._block import DFLASH, DFLASH2, DSPARK, SECOND_PARTS, SLIDING, block_names, block_shapes
from eyas.checkpoints._eagle3 import IDS, MASK, SGLANG, layer_config, publish_tensors
from eyas.checkpoints._files import find, hub_refusal, read_config, write
from eyas.checkpoints._llama import Shape, count, flag, layer_names, mapping, text, write_layer
from eyas.checkpoints._weights import Published, Weights, differences, formats, published_at, recognise, refuse_dtypes
from eyas.checkpoints.gguf import ARCHITECTURE, File
from eyas.errors import CheckpointError

__all__ = [
    "ARCHITECTURE", "DFLASH", "DFLASH2", "DSPARK", "IDS", "MASK", "SECOND_PARTS", "SGLANG", "SLIDING", "File", "Published", "Shape",
    "block_names", "block_shapes", "count", "differences", "flag", "formats", "gguf_names", "hub_refusal", "interpret",
    "layer_config", "layer_names", "mapping", "publish_tensors", "read_config", "read_published", "refuse_dtypes", "text", "write",
    "write_layer",
]  # fmt: skip


def read_published(path_or_hub_id: str) -> Published:
    """Return a head as it is published: the first half of `checkpoints.load`, with its errors."""
    place, source = find(path_or_hub_id, None)
    try:
        return published_at(place)
    except CheckpointError as error:
        raise CheckpointError(f"draft head {source}: {error}") from error


def interpret(published: Published, source: str) -> Weights:
    """Return the head that a config.json and its tensors define: the second half of `checkpoints.load`, with its errors."""
    config, tensors = published
    try:
        return Weights(*recognise(config, tensors).read(config, tensors), source)
    except CheckpointError as error:
        raise CheckpointError(f"draft head {source}: {error}") from error
