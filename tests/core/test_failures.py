"""A request that fails ends with an error of its own: those beside it and after it get the text that they get alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from covers import turn
from eyas import drafters
from eyas.core.cache import KVCache
from eyas.core.dormant import Decision, with_policy
from eyas.core.drafter import method_name
from eyas.core.engine import Decoder, Request, Step
from eyas.core.sampling import Sampling
from eyas.core.target import ForwardInput, Target
from eyas.core.tree import TargetOutput
from eyas.drafters import Drafter, DraftSession
from eyas.drafters._merge import Merged
from eyas.errors import EyasError, FitError, InputError, ModelError
from reference import plain_decode
from test_lossless import DRAWN, make
from wishes import wished

POISON = 33
PROMPTS = ((5, 9, 100, 3), (12, 9, 31, 8, 40), (60, 61, 62))


class Poisoned:
    """A runner that fills a request's row with NaN as soon as a forward begins with the token POISON there."""

    decoder: Decoder | None = None  # whose empty rows are spared: their tokens are nobody's

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __call__(self, inputs: ForwardInput) -> TargetOutput:
        output = self.runner(inputs)
        for r, token in enumerate(inputs.tokens_RQ[:, 0].tolist()):
            b = inputs.rows[r]
            if token == POISON and b not in self.decoder.prompts.empty:
                output.logits_BNV[r] = output.features_BNF[r] = torch.nan
                for store in inputs.cache.stores:
                    store[:, b] = torch.nan
        return output


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.FAMILIES["llama"]()


@pytest.fixture(scope="module")
def healthy(model: Any) -> list[tuple[Request, list[int]]]:
    requests = [Request(p, 14, Sampling(0.8 * (i % 2), seed=i)) for i, p in enumerate(PROMPTS)]
    return [(r, plain_decode(model, r)) for r in requests]


