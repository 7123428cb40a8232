"""Prompts read chunk by chunk between cycles, and behind prefixes that other rows hold: ids stay, for every method."""

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from core.test_dormant import Chance, right_now_and_then, suffix
from covers import turn
from eyas import drafters
from eyas.core.cache import common_prefix
from eyas.core.dormant import with_policy
from eyas.core.engine import Decoder, Request, Step
from eyas.core.prompts import MIN_AUTO_BUDGET, OLDEST_EVERY
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.totals import StepTotals
from eyas.drafters import Drafter
from eyas.errors import OptionError
from eyas.timing import StageTimer
from reference import plain_decode, run, run_at_random, widths_of
from test_lossless import DRAWN, SAMPLINGS

QUICK = {"eagle2", "suffix"}
CASES = [*drafters.names(), "eagle2+suffix", "eagle2 by chance"]
PARAMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
Setting = tuple[int | None, int, int]  # tokens of prompts per cycle, rows, seed
LENGTHS = (40, 3, 11, 31, 1, 9)


@cache
def plain(target: Target, request: Request) -> list[int]:
    return plain_decode(target.model, request)


@cache
def alone(name: str, target: Target, request: Request) -> list[int]:
    return run(Decoder(target, method_of(name, target)), [request])[0][0]


def method_of(name: str, target: Target, seed: int = 0) -> Drafter:
    """The method; "by chance": with a policy that lets it sleep by lot, while another drafts or nobody."""
    drafter = right_now_and_then(name.removesuffix(" by chance"), target)
    return (
        with_policy(drafter, Chance(seed, drafter.max_tree, suffix(target))) if name.endswith("by chance") else drafter
    )


def settings_of(name: str, *settings: Setting) -> set[Setting]:
    """Return the method's one of the settings, and the first one where ids show what was drafted."""
    return {turn(name, CASES, settings), *(settings[:1] if name in DRAWN else ())}


def check(name: str, target: Target, requests: list[Request], found: list[list[int]], where: str) -> None:
    """Ids are plain decoding's; those of sampled children are what they are alone, with whole prompts."""
    for request, ids in zip(requests, found, strict=True):
        if request.sampling.greedy or name not in DRAWN:
            assert ids == plain(target, request), f"{where}, {request.sampling}"
        else:
            assert ids == alone(name, target, request), f"{where}, {request.sampling}"


def prompts_of(target: Target) -> list[Request]:
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(target.vocab_size) for _ in range(length)) for length in LENGTHS]
    return [Request(prompt, 20 - i, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(prompts)]


@pytest.mark.cover(name=2)
@pytest.mark.parametrize("name", PARAMS)
def test_prompts_in_chunks_between_cycles(name: str, target: Target) -> None:
    """Guards what a session keeps of a prompt that is half read: other rows' cycles, slots, a chunk's first pair."""
    requests = prompts_of(target)
    for budget, rows, seed in settings_of(name, (1, 3, 1), (7, 2, 2), (25, 4, 3)):
        tokens, steps = run_at_random(
            Decoder(target, method_of(name, target, seed), rows, prefill_budget=budget), requests, seed
        )
        check(name, target, requests, tokens, f"budget {budget}")
        assert sum(step.prefill for step in steps) == len(requests)


@pytest.mark.cover(name=8)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("vanilla", "rest", "eagle2 by chance")])
def test_drafts_do_not_depend_on_chunks(name: str, target: Target) -> None:
    """Bug: a row's state is disturbed between chunks: first drafts are those of a prompt that was read at once."""
    drafter, prompt = right_now_and_then(name, target), tuple(range(30, 71))
    first = []
    for budget in (None, 6):
        decoder = Decoder(target, drafter, rows=2, prefill_budget=budget)
        decoder.add(Request((5,), 60))
        decoder.step()
        request_id = decoder.add(Request(prompt, 2))
        while not (cycles := [step for step in decoder.step() if step.request_id == request_id and not step.prefill]):
            pass
        first.append((cycles[0].draft.tokens_BN[1].tolist(), cycles[0].draft.tree.acceptable_BN[1].tolist()))
    drafted = [[token for token, good in zip(tokens, candidates, strict=True) if good] for tokens, candidates in first]
    assert drafted[0] == drafted[1]  # without padding: a text drafter's trees are padded to the longest of all rows


