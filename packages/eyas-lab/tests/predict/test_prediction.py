"""Predictions against calculations by hand, and the directions in which they move; speed-ups from acceptance and costs;
this CPU as a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas import passes
from eyas.adaptive.cost import Costs
from eyas.core.drafter import TreeSize
from eyas.errors import EyasError
from eyas.hardware.machine import Used
from eyas_lab.predict import (
    Head,
    Machine,
    Model,
    Prediction,
    Settings,
    measure,
    read_head,
    read_machine,
    read_model,
)
from eyas_lab.predict.heads import TYPICAL, Acceptance
from eyas_lab.predict.speedup import Outcome, outcomes, tau_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100, **HEADS}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES, "tie_word_embeddings": False, "dtype": "float32"}
WEIGHTS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 64 * 100  # the input table is not read
EAGLE3 = 2 * 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128 + 50 * 64


def model(tmp_path: Path, **changes: Any) -> Model:
    """Return the sizes of a small model, from a config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_model(str(tmp_path / "config.json"))


def machine(**changes: Any) -> Machine:
    """Return a slow machine."""
    fields = {"name": "slow", "bandwidth": 1e6, "flops": 1e8, "pass_seconds": 0.001, "layer_seconds": 0.002}
    return Machine.from_json({**fields, **changes}, "slow.json")


def head(a: float = 0.7, **changes: Any) -> Head:
    """Return a small EAGLE-3 head."""
    fields = {"name": "head", "method": "eagle3", "once": 3 * 64 * 64, "level": EAGLE3, "shared": 0, "layers": 1}
    return Head(**{**fields, "stored": 64.0, "acceptance": Acceptance((a,), 0.05, "given"), **changes})


def best(*parts: Any) -> float:
    """Return the speed-up of the best tree."""
    return Prediction(*parts).trees(1)[0].speedup


def test_a_pass_by_hand(tmp_path: Path) -> None:
    """Bug: the input table counts, keys do not, or an overhead is left out."""
    small = model(tmp_path)
    assert (small.weights, small.stored, small.layers) == (WEIGHTS, 2 * 2 * 32, 2)
    one = Prediction(small, machine(number_bytes=2), head(), Settings(context=10)).pass_of(1)
    assert one.bytes == 4 * WEIGHTS + 2 * 128 * 10
    assert one.flops == 2 * (WEIGHTS + 2 * 128 * 10)  # two query heads for each head of keys
    assert one.seconds == pytest.approx(one.bytes / 1e6 + 0.001 + 2 * 0.002)
    assert one.bound == "bytes"
    half = Prediction(small, machine(number_bytes=2, overlap=0.5), head(), Settings(context=10)).pass_of(1)
    assert half.seconds == pytest.approx(one.seconds + one.flops / 1e8 / 2)
    many = Prediction(small, machine(), head(), Settings(rows=4, context=10)).pass_of(100)
    assert (many.bound, many.flops) == ("flops", 400 * one.flops)
    assert many.seconds == pytest.approx(many.flops / 1e8 + 0.005)


def test_a_tied_table_is_read_once_and_windows_end(tmp_path: Path) -> None:
    """Bug: an output matrix that is the input table too is left out, or a window sees all tokens."""
    assert model(tmp_path, tie_word_embeddings=True).weights == WEIGHTS
    window = model(tmp_path, model_type="mistral", sliding_window=8)
    assert window.keys(1000) == window.keys(8) == 8 * 128


