"""Recurrent state by the CPU kernels: one token's bits in every shape of pass, in every format of weights, and after
every way to cut or to copy a row. tests/core/test_hybrids.py decodes with it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import kernels
from eyas.core.target import Target, TargetSession
from eyas.core.tree import Tree, Verdict
from eyas.kernels import WeightFormat
from eyas.runners.cpu import CpuRunner
from runners.test_cpu import ids, model, with_cpu_kernels

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")

FAMILIES = ("qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe")
GEMMA4 = ("gemma4_text of E2B", "gemma4_text of 26B")  # without states; keys of two sizes
PROMPT, MORE = ids(40), ids(12, 12)
TREE = Tree.build(torch.tensor([[-1, 0, 0, 1, 2, 4, 5, 3]]), 5)
TREE_TOKENS, PATH = [7, 8, 9, 10, 11, 12, 13, 14], [0, 2, 4, 5]  # a path that is not the first nodes


def accept(session: TargetSession, path: list[int], row: int = 0) -> None:
    """Commit a path of one row's nodes."""
    path_BP = torch.tensor([path] * session.rows)
    active_B = torch.arange(session.rows) == row
    count_B = torch.full((session.rows,), len(path))
    session.commit(Verdict(path_BP, path_BP, count_B, torch.zeros(session.rows)), active_B)
    session.set_host_lengths(session.length_B.tolist())


def text_of(path: list[int]) -> list[int]:
    return [*PROMPT, *(TREE_TOKENS[n] for n in path)]


def chain(session: TargetSession, tokens: list[int], row: int = 0) -> Tensor:
    """The logits [N, V] of a chain of tokens after a row's text."""
    tokens_BN = torch.tensor([tokens] * session.rows)
    return session.forward(tokens_BN, Tree.chain(session.rows, len(tokens)), (row,)).logits_BNV[row]


@pytest.mark.parametrize("weights", ["exact", "int8", "int4"])
@pytest.mark.parametrize("family", [*FAMILIES, *GEMMA4])
def test_a_token_has_the_same_bits_in_every_pass(family: str, weights: Any) -> None:
    """Guards the order of operations: prompts in one piece or in several, chains, trees, levels of a tree one by one,
    accepted paths."""
    if weights == "int4" and not kernels.has_dots():
        pytest.skip("no integer dot products, so no int4")
    plain = Target(model(family))
    target = plain.run_with(CpuRunner(plain, WeightFormat(weights)))
    own_V, ours_V = (one.open(1).prefill(0, PROMPT) for one in (plain, target))
    assert (
        float((own_V - ours_V).abs().max()) < {"exact": 3e-5, "int8": 2.0, "int4": 4.0}[weights]
    )  # int8 chooses other experts
    check_same_bits(target)


def check_same_bits(target: Target) -> None:
    session = target.open(1)
    session.prefill(0, PROMPT[:5])
    session.prefill(0, PROMPT[5:])
    logits_NV = session.forward(torch.tensor([TREE_TOKENS]), TREE).logits_BNV[0]
    for node in range(len(TREE_TOKENS)):
        path = TREE.mask_BNN[0, node].nonzero()[:, 0].tolist()
        assert torch.equal(target.open(1).prefill(0, text_of(path)), logits_NV[node])
    later = [session.extend(torch.tensor([TREE_TOKENS[:3]]), TREE.depth_BN[:, :3], TREE.mask_BNN[:, :3, :3])]
    later.append(session.extend(torch.tensor([TREE_TOKENS[3:]]), TREE.depth_BN, TREE.mask_BNN[:, 3:]))
    assert torch.equal(torch.cat([one.logits_BNV[0] for one in later]), logits_NV)
    accept(session, PATH)
    after_NV = chain(session, MORE)
    assert torch.equal(target.open(1).prefill(0, text_of(PATH) + MORE), after_NV[-1])
    assert torch.equal(chain(session, MORE), after_NV), "a pass that is not committed changes nothing"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_are_cut_and_copied(family: str) -> None:
    """Guards the accepted path that the state lacks until the next pass: cuts within it, to a prompt's end and to
    nothing, copies of other rows, and a row that sits out a pass."""
    target = with_cpu_kernels(family)
    session = target.open(3)
    for row in range(2):
        session.prefill(row, PROMPT)
    session.forward(torch.tensor([TREE_TOKENS] * 3), Tree.build(TREE.parents_BN.expand(3, -1).contiguous(), 5))
    accept(session, PATH)
    chain(session, MORE, row=1)  # row 0 sits out
    assert session.longest_known_prefix(0, 99) == len(PROMPT) + len(PATH)
    assert session.longest_known_prefix(0, len(PROMPT) + 2) == len(PROMPT) + 2
    assert session.longest_known_prefix(0, len(PROMPT) - 1) == 0
    for count in (len(PATH), 3, 1, 0):
        session.copy(0, 2, len(PROMPT) + count)
        expected_V = target.open(1).prefill(0, text_of(PATH[:count]) + MORE)
        assert torch.equal(chain(session, MORE, row=2)[-1], expected_V)
        session.truncate(0, len(PROMPT) + count)
    assert torch.equal(chain(session, MORE)[-1], target.open(1).prefill(0, PROMPT + MORE))
    accept(session, list(range(len(MORE))))
    assert torch.equal(chain(session, [5])[-1], target.open(1).prefill(0, [*PROMPT, *MORE, 5]))
    session.truncate(0, session.longest_known_prefix(0, len(PROMPT) + 1))  # the prompt's end, by its mark
    assert session.lengths[0] == len(PROMPT)
    assert torch.equal(chain(session, MORE)[-1], target.open(1).prefill(0, PROMPT + MORE))
    session.truncate(0, 0)
    assert torch.equal(session.prefill(0, MORE), target.open(1).prefill(0, MORE))


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", GEMMA4)
@torch.inference_mode()
def test_rows_with_keys_of_two_sizes_are_cut_and_copied(family: str, kv: Any) -> None:
    """Guards both caches, rounded: accepted paths, cuts within the window, before it and to nothing, copies."""
    plain = Target(model(family))
    target = plain.run_with(CpuRunner(plain, WeightFormat(kv=kv)))
    session = target.open(3)
    for row in range(2):
        session.prefill(row, PROMPT)
    session.forward(torch.tensor([TREE_TOKENS] * 3), Tree.build(TREE.parents_BN.expand(3, -1).contiguous(), 5))
    accept(session, PATH)
    chain(session, MORE, row=1)
    text = text_of(PATH)
    for length in (len(text), len(text) - 2, len(PROMPT) - 3, 5, 0):
        session.copy(0, 2, length)
        session.truncate(0, length)
        expected_V = target.open(1).prefill(0, text[:length] + MORE)
        for row in (2, 0):
            assert torch.equal(chain(session, MORE, row)[-1], expected_V)
    assert torch.equal(chain(session, MORE, 1)[-1], target.open(1).prefill(0, PROMPT + MORE))