def forced(token: int, after: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that makes `token` the only one to follow `after` tokens of a text."""

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] != after:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

    return force


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that a session keeps for later cycles, also in its caches and in the sessions within it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
    elif isinstance(value, DraftSession | KVCache):
        yield from tensors_in({name: part for name, part in vars(value).items() if name not in ("drafts", "missed")})


def run_all(decoder: Decoder, requests: list[Request]) -> list[tuple[list[int], Step]]:
    """New tokens and the last step of each request."""
    tickets, tokens, last = [decoder.add(r) for r in requests], dict[int, list[int]](), dict[int, Step]()
    while not decoder.finished:
        for step in decoder.step():
            assert step.request_id not in last or last[step.request_id].finish is None, "nothing follows the last step"
            tokens.setdefault(step.request_id, []).extend(step.tokens)
            last[step.request_id] = step
            if step.error is not None:
                left = tensors_in([decoder.target_session.cache, decoder.draft_session])
                assert not any(t.isnan().any() for t in left if t.is_floating_point() and t.numel()), (
                    "NaN is left behind"
                )
    return [(tokens[t], last[t]) for t in tickets]


def check_isolation(
    drafter: Drafter,
    failing: Request,
    error: type[EyasError],
    message: str,
    answered: list[tuple[Request, list[int]]],
    reuses: tuple[bool, ...] = (False, True),
) -> None:
    """The failing request comes twice between others, in two rows; it gets what it gets without drafts."""
    requests = [answered[0][0], failing, answered[1][0], failing, answered[2][0], answered[0][0]]
    expected = [answered[0][1], None, answered[1][1], None, answered[2][1], answered[0][1]]
    exact = method_name(drafter) not in DRAWN
    is_poisoned = isinstance(drafter.target.runner, Poisoned)
    before = [] if is_poisoned else run_all(Decoder(drafter.target, make("vanilla", drafter.target)), [failing])[0][0]
    for reuse in reuses:
        decoder = Decoder(drafter.target, drafter, 2, reuse)
        if is_poisoned:
            drafter.target.runner.decoder = decoder
        for (new, last), request, plain in zip(run_all(decoder, requests), requests, expected, strict=True):
            if plain is None:
                assert (last.finish, type(last.error)) == ("error", error), last.error
                assert message in str(last.error)
                if is_poisoned:
                    assert (last.tokens, last.accepted) == ((), 0)
                else:
                    assert new == before or not (exact or request.sampling.greedy)
            else:
                assert last.error is None
                assert new == plain or not (exact or request.sampling.greedy)


@pytest.mark.cover(name=4)
@pytest.mark.parametrize("name", drafters.names())
def test_a_row_of_nan_harms_no_other(model: Any, healthy: list[tuple[Request, list[int]]], name: str) -> None:
    """Guards masked slots (0 x NaN is NaN), after a failure in a cycle and in a prompt, texts kept or not."""
    target = Target(model)
    target = target.run_with(Poisoned(target.runner))  # type: ignore[arg-type]
    late = wished((5, 6, 7), 12, processors=(forced(POISON, 5),))
    for offset, failing in enumerate((late, Request((POISON, 5, 6), 12))):
        reuses = turn(name, drafters.names(), ((False,), (True,)), offset)
        check_isolation(make(name, target), failing, ModelError, "logits are NaN", healthy, reuses)


class Now:
    """The head drafts in the cycle that fails, and in no other."""

    def decide(self, cycle_input: Any) -> Decision:
        poisoned = POISON in cycle_input.tokens_B.tolist()
        return Decision(plain=frozenset(() if poisoned else cycle_input.active_rows))

    def observe(self, steps: Any) -> None:
        assert steps

    def observe_prompt(self, tokens: int, seconds: float | None) -> None:
        assert tokens

    def is_dormant(self, rows: int) -> bool:
        return True


@pytest.mark.slow
def test_a_row_of_nan_in_two_methods_and_in_a_dormant_one(model: Any, healthy: list[tuple[Request, list[int]]]) -> None:
    """Guards the sessions that hold sessions: each is told that the row has failed."""
    target = Target(model)
    target = target.run_with(Poisoned(target.runner))  # type: ignore[arg-type]
    late = wished((5, 6, 7), 12, processors=(forced(POISON, 6),))
    merged = Merged(make("eagle2", target), make("suffix", target))
    for drafter in (merged, with_policy(make("eagle2", target), Now())):
        check_isolation(drafter, late, ModelError, "logits are NaN", healthy)


def raises(ids: Tensor, scores: Tensor) -> Tensor:
    if ids.shape[1] > 5:
        raise KeyError("no such\nprefix")
    return scores


@pytest.mark.cover
@pytest.mark.quick("sampling0-vanilla")
@pytest.mark.parametrize("name", ["vanilla", "eagle1", "eagle2"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=2)])
def test_a_processor_that_raises(model: Any, healthy: Any, name: str, sampling: Sampling) -> None:
    """Guards the other rows of the batch; the processor's name and reason stand in one line."""
    failing = wished((5, 6, 7), 12, sampling, processors=(raises,))
    said = "processor raises raised KeyError: 'no such\\nprefix'"
    check_isolation(make(name, Target(model)), failing, InputError, said, healthy)


@pytest.mark.slow
def test_a_stop_that_raises(model: Any, healthy: list[tuple[Request, list[int]]]) -> None:
    """Guards the reading of text, which runs within the engine's step."""

    def stop(token: int) -> bool:
        raise RuntimeError("broken reader")

    failing, said = Request((5, 6, 7), 12, stop=stop), "stop raised RuntimeError: broken reader"
    check_isolation(make("eagle2", Target(model)), failing, InputError, said, healthy)


@pytest.mark.slow
def test_a_processor_that_raises_off_the_path_harms_nobody(model: Any) -> None:
    """Guards losslessness: a prefix that is drafted and not taken fails nothing."""
    prompt, seed = (5, 9, 100, 3), Sampling(1.0, seed=1)
    text = [*prompt, *plain_decode(model, Request(prompt, 20, seed))]
    met = []

    def strict(ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0].tolist() != text[: ids.shape[1]]:
            met.append(ids)
            raise KeyError("not the text")
        return scores

    for name in ("eagle2", "suffix", "medusa"):
        target, request = Target(model), wished(prompt, 20, seed, processors=(strict,))
        ((new, last),) = run_all(Decoder(target, make(name, target)), [request])
        assert (new, last.error) == (text[len(prompt) :], None)
    assert met, "some drafted prefix must be another than the text, or this test proves nothing"


def test_memory_that_does_not_suffice_fails_one_request(
    model: Any, healthy: list[tuple[Request, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the queue: the request that does not fit is named, the next one is served."""
    drafter, (request, answer) = make("eagle2", Target(model)), healthy[0]
    decoder = Decoder(drafter.target, drafter)
    reserve = decoder.target_session.reserve

    def small(tokens: int) -> None:
        if tokens > 300:
            raise FitError("keys and values do not fit")
        reserve(tokens)

    monkeypatch.setattr(decoder.target_session, "reserve", small)
    (_, failed), (new, _) = run_all(decoder, [Request((1, 2, 3), 400), request])
    assert (failed.finish, str(failed.error)) == ("error", "keys and values do not fit")
    assert new == answer
