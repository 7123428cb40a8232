"""The tests of the server (tests/serve) against a fleet of replicas.

    python packages/eyas-ray/runs/scale_contract.py --replicas 2

Those that all use one server are run, unchanged; those that make one of their own are left out (tests/serve/conftest.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import parser, run
from _servers import served

TESTS = Path(__file__).resolve().parents[3] / "tests" / "serve"
# what tests/serving.py gives its own server
OPTIONS = ("--name", "tiny", "--rows", 4, "--max-tokens", 512, "--tree.nodes", 6, "--tree.depth", 3, "--tree.branch", 2)


def main() -> None:
    options = parser(__doc__, None, replicas=2, k=("", "only tests of this expression, as for pytest")).parse_args()
    command = [sys.executable, "-m", "eyas", "serve", "--port", "{port}", "--replicas", options.replicas, *OPTIONS]
    with tempfile.TemporaryDirectory() as folder, served(command, Path(folder) / "log", 120) as (url, _):
        tests = [sys.executable, "-m", "pytest", str(TESTS), "--all", "-n", "0", "-q", "-k", options.k]
        done = subprocess.run(tests, env={**os.environ, "EYAS_SERVER_URL": url}, check=False)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    run(main)
