"""A multi-armed bandit for rates: which way of decoding makes most tokens a second, found out at a
bounded cost. docs/design/controller.md names the papers, and compares it with other algorithms.

An arm is a way to decode a cycle (plainly, with the method's drafts ...). Its true yield m, in tokens a cycle and row,
drifts:  m[t + 1] = m[t] + Normal(0, drift)  and  tokens of a cycle = m + Normal(0, noise).  So the estimate of m is a
Kalman filter. The seconds of a cycle are a median by kind of cycle.

Among the arms that can be afforded it plays the arm with the largest upper confidence bound, (mean + CONFIDENCE
* deviation) / seconds; `best` is the arm with the highest mean rate. Playing another one is a trial. The first
one waits until the share MAX_TRIAL_SHARE of the tokens so far makes up for its possible loss. A trial ends when
another arm has the largest upper bound, or when it has lost MAX_TRIAL_LOSS tokens to `best`. A trial that lost
x tokens is repeated only after x / MAX_TRIAL_SHARE tokens; each failure in a row doubles that, BACKOFF times at
most.

Arms are played in blocks of cycles, because a change costs time: a draft model first reads the tokens that it
missed. This module knows no clock, no tree and no method.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

__all__ = ["Arm", "Bandit", "RunningMedian"]

CONFIDENCE = 1.5  # standard deviations of an arm's mean that an upper bound adds to it
MAX_TRIAL_SHARE = 0.01  # the share of all tokens that the trials of one arm may lose
MAX_TRIAL_LOSS = 2.0  # tokens a row that one trial may lose
BACKOFF = 2  # doublings of the waiting time after trials that failed in a row
MEMORY = 48  # cycles over which an arm's noise and its mix of cycle kinds are averaged
MIN_NOISE = 1e-9  # the smallest variance of a cycle's tokens that is believed
# variance of an arm that was never played, or long ago, as a share of `break_even` squared
MAX_VARIANCE = 1.0
MAX_CYCLE_TIME_IN_BASELINE_CYCLES = 16  # a cycle that took longer is charged this much: the machine held it up


class RunningMedian:
    """The usual seconds of each kind of cycle: the lower median of the last seven."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = {}

    def add(self, kind: Hashable, seconds: float) -> None:
        """Note the seconds of a cycle of this kind."""
        self._seconds.setdefault(kind, deque(maxlen=7)).append(seconds)

    def __getitem__(self, kind: Hashable) -> float:
        return median_low(self._seconds[kind])

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._seconds


@dataclass
class Arm:
    """The estimated yield and cost of one way to decode. Tokens are counted for one cycle and row."""

    mean: float  # expected tokens
    variance: float  # variance of `mean`
    noise: float  # variance of a single cycle's tokens
    drift: float  # growth of `variance` in every cycle, as a share of `break_even` squared
    block: int = 4  # cycles until the bandit may choose another arm
    prior_seconds: float | None = None  # expected seconds of a cycle, until one is measured
    other_seconds: float = 0.0  # further seconds for each cycle of this arm, outside of the cycle
    break_even: float = 1.0  # tokens that make this arm as fast as the best one; at least 1
    kinds: dict[Hashable, float] = field(default_factory=dict)  # decayed counts of the cycles' kinds
    failures: int = 0  # trials in a row that did not pay
    debt: float = 0.0  # tokens that are to be saved before the next trial
    trial_cycles: int = 0
    trial_tokens: float = 0.0  # tokens that the best arm would have made in the time of the trial

    @property
    def upper(self) -> float:
        """The upper end of the estimate: tokens a cycle that the arm may reach."""
        return self.mean + CONFIDENCE * self.variance**0.5  # type: ignore[no-any-return]

    @property
    def trial_loss(self) -> float:
        """Tokens that the trial has lost: by the arm's mean, so that bad luck is not counted twice."""
        return self.trial_tokens - self.trial_cycles * self.mean

    def drift_on(self) -> None:
        """Widen the estimate by one cycle's drift: an arm that is not played becomes less certain."""
        self.variance = min(self.variance + self.drift * self.break_even**2, MAX_VARIANCE * self.break_even**2)

    def update(self, tokens: float, kind: Hashable) -> None:
        """Learn from one cycle's tokens by a step of the Kalman filter."""
        error = tokens - self.mean
        self.noise = max(MIN_NOISE, self.noise + (error * error - self.noise) / MEMORY)
        gain = self.variance / (self.variance + self.noise)
        self.mean += gain * error
        self.variance *= 1 - gain
        self.kinds = {each: count * (1 - 1 / MEMORY) for each, count in self.kinds.items()}
        self.kinds[kind] = self.kinds.get(kind, 0.0) + 1

    def replace(self, mean: float, variance: float, seconds: float) -> None:
        """Take a new estimate: tokens a cycle, their variance, and the seconds expected of a cycle."""
        self.mean, self.variance, self.prior_seconds = mean, variance, seconds
        self.kinds = {}

    def seconds(self, medians: RunningMedian) -> float | None:
        """Return the expected seconds of a cycle; None if nothing is known."""
        if not self.kinds:
            return self.prior_seconds
        total = sum(self.kinds.values())
        return sum(count * medians[kind] for kind, count in self.kinds.items()) / total

    def end_trial(self, failed: bool) -> None:
        """End a trial. After one that failed the next trial waits, each time longer."""
        if failed:
            self.debt = self.trial_loss * 2 ** min(self.failures, BACKOFF)
        self.failures = self.failures + 1 if failed else 0
        self.trial_cycles, self.trial_tokens = 0, 0.0


