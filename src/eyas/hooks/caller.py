"""Arguments of `model.generate` that transformers does not hand on to a `custom_generate`.

With an object as `custom_generate`, transformers 5.17 to 5.23 drop `streamer`, `assistant_model`
and `synced_gpus` without a word; with a folder it does not say which one. They are local variables
of the `generate` that is calling, where this module looks. Nothing is changed there. If that
function has another name one day, nothing is found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["arguments_of_generate"]

MODULE = "transformers.generation.utils"
FRAMES = 6  # between `generate` and the code that asks, at most


def arguments_of_generate() -> Mapping[str, Any]:
    """Return the local variables of the `generate` of transformers that has called the present
    function; empty without one."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == MODULE:
            return dict(frame.f_locals)
    return {}
