"""Threads of passes, with times that are made up."""

from eyas.runners._threads import MAX_SINGLE_THREAD_SECONDS, SINGLE_THREAD_SECONDS, Threads


def passes(threads: Threads, clock: float, count: int, seconds: float, kind: int = 1) -> tuple[float, list[int]]:
    """So many passes that take so long with all threads, and 5 ms with one; when they ended, and
    how many threads each had."""
    used = []
    for _ in range(count):
        used.append(threads.next(clock))
        took = seconds if used[-1] > 1 else 0.005
        threads.learn(kind, clock, clock + took)
        clock += took
    return clock, used


def test_slow_passes_are_run_on_one_thread_for_a_while() -> None:
    """Guards shared machines: with a core taken away passes of 3 ms take 200. Three are enough;
    later attempts cost less and less."""
    threads = Threads(2)
    clock, used = passes(threads, 0.0, 50, 0.003)
    assert used == [2] * 50
    clock, used = passes(threads, clock, 2000, 0.2)
    assert used[:3] == [2, 2, 2]
    assert used[3:300] == [1] * 297
    assert used.count(2) < 15
    _, used = passes(threads, clock + MAX_SINGLE_THREAD_SECONDS, 50, 0.003)
    assert used == [2] * 50, "the core is free again"


def test_one_hiccup_and_larger_passes_are_no_reason() -> None:
    """Guards against giving threads up for nothing: a single slow pass, another kind of pass, texts
    that grow, a clock that slows down."""
    threads = Threads(4)
    clock, _ = passes(threads, 0.0, 20, 0.003)
    for _ in range(20):
        clock, _ = passes(threads, clock, 1, 0.1)
        clock, used = passes(threads, clock, 8, 0.003)
        assert used == [4] * 8
    clock, used = passes(threads, clock, 30, 0.05, kind=512)
    for step in range(300):
        clock, more = passes(threads, clock, 1, 0.003 * (1 + step / 100))
        used += more
    assert set(used) == {4}
    assert threads.rest == SINGLE_THREAD_SECONDS
