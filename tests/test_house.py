"""The brake: what everybody must read does not grow without anybody noticing."""

from __future__ import annotations

from house import RINGS, code_lines
from test_architecture import EYAS

# Code lines (without docstrings, comments and blank lines) of core, drafters and api. It only gets smaller: what
# is optional is a wing, and what comes in takes something out.
MAX_CODE_LINES = 8_300


def test_the_trunk_has_a_ceiling() -> None:
    """Guards against growth by small steps: source grew by 110 % in two rounds, and no single change did it."""
    lines = sum(code_lines(file)[0] for ring in RINGS for file in (EYAS / ring).rglob("*.py"))
    assert lines <= MAX_CODE_LINES, f"{lines:,} code lines in {' + '.join(RINGS)}: {MAX_CODE_LINES:,} is the ceiling"