def shared_prompts(target: Target) -> list[Request]:
    """Prompts that begin alike: turns of chats, samples of one prompt, a common system prompt."""
    dice = random.Random(6)
    system = tuple(dice.randrange(target.vocab_size) for _ in range(30))
    chat = (*system, *(dice.randrange(target.vocab_size) for _ in range(25)))
    prompts = [chat, chat, system, (*system, 7, 8), chat, (*chat, 1, 2, 3), (9, *system), chat[:40], (*system, 7, 8, 9)]
    return [Request(prompt, 18 - i, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(prompts)]


@pytest.mark.cover(name=4)
@pytest.mark.parametrize("name", PARAMS)
def test_prefixes_of_other_rows(name: str, target: Target) -> None:
    """Guards copies of keys: wrong row, too many tokens, target and drafter disagree, an index keeps old text."""
    requests = shared_prompts(target)
    for budget, rows, seed in settings_of(name, (None, 3, 1), (9, 3, 2), (16, 2, 3)):
        tokens, steps = run_at_random(
            Decoder(target, method_of(name, target, seed), rows, True, prefill_budget=budget), requests, seed
        )
        check(name, target, requests, tokens, f"budget {budget}, {rows} rows")
        least = 40 if name == "seagle" else 100  # its window has lost most pairs of a text, so the text is read again
        assert sum(step.cached_tokens for step in steps) > least, "nothing was reused"


@pytest.mark.parametrize("name", ["vanilla", "eagle2", "eagle3", "suffix", "small_model"])
def test_samples_of_one_prompt_cost_one_prefill(name: str, target: Target) -> None:
    """Bug: each sample reads the prompt anew. Drafters of pairs read the last two tokens again, others one."""
    decoder = Decoder(target, right_now_and_then(name, target), rows=4, reuse=True, prefill_budget=16)
    for seed in range(4):
        decoder.add(Request(tuple(range(100)), 1, Sampling(1.0, seed=seed)))
    steps = []
    with widths_of(target.model) as widths:
        while not decoder.finished:
            steps += decoder.step()
    assert [step.cached_tokens for step in steps] in ([0, 99, 99, 99], [0, 98, 98, 98])
    own_model = name == "small_model"  # its model is the target itself, and reads the same
    assert sum(widths) == (100 + sum(100 - step.cached_tokens for step in steps[1:])) * (1 + own_model)


def test_the_least_useful_text_is_overwritten(target: Target) -> None:
    """Bug: a new prompt replaces the text used last, or a copy destroys the text that it is copied from."""
    decoder = Decoder(target, drafters.find("vanilla")(target), rows=3, reuse=True)
    texts = [tuple(range(start, start + 40)) for start in (0, 50, 100)]

    def cached(prompt: tuple[int, ...]) -> int:
        decoder.add(Request(prompt, 1))
        return sum(step.cached_tokens for step in decoder.step())

    assert [cached(text) for text in texts] == [0, 0, 0]
    assert cached((*texts[0], 7)) == 40  # in place; the text of row 1 is now the one that was used least recently
    assert cached((*texts[2][:19], 7)) == 19  # less than half of row 2: copied to row 1
    assert cached(texts[2]) == 39
    assert cached((*texts[0], 7, 8)) == 41
    assert cached(texts[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_cancel_in_the_middle_of_a_prompt(reuse: bool, target: Target) -> None:
    """Bug: the row stays occupied, its text is held to be read whole, or rows that run are disturbed."""
    drafter, prompt = right_now_and_then("eagle2", target), tuple(range(60, 140))
    decoder = Decoder(target, drafter, rows=2, reuse=reuse, prefill_budget=16)
    running, expected = Request((5,), 24), plain(target, Request((5,), 24))
    request_id, found = decoder.add(running), list[int]()
    for round_ in range(30):
        if round_ % 5 == 1:
            late = decoder.add(Request(prompt, 9))
        if round_ % 5 == 4:
            decoder.cancel(late)
        found += [token for step in decoder.step() if step.request_id == request_id for token in step.tokens]
    assert found == expected
    assert decoder.finished
    assert run(decoder, [Request(prompt, 9)])[0][0] == plain(target, Request(prompt, 9))


def test_a_step_reads_no_more_than_its_budget(target: Target) -> None:
    """Bug: a long prompt stalls the rows that run."""
    with pytest.raises(OptionError, match="must be 1 or more tokens, auto, or None for whole prompts, got 0"):
        Decoder(target, drafters.find("vanilla")(target), prefill_budget=0)
    decoder = Decoder(target, drafters.find("vanilla")(target), rows=3, prefill_budget=8)
    decoder.add(Request((5,), 60))
    decoder.step()
    for prompt in (tuple(range(100)), tuple(range(20))):
        decoder.add(Request(prompt, 1))
    with widths_of(target.model) as widths:
        for _ in range(15):
            widths.clear()
            steps = decoder.step()
            assert widths.pop() == 1, "the cycle of the running row"
            assert sum(widths) == 8
            assert any(not step.prefill for step in steps)


@pytest.mark.slow
def test_short_prompts_and_long_ones_get_their_share(target: Target) -> None:
    """Bug: a short prompt waits for a long one, or a long one as long as short ones keep coming."""
    decoder, budget = Decoder(target, drafters.find("vanilla")(target), rows=3, prefill_budget=8), 8
    long, waits = decoder.add(Request(tuple(range(160)), 1)), list[int]()
    decoder.step()
    for step_number in range(1, 1000):
        if decoder.prompts.waiting == type(decoder.prompts.waiting)() and len(decoder.prompts.reading) < 2:
            decoder.add(Request((1, 2, 3, 4, 5, 6, 7, 8), 1))
            waits.append(step_number)
        done = [step.request_id for step in decoder.step()]
        if long in done:
            break
    assert step_number <= OLDEST_EVERY * (160 // budget)
    assert len(waits) >= (OLDEST_EVERY - 1) * step_number // OLDEST_EVERY - 1, (
        "a short prompt is read in each of the other steps"
    )


def test_times_of_a_prompt_in_chunks(target: Target) -> None:
    """Bug: cycles of others between the chunks count as decoding. A prefill lasts from its first chunk to its token."""
    decoder, totals = Decoder(target, drafters.find("vanilla")(target), rows=2, prefill_budget=4), StepTotals()
    decoder.add(Request((5,), 40))
    decoder.step()
    request_id, steps = decoder.add(Request(tuple(range(40)), 5)), list[Step]()
    while not decoder.finished:
        steps += decoder.step()
    own, others = ([s for s in steps if (s.request_id == request_id) == mine] for mine in (True, False))
    between = [s for s in others if own[0].ended_at - own[0].seconds < s.ended_at < own[0].ended_at]
    assert len(between) == 9
    assert own[0].stage_seconds["prompt"] + sum(s.seconds for s in between) <= own[0].seconds
    for step in own:
        totals.add(step)
    assert totals.prefill_seconds == own[0].seconds
    assert totals.seconds == pytest.approx(own[-1].ended_at - own[0].ended_at + own[0].seconds)


@pytest.fixture
def clock(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let decoders measure by `Clock`."""
    for module in ("engine", "prompts"):
        monkeypatch.setattr(f"eyas.core.{module}.StageTimer", Clock)
    with widths_of(target.model) as Clock.widths:
        yield


class Clock(StageTimer):
    """Seconds by count: a prompt token takes `token` seconds to read, a cycle `cycle`; both may change."""

    now_ = token = cycle = 0.0
    widths: list[int]

    def __init__(self) -> None:
        self.began, self.stage_seconds = Clock.now_, {}

    def __enter__(self) -> None:
        Clock.widths.clear()

    def __exit__(self, *raised: object) -> None:
        seconds = Clock.token * sum(Clock.widths) if self._stage == "prompt" else Clock.cycle / 4  # of four stages
        Clock.now_ += seconds
        self.stage_seconds[self._stage] = self.stage_seconds.get(self._stage, 0.0) + seconds

    def now(self) -> float:
        return Clock.now_


@pytest.mark.slow
def test_an_automatic_budget_follows_the_cycles(target: Target, clock: None) -> None:
    """Bug: prompts stall rows whose cycles are short, are read slowly beside long ones, or although no row runs."""
    for cycle, expected in ((0.01, 15), (0.1, 150), (0.001, MIN_AUTO_BUDGET), (9.0, 512)):
        Clock.token, Clock.cycle = 0.001, cycle
        decoder = Decoder(target, drafters.find("vanilla")(target), rows=2, prefill_budget="auto")
        decoder.add(Request(tuple(range(100)), 100))
        assert len(decoder.step()) == 2, "read at once: no row runs"
        for _ in range(20):
            decoder.step()
        decoder.add(Request(tuple(range(100)) * 4, 1))
        done = [step for step in decoder.step() if step.prefill]
        read = 400 if done else next(iter(decoder.prompts.reading.values())).read
        assert read == pytest.approx(min(expected, 400), abs=1)


def test_an_automatic_budget_counts_the_prompts(target: Target, clock: None) -> None:
    """Bug: prompts that wait together share the time of one, so rows stay empty."""
    Clock.token, Clock.cycle = 0.001, 0.02
    decoder = Decoder(target, drafters.find("vanilla")(target), rows=4, prefill_budget="auto")
    decoder.add(Request(tuple(range(100)), 100))
    for _ in range(20):
        decoder.step()
    for count in (1, 2, 3, 3):  # the last one finds no empty row
        decoder.add(Request(tuple(range(100)) * 4, 1))
        assert decoder.prompts.tokens_per_step == pytest.approx(30 * count, abs=1)


def test_an_automatic_budget_counts_other_decoders(target: Target, clock: None) -> None:
    """Bug: a decoder without running rows reads 512 tokens at once, while those of another one wait for it."""
    Clock.token, Clock.cycle = 0.001, 0.01
    decoder = Decoder(target, drafters.find("vanilla")(target), rows=2, prefill_budget="auto")
    decoder.prompts.other_decoders_seconds = 0.03
    decoder.add(Request(tuple(range(100)) * 4, 1))
    assert decoder.step() == []
    assert decoder.prompts.reading[0].read == MIN_AUTO_BUDGET, "the seconds of a token are not known yet"
    assert decoder.step() == []
    assert decoder.prompts.reading[0].read == pytest.approx(MIN_AUTO_BUDGET + 45, abs=1)
    decoder.prompts.other_decoders_seconds = 0.0
    assert len(decoder.step()) == 1


def test_common_prefix() -> None:
    """Bug: a difference within a block of 64, or at its edge, is missed."""
    text = list(range(200))
    for length in (0, 1, 63, 64, 65, 127, 128, 199, 200):
        assert common_prefix(text, tuple(text[:length])) == length
        assert common_prefix(text[:length] + [-1] * 9, tuple(text)) == length
    assert torch.tensor(common_prefix([], [1])) == 0
