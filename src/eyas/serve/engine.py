"""The engine: one thread owns the Decoders; the event loop hands it jobs and receives their tokens.

    event loop                              engine thread
    submit(job) -> Answer    --- inbox -->  waiting, until fewer than `rows` sequences are in flight
    Answer.deltas()          <-- Deltas --  one cycle of every Decoder that has something to do
    Answer given up          --- inbox -->  its sequences are cancelled

Nothing else is shared but counters. An exception that escapes a Decoder ends the engine: it fails
every job, and `error` tells the server, which ends with it. This module knows no dialect and no
HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from random import SystemRandom

from eyas.api import LLM, TextReader
from eyas.arguments import MediaIds
from eyas.core.engine import Decoder, Request, Step
from eyas.core.sockets import FEATURE
from eyas.errors import EyasError
from eyas.serve.answers import Answer
from eyas.serve.cycles import CycleWriter
from eyas.serve.errors import ApiError, bad_request
from eyas.serve.metrics import Metrics, SequenceTimes
from eyas.serve.pool import DecoderPool, Methods
from eyas.serve.records import CycleFigures, Delta, Job, check_ids
from eyas.serve.settings import Settings

DEADLINE_CHECK_SECONDS = 0.25  # time between two checks of the deadlines
SEEDS = SystemRandom()


@dataclass(eq=False)
class Sequence:
    """One sequence of a job."""

    index: int
    request: Request
    reader: TextReader
    method: str
    deadline: float
    answer: Answer
    stop_ids: Collection[int]  # that end it because the job says so
    writer: CycleWriter | None  # says what happened in each cycle, if that is asked for
    times: SequenceTimes
    decoder: Decoder | None = None  # the Decoder that decodes it
    request_id: int = 0

    def delta(self, step: Step, drafted: int) -> Delta:
        """Return the Delta of one Step, for whose cycle `drafted` nodes were drafted in this row."""
        accepted = max(0, len(step.path) - 1)
        figures = CycleFigures(len(step.tokens), accepted, drafted, step.seconds, step.drafted_by)
        ends = step.finish == "stop" and step.tokens[-1] in self.stop_ids
        return Delta(
            self.index,
            text=self.reader.take(final=step.finish is not None),
            token_ids=step.tokens,
            finish=step.finish,
            stop_reason=self.reader.stop_string or (step.tokens[-1] if ends else None),
            cycles=() if step.prefill else (figures,),
            prefill=step.prefill,
            cached_tokens=step.cached_tokens,
            predicted=step.extra.get("predicted", 0),
            logprobs=step.extra.get("logprobs", ()),
            prompt_logprobs=step.extra.get("prompt_logprobs", ()),
            cycle=None if self.writer is None else self.writer.write(step),
            error=step.error,
        )


class Engine:
    """Serves jobs. After `start`, `submit` and `prepare` may be called from the event loop and its workers."""

    def __init__(
        self, llm: LLM, settings: Settings, metrics: Metrics, rest: Callable[[bool], bool] | None = None
    ) -> None:
        """`rest`: called between requests, with whether none is in flight; returns whether it has more to do."""
        self.llm = llm
        self._rest = rest
        self._ended = False  # whether a sequence has ended since `rest` was last called
        self.settings = settings
        self.metrics = metrics
        self.methods = Methods(llm)
        self.error: BaseException | None = None
        self.draining = False
        self._pool = DecoderPool(self.methods, settings.rows, settings.prefill_budget)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._in_flight: dict[tuple[Decoder, int], Sequence] = {}
        self._lock = threading.Lock()
        self._accepted = 0  # sequences that are waiting or in flight
        self._next_deadline_check = 0.0
        self._cycle_seconds: dict[Decoder, float] = {}  # the last cycle of each Decoder, 0 while no row of it runs
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.watch(lambda: self.load, settings.rows)
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)

    # --- called by the event loop and its workers ---

    def start(self) -> None:
        """Begin to decode. Called in the event loop that receives the tokens."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self.halt()
        if self._thread.is_alive():
            self._thread.join()

    def halt(self) -> None:
        """Give up everything: every waiting request gets an error."""
        self._inbox.put(None)

    def drain(self) -> None:
        """Take no further requests; those in flight go on."""
        self.draining = True

    def between_cycles(self, task: Callable[[], None]) -> Future[None]:
        """Let the engine's thread do something while no cycle runs; the Future ends when it is done."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                task()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(run)
        return done

    @property
    def idle(self) -> bool:
        """Whether no request is accepted and unfinished."""
        return not self._accepted

    @property
    def load(self) -> tuple[int, int]:
        """Sequences in flight, and sequences that wait."""
        running = len(self._in_flight)
        return running, max(0, self._accepted - running)

    def check_open(self) -> None:
        """Raise the ApiError that says why no job is taken now, if so."""
        if self.error is not None:
            raise ApiError(503, "the engine has failed, and the server ends", headers={"x-should-retry": "false"})
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask another one", headers={"retry-after": "5"})

    def prepare(self, job: Job) -> list[tuple[Request, TextReader]]:
        """Return the engine's requests for a job, checked. Slow for long prompts, so it runs in a worker."""
        self.methods.drafter(job.method or self.llm.method)
        prepared = []
        traced = FEATURE.plug_for("cycles").traced if job.cycles else None
        for prompt in job.prompts:
            # what `Decoder.add` would refuse, before the job is queued
            if not prompt:
                raise bad_request("the prompt is empty: give at least one token", "prompt")
            check_ids(prompt, self.llm.target.vocab_size, "prompt")
            seed, whole = job.keywords.get("seed"), MediaIds(prompt, job.media) if job.media else prompt
            for sample in range(job.n):
                own = SEEDS.getrandbits(62) if seed is None else (seed + sample) % 2**63
                request, reader = self.llm.request(whole, **{**job.keywords, "seed": own})
                prepared.append((request if traced is None else traced(request), reader))
        return prepared

    def submit(self, job: Job, prepared: list[tuple[Request, TextReader]]) -> Answer:
        """Queue a job, whole or not at all; ApiError if the queue is full (429) or the server takes no jobs (503)."""
        self.check_open()
        with self._lock:
            if self._accepted + len(prepared) > self.settings.rows + self.settings.queue:
                self.metrics.rejections.inc()
                seconds = self.metrics.seconds_until_free(self._accepted, self.settings.rows)
                raise ApiError(
                    429, f"the queue is full: come back in {seconds} s", headers={"retry-after": str(seconds)}
                )
            self._accepted += len(prepared)
        answer = Answer(len(prepared), self._give_up, join=not job.cycles)
        method = job.method or self.llm.method
        deadline = time.monotonic() + min(job.timeout or self.settings.timeout, self.settings.timeout)
        sequences = []
        for i, (request, reader) in enumerate(prepared):
            writer = CycleWriter(self.llm.tokenizer) if job.cycles else None
            stops, times = job.keywords.get("stop_token_ids", ()), SequenceTimes(len(request.prompt))
            sequences.append(Sequence(i, request, reader, method, deadline, answer, stops, writer, times))
        self._inbox.put(lambda: self._waiting.extend(sequences))
        return answer

    def _give_up(self, answer: Answer) -> None:
        self._inbox.put(lambda: self._cancel([s for s in self._sequences() if s.answer is answer]))

    # --- the thread ---

    def _run(self) -> None:
        error = ApiError(503, "the server has shut down")
        try:
            while self._read_inbox():
                self._expire()
                self._admit()
                self._step(self._pool.busy())
        except BaseException as fault:
            self.error = fault
            error = ApiError(500, "the engine has failed, and the server ends", headers={"x-should-retry": "false"})
        self._end(self._sequences(), error)

    def _step(self, decoders: list[Decoder]) -> None:
        """Run one step of each Decoder. A prompt in one of them waits for the cycles of all: its budget counts them."""
        seconds = {decoder: self._cycle_seconds.get(decoder, 0.0) for decoder in decoders}
        for decoder in decoders:
            decoder.prompts.other_decoders_seconds = sum(seconds.values()) - seconds[decoder]
            steps = decoder.step()
            seconds[decoder] = next((step.seconds for step in steps if not step.prefill), 0.0)
            self._deliver(decoder, steps)
        self._cycle_seconds = seconds

    def _sequences(self) -> list[Sequence]:
        return [*self._in_flight.values(), *self._waiting]

    def _read_inbox(self) -> bool:
        """Do the work that the event loop asks for; wait for it if nothing is to be decoded. False: the thread
        ends."""
        wait = idle = not self._waiting and not self._in_flight
        if self._rest is not None and (idle or self._ended):
            self._ended = False
            wait = not self._rest(idle) and idle
        while True:
            try:
                task = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
            wait = False

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + DEADLINE_CHECK_SECONDS
        late = [sequence for sequence in self._sequences() if sequence.deadline < now]
        self._cancel(
            late,
            ApiError(408, "the time for this request is over", code="timeout", headers={"x-should-retry": "false"}),
        )

    def _cancel(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Take sequences out of the queue and the Decoders; with an error, tell their readers."""
        listed = list(sequences)
        for sequence in listed:
            if sequence.decoder is not None:
                sequence.decoder.cancel(sequence.request_id)
        self._end(listed, error)

    def _admit(self) -> None:
        """Let waiting sequences enter Decoders, first come, first served."""
        while self._waiting and len(self._in_flight) < self.settings.rows:
            sequence = self._waiting.popleft()
            decoder = self._pool.take(
                sequence.method, len(self._in_flight) + len(self._waiting) + 1, sequence.request.adapter or ""
            )
            try:
                sequence.request_id = decoder.add(sequence.request)
            except EyasError as error:
                self._pool.release(decoder)
                self._end([sequence], error)
                continue
            sequence.decoder = decoder
            self._in_flight[decoder, sequence.request_id] = sequence
            self.metrics.admitted(sequence.times)

    def _deliver(self, decoder: Decoder, steps: list[Step]) -> None:
        news: dict[Answer, list[Delta]] = defaultdict(list)
        grown = list[tuple[Delta, SequenceTimes]]()
        for step, drafted in zip(steps, drafted_nodes(steps), strict=True):
            sequence = self._in_flight[decoder, step.request_id]
            delta = sequence.delta(step, drafted)
            news[sequence.answer].append(delta)
            grown.append((delta, sequence.times))
            if delta.finish:
                self._remove(sequence)
        self.metrics.stepped(grown)
        self._tell(news)

    def _end(self, sequences: Iterable[Sequence], error: Exception | None) -> None:
        """Forget sequences that end without a last Step; with an error, tell their readers."""
        news: dict[Answer, list[Delta]] = defaultdict(list)
        for sequence in sequences:
            self._remove(sequence)
            self.metrics.ended(sequence.times, "error" if error else "abort")
            if error is not None:
                news[sequence.answer].append(Delta(sequence.index, finish="error", error=error))
        self._tell(news)

    def _remove(self, sequence: Sequence) -> None:
        self._ended = True
        if sequence.decoder is not None:
            del self._in_flight[sequence.decoder, sequence.request_id]
            self._pool.release(sequence.decoder)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        with self._lock:
            self._accepted -= 1

    def _tell(self, news: Mapping[Answer, list[Delta]]) -> None:
        def put() -> None:
            for answer, deltas in news.items():
                answer.put(deltas)

        if news and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(put)


def drafted_nodes(steps: list[Step]) -> list[int]:
    """Return for each Step the nodes of its cycle's draft for its row, without the root. Each draft is read once."""
    drafts = {id(step.draft): step.draft for step in steps if step.draft is not None}
    counts = {key: (draft.tree.acceptable_BN.sum(1) - 1).tolist() for key, draft in drafts.items()}
    return [0 if step.draft is None else counts[id(step.draft)][step.row] for step in steps]
