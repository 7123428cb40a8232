"""Profiles of hand-made steps and sizes; the needs of a tiny model's pass, compared with numbers
worked out on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zoo
from eyas import drafters, kernels
from eyas.bench import cost
from eyas.bench.cost import Need
from eyas.bench.profile import bound, cycles_of, trace_names
from eyas.core.dormant import Decision
from eyas.core.engine import Step
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.runners import with_fastest_runner

PARTS = {"draft": 0.001, "target": 0.004, "verify": 0.002, "commit": 0.001}


def cycle(emitted: int, nodes: int = 4, plain: bool = False, slower: float = 1.0) -> Step:
    """A cycle of a chain that accepted all but the bonus of what it emitted."""
    draft = Draft(Tree.chain(1, nodes), torch.zeros(1, nodes, dtype=torch.long))
    parts = {name: slower * seconds for name, seconds in PARTS.items()}
    decision = Decision(plain=frozenset({0}) if plain else frozenset())
    return Step(
        1,
        (5,) * emitted,
        emitted - 1,
        False,
        None,
        tuple(range(emitted)),
        draft,
        stage_seconds=parts,
        decision=decision,
    )


PROMPT = (Step(1, (5,), 0, True, None), 9.0)


def test_stages_of_a_cycle() -> None:
    """Bugs: the prompt's pass or cycles that warm up are in the means; what no stage claims is
    lost; percent of the stages, not of the cycle; the context is counted with the root, which is in
    no cache yet, or where the cycle ends."""
    timed = [PROMPT, (cycle(2, slower=50), 7.0), (cycle(3), 0.010), (cycle(1), 0.014)]
    found = cycles_of(timed, prompt_tokens=100, warm=1)
    assert found is not None
    assert found["ms"] == pytest.approx({"draft": 1, "target": 4, "verify": 2, "commit": 1, "host": 4})
    assert found["percent"] == pytest.approx(
        {"draft": 8.3, "target": 33.3, "verify": 16.7, "commit": 8.3, "host": 33.3}
    )
    assert (found["cycles"], found["plain"], found["nodes"], found["cycle_ms"]) == (2, 0, 4, pytest.approx(12))
    assert found["context"] == pytest.approx((102 + 105) / 2, abs=0.1)


def test_cycles_without_a_draft_are_apart() -> None:
    """Bugs: a governor that let half of the cycles go plain halves the draft, another drafter's
    cycles count as the method's; or nothing is left when all of them were plain."""
    some = cycles_of([PROMPT, (cycle(3, nodes=6), 0.010), (cycle(1, nodes=1, plain=True), 0.006)], 10, warm=0)
    assert some is not None
    assert (some["cycles"], some["plain"], some["nodes"], some["cycle_ms"]) == (1, 1, 6, pytest.approx(10))
    spared = replace(
        cycle(9, nodes=16), decision=Decision(fallback=drafters.find("suffix")(Target(zoo.FAMILIES["llama"]())))
    )
    some = cycles_of([PROMPT, (cycle(3, nodes=6), 0.010), (spared, 0.006)], 10, warm=0)
    assert some is not None
    assert (some["cycles"], some["plain"], some["nodes"]) == (1, 1, 6)
    every = cycles_of([PROMPT, (cycle(1, nodes=1, plain=True), 0.010)], 10, warm=0)
    assert every is not None
    assert (every["cycles"], every["plain"], every["nodes"]) == (1, 1, 1)


def test_no_cycle_to_tell_of() -> None:
    """Bug: the mean of nothing, for a prompt that fills the context."""
    assert cycles_of([PROMPT], 10) is None
    assert cycles_of([PROMPT, (cycle(1), 1.0)], 10, warm=1) is None


def test_the_bound_is_the_larger_side() -> None:
    """Bugs: the smaller side or their sum is the bound, milliseconds are seconds, or a pass is
    compared with a cycle."""
    ms = {"draft": 3.0, "target": 6.0, "verify": 1.0}
    reading = bound(Need(bytes=4e6, flops=1e6), 2e9, 1e9, ms)
    assert reading is not None
    assert (reading["binds"], reading["bytes_ms"], reading["flops_ms"], reading["ms"]) == ("bytes", 2.0, 1.0, 2.0)
    assert (reading["pass_over_bound"], reading["cycle_over_bound"]) == (3.0, 5.0)
    computing = bound(Need(bytes=4e6, flops=4e6), 2e9, 1e9, ms)
    assert computing is not None
    assert (computing["binds"], computing["ms"], computing["pass_over_bound"]) == ("flops", 4.0, 1.5)
    assert bound(Need(1, 1), None, 1e9, ms) is None
    assert bound(Need(1, 1), 1e9, None, ms) is None


def test_what_a_pass_needs() -> None:
    """Bugs: an embedding table counts though rows of it are read, keys count by query heads or
    attention's flops by key heads, or nodes multiply what is read."""
    it = Target(zoo.FAMILIES["llama"]())  # 4 layers; 4 heads, 2 of keys, of width 12; float32
    weights = sum(p.numel() for p in it.model.parameters()) - zoo.VOCAB * it.hidden_size
    found = cost.need(it, nodes=5, context=100)
    assert found.bytes == cost.bytes_per_step(it) + 4 * (4 * 2 * 24 * 100)
    assert found.flops == 2 * 5 * (weights + 4 * 4 * 24 * 100)
    assert cost.bytes_per_step(it) == 4 * weights
    assert cost.need(it, nodes=1, context=100).bytes == found.bytes


def test_a_window_is_all_that_is_needed() -> None:
    """Bug: layers that see 16 tokens are said to read the whole context, so that passes are faster
    than their bound."""
    it = Target(zoo.FAMILIES["mistral"]())
    assert it.family.window == zoo.WINDOW
    far, near = (cost.need(it, 1, context) for context in (400, zoo.WINDOW))
    assert far == near
    assert cost.need(it, 1, zoo.WINDOW - 1).bytes < near.bytes


def test_traces_have_names_of_their_own() -> None:
    """Bug: two variants write into one file, or a path in a method's options leads into another folder."""
    names = trace_names(["eagle2", "eagle2:tree.nodes=26:head=a/b", "eagle2:tree.nodes=26:head=a_b", "x" * 300])
    assert names[:2] == ["trace-eagle2.json", "trace-eagle2_tree.nodes=26_head=a_b.json"]
    assert len(set(names)) == 4
    assert not any("/" in name or len(name) > 120 for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["off", "on"])
def test_a_rate_is_measured(by: str) -> None:
    """Bug: no rate where there could be one, by torch or by kernels. Timing is not asserted."""
    model = zoo.tiny(
        "llama", hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2
    )
    if by == "on" and not kernels.available():
        pytest.skip(f"no kernels here: {kernels.why_not()}")
    target = with_fastest_runner(Target(model), kernels=by)
    assert (target.runner.name == "kernels") == (by == "on")
    rate = cost.flop_rate(target)
    assert rate is not None
    assert rate > 0
