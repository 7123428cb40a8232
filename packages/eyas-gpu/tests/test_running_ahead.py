"""The next cycle is launched before the last one is read: the same Steps as one cycle after the
other, whatever ends meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import zoo
from eyas import drafters
from eyas.core.dormant import Decision, Policy, with_policy
from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request, Step
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas_gpu.graphs import GraphRunner
from eyas_gpu.recording import CycleReplay
from fake_graphs import captured_without_gpu, prompt
from reference import plain_decode
from test_lossless import OPTIONS
from wishes import wish

METHODS = ("vanilla", "eagle2", "seagle", "hydra")  # one of each kind of session


pytestmark = pytest.mark.usefixtures("without_cpu_kernels")


@dataclass
class Counts:
    """Cycles that ran ahead, and rows of them that had ended when they were read."""

    ahead: int = 0
    ignored: int = 0


def decoded(
    drafter: Drafter, requests: list[Request], ahead: bool, cancel: dict[int, int] | None = None, rows: int = 2
) -> tuple[dict[int, list[Step]], Counts]:
    """The Steps of each request. cancel: by request, after how many of its Steps it is cancelled."""
    decoder, counts = Decoder(drafter.target, drafter, rows, reuse=True), Counts()
    assert isinstance(decoder.cycle_runner, CycleReplay)
    decoder.cycle_runner.runs_ahead = ahead
    found: dict[int, list[Step]] = {decoder.add(request): [] for request in requests}
    while not decoder.finished:
        launched = decoder._ahead
        steps = decoder.step()
        counts.ahead += decoder._ahead is not None
        empty = [
            b for b in decoder.prompts.empty if decoder.target_session.length_B[b] != decoder.target_session.lengths[b]
        ]
        assert not empty, "the next cycle writes behind a row's length, in the slots that the host has reserved"
        if launched is not None:
            read = {step.row for step in steps if not step.prefill}
            counts.ignored += len({b for b, row in enumerate(launched.rows) if row} - read)
        for step in steps:
            found[step.request_id].append(step)
            if cancel and cancel.get(step.request_id) == len(found[step.request_id]):
                decoder.cancel(step.request_id)
    return found, counts


def essence(steps: list[Step]) -> list[Any]:
    """Everything in Steps but times; of the draft, this row's tree."""
    trees = [
        None if s.draft is None else (s.draft.tokens_BN[s.row].tolist(), s.draft.tree.parents_BN[s.row].tolist())
        for s in steps
    ]
    return [
        (s.tokens, s.accepted, s.finish, s.path, s.drafted_by, s.cached_tokens, tree)
        for s, tree in zip(steps, trees, strict=True)
    ]


def drafter_of(name: str) -> Drafter:
    target, kind = Target(zoo.FAMILIES["llama"]()), drafters.find(name)
    target = target.run_with(GraphRunner(target, captured_without_gpu))
    drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
    if name == "eagle2":  # it drafts the token that it reads: right where a greedy text repeats itself
        with torch.no_grad():
            for weight in drafter.net.parameters():
                weight.zero_()
            drafter.net.fc.weight[:, target.hidden_size :] = torch.eye(target.hidden_size)
    return drafter


@cache
def ending(temperature: float) -> tuple[list[Request], list[list[int]]]:
    """Requests that end by length, a stop token, a stop string (the third), by being cancelled (the
    fourth), and two that continue their texts; and the texts of plain decoding."""
    free = [Request(prompt(n), 24, Sampling(temperature, seed=n)) for n in (7, 30, 12, 9, 60)]
    texts = [plain_decode(zoo.FAMILIES["llama"](), request) for request in free]
    # where a token stands for the first time, a late one
    last = [max(text.index(token) for token in text[:16]) for text in texts]
    stops: Callable[[int], bool] = lambda token: token == texts[2][last[2]]  # noqa: E731
    ends = [free[0], replace(free[1], eos=frozenset([texts[1][last[1]]])), replace(free[2], stop=stops), *free[3:]]
    later = [replace(free[i], prompt=(*free[i].prompt, *texts[i][:8], 5)) for i in (1, 2)]
    expected = [*texts, *(plain_decode(zoo.FAMILIES["llama"](), request) for request in later)]
    return [*ends, *later], [text[: last[i] + 1] if i in (1, 2) else text for i, text in enumerate(expected)]


@pytest.mark.cover(name=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_steps(name: str, temperature: float) -> None:
    """Guards lengths, drafts and noise of rows that go on beside rows that ended, and of the requests that take their
    place and begin with their texts: a cycle too many in a row that has ended must not be seen by anybody."""
    drafter, (requests, texts) = drafter_of(name), ending(temperature)
    (alone, none), (ahead, counts) = (decoded(drafter, requests, mode, {4: 3}) for mode in (False, True))
    assert (none.ahead, none.ignored) == (0, 0)
    assert counts.ahead > 10
    assert counts.ignored > 0
    for request_id, steps in alone.items():
        assert essence(ahead[request_id]) == essence(steps)
    for request_id, text in enumerate(texts, 1):
        tokens = [token for step in ahead[request_id] for token in step.tokens]
        assert tokens == (text[: len(tokens)] if request_id == 4 else text)
    assert name != "eagle2" or temperature or max(step.accepted for steps in ahead.values() for step in steps) > 0


@pytest.mark.slow
def test_the_next_cycle_is_launched_first() -> None:
    """Guards what it is for: while the host reads a cycle, the next one runs."""
    seen = list[bool]()
    request = Request(prompt(9), 30, Sampling(), stop=lambda token: seen.append(decoder._ahead is not None) or False)
    drafter = drafter_of("eagle3")
    decoder = Decoder(drafter.target, drafter)
    decoder.add(request)
    while not decoder.finished:
        decoder.step()
    assert len(seen) == 30
    assert all(seen[1:20]), "no row was about to end"
    assert not seen[-1], "a row that may end by its length is waited for"


class Fixed(Policy):
    def decide(self, roots: Any) -> Decision:
        return Decision()

    def observe(self, steps: Any) -> None:
        pass


@pytest.mark.quick("suffix")
@pytest.mark.parametrize("why", ["policy", "logprobs", "trace", "min_tokens", "limit", "suffix"])
def test_what_the_host_must_read_first(why: str) -> None:
    """Guards cycles whose input depends on the last one's result."""
    drafter, request = drafter_of("suffix" if why == "suffix" else "eagle2"), Request(prompt(9), 12, Sampling())
    changes: dict[str, dict[str, Any]] = {
        "logprobs": {"logprobs": 2},
        "trace": {"trace": True},
        "min_tokens": {"min_tokens": 12, "eos": frozenset([3])},
        "limit": {"drafting": 2},
    }
    request = wish(request, **changes.get(why, {}))
    steps, counts = decoded(with_policy(drafter, Fixed()) if why == "policy" else drafter, [request], True)
    assert counts.ahead == 0
    assert [token for step in steps[1] for token in step.tokens] == list(plain_decode(zoo.FAMILIES["llama"](), request))
