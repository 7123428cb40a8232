"""How many nodes a pass verifies: against every choice there is, and in batches whose text must stay the same."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from covers import turn
from curves import curve
from eyas import drafters, kernels
from eyas.adaptive import AdaptiveController
from eyas.adaptive.nodes import (
    CORRECT_EVERY,
    CORRECTED_FROM,
    FORGOTTEN_AFTER,
    MIN_GAIN,
    PADDED,
    NodeChoice,
    PassSeconds,
)
from eyas.core.dormant import with_policy
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.runners import make_cpu_runner
from reference import plain_decode, run

falling = st.lists(st.floats(0.01, 0.99), max_size=4).map(lambda row: sorted(row, reverse=True))


def passes(node: float, flat: int = 1) -> PassSeconds:
    """A pass takes 1 for the first `flat` tokens, and `node` for each further one."""
    tokens = (1, flat, 64) if flat > 1 else (1, 64)
    return PassSeconds(tokens, [1 + node * max(0, n - flat) for n in tokens])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(falling, min_size=1, max_size=3), st.floats(0.001, 0.5), st.integers(1, 6), st.booleans())
def test_it_is_the_best_of_all_choices(chances: list[list[float]], node: float, flat: int, padded: bool) -> None:
    """Bug: rows are judged apart, a node comes without its parent, padding is forgotten, worthless drafts verified."""
    rows, seconds = len(chances), passes(node, flat)

    def rate(counts: Sequence[int]) -> float:
        width = min(size for size in PADDED if size >= max(counts))
        nodes = rows * (1 + width) if padded else rows + sum(counts)
        accepted = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        return (rows + accepted) / float(seconds(np.array(nodes)))

    chosen = NodeChoice(seconds, rows, padded).choose(chances)
    every = itertools.product(*(range(1 + len(row)) for row in chances))
    best = max(map(rate, every))
    if best > MIN_GAIN * rate([0] * rows) + 1e-9:
        assert rate(chosen) == pytest.approx(best)
    else:
        assert chosen == [0] * rows or rate(chosen) == pytest.approx(best)


def test_passes_are_corrected_by_what_cycles_take() -> None:
    """Bug: one slow or first cycle counts; a size once slow is never tried; plain cycles make drafts look cheap."""
    seconds = PassSeconds((1, 4, 16), (1.0, 1.0, 2.0))

    def at(tokens: int) -> float:
        return float(seconds(np.array(tokens)))

    seconds.observe(4, 100.0)
    assert at(4) == 1.0
    for took in (3.0, 50.0, 3.0)[:CORRECTED_FROM]:
        seconds.observe(4, took)
    assert (at(1), at(4), at(16)) == (1.0, 3.0, 6.0)
    assert seconds.pace(4) == 3.0
    for _ in range(1 + CORRECTED_FROM):
        seconds.observe(16, 20.0)
    assert at(16) == 20.0
    for _ in range(CORRECT_EVERY + FORGOTTEN_AFTER):
        seconds.observe(4, 3.0)
    assert at(16) == 6.0


LAWS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.9, seed=4), Sampling(repetition_penalty=1.3))


CHOSEN = ["suffix", "prompt_lookup", "rest", "eagle2", "lookahead"]


@pytest.mark.cover(name=2)
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("name", CHOSEN)
def test_text_stays_the_same_whatever_is_chosen(name: str, with_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in unequal trees a row reads another's node, or what a guess is worth moves a token."""
    monkeypatch.setattr(PassSeconds, "observe", lambda *_: None)  # a busy machine must not make nodes dear
    if with_kernels and not kernels.available():
        pytest.skip(f"no kernels here: {kernels.why_not()}")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    target = Target(zoo.tiny("llama", **sizes))
    target = target.run_with(make_cpu_runner(target)) if with_kernels else target
    drafter = drafters.find(name).random(target)
    fallback = None if drafter.model_free else drafters.find("suffix").load(None, target)
    costs = curve(0.001, 0.001)
    settings = (drafter.max_tree, False, drafter.chooses_nodes, fallback, target.runner.skips_padding)
    policy = AdaptiveController(lambda: costs, *settings)
    prompts = ((5, 6, 7, 5, 6, 7, 5, 6), tuple(range(20, 49)) * 2, (11,), (9, 8, 9, 8, 9))
    laws = turn(name, CHOSEN, ((LAWS[0],) * 4, LAWS), offset=int(with_kernels))
    requests = [Request(prompt, 40 - 3 * n, law) for n, (prompt, law) in enumerate(zip(prompts, laws, strict=True))]
    got, steps = run(Decoder(target, with_policy(drafter, policy), 3), requests)
    for request, ids in zip(requests, got, strict=True):
        assert ids == plain_decode(target.model, request)
    counts = [step.draft.tree.counts for step in steps if step.draft is not None and step.draft.tree.counts]
    if drafter.chooses_nodes and name != "rest":
        assert any(len(set(each)) > 1 for each in counts), "no pass had trees of unequal sizes"
