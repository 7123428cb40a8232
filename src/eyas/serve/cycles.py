"""Steps as the page reads them: one JSON object for each cycle, with the texts of its tokens.

    {"number": 3, "prefill": false,
     "tokens": [{"token": 318, "text": " you", "node": 2}, ..., {"token": 760, "text": " book", "node": null}],
     "nodes": [{"parent": -1, "token": 262, "text": " do", "depth": 0, "q": null, "p": 1.0, "accepted": true}, ...],
     "path": [0, 2], "bonus": 760, "bonus_text": " book", "ended": "other token",
     "ms": 7.4, "parts_ms": {"draft": 2.1, ...}, "plan": "16/5/4", "tau_so_far": 2.67}

`tokens` are the emitted tokens; `node` is a number in `nodes`, or null for a token of the target's own. Their
texts together are the answer's text. The texts of `nodes` show a token by
itself: special tokens too, and the space that begins a word. `nodes`, `path`, `bonus` and `ended`
come from `features.Trace`. The object of a prefill has no nodes.

The server sends these objects (`cycles: true`), `eyas generate --view` writes them into a file.
This module knows no web framework.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from eyas.core.requests import Step
from eyas.core.totals import StepTotals
from eyas.text import Detokeniser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# how vocabularies write a word's space
SPACE_MARKS = ("\N{LOWER ONE EIGHTH BLOCK}", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")


class CycleWriter:
    """Turns the Steps of one request into objects for the page, in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer)
        self._totals = StepTotals()
        self._shown: dict[int, str] = {}

    def write(self, step: Step) -> dict[str, Any]:
        """Return a step as the object that the page reads: tree, path, tokens, times."""
        self._totals.add(step)
        trace = step.extra.get("trace")
        path = step.path if trace is None else trace.path
        nodes = path[1 : 1 + step.accepted]
        places = [*nodes, *[None] * (len(step.tokens) - len(nodes))]
        last = len(step.tokens) - 1 if step.finish else -1
        return {
            "number": self._totals.cycles,
            "prefill": step.prefill,
            "tokens": [
                {"token": token, "text": self._emitted(token, final=i == last), "node": node}
                for i, (token, node) in enumerate(zip(step.tokens, places, strict=True))
            ],
            **self._tree(step),
            "ms": step.seconds * 1000,
            "parts_ms": {name: seconds * 1000 for name, seconds in step.stage_seconds.items()},
            "plan": step.drafted_by,
            "tau_so_far": self._totals.tau,
        }

    def _tree(self, step: Step) -> dict[str, Any]:
        if "trace" not in step.extra:
            return {"nodes": [], "path": [], "bonus": None, "bonus_text": "", "ended": ""}
        trace = asdict(step.extra["trace"])
        for node in trace["nodes"]:
            node["text"] = self._alone(node["token"])
            node["p"], node["q"] = _number(node["p"]), _number(node["q"])
        return {**trace, "bonus_text": self._alone(trace["bonus"])}

    def _emitted(self, token: int, final: bool) -> str:
        """Return the text that this token adds to the answer, or completes."""
        if self._detokeniser is None:
            return f"{token} "
        text = self._detokeniser.feed(token)
        return text + self._detokeniser.flush() if final else text

    def _alone(self, token: int) -> str:
        if token not in self._shown:
            self._shown[token] = str(token) if self._tokenizer is None else _token_text(self._tokenizer, token)
        return self._shown[token]


def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of one token by itself, with the space that a decoder drops before a text's first word."""
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = tokenizer.convert_ids_to_tokens(token)
    if isinstance(piece, str) and piece.startswith(SPACE_MARKS) and not text.startswith(" "):
        text = " " + text
    return text


def _number(value: float | None) -> float | None:
    """Return the number; None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
