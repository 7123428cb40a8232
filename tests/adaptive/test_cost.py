"""The measurement of costs and the file that keeps them. No time is compared with another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zoo
from curves import curve
from eyas import drafters, passes
from eyas.adaptive import cost, make_controller
from eyas.adaptive.cost import Costs, cost_key, cost_path, load_costs
from eyas.arguments import mode_of
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter, TreeSize
from test_lossless import make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eyas"


GROWING = (
    "dflash", "dflash2", "dspark", "eagle2", "eagle3", "gemma4_assistant", "glide", "hydra", "medusa", "mtp", "pard", "peagle", "seagle",
)  # fmt: skip


def test_costs_between_and_beyond_what_was_measured() -> None:
    """Bug: a size that was not measured gets the time of another one, or less than a smaller one."""
    costs = Costs(256, (1, 4, 8), (1.0, 1.6, 1.4), (1, 4), (0.5, 0.8), (0.25, 0.4), 0.125, 0.375)
    assert costs.plain() == pytest.approx(1.125)
    assert costs.plain(4) == pytest.approx(1.725)
    assert costs.draft(1, 1) == pytest.approx(0.5)
    assert costs.draft(3, 2) == pytest.approx(0.6 + 2 * 0.3)
    assert costs.cycle(TreeSize(2, 3, 2)) == pytest.approx(1.2 + 1.2 + 0.375)
    assert costs.cycle(TreeSize(16, 1, 1)) == pytest.approx(1.4 + 0.5 + 0.375)  # never falling past the end
    assert costs.draft(1, 8) == pytest.approx(0.8 + 0.4)
    assert curve(0.1, 0.1).cycle(TreeSize(128, 1, 1)) == pytest.approx(1 + 0.1 * 127 + 0.1)
    assert cost._rising([2.6, 1.2, 1.3, 3.0]) == (1.2, 1.2, 1.3, 3.0)  # the first one was held up


@pytest.mark.slow
def test_which_methods_grow(target: Target) -> None:
    """Bug: a method that grows its trees is not planned for, or one that does not is asked for sizes."""
    assert {name for name in drafters.names() if make(name, target).max_tree is not None} == set(GROWING)
    kind = drafters.find("small_model")
    grown = kind.random(target, build_options(kind.Options, {"depth": 3, "dynamic.nodes": 9}))
    assert grown.max_tree == TreeSize(9, 3, 4)
    assert make_controller(make("vanilla", target)) is None
    assert all(make_controller(make(name, target)) is not None for name in drafters.names() if name != "vanilla")


@pytest.mark.cover(name=5)
@pytest.mark.quick("eagle2")
@pytest.mark.parametrize("name", GROWING)
def test_measuring(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a method cannot be measured, or what was measured is not whole."""
    monkeypatch.setattr(passes, "REPEATS", 1)
    drafter = make(name, target)
    found = cost.measure(drafter)
    assert found.nodes == passes.NODES
    assert found.branches[-1] in (drafter.max_tree.branch, cost.ROWS * drafter.max_tree.branch)
    assert Costs.from_json(json.loads(json.dumps(vars(found)))) == found
    assert found.cycle(TreeSize(8, 2, 2)) > 0


class Maker:
    """Counts how often it measures."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, drafter: Drafter) -> Costs:
        self.count += 1
        return curve(0.1 * self.count, 0.1)


def test_measured_once(target: Target, cache: Path) -> None:
    """Bug: every start measures, or a machine's times are those of another model, head, number of threads or dtype."""
    make_costs, drafter = Maker(), make("eagle2", target)
    first, known = load_costs(drafter, make=make_costs)
    assert not known
    assert load_costs(drafter, make=make_costs) == (first, True)
    assert cost_path(cost_key(drafter)).parent == cache
    assert [p.name for p in cache.iterdir()] == [cost_path(cost_key(drafter)).name], "something temporary was left"
    assert load_costs(drafter, force=True, make=make_costs)[0] != first
    assert make_costs.count == 2
    others = [make("eagle3", target), make("eagle2", target, **{"tree.nodes": 9})]
    others.append(make("eagle2", Target(zoo.FAMILIES["mistral"]())))
    assert len({cost_path(cost_key(d)) for d in (drafter, *others)}) == 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert cost_path(cost_key(drafter)) != cost_path({**cost_key(drafter), "threads": threads})
    finally:
        torch.set_num_threads(threads)