def test_experts(tmp_path: Path) -> None:
    """Bug: a pass over one token reads all experts, or one over many reads two of them."""
    mixtral = model(tmp_path, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert (mixtral.experts, mixtral.chosen, mixtral.expert) == (4, 2, 2 * 3 * 64 * 128)
    assert mixtral.read(1) == mixtral.dense + 2 * mixtral.expert
    assert mixtral.read(2) == mixtral.dense + 3 * mixtral.expert  # 4 (1 - 1/4)
    assert mixtral.read(99) == pytest.approx(mixtral.weights)


def test_a_draft_by_hand(tmp_path: Path) -> None:
    """Bug: the first level, the deeper ones, or the overheads of a draft are counted wrongly."""
    costs = {"draft_seconds": 0.1, "level_seconds": 0.01, "draft_cycle_seconds": 0.5, "cycle_seconds": 0.25}
    prediction = Prediction(model(tmp_path), machine(**costs), head(0.5), Settings(context=0))
    size = TreeSize(4, 3, 1)
    read = 2 * (3 * 64 * 64 + 3 * EAGLE3) / 1e6  # in bfloat16: its bytes take longer than its operations
    assert prediction.draft(size) == pytest.approx(read + 0.1 + 3 * (0.01 + 0.002))
    tree = prediction.of_tree(size)
    plain = prediction.pass_of(1).seconds + 0.25
    assert tree.c == pytest.approx((prediction.pass_of(4).seconds + prediction.draft(size) + 0.5) / plain)
    assert tree.tau == 1 + 0.5 + 0.25 + 0.125
    assert tree.speedup == pytest.approx(tree.tau / tree.c)
    assert tree.low < tree.speedup < tree.high


def test_directions(tmp_path: Path) -> None:
    """Bug: a sign."""
    small, slow, settings = model(tmp_path), machine(), Settings()
    faster = [best(small, machine(flops=rate), head(), settings) for rate in (1e7, 1e8, 1e9)]
    assert faster == sorted(faster)
    assert faster[0] < faster[2]
    ratios = []
    for bandwidth in (1e6, 1e7, 1e8):  # the faster the memory, the less is free
        prediction = Prediction(small, machine(bandwidth=bandwidth, flops=1e9), head(), settings)
        ratios.append(prediction.pass_of(32).seconds / prediction.pass_of(1).seconds)
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[2]
    heads = [best(small, slow, head(a), settings) for a in (0.3, 0.5, 0.7, 0.9)]
    assert heads == sorted(heads)
    assert best(small, slow, head(), Settings(rows=64)) < best(small, slow, head(), settings)
    assert best(small, slow, head(level=10 * EAGLE3), settings) < best(small, slow, head(), settings)


def test_a_model_in_the_cache_is_not_read_from_memory(tmp_path: Path) -> None:
    """Bug: a small model is as slow as the memory; or a large one as fast as the cache."""
    small = model(tmp_path)
    for size, bound in ((4 * WEIGHTS, "flops"), (4 * WEIGHTS - 1, "bytes")):
        assert Prediction(small, machine(cache_bytes=size), head(), Settings()).pass_of(1).bound == bound


def test_rates_between_measured_tokens() -> None:
    """Bug: time falls between two numbers of tokens, or a format finds another one's rates."""
    table = machine(flops={"int8": {"2": 4.0, "4": 4.0, "8": 16.0}, "bfloat16": 9.0})
    assert table.rate("int8", 1) == table.rate("int8", 3) == 4.0
    assert 6 / table.rate("int8", 6) == pytest.approx((4 / 4 + 8 / 16) / 2)
    assert table.rate("int8", 99) == 16.0
    assert table.rate("int4", 1) == 9.0


def test_heads(tmp_path: Path) -> None:
    """Bug: a head's own sizes or its measured acceptance are not read; another model's head is taken."""
    small = model(tmp_path)
    folder = tmp_path / "head"
    folder.mkdir()
    config = {"draft_vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    found = read_head(str(folder), None, small)
    assert (found.method, found.level, found.once, found.shared) == ("eagle3", EAGLE3, 3 * 64 * 64, 0)
    assert found.acceptance == TYPICAL["eagle3"]
    (folder / "training.json").write_text(json.dumps({"heldout": {"0-alpha": 0.5, "1-alpha": 0.9, "2-alpha": None}}))
    by_depth = read_head(str(folder), None, small).acceptance.by_depth
    assert by_depth[0] == 0.5
    assert by_depth[-1] == pytest.approx((0.5 + 0.5 * 0.9) / 1.5, abs=1e-3)
    assert by_depth[-1] < by_depth[1] < 0.9  # the second depth is seen half as often
    assert read_head(str(folder), None, small, (0.3,)).acceptance.by_depth == (0.3,)
    (folder / "config.json").write_text(json.dumps({"model_type": "eyas_mtp", "hidden_size": 64}))
    assert read_head(str(folder), None, small).shared == 6400
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(EyasError, match="hidden size of 32"):
        read_head(str(folder), None, small)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 3}))
    draft = read_head(str(folder), None, small)
    assert (draft.method, draft.layers) == ("small_model", 3)


