"""Request features: wishes of a request beyond sampling, one file each.

    guidance.py      constraints (structured output), and logits processors
    predictions.py   a text that the answer probably repeats
    logprobs.py      log-probabilities of the answer's tokens, and of the prompt's
    traces.py        the trees of all cycles for display, and raw logits

Each is a `core.requests.RequestFeature` in `Request.features`, and makes a `core.features.RowFeature`. The loop
imports none of them. A feature may be anywhere: `LLM.generate(features=[...])` takes it.
"""

from eyas.features.guidance import Guidance
from eyas.features.logprobs import Logprobs
from eyas.features.plug_feature import traced
from eyas.features.predictions import Predicted
from eyas.features.traces import RawLogits, Trace, Traced

__all__ = ["Guidance", "Logprobs", "Predicted", "RawLogits", "Trace", "Traced", "traced"]
