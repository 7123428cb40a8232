"""Each wing without the others: their folders are gone, and its modules can be imported and used all the same.

`make wings` runs this alone, and tests of each wing's own as well.
"""

import os
import sys
from pathlib import Path

import pytest

import processes
from test_architecture import EYAS, WINGS

# Quick tests of each wing that need no other one, for `make wings`: the whole suite has them anyway, beside the other
# wings. `wing_alone.py` imports all of a wing's modules before.
TESTS = {
    "adaptive": ["adaptive/test_bandit.py", "adaptive/test_goodput.py"],
    "blocks": ["checkpoints/test_block.py"],
    "features": ["features/test_guidance.py"],
    "grammar": ["grammar/test_grammar.py"],
    "hooks": ["hooks/test_attach.py"],
    "named": ["named/test_named.py::test_names_are_known"],
    "pard": [],
    "recall": [],
    "serve": ["serve/test_hosts.py", "serve/test_page_files.py"],
    "speed": ["runners/test_threads.py"],
}


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_alone(wing: str, tmp_path: Path) -> None:
    """Guards against a wing that needs another one, also in a way that no import shows."""
    others = {folder for other, folders in WINGS.items() if other != wing for folder in folders}
    (tmp_path / "eyas").mkdir()
    for entry in EYAS.iterdir():
        if entry.stem not in others:
            (tmp_path / "eyas" / entry.name).symlink_to(entry)
    tests = Path(__file__).parent
    further = TESTS[wing] if os.environ.get("EYAS_WINGS") else []
    files = [tests / "wing_alone.py", *(tests / file for file in further)]
    paths = f"{tmp_path}:{tests}"
    options = ["-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a warm child has imported plugins of other tests
    environment = processes.environment(PYTHONPATH=paths, EYAS_WING=wing)
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = processes.run(command, warm=True, env=environment, cwd=tests.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
