"""The records of the engine's interface: a Request goes in, Steps come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyas.core.features import PromptLogits, RowFeature
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.errors import EyasError, InputError

__all__ = ["DecisionLabel", "Request", "RequestFeature", "Step", "check_request", "check_steps"]


class DecisionLabel(Protocol):
    """An adaptive drafter's decision about one cycle, as far as statistics need it."""

    def label(self, row: int) -> str:
        """Return the name under which statistics count the row's draft, such as "plain" or "16/5/4"."""
        ...


class RequestFeature:
    """A wish of one request. Frozen: several rows may share it, unless it says otherwise."""

    has_scores: bool = False  # `RowFeature.has_scores` of what it opens; at most one feature of a request has scores

    @property
    def runs_per_node(self) -> tuple[str, ...]:
        """Names of the parts that run once for each node of a tree, which is slow."""
        return ()

    def check(self, request: Request, vocab: int) -> None:
        """Raise InputError if it cannot be served.

        Args:
            vocab: size of the target's vocabulary.
        """

    def prompt_logits(self, prompt: Sequence[int]) -> PromptLogits | None:
        """Return the reader of the prompt's logits, or None. With a reader, no prefix is reused."""
        return None

    def open(self, request: Request, target: Target) -> RowFeature:
        """Return the state of this feature for the row of a request whose prompt is read."""
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    """A prompt with its generation parameters."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()  # ids that the target does not have, such as -1, end nothing
    # called with every new token in order; True: the text ends with this token
    stop: Callable[[int], bool] | None = None
    min_tokens: int = 0  # no token of `eos` is emitted before this many others
    # "auto": as drafter and policy decide; "off": no drafts; n: at most n draft tokens are verified per cycle
    drafting: str | int = "auto"
    features: tuple[RequestFeature, ...] = ()  # what it asks for beyond that; see `core.features`
    media: Mapping[str, Any] | None = field(default=None, compare=False)
    """Further inputs of the model's forward for the prompt, such as pixel_values, each for one row.
    Such a prompt is prefilled in one forward, and never shares keys with another prompt."""
    adapter: str | None = None
    """The LoRA adapter that answers, "" for none. A Decoder refuses requests for another adapter
    than its target's. None: whatever the target uses."""
    stops_after: Callable[[Sequence[int]], bool] | None = None
    """Whether `stop` would end the text with the last of these tokens, which follow the emitted ones;
    changes nothing. None: that is not known beforehand, and features may be shown text behind it."""

    @property
    def draft_limit(self) -> int | None:
        """Most acceptable nodes below the root; None: no limit."""
        return None if self.drafting == "auto" else 0 if self.drafting == "off" else int(self.drafting)


@dataclass(frozen=True)
class Step:
    """The result of one cycle, or of the prefill, for one row."""

    request_id: int  # the number that `Decoder.add` returned
    tokens: tuple[int, ...]  # emitted tokens, cut at stop and length; of an "error", those before it
    finish: str | None  # "stop" | "length" | "error" in the last step of the request
    path: tuple[int, ...] = ()  # accepted nodes, root first, before the cut at stop and length; () for a prompt
    draft: Draft | None = None  # the cycle's trees of all rows; this row's is number `row`
    row: int = 0
    # wall time of the cycle (all rows), or for a prefill, since the reading of the prompt began
    seconds: float = 0.0
    # seconds of each stage ("draft", "target", "verify", "commit") on the host's clock; for a
    # prefill: "prompt", the time spent on this prompt, without other prompts and the cycles between
    # its chunks
    stage_seconds: dict[str, float] = field(default_factory=dict)
    ended_at: float = 0.0  # `time.perf_counter` seconds
    decision: DecisionLabel | None = None  # an adaptive drafter's decision about this cycle
    error: EyasError | None = None  # with finish "error": why this request failed; other requests continue
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the request's features report, by their names for it
    cached_tokens: int = 0  # in the prefill step: prompt tokens whose keys and values were there already

    @property
    def prefill(self) -> bool:
        """Whether this is the step of the prompt; it holds the first token unless `finish` is "error"."""
        return not self.path

    @property
    def accepted(self) -> int:
        """The number of emitted tokens that are accepted draft tokens."""
        return min(len(self.tokens), max(0, len(self.path) - 1))

    @property
    def drafted_by(self) -> str:
        """The label of the decision, such as "plain" or "16/5/4"; "fixed" (the size that the
        drafter's options give) if there is no decision."""
        return "fixed" if self.decision is None else self.decision.label(self.row)


def check_request(request: Request, vocab: int) -> None:
    """Raise InputError if a request could not be served at any length; `vocab`: size of the target's vocabulary."""
    if not request.prompt:
        raise InputError("the prompt is empty: give at least one token")
    biased = (token for token, _ in request.sampling.logit_bias)
    for name, tokens in (("token id", request.prompt), ("logit_bias: token id", biased)):
        for token in tokens:
            if not 0 <= token < vocab:
                raise InputError(f"{name} {token} is outside the target's vocabulary of {vocab} (0..{vocab - 1})")
    if request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be 1 or more, got {request.max_new_tokens}")
    if not 0 <= request.min_tokens <= request.max_new_tokens:
        raise InputError(
            f"min_tokens must be from 0 to max_new_tokens ({request.max_new_tokens}), got {request.min_tokens}"
        )
    if len(scoring := [type(f).__name__ for f in request.features if f.has_scores]) > 1:
        raise InputError(f"{' and '.join(scoring)} both compute the distribution: ask for one of them")
    for feature in request.features:
        feature.check(request, vocab)


def check_steps(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps; raises the error of a request that has failed."""
    for step in steps:
        if step.error is not None:
            raise step.error
    return steps
