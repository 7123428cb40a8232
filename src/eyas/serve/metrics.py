"""Counters of the server, in Prometheus' text form, under vLLM's names where it has them, so that its dashboards find
them. A request there is a sequence here: one sample of one prompt.

    draft              a cycle of one sequence in which something was drafted
    draft token        a candidate node of the draft tree, the root excluded
    accepted token     a draft token on the accepted path; position 0 is the first one
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from eyas.core.totals import tau
from eyas.serve.records import CycleFigures, CycleSums, Delta

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DEEPEST = 32  # positions of accepted tokens that are counted apart; deeper ones share the last


@dataclass
class SequenceTimes:
    """When each event of one sequence happened, in seconds of the monotonic clock."""

    prompt_tokens: int
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None  # the first token
    last: float | None = None  # the newest tokens


class Metrics:
    """Counters of the engine. The methods are called by its thread, but for `text` and `seconds_until_free`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentTokens()
        self._label = {"model_name": model_name}
        self._with_labels: dict[tuple[object, ...], Counter] = {}  # what `_with_label` has looked up
        self._sequence_seconds = 1.0  # running mean of a sequence's time in its row

        count, count_by, seconds = self._counter, self._labelled_counter, self._histogram
        self.prompt_tokens = count("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = count("vllm:generation_tokens", "Tokens generated.")
        self.cached_tokens = count("vllm:prefix_cache_hits", "Prompt tokens whose keys and values were used again.")
        self.queried_tokens = count("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.drafts = count("vllm:spec_decode_num_drafts", "Cycles in which something was drafted.")
        self.draft_tokens = count("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self.accepted_tokens = count("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.accepted_by_position = count_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth.", "position"
        )
        self.finished = count_by("vllm:request_success", "Sequences that ended, by reason.", "finished_reason")
        self.rejections = count("eyas:admission_rejections", "Requests refused because the queue was full.")
        self.cycles = count_by("eyas:decision_cycles", "Cycles of sequences by what was drafted.", "decision")
        self.cycle_tokens = count("eyas:cycle_tokens", "Tokens emitted by cycles; over eyas:decision_cycles it is tau.")
        self.first_token_seconds = seconds(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token_seconds = seconds(
            "vllm:inter_token_latency_seconds", "Time between tokens; of a cycle, its mean."
        )
        self.sequence_seconds = seconds("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.queue_seconds = seconds("vllm:request_queue_time_seconds", "Time in the queue.")
        self.prefill_seconds = seconds("vllm:request_prefill_time_seconds", "From the queue to the first token.")
        self.decode_seconds = seconds("vllm:request_decode_time_seconds", "From the first token to the last.")

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ["model_name"], registry=self.registry).labels(**self._label)

    def _labelled_counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(name, help, ["model_name", label], registry=self.registry)

    def _gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        Gauge(name, help, ["model_name"], registry=self.registry).labels(**self._label).set_function(value)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, ["model_name"], registry=self.registry, buckets=SECONDS).labels(**self._label)

    def watch(self, load: Callable[[], tuple[int, int]], rows: int) -> None:
        """Add the gauges of load; `load` returns (sequences in flight, sequences that wait)."""
        self._gauge("vllm:num_requests_running", "Sequences in flight.", lambda: load()[0])
        self._gauge("vllm:num_requests_waiting", "Sequences that wait for a row.", lambda: load()[1])
        self._gauge("vllm:kv_cache_usage_perc", "Share of the rows that are taken, 1 = all.", lambda: load()[0] / rows)

    def text(self) -> bytes:
        """Return all metrics in the text form of Prometheus."""
        return generate_latest(_WithoutTimes(self.registry))

    def seconds_until_free(self, sequences: int, rows: int) -> int:
        """Return about how long a new sequence would wait after `sequences`: whole seconds from 1 to 60."""
        return max(1, min(60, math.ceil(self._sequence_seconds * (sequences - rows + 1) / rows)))

    def admitted(self, times: SequenceTimes) -> None:
        """Count a sequence that got a row, and how long it waited."""
        times.admitted = time.monotonic()
        self.queue_seconds.observe(times.admitted - times.arrived)
        self.prompt_tokens.inc(times.prompt_tokens)
        self.queried_tokens.inc(times.prompt_tokens)

    def stepped(self, news: Sequence[tuple[Delta, SequenceTimes]]) -> None:
        """Count the tokens of one cycle. Counters are raised once for all sequences: each raise costs microseconds."""
        now = time.monotonic()
        self.generated_tokens.inc(sum(len(delta.token_ids) for delta, _ in news))
        if cached := sum(delta.cached_tokens for delta, _ in news):
            self.cached_tokens.inc(cached)
        self._count(CycleSums.from_cycles([cycle for delta, _ in news for cycle in delta.cycles]))
        for delta, times in news:
            self._time(now, len(delta.token_ids), times)
            self.recent.add(now, delta)
            if delta.finish:
                self.ended(times, delta.finish)

    def _count(self, sums: CycleSums) -> None:
        for decision, count in sums.plans.items():
            self._with_label(self.cycles, decision=decision).inc(count)
        if sums.cycles:
            self.cycle_tokens.inc(sums.emitted)
        if sums.drafts:
            self.drafts.inc(sums.drafts)
            self.draft_tokens.inc(sums.drafted)
            self.accepted_tokens.inc(sums.accepted)
        for position, count in enumerate(sums.accepted_at):
            self._with_label(self.accepted_by_position, position=str(min(position, DEEPEST - 1))).inc(count)

    def _time(self, now: float, tokens: int, times: SequenceTimes) -> None:
        if times.first is None:
            times.first = now
            self.first_token_seconds.observe(now - times.arrived)
            self.prefill_seconds.observe(now - (times.admitted or now))
        elif times.last is not None and tokens:
            self.inter_token_seconds.observe((now - times.last) / tokens)
        times.last = now

    def _with_label(self, counter: Counter, **label: str) -> Counter:
        """Return the counter of one label; prometheus-client's own look-up takes longer than the counting."""
        key = (counter, *label.values())
        if key not in self._with_labels:
            self._with_labels[key] = counter.labels(**self._label, **label)
        return self._with_labels[key]

    def ended(self, times: SequenceTimes, reason: str) -> None:
        """Count a sequence that has ended: "stop", "length", "abort" or "error"."""
        now = time.monotonic()
        self.finished.labels(**self._label, finished_reason=reason).inc()
        if times.first is not None and reason in ("stop", "length"):
            self.sequence_seconds.observe(now - times.arrived)
            self.decode_seconds.observe(now - times.first)
        if times.admitted is not None:
            self._sequence_seconds += 0.1 * (now - times.admitted - self._sequence_seconds)


class _WithoutTimes:
    """A registry without the samples that say when each counter was made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


WINDOW_SECONDS = 10.0


class Moment(NamedTuple):
    """The tokens that one moment brought."""

    at: float
    tokens: int
    cycles: tuple[CycleFigures, ...]


class RecentTokens:
    """The Deltas of the last ten seconds, as numbers. May be used by several threads."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def add(self, now: float, delta: Delta) -> None:
        """Count the tokens of a delta at this time."""
        with self._lock:
            self._moments.append(Moment(now, len(delta.token_ids), delta.cycles))
            self._forget(now)

    def summary(self) -> dict[str, Any]:
        """Return speed and acceptance of the last seconds, for the page."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            moments = list(self._moments)
        sums = CycleSums.from_cycles([cycle for moment in moments for cycle in moment.cycles])
        seconds = min(WINDOW_SECONDS, max(now - self._started, 1e-3))
        return {
            "seconds": seconds,
            "tokens_per_second": sum(moment.tokens for moment in moments) / seconds,
            "cycles": sums.cycles,
            "tau": tau(sums.emitted, sums.cycles) if sums.cycles else None,
            "mean_cycle_ms": 1000 * sums.seconds / sums.cycles if sums.cycles else None,
            "accepted_by_depth": [count / sums.drafts for count in sums.accepted_at],
            "decisions": dict(sums.plans),
        }

    def _forget(self, now: float) -> None:
        while self._moments and self._moments[0].at < now - WINDOW_SECONDS:
            self._moments.popleft()
