"""Decodes a few tokens after loading where that compiles or records something, so that the first
answer does not wait for it."""

from __future__ import annotations

import logging

from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.timing import StageTimer

__all__ = ["warm_up"]

log = logging.getLogger(__name__)
NEW = 4  # tokens of each answer
# (length of the prompt, Sampling)
TEXTS = ((8, Sampling()), (512, Sampling(1.0)), (100, Sampling(0.7, top_k=20, top_p=0.9)))


def warm_up(drafter: Drafter) -> None:
    """Decode short and long prompts, greedily, by a temperature, and by filters, if the target's
    runner records cycles. The kernels that these compile serve every text and every Sampling."""
    target = drafter.target
    if not target.runner.records_cycles or target.context <= 2 * NEW:
        return
    timer = StageTimer()
    decoder = Decoder(target, drafter)
    for length, sampling in TEXTS:
        decoder.add(
            Request(tuple(n % target.vocab_size for n in range(min(length, target.context - NEW))), NEW, sampling)
        )
        while not decoder.finished:
            decoder.step()
    log.info("warmed up in %.1f s", timer.now() - timer.began)
