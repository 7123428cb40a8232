"""The logits processors and samplings that a request may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eyas.arguments import plain_number
from eyas.core.sampling import Processor, Sampling
from eyas.errors import InputError

__all__ = ["check_processor", "sampling_of"]

# Processors of transformers with a memory: in a tree they would see tokens that are never emitted.
STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }
)


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """Return the Sampling among the keywords of `generate`; OptionError for impossible values."""
    return Sampling(**{f.name: plain_number(params[f.name]) for f in fields(Sampling)})


def check_processor(processor: Processor) -> Processor:
    """Return the processor; InputError for one that cannot be asked about every node of a tree."""
    name = type(processor).__name__
    if STATEFUL & {kind.__name__ for kind in type(processor).__mro__}:
        raise InputError(
            f"{name} keeps a memory, and in a tree it would see tokens that are never emitted: decode without it"
        )
    if isinstance(processor, type) or not callable(processor):
        raise InputError(f"logits_processor must hold callables (ids, scores) -> scores, got {processor!r}")
    return processor
