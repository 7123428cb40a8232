"""Decodes a few tokens after loading where that compiles or records something, so that the first answer does not wait for it."""

from __future__ import annotations

import logging

from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.timing import StageTimer

__all__ = ["warm_up"]

log = logging.getLogger(__name__)
PROMPT, NEW = 8, 4  # tokens


def warm_up(drafter: Drafter) -> None:
    """Decode greedily and by a temperature, if the target's runner records cycles. The kernels that these compile serve every text."""
    target = drafter.target
    if not target.run.records_cycles or target.context < PROMPT + NEW:
        return
    timer = StageTimer()
    decoder = Decoder(target, drafter)
    for temperature in (0.0, 1.0):
        decoder.add(Request(tuple(n % target.vocab_size for n in range(PROMPT)), NEW, Sampling(temperature)))
        while not decoder.finished:
            decoder.step()
    log.info("warmed up in %.1f s", timer.now() - timer.began)
