"""Plugs this package into the socket "feature" (core/sockets.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eyas.core.features import Constraint
from eyas.core.requests import Request, RequestFeature
from eyas.core.sampling import Processor
from eyas.features.guidance import Guidance
from eyas.features.logprobs import Logprobs
from eyas.features.predictions import Predicted
from eyas.features.traces import Traced

__all__ = ["features", "traced"]


def features(
    params: Mapping[str, Any],
    processors: tuple[Processor, ...],
    constraint: Constraint | None,
    prediction: tuple[int, ...],
) -> tuple[RequestFeature, ...]:
    """Return the features that these keywords of `LLM.generate` ask for."""
    made: list[RequestFeature] = []
    if processors or constraint is not None:
        made.append(Guidance(processors, constraint))
    if prediction:
        made.append(Predicted(prediction))
    if params["logprobs"] is not None or params["prompt_logprobs"] is not None:
        made.append(Logprobs(params["logprobs"], params["prompt_logprobs"]))
    return tuple(made)


def traced(request: Request) -> Request:
    """Return the request whose Steps have traces."""
    return replace(request, features=(*request.features, Traced()))