class Bandit:
    """Chooses among arms. The first one is the baseline: always available, and played first.

    Attributes:
        playing: the name of the arm that the next cycle belongs to.
        best: the name of the arm with the highest mean rate.
        switched: whether the next cycle is the first one of `playing` after another arm.
    """

    def __init__(self, arms: Mapping[str, Arm]) -> None:
        self.arms = dict(arms)
        self.medians = RunningMedian()
        self.baseline = self.playing = self.best = next(iter(self.arms))
        self.switched = True
        self._left = self.arms[self.playing].block

    def seconds(self, name: str) -> float | None:
        """Return the expected seconds of an arm's cycle, or of a baseline cycle where nothing
        else is known."""
        seconds = self.arms[name].seconds(self.medians)
        if seconds is None:
            seconds = self.arms[self.baseline].seconds(self.medians)
        return None if seconds is None else seconds + self.arms[name].other_seconds

    def rate(self, name: str) -> float:
        """Return tokens per second of an arm; 0 while its seconds are unknown."""
        seconds = self.seconds(name)
        return self.arms[name].mean / seconds if seconds else 0.0

    def observe(self, name: str, kind: Hashable, tokens: float, seconds: float) -> None:
        """Learn from one cycle of an arm: its tokens a row and its seconds.

        The first cycle of a kind updates no estimate, because it may include one-off work
        (recording, compiling); its time is charged.
        """
        is_new = kind not in self.medians
        for arm in self.arms.values():
            arm.drift_on()
        self.medians.add(kind, seconds)
        if not is_new:
            self.arms[name].update(tokens, kind)
        # The first cycle after a switch is charged its own time, not the median, because the
        # session catches up in it.
        self._account(name, seconds if self.switched else self.medians[kind])
        self.switched = False
        self._left -= 1

    def _account(self, name: str, seconds: float) -> None:
        """Charge the cycle's time, in tokens that the best arm would have made in it."""
        baseline = self.arms[self.baseline].seconds(self.medians)
        if baseline is None:
            return
        charged = min(seconds, MAX_CYCLE_TIME_IN_BASELINE_CYCLES * baseline) + self.arms[name].other_seconds
        tokens = charged * self.rate(self.best)
        for each in self.arms.values():
            each.debt -= MAX_TRIAL_SHARE * tokens
        if name != self.best:
            self.arms[name].trial_cycles += 1
            self.arms[name].trial_tokens += tokens

    @property
    def may_choose(self) -> bool:
        """Whether the block of cycles is over and the baseline is known."""
        return self._left <= 0 and bool(self.arms[self.baseline].kinds)

    def choose(self) -> None:
        """Choose the arm of the next cycle: the best one, or a trial of an arm that may be better and can be
        afforded."""
        self.best = max(self.arms, key=self.rate)
        for name, arm in self.arms.items():
            arm.break_even = max(1.0, (self.seconds(name) or 0.0) * self.rate(self.best))
        last = self.arms[self.playing]
        if self.playing == self.best:
            last.end_trial(failed=False)
        chosen = max(filter(self._is_affordable, self.arms), key=self._upper_rate)
        if chosen != self.playing and self.playing != self.best:
            last.end_trial(failed=True)
        self.switched = chosen != self.playing
        self.playing, self._left = chosen, self.arms[chosen].block

    def _upper_rate(self, name: str) -> float:
        seconds = self.seconds(name)
        return self.arms[name].upper / seconds if seconds else 0.0

    def _is_affordable(self, name: str) -> bool:
        arm = self.arms[name]
        if name == self.best:
            return True
        if name == self.playing:
            return arm.trial_loss <= MAX_TRIAL_LOSS
        never_played = not arm.kinds and not arm.failures
        return arm.debt + (arm.block * (arm.break_even - 1) if never_played else 0.0) <= 0
