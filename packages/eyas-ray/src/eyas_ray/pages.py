"""The metrics of all replicas on one page, in Prometheus' text form: every sample gets the label `replica`."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["merged"]


def merged(pages: Mapping[str, str]) -> str:
    """Return one page of the pages of replicas, by the replica's name. A metric's description comes once, as the
    format asks for, with the samples of all replicas below it."""
    metrics: dict[str, dict[str, None]] = {}  # name of a metric -> its lines, each once and in order
    for replica, page in pages.items():
        lines: dict[str, None] = {}
        for line in page.splitlines():
            if line.startswith("# HELP "):
                lines = metrics.setdefault(line.split()[2], {})
            if line.startswith("#"):
                lines[line] = None
            elif line:
                lines[_labelled(line, replica)] = None
    return "".join(f"{line}\n" for lines in metrics.values() for line in lines)


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, space, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}}{space}{value}'
