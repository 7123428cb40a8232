"""eyas: lossless speculative decoding on unmodified Hugging Face models.

    import eyas

    llm = eyas.load()                     # the embedded model; or a path, a hub id, a loaded model
    print(llm.generate("Hello!").text)

The names below are looked up on first use, so `import eyas` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.api import LLM, Result, load
    from eyas.core.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["LLM", "Result", "Sampling", "__version__", "load"]

_HOME = {"LLM": "eyas.api", "Result": "eyas.api", "Sampling": "eyas.core.sampling", "load": "eyas.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
