"""Plugs this package into the socket "feature" (core/sockets.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eyas.core.features import Constraint
from eyas.core.requests import Request, RequestFeature
from eyas.core.sampling import Processor
from eyas.features.guidance import Guidance, check_processor
from eyas.features.logprobs import Logprobs
from eyas.features.predictions import Predicted
from eyas.features.traces import RawLogits, Traced

__all__ = ["check_processor", "features", "traced"]


def features(
    params: Mapping[str, Any],
    processors: tuple[Processor, ...],
    constraint: Constraint | None,
    prediction: tuple[int, ...],
) -> tuple[RequestFeature, ...]:
    """Return the features of a request: its processors with its constraint, and its prediction."""
    made: list[RequestFeature] = []
    if processors or constraint is not None:
        made.append(Guidance(tuple(map(check_processor, processors)), constraint))
    if prediction:
        made.append(Predicted(prediction))
    answer, prompt = params.get("logprobs"), params.get("prompt_logprobs")
    if answer is not None or prompt is not None:
        made.append(Logprobs(answer, prompt))
    if params.get("raw_logits"):
        made.append(RawLogits())
    return tuple(made)


def traced(request: Request) -> Request:
    """Return the request whose Steps have traces."""
    return replace(request, features=(*request.features, Traced()))
