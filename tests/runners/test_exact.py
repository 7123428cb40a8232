"""The guarantee of the CPU kernels: in every format of weights and activations, logits have the bits of plain decoding and
ids are equal, whatever else is in a pass.

As in test_kernels.py, every test runs for each instruction set that this machine has.
"""

import random

import pytest
import torch

import exact
import zoo
from exact import MODELS, MODES, PASSES, Referee, by_kernels, model, name_of, runnable
from eyas import runners
from eyas.core.sampling import Sampling, apply_sampling
from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.formats import WeightFormat
from eyas.kernels._build import NATIVE
from eyas.runners._decoders import FAMILIES
from eyas.runners.cpu import CpuRunner
from test_kernels import _kernels, needs  # noqa: F401

EFFORT = 0.1  # the share of the cases that are tried


def by_turns(number: int) -> tuple[str, int]:
    """Return a model and a number of threads. Both come with every mode and with every kind of pass."""
    return list(MODELS)[number % len(MODELS)], number % 2 + 1


def kinds_of_passes(mode: WeightFormat, isa: str) -> list[str]:
    """Return the kinds of passes that are tried: all of them by the native kernels, else two by turns."""
    names, turn = list(PASSES), MODES.index(mode)
    return names if isa == NATIVE else [names[(turn + i) % len(names)] for i in range(2)]


@pytest.mark.cover(mode=5)
@needs
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_logits_have_the_bits_of_plain_decoding(mode: WeightFormat, request: pytest.FixtureRequest) -> None:
    """Guards every place where the order of a sum, a scale or a choice of kernels could depend on what else is in the
    pass: tiles, blocks of rows, weights that are widened once, groups of queries, windows, copies of keys, threads."""
    if not runnable(mode):
        pytest.skip("this instruction set lacks the instructions")
    for name in kinds_of_passes(mode, request.node.callspec.params["_kernels"][0]):
        family, threads = by_turns(list(PASSES).index(name) + MODES.index(mode))
        found = PASSES[name](by_kernels(model(family), mode, threads), random.Random(0), EFFORT)
        counts = exact.compare(Referee(by_kernels(model(family), mode)), found)
        assert counts.compared > 50, name
        assert not counts.different, f"{name}, {family}, {threads} threads: {counts}"


@pytest.mark.cover(mode=2)
@needs
@pytest.mark.quick("native-int4-int8")
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_ids_equal_plain_decoding_at_near_ties(mode: WeightFormat) -> None:
    """Guards the whole loop. Each token of these models has a twin whose logit is about 10^-6 away, so that bits which
    differ become ids which differ."""
    if not runnable(mode):
        pytest.skip("this instruction set lacks the instructions")
    family, _ = by_turns(MODES.index(mode))
    counts = exact.compare_ids(by_kernels(model(family), mode), by_kernels(model(family), mode), EFFORT)
    assert counts.compared >= 16
    assert not counts.different, f"{family}: {counts}"


@needs
def test_rotary_tables_do_not_depend_on_their_length() -> None:
    """Guards positions: the table of cosines grows with the text, so its numbers must not depend on how many are
    computed at once."""
    whole, grown = CpuRunner(model("llama")), CpuRunner(model("llama"))
    whole.tables(exact.CONTEXT)
    for positions in (1, 255, 257, 700):
        grown.tables(positions)
        count = grown._cosine.shape[1]
        assert torch.equal(whole._cosine[:, :count], grown._cosine)
        assert torch.equal(whole._sine[:, :count], grown._sine)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_k=20, top_p=0.9), Sampling(1.3, min_p=0.05), Sampling(0.6, top_p=0.5)], ids=str
)
def test_scores_do_not_depend_on_other_nodes(sampling: Sampling) -> None:
    """Guards sampling: the filters of a node's logits give the same bits alone and among others, ties included, so the
    same random numbers draw the same token."""
    logits_NV = torch.randn(70, 1001, generator=torch.Generator().manual_seed(0))
    logits_NV[:, 500:1000] = logits_NV[:, :500]
    alone_NV = torch.cat([apply_sampling(logits_NV[n : n + 1], sampling) for n in range(70)])
    for count in (2, 7, 16, 33, 70):
        assert torch.equal(apply_sampling(logits_NV[:count], sampling), alone_NV[:count])


@needs
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "jamba"])
def test_no_other_model_is_rounded(family: str) -> None:
    """Guards the edge of the guarantee: models without kernels run by torch's products, whose sums depend on the
    shape of a pass, and rounding is refused there."""
    assert family not in FAMILIES
    made = (zoo.FAMILIES | zoo.HYBRIDS)[family]()
    with pytest.raises(OptionError, match="there are none for this model"):
        runners.with_fastest_runner(Target(made), weights="int8")
    with pytest.raises(OptionError, match="none whose sums have one order: the kernels do not know the family"):
        runners.with_fastest_runner(Target(made), "fixed")


@needs
def test_fixed_kernels_are_the_kernels() -> None:
    """Guards `kernels="fixed"` on a CPU, rounded and not: the same kernels, also for a model that the caller loaded."""
    for weights in ("exact", "int8"):
        made = runners.with_fastest_runner(model("llama"), "fixed", own=False, weights=weights)
        assert made.runner.name == "kernels"
