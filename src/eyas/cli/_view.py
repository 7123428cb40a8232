"""The page that `eyas generate --view` writes: an answer with the cycles that made it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli._errors import note
from eyas.errors import InputError
from eyas.files import write_text

if TYPE_CHECKING:
    from eyas.api import LLM, Result
    from eyas.core.requests import Step


class CycleView:
    """Collects the cycles of one answer and writes them into a file.

    Args:
        path: the file. One that is there already is replaced.
        prompt: shown as the prompt; token ids are shown as numbers.
        system: the system message, if there is one.

    Raises:
        InputError: nothing can be written there. This is checked before anybody waits for an answer.
    """

    def __init__(self, path: str, prompt: str | Sequence[int], system: str | None) -> None:
        self.path = Path(path)
        self.prompt = prompt if isinstance(prompt, str) else ", ".join(map(str, prompt))
        self.system = system
        self._cycles: list[dict[str, Any]] = []
        folder = self.path.parent
        if self.path.is_dir():
            raise InputError(f"output file {path!r} is a folder")
        if not folder.is_dir():
            raise InputError(f"output file {path!r} cannot be written: the folder {str(folder)!r} does not exist")
        if not os.access(folder, os.W_OK):
            raise InputError(f"output file {path!r} cannot be written: permission denied")

    def watch(self, llm: LLM) -> Callable[[Step], None]:
        """Return a function that is called with each Step of the answer, and records it."""
        from eyas.serve.cycles import CycleWriter

        writer = CycleWriter(llm.tokenizer)
        return lambda step: self._cycles.append(writer.write(step))

    def write(self, llm: LLM, result: Result) -> None:
        """Write the page. Raise InputError when that fails."""
        from eyas.serve.page import one_file

        data = {
            "prompt": self.prompt,
            "system": self.system,
            "target": llm.target.name,
            "method": llm.method,
            "tau": result.stats.tau,
            "seconds": result.stats.seconds,
            "text": None if llm.tokenizer is None else result.text,  # None: the numbers of the tokens
            "cycles": self._cycles,
        }
        write_text(self.path, one_file(data))
        note(f"every cycle: {self.path}")