def test_text_drafts_chains_for_nothing(tmp_path: Path) -> None:
    """Bug: a look-up grows trees, or is charged for a head."""
    prediction = Prediction(model(tmp_path), machine(), read_head(None, "suffix", model(tmp_path)), Settings())
    trees = prediction.trees(3)
    assert all(tree.tree.branch == 1 and tree.draft_seconds == 0 for tree in trees)
    assert trees[0].tau == tau_of(trees[0].tree, TYPICAL["suffix"].by_depth)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "a machine is a JSON object"),
        ("{", "not JSON"),
        ('{"bandwidth": 1e9}', "flops must be given"),
        ('{"flops": 1e9}', "bandwidth must be given"),
        ('{"bandwidth": "fast", "flops": 1}', "bandwidth must be a number of at least 0, not 'fast'"),
        ('{"bandwidth": 1, "flops": {"int8": {"x": 1}}}', "'x' is not a number of tokens"),
        ('{"bandwidth": 1, "flops": {"int8": -1}}', "flops of int8 must be a number of at least 1, not -1"),
        ('{"bandwidth": 1, "flops": {}}', "flops must be given"),
        ('{"bandwith": 1, "flops": 1}', "unknown field 'bandwith'; did you mean bandwidth?"),
        ('{"bandwidth": 1, "flops": 1, "layer_seconds": -1}', "layer_seconds must be a number of at least 0"),
        ('{"bandwidth": 1, "flops": 1, "overlap": 2}', "overlap must be a number from 0 to 1, not 2"),
        ('{"bandwidth": NaN, "flops": 1}', "bandwidth must be a number"),
    ],
)
def test_machine_files_are_checked(tmp_path: Path, content: str, message: str) -> None:
    """Bug: a typing error becomes a wrong prediction, or a traceback."""
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(EyasError, match=message) as caught:
        read_machine(str(tmp_path / "machine.json"))
    assert "\n" not in str(caught.value)


RESULTS = Path(__file__).resolve().parents[4] / "docs" / "results"
LIMIT = TreeSize(26, 5, 4)


def costs(node: float, draft: float = 0.0) -> Costs:
    """A pass costs 1, and `node` more for each further node; each level of a draft `draft`."""
    nodes = (1, 2, 4, 8, 16, 64)
    return Costs(
        256, nodes, tuple(1 + node * (n - 1) for n in nodes), (1, 10), (draft, draft), (draft, draft), 0.0, 0.0
    )


def best_tree(costs: Costs, acceptance: float) -> Outcome:
    """Return the tree that makes most tokens a second."""
    return max(outcomes(costs, LIMIT, [acceptance]), key=lambda outcome: outcome.drafted)


def acceptance_of(tau: float, depth: int) -> float:
    """Return the acceptance with which a chain of `depth` draft tokens emits `tau` tokens a cycle."""
    roots = np.roots([*[1.0] * depth, 1 - tau])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def test_a_chain_emits_the_sum_of_powers() -> None:
    """Bug: the root or the bonus token is counted twice."""
    assert tau_of(TreeSize(4, 3, 1), [0.6]) == pytest.approx(1 + 0.6 + 0.6**2 + 0.6**3)


