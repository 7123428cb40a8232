"""What every experiment says of itself, the machine and the command line, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import transformers

from eyas.errors import EyasError
from eyas.hardware import cpu_name

INTERRUPTED = 130


def machine() -> dict[str, object]:
    """What the numbers were measured on, and how busy it was just now."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command(script: str) -> str:
    return " ".join(["python", f"runs/{script}", *sys.argv[1:]])


def run(main: Callable[[], None]) -> NoReturn:
    """Status 2 and one line for a user's mistake; 130 when interrupted."""
    try:
        main()
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)
