"""The vectors are what eyas and the package's own reference compute, each planted fault leaves numbers of its own, and the
runner names it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from draft_vectors import runner
from draft_vectors.decode import Case
from draft_vectors.engines.eyas import Eyas
from draft_vectors.engines.transformers import Transformers
from draft_vectors.faults import FAULTS
from draft_vectors.heads import Target
from draft_vectors.runner import TOLERANCES, Observed, Reference, Vectors, check, differences, fitting_faults, observe
from eyas.core.tree import Draft, Verdict
from eyas.core.verify import accepted_nodes, verdict_of, verify

VECTORS = Vectors()
EXACT = TOLERANCES["float32"]
CASES = list(VECTORS.cases)
QUICK = ("eagle1-tree-rejection", "dspark-chain-greedy")
ONE = [name for name in CASES if "chain" in name] + [
    "mtp-one-greedy",
    "eagle2-tree-draw",
    "peagle-tree-draw",
    "eagle1-tree-rejection",
]


@pytest.fixture
def engine() -> Eyas:
    """eyas, whose target and heads a test may change."""
    torch.set_num_threads(1)
    return Eyas(runner.DATA)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """runs/make_vectors.py."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
    return importlib.import_module("make_vectors")


@pytest.mark.quick(*QUICK)
@pytest.mark.cover(name=14)
@pytest.mark.parametrize("name", CASES)
def test_both_implementations_agree(name: str, engine: Eyas) -> None:
    """Guards the vectors against a change of eyas, and of the reference."""
    case = VECTORS.cases[name]
    for one in (engine, Reference(runner.DATA)):
        seen = observe(one, case, VECTORS)
        assert seen is not None
        assert len(seen.drafts) == len(VECTORS.drafts(case)) >= 1
        assert differences(seen, VECTORS.right(case), EXACT) == []


@pytest.mark.slow
def test_eyas_in_bfloat16() -> None:
    """Guards the tolerances of bfloat16: no text differs, and accepted tokens hardly do. The best token leads by more than
    twice the tolerance of logits, so an engine within it cannot emit another text."""
    torch.set_num_threads(1)
    results = check(Eyas(runner.DATA, "bfloat16"), VECTORS, "eagle3", lambda line: None)
    assert [result.lines() for result in results if result.differences] == []
    lead = min(float(leads(number).min()) for number in range(len(VECTORS.prompts)))
    assert lead > 2 * TOLERANCES["bfloat16"].logits


def leads(number: int) -> np.ndarray[Any, Any]:
    """Return the lead of the target's best token over the second, after each token of a text but its last."""
    ordered = np.sort(VECTORS.arrays[f"text.{number}.logits"], -1)[len(VECTORS.prompts[number]) - 1 : -1]
    return ordered[:, -1] - ordered[:, -2]


@pytest.mark.slow
def test_transformers() -> None:
    """Guards the class for transformers, a third implementation of the target and of MTP modules."""
    results = check(Transformers(runner.DATA), VECTORS, show=lambda line: None)
    assert [result.case for result in results] == [
        "target, text 0",
        "target, text 1",
        "target, text 2",
        "mtp-one-greedy",
    ]
    assert not any(result.differences for result in results)


@pytest.mark.quick("medusa-tree-greedy")
@pytest.mark.parametrize("name", ["eagle1-chain-rejection", "eagle3-tree-greedy", "medusa-tree-greedy"])
def test_vectors_are_made_again(name: str, maker: ModuleType, engine: Eyas) -> None:
    """Guards the generator: from the weights of the package it makes the numbers that are stored, up to rounding."""
    case = VECTORS.cases[name]
    assert case in maker.cases()
    kept, arrays = maker.record(case, 0, VECTORS.prompts[0], Target(runner.DATA / "target"), engine)
    stored = VECTORS.answers[name][0]
    assert kept["ids"] == stored["ids"]
    for one, other in zip(kept["cycles"], stored["cycles"], strict=True):
        assert one.pop("log_q") == pytest.approx(other["log_q"], abs=1e-4)
        assert one == {key: other[key] for key in one}
    assert {key for key in VECTORS.arrays if key.startswith(f"{name}.")} == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(array, VECTORS.arrays[key], atol=1e-4)


@pytest.mark.slow
@pytest.mark.cover(name=4)
@pytest.mark.parametrize("name", ONE)
def test_each_fault_leaves_numbers_of_its_own(name: str) -> None:
    """Guards the diagnosis: no two faults have the same numbers, and none has the right ones."""
    case = VECTORS.cases[name]
    seen = {fault: observe(Reference(runner.DATA, fault=fault), case, VECTORS) for fault in FAULTS}
    left = {fault: numbers for fault, numbers in seen.items() if numbers is not None}
    assert len(left) >= 5
    for fault, numbers in left.items():
        assert differences(numbers, VECTORS.right(case), EXACT), fault
        assert [other for other in left if not differences(numbers, left[other], EXACT)] == [fault]


# --- faults that are planted in eyas, which the reference knows nothing of


def change_layers(by: int) -> Callable[[Any], None]:
    def change(drafter: Any) -> None:
        drafter.feature_layers = tuple(k + by for k in drafter.feature_layers)

    return change


def no_norm_of_features(drafter: Any) -> None:
    drafter.net.layer.hidden_norm = nn.Identity()


def no_norm_of_output(drafter: Any) -> None:
    drafter.net.norm = nn.Identity()


def draft_ids_without_map(drafter: Any) -> None:
    drafter.draft_ids_v = torch.arange(len(drafter.draft_ids_v))


