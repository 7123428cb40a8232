"""The questions and answers of runs/peers.py: lines of JSON on stdin and stdout, of a process that
one engine fills.

    {"ask": "answer", "ids": [...], "max_tokens": N}   -> {"ids": [new ids], "first": seconds to the first token, "seconds": to the last}
    {"ask": "counts"}                                  -> {"drafts": cycles with drafts, "accepted": draft tokens}
    a question that the engine has no answer to        -> {}

The first line is {"versions": {...}}, written when the engine is ready. What libraries print goes
to stderr.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def talk(versions: dict[str, str], handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer questions until stdin ends."""
    _say({"versions": versions})
    for line in sys.stdin:
        question = json.loads(line)
        handler = handlers.get(question.pop("ask"))
        _say(handler(**question) if handler else {})


def redirect() -> None:
    """From here on stdout is stderr for everybody but `talk`."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=_answers, flush=True)


_answers = sys.stdout
