"""The search for the setting of a head that fits its target best.

All variants are measured on a few answers, the best ones on all. A setting counts as better if its drafts are accepted
clearly more often, by answers compared in pairs. After a better setting the search begins again from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from eyas import drafters
from eyas.adaptive.memory import MIN_SHARE
from eyas.checkpoints import Weights
from eyas.checkpoints.tools import Published, interpret, read_published
from eyas.core.target import Target
from eyas.errors import CheckpointError, EyasError, InputError
from eyas.files import parse_json
from eyas.targets.fingerprints import has_fingerprint
from eyas_lab.examine.acceptance import DEPTH, AsGiven, Inputs, KeptAnswer, cycles, run_lengths, which_are_right
from eyas_lab.examine.published import Edit, edit_for, readings
from eyas_lab.examine.variants import Variant, variants
from eyas_lab.metrics import n_alpha

__all__ = ["Examination", "Figures", "Step", "examine"]

LOOKS, LOOK_TOKENS, LOOK_DEPTH = 6, 24, 2  # answers of the first look, their tokens, draft tokens of a chain
CONFIRMED = 3  # variants that are then measured on all answers
LEAST_GAIN, LEAST_SHARE, LEAST_T = 0.05, 0.08, 3.0  # tokens, share of the tokens before, standard errors
LOW = 0.2  # of the first drafts: fewer are accepted of no head that fits
ROUNDS = 3

OnVariant = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Figures:
    """The drafts of a head that the target accepts, in chains of `DEPTH` tokens."""

    tokens: float  # accepted draft tokens from a place, the mean over all places of all answers
    tau: float  # tokens a forward pass emits
    alphas: dict[str, float]  # acceptance by depth: 0-alpha, 1-alpha, ...

    @classmethod
    def of(cls, right: Sequence[Tensor]) -> Figures:
        """Return the figures of drafts, from which places were right in each answer."""
        every = [cycle for right_MK in right for cycle in cycles(right_MK)]
        tau = sum(cycle.emitted for cycle in every) / len(every) if every else 0.0
        return cls(float(run_lengths(torch.cat(list(right))).mean()), tau, n_alpha(every, DEPTH))


@dataclass(frozen=True)
class Step:
    """A setting that fits better than the one before it."""

    name: str
    figures: Figures
    says: str  # the lines of the published file that are wrong; "" if no field says the setting
    write: str  # the lines to write instead, or the change of the tensors


@dataclass(frozen=True)
class Examination:
    """The findings about a head."""

    method: str
    published: Figures | None  # of the unchanged head; None if its reader refuses the file
    refusal: str  # why it does
    steps: tuple[Step, ...]
    tried: tuple[
        tuple[str, float], ...
    ]  # variants of the published head, and accepted tokens on a few answers; best first
    record: dict[str, float] | None  # acceptance by depth in its training
    doubts: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Figures | None:
        """The figures with all changes."""
        return self.steps[-1].figures if self.steps else self.published

    @property
    def verdict(self) -> str:
        """Return "fits", "fits with changes" or "does not fit"."""
        first = 0.0 if self.best is None else self.best.alphas.get("0-alpha", 0.0)
        if first < (LOW if self.record is None else MIN_SHARE * self.record["0-alpha"]):
            return "does not fit"
        return "fits with changes" if self.steps else "fits"


class Candidate:
    """A head as a variant has it, measured on answers."""

    def __init__(self, variant: Variant, target: Target) -> None:
        """Raise EyasError if the target cannot have such a head."""
        method = drafters.find(variant.weights.method)
        with no_init_weights():
            self.drafter: Any = method.load(variant.weights, target)
        self.variant = variant

    def right(self, answers: Sequence[KeptAnswer], depth: int = DEPTH) -> list[Tensor]:
        """Return which drafted tokens of each answer are right, to a depth."""
        return [which_are_right(self.drafter, answer, depth, self.variant.inputs) for answer in answers]


def examine(
    head: str,
    target: Target,
    answers: Sequence[KeptAnswer],
    on_variant: OnVariant = lambda done, total, name: None,
    inputs: Inputs = AsGiven,
) -> Examination:
    """Return the findings about a head.

    Args:
        target: run by its own forward.
        on_variant: called before each variant is measured.
        inputs: of an engine that gives heads other inputs than eyas does.

    Raises:
        CheckpointError: no head is there, or it is refused for a reason that no small change removes.
        InputError: the answers have too few tokens.
    """
    answers = [answer for answer in answers if answer.places]
    if len(answers) < 2:
        raise InputError("fewer than two prompts have an answer of two tokens or more: give other --prompts")
    published = read_published(head)
    search = _Search(target, answers, head, published, inputs, on_variant)
    refusal, base = "", None
    try:
        start = Candidate(Variant("as published", interpret(published, head), inputs), target)
        base = start.right(answers)
    except CheckpointError as error:
        refusal = str(error)
        start = search.first_reading(error)
    search.climb(start, start.right(answers) if base is None else base)
    weights = start.variant.weights
    figures = None if base is None else Figures.of(base)
    doubts = tuple(_doubts(weights, start.drafter, target, answers))
    tried = tuple(sorted(search.tried, key=lambda one: -one[1]))
    return Examination(weights.method, figures, refusal, tuple(search.steps), tried, _record(head), doubts)


@dataclass
class _Search:
    target: Target
    answers: Sequence[KeptAnswer]
    source: str
    published: Published | None  # with the changes so far; None after a change that no field says
    inputs: Inputs
    on_variant: OnVariant
    steps: list[Step] = field(default_factory=list)
    tried: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        short = [answer.shortened(LOOK_TOKENS) for answer in self.answers]
        self.looks = sorted(short, key=lambda a: -a.places / len(a.ids_N))[:LOOKS]  # many tokens for their length

    def first_reading(self, error: CheckpointError) -> Candidate:
        """Return the best of the readings that small changes of a refused file allow. Raise `error` if there are none."""
        assert self.published is not None
        found = list[tuple[float, Edit, Candidate]]()
        for edit, weights in readings(self.published, self.source):
            if candidate := self._candidate(Variant(edit.write, weights, self.inputs)):
                found.append((self._look(candidate), edit, candidate))
        if not found:
            raise error
        _, edit, best = max(found, key=lambda one: one[0])
        self.steps.append(Step(edit.write, Figures.of(best.right(self.answers)), edit.says, edit.write))
        self.published = edit.published
        return best

    def climb(self, now: Candidate, right: list[Tensor]) -> None:
        """Take the best variant as long as one is clearly better."""
        for number in range(ROUNDS):
            better = self._better(now, right, keep=not number)
            if better is None:
                return
            now, right = better
            variant, edit = now.variant, None
            if self.published is not None and variant.inputs == self.inputs:
                edit = edit_for(self.published, self.source, variant.weights)
            self.published = None if edit is None else edit.published
            says, write = (edit.says, edit.write) if edit else ("", variant.by_hand)
            self.steps.append(Step(variant.name, Figures.of(right), says, write))

    def _better(self, now: Candidate, right: list[Tensor], keep: bool) -> tuple[Candidate, list[Tensor]] | None:
        layers, inputs = tuple(now.drafter.feature_layers), now.variant.inputs
        every = list(variants(now.variant.weights, layers, self.target, inputs))
        looks = list[tuple[float, Candidate]]()
        for done, variant in enumerate(every):
            self.on_variant(done, len(every), variant.name)
            if candidate := self._candidate(variant):
                looks.append((self._look(candidate), candidate))
        if keep:
            self.tried = [(candidate.variant.name, tokens) for tokens, candidate in looks]
        least = self._look(now) + LEAST_GAIN / 2
        promising = [one for one in looks if one[0] >= least]
        best = None
        for _, candidate in sorted(promising, key=lambda one: -one[0])[:CONFIRMED]:
            other = candidate.right(self.answers)
            gain, error = _gain(right, other)
            least = max(LEAST_GAIN, LEAST_SHARE * _tokens(right), LEAST_T * error)
            if gain >= least and (best is None or gain > best[0]):
                best = gain, candidate, other
        return best and best[1:]

    def _candidate(self, variant: Variant) -> Candidate | None:
        try:
            return Candidate(variant, self.target)
        except EyasError:
            return None

    def _look(self, candidate: Candidate) -> float:
        return _tokens(candidate.right(self.looks, LOOK_DEPTH))


def _tokens(right: Sequence[Tensor]) -> float:
    return float(run_lengths(torch.cat(list(right))).mean())


def _gain(right: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """Return how many more tokens are accepted from a place, and the standard error, with answers as the units."""
    sums = torch.stack([(run_lengths(b) - run_lengths(a)).sum() for a, b in zip(right, other, strict=True)])
    places = torch.tensor([float(len(a)) for a in right])
    gain = float(sums.sum() / places.sum())
    spread = (sums - gain * places).square().sum().sqrt() / places.sum()
    return gain, float(spread) * math.sqrt(len(right) / (len(right) - 1))


def _record(head: str) -> dict[str, float] | None:
    """Return the acceptance by depth that the head's training measured, from the training.json in its folder."""
    try:
        heldout = parse_json((Path(head).expanduser() / "training.json").read_bytes())["heldout"]
        found = {name: float(value) for name, value in heldout.items() if name.endswith("-alpha")}
        return found if "0-alpha" in found else None
    except (OSError, InputError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _doubts(weights: Weights, drafter: Any, target: Target, answers: Sequence[KeptAnswer]) -> list[str]:
    """Return the facts that no variant can change."""
    found = list[str]()
    trained = (weights.config.get("eyas") or {}).get("target_fingerprint")
    if isinstance(trained, str) and not has_fingerprint(target, trained):
        found.append("the head's record names other weights than the target's: it was trained for another model")
    ids_v = drafter.draft_ids_v
    if ids_v is not None:
        new = torch.cat([answer.ids_N[answer.first :] for answer in answers])
        share = float(torch.isin(new, ids_v).float().mean())
        found.append(f"{share:.0%} of the answers' tokens are among the head's {len(ids_v):,} draft tokens")
    return found
