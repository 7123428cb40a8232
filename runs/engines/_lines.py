"""The questions and answers of runs/peers.py: lines of JSON on stdin and stdout, of a process that
one engine fills.

    {"ask": "answer", "ids": [...], "max_tokens": N}   -> {"ids": [new ids], "first": seconds to the first token, "seconds": to the last}
    {"ask": "passes", "tokens": [1, 2, ...], "context": N, "repeats": N}   -> {"seconds": [...]}, a pass over so many tokens each
    {"ask": "counts"}                                  -> {"drafts": cycles with drafts, "accepted": draft tokens}
    a question that the engine has no answer to        -> {}

The first line is {"versions": {...}}, written when the engine is ready. What libraries print goes
to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
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


def median_seconds(work: Callable[[], object], prepare: Callable[[], object], repeats: int) -> float:
    """The median time of `work`, before each of which `prepare` runs; the first run does not count."""
    seconds = []
    for _ in range(repeats + 1):
        prepare()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=_answers, flush=True)


_answers = sys.stdout
