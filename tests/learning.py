"""Targets, runners and requests for tests of heads that learn or are replaced."""

from typing import Any

import zoo
from eyas import kernels
from eyas.core.engine import Request
from eyas.core.requests import RequestFeature
from eyas.core.target import Target
from eyas.runners import with_fastest_runner
from reference import SAMPLINGS

PROMPTS = ((1, 5, 3, 6), (7, 9, 2), (4, 4, 8, 1, 3))
RUNNERS = [
    "model",
    *(["kernels"] if kernels.available() else []),
    *(["kernels, int4 drafts"] if kernels.available() and kernels.has_dots() else []),
]


def target_by(runner: str) -> Target:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16} if runner != "model" else {}
    target = Target(zoo.tiny("llama", **sizes), "tiny")
    draft_weights = "int4" if runner.endswith("int4 drafts") else "auto"
    return with_fastest_runner(target, "off" if runner == "model" else "on", draft_weights=draft_weights)


def requests(count: int, features: tuple[RequestFeature, ...] = ()) -> list[Request]:
    return [Request(PROMPTS[i % 3], 24, SAMPLINGS[i % len(SAMPLINGS)], features=features) for i in range(count)]
