"""torch.compile where it works, and the function as it is where it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

__all__ = ["Backend", "Compiled"]

Backend = str | Callable[..., Any]  # of torch.compile
MOST = 64  # compilations of one function, for shapes that differ in kind; torch's own logs announce each (TORCH_LOGS=recompiles)


class Compiled:
    """A function, compiled as a whole for each kind of arguments; as it is, with one warning, if it cannot be.

    Args:
        name: what it is called in the warning.
    """

    def __init__(self, function: FunctionType | Callable[..., Any], backend: Backend, name: str) -> None:
        self.function, self.name, self.failed = function, name, False
        own = FunctionType(  # compilations are kept with the code: those of another model with the same code would count here
            function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        self.compiled = torch.compile(own, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes a second to import: only who compiles pays

        if not self.failed:
            try:
                with torch._dynamo.config.patch(recompile_limit=MOST):
                    return self.compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # while compiling: nothing of it has run
                self.failed = True
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                warnings.warn(f"{self.name} cannot be compiled and runs as it is: {reason}", stacklevel=2)
        return self.function(*args, **kwargs)