@pytest.mark.quick("", "null", "extra", "nan", "foreign", "negative")
@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"key": 1}', "negative", "short", "nan", "foreign", "text", "empty", "extra"]
)
def test_a_broken_file_is_measured_anew(damage: str, target: Target, cache: Path) -> None:
    """Bug: a file that was cut off, edited, or copied from elsewhere stops the program, or is believed."""
    make_costs, drafter = Maker(), make("eagle2", target)
    load_costs(drafter, make=make_costs)
    path = cost_path(cost_key(drafter))
    found = json.loads(path.read_text())
    edits = {
        "negative": {"verify": [-1.0] * 7}, "short": {"verify": [1.0]}, "nan": {"rest": float("nan")}, "text": {"first": ["a", "b"]},
        "empty": {"nodes": [], "verify": []}, "extra": {"colour": 1},
    }  # fmt: skip
    if damage == "foreign":
        found["key"]["cpu"] = "another"
    whole = json.dumps({**found, "costs": {**found["costs"], **edits.get(damage, {})}})
    path.write_text(whole if damage in (*edits, "foreign") else damage)
    _, known = load_costs(drafter, make=make_costs)
    assert not known
    assert make_costs.count == 2
    assert load_costs(drafter, make=make_costs)[1], "it was not written whole"


def test_what_is_asked_of_trees() -> None:
    """Bug: a tree that the user describes is changed by a policy, or the other way round."""
    assert mode_of({}) == ("auto", {})
    assert mode_of({"tree": "fixed", "noise": "none"}) == ("fixed", {"noise": "none"})
    assert mode_of({"tree": "auto", "tree.depth": 5}) == ("auto", {"tree.depth": 5})
    inner = {"tree": {"nodes": 9}}
    for given in ({"tree.nodes": 9}, inner, {"depth": 3}, {"dynamic.nodes": 9}, {"tree.noise": "none"}):
        assert mode_of(given) == ("fixed", given)
    assert mode_of({"window.size": 9, "suffix.nodes": 3})[0] == "auto"
    with pytest.raises(ValueError, match="unknown tree 'atuo'; did you mean auto"):
        mode_of({"tree": "atuo"})


def busy(spread: float = 0.0, others: float = 0.0, at: float = 1000.0) -> Costs:
    return replace(curve(0.1, 0.1), spread=spread, others=others, measured_at=at)


@pytest.mark.parametrize(("spread", "others"), [(0.6, 0.1), (0.05, 0.5)])
def test_doubtful_costs_expire(spread: float, others: float, target: Target, cache: Path) -> None:
    """Bug: a busy minute's figures are kept for ever, and trees are planned by them on a quiet machine."""
    drafter, clock, made = make("eagle2", target), [1000.0], list[Costs]()

    def measured(drafter: Drafter) -> Costs:
        made.append(busy(spread, others, clock[0]) if len(made) < 2 else busy(at=clock[0]))
        return made[-1]

    def load_at(seconds: float) -> bool:
        clock[0] = seconds
        return load_costs(drafter, make=measured, now=lambda: clock[0])[1]

    assert not load_at(1000.0)
    assert load_at(1000.0 + cost.DOUBTFUL_SECONDS - 1)
    assert not load_at(1000.0 + cost.DOUBTFUL_SECONDS)
    assert not load_at(500.0), "the clock was set back: the age is unknown"
    assert not made[-1].doubtful
    assert load_at(1e12), "a good measurement does not expire"
    assert len(made) == 3
