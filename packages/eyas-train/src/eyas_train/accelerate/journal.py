"""The plan and the finished steps of a run, in a file that is written after every step. So the same command
goes on where it ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError
from eyas.files import write_text
from eyas_lab.folders import read_versioned

FILE = "run.json"
FORMAT, VERSION = "eyas-accelerate", 2


class Journal:
    """The journal of a folder; empty when the folder is new.

    Args:
        settings: settings that must be equal for a run to go on.

    Raises:
        OptionError: the folder holds a run with other settings.
        InputError: the file is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        now = json.loads(json.dumps(settings))
        self.content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "settings": now, "steps": {}}
        if not self.path.exists():
            return
        self.content = read_versioned(self.path, FORMAT, VERSION, self._checked, "", self._damage_error)
        there = self.content["settings"]
        if other := [
            f"{name} {there.get(name)} there, {now[name]} now" for name in now if there.get(name) != now[name]
        ]:
            raise OptionError(
                f"{folder.parent} holds a run with other settings: {'; '.join(other)}; "
                "repeat the old ones, or use another --output"
            )

    def _damage_error(self, reason: str) -> InputError:
        return InputError(f"{self.path} is damaged ({reason}): delete it, and the run begins again")

    def _checked(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields["version"] < VERSION or not {"settings", "steps"} <= fields.keys():
            raise LookupError
        return fields

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def write(self, **values: Any) -> None:
        """Keep these values."""
        self.content |= values
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")

    def is_done(self, step: str) -> bool:
        """Return whether a step is finished."""
        return bool(self.content["steps"].get(step, {}).get("done"))

    def seconds(self, *steps: str) -> float:
        """Return the seconds that these steps have taken so far; without names, all of them."""
        taken = self.content["steps"]
        return float(sum(taken[name]["seconds"] for name in steps or taken if name in taken))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, and keep that it is done; the time of one that is interrupted is kept too."""
        before, began, done = self.seconds(name), time.monotonic(), False
        try:
            yield
            done = True
        finally:
            seconds = round(before + time.monotonic() - began, 1)
            self.write(steps={**self.content["steps"], name: {"seconds": seconds, "done": done}})
