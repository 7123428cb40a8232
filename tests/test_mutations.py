"""Tests of the tests: every mistake in mutations.py is found, by an assertion, and the code as it is passes the same checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mutations


def test_snippets_occur_once() -> None:
    """Guards the list against changes of the source: a snippet that is gone or twice there mutates nothing, or the wrong place."""
    assert len({m.name for m in mutations.MUTATIONS}) == len(mutations.MUTATIONS)
    for m in mutations.MUTATIONS:
        count = (mutations.SOURCE / m.file).read_text(encoding="utf-8").count(m.old)
        assert count == 1, f"{m.name}: the snippet occurs {count} times in {m.file}: {m.old!r}"
        assert m.old != m.new


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every mutation is tried in a forked process")
def test_every_mutation_is_found(tmp_path: Path) -> None:
    """Guards that the other tests would notice: each mutation fails its check by an assertion of a test, not by a crash. Deterministic."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "EYAS_KERNELS": "off"}  # what is mutated is Python
    done = subprocess.run(
        [sys.executable, mutations.__file__, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = {line["trial"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(results) == [name for name, _, _ in mutations.trials()]
    for name, result in results.items():
        if name.startswith(mutations.ORIGINAL):
            assert result["outcome"] == "passed", f"the code as it is fails {name}: {result}"
    wrong = []
    for m in mutations.MUTATIONS:
        if results[m.name]["outcome"] != "assertion" or m.words not in results[m.name]["words"]:
            wrong.append(f"{m.name}: {results[m.name]}")
    assert not wrong, "not found, or for another reason:\n" + "\n".join(wrong)
