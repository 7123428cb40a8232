"""Empty rows: a forward leaves them out, wherever they are, and the results of the others do not change."""

from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import drafters, kernels
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Tree
from reference import plain_decode, run, widths_of

FEATURES = (1, 4)
needs = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_a_forward_of_some_rows(family: str) -> None:
    """Bug: keys are stored in another row, a row attends to another's keys, outputs land in wrong rows."""
    target, tree = Target(zoo.FAMILIES[family]()), Tree.chain(4, 3)
    tokens_BN = torch.tensor([[3, 4, 5], [9, 8, 7], [11, 12, 13], [20, 30, 40]])
    outputs = []
    for rows in ((), (1, 3)):
        session = target.open(4, FEATURES)
        for b in range(4):
            session.prefill(b, [5 + b, 9, 6 + b, 2][: 2 + b % 3])
        first = session.forward(tokens_BN, tree, rows)
        session.advance(torch.tensor([0, 2, 0, 2]), [4, 5, 4, 5])
        outputs.append((first, session.forward(tokens_BN, tree, rows)))
    for whole, some in zip(*outputs, strict=True):
        for a, b in ((whole.logits_BNV, some.logits_BNV), (whole.features_BNF, some.features_BNF)):
            torch.testing.assert_close(b[[1, 3]], a[[1, 3]], atol=1e-5, rtol=1e-4)
            assert not b[[0, 2]].any()


def test_cycles_compute_active_rows_only(target: Target) -> None:
    """Bug: one text in a batch of sixteen rows costs as much as sixteen."""
    decoder = Decoder(target, drafters.find("suffix")(target), 6)
    requests = [Request((5, 9, 5, 9), 12), Request((7, 3, 7, 3), 4, Sampling(temperature=0.8, seed=3))]
    with widths_of(target.model, axis=0) as rows:
        assert run(decoder, requests)[0] == [plain_decode(target.model, request) for request in requests]
    assert set(rows[2:]) == {1, 2}


@pytest.mark.slow
def test_a_draft_model_computes_active_rows_only(target: Target) -> None:
    """Bug: the draft model goes on for rows that nobody uses."""
    drafter: Any = drafters.find("small_model").random(target, seed=1)
    request = Request((5, 9, 5, 9), 12)
    with widths_of(drafter.net, axis=0) as rows:
        assert run(Decoder(target, drafter, 4), [request])[0] == [plain_decode(target.model, request)]
    assert set(rows) == {1}


@pytest.mark.slow
@needs
def test_kernels_leave_rows_out() -> None:
    """Forwards and draft trees of two rows out of five equal those of all five to the last bit."""
    llm = eyas.load()
    prompts = ["I want to book a table", "Is there a bus", "A movie please"]
    ids = [llm.tokenizer(text)["input_ids"] for text in prompts]
    shapes = []
    for skips in (True, False):
        llm.target.runner.skips_rows = skips  # type: ignore[misc]
        try:
            decoder = Decoder(llm.target, llm.drafter, 5)
            laws = [Sampling(0.7 * (i % 2), seed=i) for i in range(3)]
            requests = [Request(tuple(ids[i]), 24 - 8 * i, laws[i]) for i in range(3)]
            texts, steps = run(decoder, requests)
            cycles = [step for step in steps if not step.prefill]
            trees = [(step.request_id, step.path, step.draft.tokens_BN[step.row].tolist()) for step in cycles]
            shapes.append((texts, trees))
        finally:
            llm.target.runner.skips_rows = True  # type: ignore[misc]
    assert shapes[0] == shapes[1]
