"""The acceptance of drafts by depth on a server, from the counters of vLLM, which eyas' and llama.cpp's servers have too."""

from __future__ import annotations

import re
import urllib.request
from http.client import HTTPException

from eyas.errors import InputError, one_line

__all__ = ["alphas_of", "served_alphas"]

SECONDS = 10.0
LARGEST = 64 * 2**20  # bytes of an answer
ACCEPTED = re.compile(
    r'^(?:vllm|llamacpp):spec_decode_num_accepted_tokens_per_pos(?:_total)?\{[^}]*position="(\d+)"[^}]*\} (\S+)$',
    re.MULTILINE,
)
DRAFTS = re.compile(r"^(?:vllm|llamacpp):spec_decode_num_drafts(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def served_alphas(url: str) -> dict[str, float]:
    """Return the acceptance by depth since the server began. Raise InputError if it cannot be read there."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            text = answer.read(LARGEST).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        raise InputError(f"--metrics {url}: {one_line(error, 200)}") from error
    if not (found := alphas_of(text)):
        raise InputError(
            f"--metrics {url}: no counters of accepted drafts by position are there, or nothing was drafted yet (llama-server "
            "needs --metrics)"
        )
    return found


def alphas_of(text: str) -> dict[str, float]:
    """Return {"0-alpha": ...}: the share of drafts at a position that were accepted, of those whose predecessors were.
    Counters of several engines in one text are summed."""
    before = sum(float(value) for value in DRAFTS.findall(text))
    accepted: dict[int, float] = {}
    for position, value in ACCEPTED.findall(text):
        accepted[int(position)] = accepted.get(int(position), 0.0) + float(value)
    alphas = dict[str, float]()
    for position in sorted(accepted):
        if not before:
            break
        alphas[f"{position}-alpha"] = accepted[position] / before
        before = accepted[position]
    return alphas