def other_rope_theta(drafter: Any) -> None:
    attention = drafter.net.layer.attention
    attention.shape = replace(attention.shape, rope_theta=attention.shape.rope_theta * 100)


def slots_one_off(drafter: Any) -> None:
    drafter.block_format = replace(drafter.block_format, from_anchor=not drafter.block_format.from_anchor)


def no_markov_head(drafter: Any) -> None:
    nn.init.zeros_(drafter.net.markov.after.weight)


IN_HEADS = [
    ("layers_one_above", "eagle3-chain-greedy", change_layers(1)),
    ("layers_one_below", "eagle3-tree-draw", change_layers(-1)),
    ("layers_one_below", "dflash-chain-greedy", change_layers(-1)),
    ("layers_one_below", "medusa-tree-greedy", change_layers(-1)),
    ("no_norm_of_features", "eagle3-chain-greedy", no_norm_of_features),
    ("no_norm_of_output", "peagle-chain-greedy", no_norm_of_output),
    ("draft_ids_without_map", "seagle-chain-greedy", draft_ids_without_map),
    ("other_rope_theta", "eagle1-chain-greedy", other_rope_theta),
    ("slots_one_off", "dflash-tree-greedy", slots_one_off),
    ("no_markov_head", "dspark-tree-draw", no_markov_head),
]


@pytest.mark.quick("layers_one_above-*")
@pytest.mark.parametrize(("fault", "name", "plant"), IN_HEADS, ids=[f"{fault}-{name}" for fault, name, _ in IN_HEADS])
def test_faults_of_heads_in_eyas(fault: str, name: str, plant: Callable[[Any], None], engine: Eyas) -> None:
    """Guards the diagnosis against faults that only look like themselves: another implementation has the fault, and the
    runner names it and no other."""
    case = VECTORS.cases[name]
    plant(engine.drafter(case))
    assert named(engine, case) == [fault]


def named(engine: Eyas, case: Case) -> list[str]:
    seen = observe(engine, case, VECTORS)
    assert seen is not None
    assert differences(seen, VECTORS.right(case), EXACT)
    return fitting_faults(seen, case, VECTORS, EXACT)


def lenient(draft: Draft, scores: Any, position: Any, noise: Any, ops: Any = None) -> Verdict:
    """Accept a token of a chain if it is one of the target's two best."""
    best = scores.argmax(-1)
    second = scores.scatter(-1, best[..., None], -torch.inf).argmax(-1)
    child = draft.tokens_BN.roll(-1, 1)
    accepted, _ = accepted_nodes(draft.tree, draft.tokens_BN, torch.where(second == child, second, best))
    last = accepted.sum(-1, keepdim=True) - 1
    return verdict_of(draft.tree, draft.tokens_BN, accepted, best.gather(1, last)[:, 0])


@pytest.mark.slow
def test_lenient_acceptance_in_eyas(engine: Eyas) -> None:
    """Guards the diagnosis of verification that changes the text."""
    engine.decoder_options = {"verify": lenient}
    assert named(engine, VECTORS.cases["eagle3-chain-greedy"]) == ["lenient_acceptance"]


@pytest.mark.slow
def test_noise_that_eyas_reads_twice(engine: Eyas) -> None:
    """Guards the rule of drawn tokens: each cycle begins with the same noise."""
    again = lambda draft, scores, position, noise, ops=None: verify(draft, scores, position * 0, noise, ops)  # noqa: E731
    engine.decoder_options = {"verify": again}
    assert named(engine, VECTORS.cases["mtp-tree-draw"]) == ["noise_read_twice"]


@pytest.mark.slow
def test_an_engine_that_shows_texts_only(engine: Eyas) -> None:
    """Guards what most engines can show: texts and accepted tokens are enough to name a fault; texts alone cannot, if the
    fault is one of drafts."""
    case = VECTORS.cases["eagle3-chain-greedy"]
    change_layers(1)(engine.drafter(case))
    seen = observe(engine, case, VECTORS)
    assert seen is not None
    assert fitting_faults(Observed(seen.answers), case, VECTORS, EXACT) == ["layers_one_above"]
    texts = Observed([answer and replace(answer, accepted=None) for answer in seen.answers])
    assert differences(texts, VECTORS.right(case), EXACT) == []


class Shifted(Reference):
    """An engine with a fault, for the command line."""

    def __init__(self, data: Path, dtype: str) -> None:
        super().__init__(data, dtype, "layers_one_above")


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards exit status and report: the fault's words are there, and an engine without one passes."""
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    for engine, status in (("mine:Shifted", 1), ("draft_vectors.runner:Reference", 0)):
        monkeypatch.setattr(sys, "argv", ["draft_vectors", engine, "--only", "peagle-chain"])
        assert runner.main() == status
    shown = capsys.readouterr().out
    assert "FAIL  peagle-chain-greedy" in shown
    assert f"fits: layers_one_above: {FAULTS['layers_one_above'].says}" in shown
    assert shown.endswith("ok    peagle-chain-greedy\nreference, float32: 1 of 1 as the vectors\n")


def test_the_package_is_small_and_alone() -> None:
    """Guards what an engine's CI installs: 5 MB of data, and neither eyas nor torch."""
    files = [file for file in runner.DATA.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 5_000_000
    code = "import sys, draft_vectors.runner; print(*sorted({'torch', 'eyas', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_weights_are_exact_in_bfloat16() -> None:
    """Guards that an engine has the same weights in both dtypes."""
    for file in runner.DATA.glob("*/*.safetensors"):
        for name, weight in load_file(file).items():
            if weight.dtype == np.float32:
                assert not (weight.view(np.uint32) & 0xFFFF).any(), (file.parent.name, name)
