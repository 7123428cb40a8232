"""Processes that run `eyas features` for some of the shards each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eyas.errors import EyasError
from eyas_train.store import FeatureStore

__all__ = ["Workers"]

POLL_SECONDS = 0.2
STOP_SECONDS = 20


class Workers:
    """The worker processes of one `eyas features`, which start at once.

    Args:
        todo: the shards to be made; worker k makes numbers k, k + count, ... of them.
        devices: given to the workers in turn.
        arguments: of the command, repeated for every worker.
        notes: a folder for their stderr; a pipe that nobody reads would block them.
    """

    def __init__(
        self,
        store: FeatureStore,
        todo: Sequence[int],
        count: int,
        devices: Sequence[str],
        arguments: Sequence[str],
        notes: Path,
    ) -> None:
        self.store = store
        self.todo = todo
        self.command = [sys.executable, "-m", "eyas", "features", *arguments]
        self.threads = max(1, (os.cpu_count() or 1) // count)
        self.notes = [notes / str(k) for k in range(count)]
        self.processes = [
            self._start(todo[k::count], devices[k % len(devices)], path) for k, path in enumerate(self.notes)
        ]

    def _start(self, shards: Sequence[int], device: str, notes: Path) -> subprocess.Popen[bytes]:
        part = [
            "--only",
            ",".join(map(str, shards)),
            "--of",
            str(os.getpid()),
            "--device",
            device,
            "--workers",
            "1",
            "--yes",
        ]
        environment = dict(os.environ)
        if device in ("cpu", "auto"):
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        with notes.open("wb") as stderr:
            return subprocess.Popen([*self.command, *part], stdout=subprocess.DEVNULL, stderr=stderr, env=environment)

    def run(self, on_tokens: Callable[[int], None]) -> None:
        """Wait for all of them. Raise EyasError when one failed.

        Args:
            on_tokens: called with the tokens of each shard that is made.
        """
        shards, missing = self.store.manifest.shards, list(self.todo)
        try:
            running = True
            while running:
                running = any(process.poll() is None for process in self.processes)
                for shard in [i for i in missing if not self.store.fault(i)]:
                    missing.remove(shard)
                    on_tokens(shards[shard].tokens)
                time.sleep(POLL_SECONDS * running)
        except KeyboardInterrupt:
            self._stop()
            raise
        for number, (process, notes) in enumerate(zip(self.processes, self.notes, strict=True), start=1):
            if process.returncode:
                code = process.returncode
                lines = notes.read_text(errors="replace").strip().splitlines()
                last = lines[-1] if lines else f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
                raise EyasError(
                    f"worker {number} of {len(self.processes)}: {last.removeprefix('eyas: error: ')}; "
                    f"{self.store.progress()} are whole. Run the same command again, it goes on"
                )

    def _stop(self) -> None:
        """End the workers that do not react to Ctrl-C, which reaches them too. An unfinished shard leaves nothing."""
        for process in self.processes:
            try:
                process.wait(timeout=STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
