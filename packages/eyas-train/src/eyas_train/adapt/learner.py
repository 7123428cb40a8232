"""The learner: steps of training on texts that were just decoded, within a budget of time, and with a guard.

    request ends -> its tokens and features (`recording`)
    rest()       -> a step on them with the method's own training loss, if the budget pays for it
    every few    -> the new weights draft by turns with the old ones : kept, or gone back
    steps

A step changes a copy of the net (`self.student`), which never drafts. The weights that draft change between two
cycles only, and as a whole (`swap.put`).

**Budget.** Seconds of steps, of the copies that follow, and of the comparison of texts, over the seconds of the
cycles in which the method drafted. A step begins only if the longest of the last ones would still fit.

**Guard.** New weights draft in alternation with the last good weights, and still newer weights replace them, so
that no time is lost. So a comparison is between learning and not learning. Where new weights draft worse, the
old ones come back, the optimiser forgets, and the learning rate halves. Every `GIVEN_EVERY`-th comparison is
with the head that was given instead of the last good one, so that small losses, none of which shows by itself,
do not add up.

    block     0    1    2    3    4    5   ...     BLOCK cycles each
    weights   old  new  new  old  old  new         ABBA
    pair      [  0   ] [  1   ] [  2   ]           its difference: mean tokens per cycle, new minus old

The two blocks of a pair follow each other. So they draft for the same texts, with trees of the same size, and a
change of the traffic moves both. The differences of pairs are nearly independent, so the error of their mean is
their standard deviation / sqrt(pairs), and no model of the text is needed.

The new weights are worse if the mean difference is below -LIMIT standard errors. That is looked at after each pair
from MIN_PAIRS on: with equal weights a false alarm comes in about 3 of 100 trials (tests/adapt/test_guard.py counts
them). They are kept as soon as they are better by the same rule, and after MAX_PAIRS without an alarm.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from eyas import checkpoints
from eyas.core.drafter import Drafter
from eyas.core.target import ModelRunner
from eyas.drafters.tools import EagleMethod
from eyas.errors import InputError, OptionError
from eyas.files import write_text
from eyas_train.adapt.recording import Recorded, RecordingSession, Texts, batch_of
from eyas_train.adapt.swap import check_same, head_of, kept_names, prepare, put

BLOCK = 8  # cycles
MIN_PAIRS, MAX_PAIRS = 6, 16
LIMIT = 3.0  # standard errors
OLD, NEW = 0, 1
ORDER = (OLD, NEW, NEW, OLD)
GIVEN_EVERY = 4  # trials, of which one compares with the head that was given
WARM_UP = 8  # steps over which the learning rate rises
CLIP = 0.5  # largest norm of a gradient, as in training
RECORD = "adapt.json"  # in the folder of a head that was saved here


@dataclass(frozen=True)
class Settings:
    """How a head learns while it drafts.

    Attributes:
        share: seconds of learning per second of drafting, at most.
        lr: the learning rate of AdamW, before the guard halves it.
        batch_tokens: about how many tokens a step reads.
        steps: steps after which the new weights draft. max_tokens, max_mib, max_uses: see `Texts`.
        first_seconds: assumed seconds of the first step. Later steps are timed.
    """

    share: float = 0.03
    lr: float = 1e-4
    batch_tokens: int = 256
    steps: int = 4
    max_tokens: int = 16_384
    max_mib: int = 256
    max_uses: int = 4
    first_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise OptionError(f"adapt: {name} must be above 0, got {value}")


class Learner:
    """Lets the head of a drafter learn.

    Attributes:
        drafter: it drafts in the given drafter's place. served, spent: seconds of drafting, and of learning.
        good: the head that is saved: the last one that a comparison did not find worse.

    Args:
        drafter: with EAGLE-3's head, an MTP module, or another head of that kind.
        now: the clock, in seconds.

    Raises:
        OptionError: a drafter that cannot learn.
    """

    def __init__(
        self, drafter: Drafter, settings: Settings | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        method = head_of(drafter)
        if method is not drafter:
            raise OptionError("a head learns by itself: leave the second method out")
        if method.samples_children or not method.trainable:
            raise OptionError("a head learns while it serves where its trees are deterministic: use eagle3 or mtp")
        self.settings, self.method, self._now = settings or Settings(), method, now
        self.texts = Texts(self.settings.max_tokens, self.settings.max_mib * 2**20, self.settings.max_uses)
        self.drafter = Recorded(method, self)
        self.served = self.spent = 0.0
        self.steps = self.kept = self.undone = 0
        self._costs = deque([self.settings.first_seconds], maxlen=8)
        self.sessions: weakref.WeakSet[RecordingSession] = (
            weakref.WeakSet()
        )  # their texts are wanted when nothing is in flight
        self._began = 0.0
        self._start(copy(method))

    def _start(self, head: EagleMethod) -> None:
        self.given = self.good = self._drafting = head
        self.new: EagleMethod | None = None
        self.trial: PairedTrial | None = None
        self.trials = 0
        self.lr = self.settings.lr
        self._study(head)

    def _study(self, head: EagleMethod) -> None:
        with torch.inference_mode(False):
            net = deepcopy(head.net).float().train().requires_grad_()
        self.student = _with_net(head, net)
        self.student.target = head.target.run_with(ModelRunner())  # kernels have no gradients
        self._parameters = list(net.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._warm, self._since = 0, 0

    # --- calls of the recorder

    def begin_cycle(self) -> None:
        """Choose the weights of the cycle that begins."""
        self._began = self._now()
        if self.trial is not None and self.new is not None:
            self._draft_by(self.new if self.trial.arm == NEW else self._old)

    def end_cycle(self, lengths: Sequence[int]) -> None:
        """Count the tokens that each row has got in the cycle that ends."""
        ended = self._now()
        self.served += ended - self._began
        if self.trial is None or not lengths:
            return
        self.trial.count(lengths)
        if self.trial.is_worse:
            self._go_back()
        elif self.trial.is_over:
            self._keep()
        self.spent += self._now() - ended

    @property
    def _old(self) -> EagleMethod:
        """The head that the new one is compared with."""
        return self.given if self.trials % GIVEN_EVERY == 0 else self.good

    def _draft_by(self, head: EagleMethod) -> None:
        if self._drafting is not head:
            put(self.method, head)
            self._drafting = head

    def _keep(self) -> None:
        assert self.new is not None
        self.good, self.new, self.trial = self.new, None, None
        self.kept += 1
        self._draft_by(self.good)

    def _go_back(self) -> None:
        self.good, self.new, self.trial = self._old, None, None
        self.undone += 1
        self.lr /= 2
        self._draft_by(self.good)
        self._study(self.good)

    # --- steps

    def rest(self, idle: bool = True) -> bool:
        """Make one step, if the budget pays for it and there is something to learn. Returns whether it was made.

        Called between requests, never within a cycle.

        Args:
            idle: no request is in flight, so all texts that are kept are complete.
        """
        if idle:
            self._take_all()
        if not self.texts.texts or self.spent + max(self._costs) > self.settings.share * self.served:
            return False
        began = self._now()
        self._step()
        if self._since >= self.settings.steps:
            self._try()
        seconds = self._now() - began
        self.spent += seconds
        if self.steps == 1:
            self._costs.clear()
        self._costs.append(seconds)
        return True

    def _take_all(self) -> None:
        for session in list(self.sessions):
            session.give_all()

    def _step(self) -> None:
        """Make one step of AdamW. Nothing changes if the loss or its gradient is not finite."""
        self.steps += 1
        self._since += 1
        with torch.inference_mode(False), torch.enable_grad():
            batch = batch_of(self.texts.take(self.settings.batch_tokens), self.method.target.device)
            loss = self.student.loss(batch, torch.Generator().manual_seed(self.steps))
            # the caller may be training the target, so its weights must get no gradient from here
            gradients = torch.autograd.grad(loss.total / loss.count.clamp(min=1), self._parameters, allow_unused=True)
        self._update(gradients)

    @torch.inference_mode(False)
    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        if bool(norm.isfinite()):
            self._warm += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, self._warm / WARM_UP)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _try(self) -> None:
        """Let the new weights draft, in alternation with the earlier ones. A comparison that runs goes on with it."""
        with torch.inference_mode(False), torch.no_grad():
            net = deepcopy(self.good.net)
            net.load_state_dict(self.student.net.state_dict())  # in the dtype of the head
        self.new, self._since = _with_net(self.good, net), 0
        prepare(self.new)
        if self.trial is None:
            self.trial = PairedTrial()
            self.trials += 1

    # --- what a user asks for

    def replace(self, head: EagleMethod) -> None:
        """Let another head draft, and learn from it on. Call it between cycles."""
        check_same(self.method, head, "the new head")
        put(self.method, head)
        self._start(copy(head))

    def forget(self) -> None:
        """Forget all texts: for a target whose weights have changed."""
        self._take_all()
        self.texts.texts = []

    def save(self, folder: str | Path, given: str | None = None) -> None:
        """Write the last good head into a folder of its own.

        Args:
            given: the folder of the head that was given, which is never written into.

        Raises:
            InputError: the folder holds another head, or cannot be written.
        """
        path = Path(folder).expanduser()
        is_given = given is not None and path.exists() and Path(given).exists() and path.samefile(given)
        if is_given or ((path / "config.json").exists() and not (path / RECORD).exists()):
            raise InputError(f"{folder} holds another head, which is not overwritten: choose another folder")
        checkpoints.save(self.good.weights(), path)
        write_text(path / RECORD, json.dumps(self.figures(), indent=2) + "\n")

    def figures(self) -> dict[str, Any]:
        """Return counts and times of the learning."""
        return {
            "steps": self.steps,
            "kept": self.kept,
            "undone": self.undone,
            "lr": self.lr,
            "seconds": round(self.spent, 3),
            "seconds_of_drafting": round(self.served, 3),
            "texts": len(self.texts.texts),
            "tokens": self.texts.tokens,
        }


def _with_net(drafter: EagleMethod, net: nn.Module) -> EagleMethod:
    """Return the same method with another net, and without the copies that were made of the old one."""
    other = copy(drafter)
    for name in kept_names(drafter):
        vars(other).pop(name, None)
    other.net = net
    return other


class PairedTrial:
    """One comparison of old and new weights."""

    def __init__(self) -> None:
        self.cycles = 0
        self.blocks: list[float] = []  # the mean length of each complete block
        self.differences: list[float] = []
        self._sum = 0.0

    @property
    def arm(self) -> int:
        """Return which weights draft in the next cycle: OLD or NEW."""
        return ORDER[self.cycles // BLOCK % len(ORDER)]

    def count(self, lengths: Sequence[int]) -> None:
        """Count a cycle, with the tokens that each row has got."""
        self._sum += sum(lengths) / len(lengths)
        self.cycles += 1
        if self.cycles % BLOCK:
            return
        self.blocks.append(self._sum / BLOCK)
        self._sum = 0.0
        if len(self.blocks) % 2 == 0:
            first, second = self.blocks[-2:]
            was_new_first = ORDER[(len(self.blocks) - 2) % len(ORDER)] == NEW
            self.differences.append(first - second if was_new_first else second - first)

    @property
    def mean(self) -> float:
        """The mean difference; 0 without pairs."""
        return fmean(self.differences) if self.differences else 0.0

    @property
    def limit(self) -> float:
        """The size of a mean difference that says something; infinite where nothing is known."""
        n = len(self.differences)
        return LIMIT * stdev(self.differences) / math.sqrt(n) if n >= MIN_PAIRS else math.inf

    @property
    def is_worse(self) -> bool:
        """Whether the new head accepts significantly less."""
        return self.mean < -self.limit

    @property
    def is_over(self) -> bool:
        """Whether the new weights have drafted long enough: they are better, or there was no alarm."""
        return self.mean > self.limit or len(self.differences) >= MAX_PAIRS
