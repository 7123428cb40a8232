"""eyas: lossless speculative decoding on unmodified Hugging Face models.

    import eyas

    llm = eyas.load()                     # the embedded model; or a path, a hub id, a loaded model
    print(llm.generate("Hello!").text)

Names are imported on first use, so `import eyas` is fast and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.api import LLM, Chat, Result, Stream, load
    from eyas.core.sampling import Sampling
    from eyas.errors import EyasError
    from eyas.hooks import attach, detach, hf

__version__ = "0.1.0"
__all__ = ["LLM", "Chat", "EyasError", "Result", "Sampling", "Stream", "__version__", "attach", "detach", "hf", "load"]

_MODULES = {
    **dict.fromkeys(["LLM", "Chat", "Result", "Stream", "load"], "eyas.api"),
    **dict.fromkeys(["attach", "detach", "hf"], "eyas.hooks"),
    "EyasError": "eyas.errors",
    "Sampling": "eyas.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next access finds it there
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
