"""torch.compile with a fallback to the uncompiled function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from eyas.core.ops import Backend
from eyas.errors import first_line

__all__ = ["Compiled"]

MAX_RECOMPILES = 64  # limit per function, for different kinds of shapes; TORCH_LOGS=recompiles shows them


class Compiled:
    """A function compiled as a whole for each kind of arguments; uncompiled, with one warning, if
    that fails.

    Args:
        name: for the warning.
    """

    def __init__(self, function: FunctionType | Callable[..., Any], backend: Backend, name: str) -> None:
        self.function, self.name, self.failed = function, name, False
        # torch counts compilations per code object: other models with the same code would count here
        copy = FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self.compiled = torch.compile(copy, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # imported late: it takes a second

        if not self.failed:
            try:
                with torch._dynamo.config.patch(recompile_limit=MAX_RECOMPILES):
                    return self.compiled(*args, **kwargs)
            except (
                TorchDynamoException,
                FailOnRecompileLimitHit,
            ) as error:  # raised before anything of the function ran
                self.failed = True
                reason = first_line(error)
                warnings.warn(f"{self.name} cannot be compiled and runs uncompiled: {reason}", stacklevel=2)
        return self.function(*args, **kwargs)
