"""Requests with features, written as keywords."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eyas.core.engine import Request
from eyas.core.features import Constraint
from eyas.core.requests import RequestFeature
from eyas.core.sampling import Processor
from eyas.features import Guidance, Logprobs, Predicted, RawLogits, Traced

WISHES = ("processors", "constraint", "prediction", "trace", "logprobs", "prompt_logprobs")
KEPT: Any = object()  # the wish stays as it is in the request


def wished(*args: Any, **fields: Any) -> Request:
    """A Request; `fields` may hold wishes, see `wish`."""
    wishes = {name: fields.pop(name) for name in WISHES if name in fields}
    return wish(Request(*args, **fields), **wishes)


def wish(
    request: Request, *, processors: Sequence[Processor] = KEPT, constraint: Constraint | None = KEPT,
    prediction: tuple[int, ...] = KEPT, trace: bool = KEPT, logprobs: int | None = KEPT,
    prompt_logprobs: int | None = KEPT, **fields: Any,
) -> Request:  # fmt: skip
    """The request with other wishes, and other fields."""
    old_trace = any(isinstance(feature, Traced) for feature in request.features)
    processors = processors_of(request) if processors is KEPT else tuple(processors)
    constraint = constraint_of(request) if constraint is KEPT else constraint
    prediction = prediction_of(request) if prediction is KEPT else prediction
    features: list[RequestFeature] = [f for f in request.features if isinstance(f, RawLogits)]
    if processors or constraint is not None:
        features.append(Guidance(tuple(processors), constraint))
    if prediction:
        features.append(Predicted(prediction))
    old = logprobs_of(request)
    asked = (old.answer if logprobs is KEPT else logprobs, old.prompt if prompt_logprobs is KEPT else prompt_logprobs)
    if asked != (None, None):
        features.append(Logprobs(*asked))
    if old_trace if trace is KEPT else trace:
        features.append(Traced())
    return replace(request, features=tuple(features), **fields)


def constraint_of(request: Request) -> Constraint | None:
    """The constraint of a request."""
    return next((f.constraint for f in request.features if isinstance(f, Guidance)), None)


def prediction_of(request: Request) -> tuple[int, ...]:
    """The predicted text of a request; empty without one."""
    return next((f.tokens for f in request.features if isinstance(f, Predicted)), ())


def processors_of(request: Request) -> tuple[Processor, ...]:
    """The logits processors of a request."""
    return tuple(p for feature in request.features if isinstance(feature, Guidance) for p in feature.processors)


def logprobs_of(request: Request) -> Logprobs:
    """Which log-probabilities a request asks for."""
    return next((feature for feature in request.features if isinstance(feature, Logprobs)), Logprobs())