def test_free_nodes_are_all_drafted_and_dear_ones_not_at_all() -> None:
    """Bug: the costs do not reach the choice of the tree."""
    free, dear = best_tree(costs(0.0), 0.6), best_tree(costs(1.0), 0.6)
    assert free.tree.nodes > 20
    assert free.speedup == pytest.approx(free.tau)
    assert dear.drafted < 1
    assert dear.speedup == 1.0


def _heads() -> list[tuple[str, dict[str, float]]]:
    """(head, tau by tree) of the records with three trees."""
    found = []
    for name, heads in (("heads_mtp", ("eagle2", "eagle3", "mtp")), ("drafters", ("eagle3", "two", "mtp"))):
        record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["T = 0"]
        trees = [tree for tree in record if tree.count("/") == 2]
        found += [(head, {tree: record[tree]["tau"][head][0] for tree in trees}) for head in heads]
    return found


def test_tau_of_trees_follows_from_the_chain() -> None:
    """Guards the formula for siblings: from the tau of a chain of three, that of the larger trees of
    six measured heads within 7 % (root mean square)."""
    misses = []
    for _, taus in _heads():
        acceptance = acceptance_of(taus["4/3/1"], 3)
        for tree in ("8/4/2", "26/5/4"):
            expected = tau_of(TreeSize(*map(int, tree.split("/"))), [acceptance])
            misses.append(expected / taus[tree] - 1)
    assert float(np.sqrt(np.mean(np.square(misses)))) < 0.07


def test_noise_in_the_costs_makes_no_draft_cheaper_than_none() -> None:
    """Bug: on a busy machine a cycle with a draft was measured shorter than a plain one, and a head that
    accepts little was expected to double the speed."""
    noisy = Costs(256, (1, 8), (1.0, 1.0), (1, 10), (0.0, 0.0), (0.0, 0.0), 0.5, 0.0)
    assert best_tree(noisy, 0.3).cost >= 1


CONFIG = Path(__file__).resolve().parents[4] / "tiny" / "eyas_tiny" / "weights" / "config.json"


@pytest.mark.slow
def test_this_cpu_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rate is missing or not a number; it is measured again each time, or not when told to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(passes, "REPEATS", 1)
    monkeypatch.setattr(measure, "LARGE", measure.CACHED)
    monkeypatch.setattr(measure, "TOKENS", (1, 8))
    monkeypatch.setattr(measure, "used", lambda before: Used(1.0, 99.0))
    measure.measured_machine("int8")
    assert not list(tmp_path.rglob("machine-*")), "a busy machine's figures are kept"
    monkeypatch.setattr(measure, "used", lambda before: Used(1.0, 0.0))
    machine = measure.measured_machine("int8")
    assert set(machine.flops) == {"int8", "draft"}
    assert all(rate > 0 for table in machine.flops.values() for rate in table.values())
    assert machine.bandwidth > 0
    assert machine.cycle_seconds > 0
    monkeypatch.setattr(measure, "measure", lambda *given: pytest.fail("measured again"))
    assert measure.measured_machine("int8") == machine
    with pytest.raises(pytest.fail.Exception):
        measure.measured_machine("int8", force=True)
    with pytest.raises(pytest.fail.Exception):
        measure.measured_machine("float32")


def test_the_overlap_is_found() -> None:
    """Bug: bandwidth and overlap do not explain the passes that they are taken from."""
    sizes = read_model(str(CONFIG))
    made = Machine("", 8e8, {"float32": {1: 1e9}}, 0.3)
    took = {n: made.seconds(4.0 * sizes.weights, sizes.flops(n, 32), "float32", n, 1.0)[0] for n in (1, 2, 4, 8)}
    found = measure._with_bandwidth(replace(made, bandwidth=1.0, overlap=1.0), "float32", took, sizes)
    assert (found.bandwidth, found.overlap) == pytest.approx((8e8, 0.3))
