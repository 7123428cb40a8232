"""cascade: the small model's drafts with fewer of its passes, and a tail by n-grams after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import small_model
from eyas.drafters.prompt_lookup import NgramIndex
from eyas_lab.methods import method_cascade
from eyas_lab.methods.method_cascade import Method, Options
from reference import plain_decode, run
from zoo import FAMILIES

PROMPT = (5, 9, 3, 7, 11, 2)
GREEDY, DRAWN = Sampling(), Sampling(0.7, seed=3)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(FAMILIES["llama"]())


def drafts(drafter: Any, laws: Sequence[Sampling], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Draft], int]:
    """The drafts for rows with these laws, and the passes of the small model."""
    passes, extend = list[int](), small_model.LanguageModelSession.extend

    def counted(*args: Any) -> Any:
        passes.append(1)
        return extend(*args)

    with monkeypatch.context() as patched:
        patched.setattr(small_model.LanguageModelSession, "extend", counted)
        _, steps = run(Decoder(drafter.target, drafter, len(laws)), [Request(PROMPT, 24, law) for law in laws])
    return [step.draft for step in steps if step.draft is not None], len(passes)


@pytest.mark.parametrize("laws", [(GREEDY, GREEDY), (GREEDY, DRAWN)], ids=["greedy", "mixed"])
@pytest.mark.parametrize("options", [{"depth": 5}, {"dynamic.nodes": 12, "dynamic.branch": 3, "depth": 4}])
def test_the_small_models_own_tree_with_fewer_passes(
    options: dict[str, Any], laws: Sequence[Sampling], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the vertical cascade: a node that is read ahead at a wrong place, or behind wrong ancestors, changes the
    tree. N-grams are right about greedy text, but for every fifth token of it."""
    answer = plain_decode(target.model, Request(PROMPT, 40))

    def almost_right(index: NgramIndex, path: tuple[int, ...], count: int) -> list[int]:
        begin = len(index.tokens) + len(path) - len(PROMPT)
        return [token if n % 5 else 0 for n, token in enumerate(answer)][begin : begin + count]

    monkeypatch.setattr(method_cascade, "continuation", almost_right)
    coupled = {} if "dynamic.nodes" in options else {"tree.noise": "coupled"}
    plain = small_model.Method(target, build_options(small_model.Options, {**options, **coupled}), target)
    ahead = Method(target, build_options(Options, {**options, "cascade.tail": 0}), target)
    (wanted, many), (got, few) = drafts(plain, laws, monkeypatch), drafts(ahead, laws, monkeypatch)
    assert [draft.tokens_BN.tolist() for draft in got] == [draft.tokens_BN.tolist() for draft in wanted]
    if next(iter(options)) == "depth" and laws[1].greedy:  # else nodes that no n-gram expects need the pass
        assert few < 0.6 * many
    assert few <= many


def test_n_grams_draft_after_the_given_depth(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the horizontal cascade: two tokens of the small model, then what followed the longest n-gram."""
    text = (1, 2, 3, 4, 5, 6, 1, 2)
    drafter = Method(target, build_options(Options, {"depth": 2, "cascade.tail": 3}), target)
    monkeypatch.setattr(
        small_model.LanguageModelSession, "draft", lambda session, cycle: chain_of(cycle.tokens_B, [3, 4])
    )
    session: Any = drafter.open(1)
    session.begin(0, 0, len(text))
    draft = session.draft(cycle_of(text))
    assert draft.tokens_BN.tolist() == [[2, 3, 4, 5, 6, 1]]
    assert draft.tree.parents_BN.tolist() == [[-1, 0, 1, 2, 3, 4]]
    assert draft.tree.acceptable_BN.all()


def chain_of(tokens_B: Any, drafted: list[int]) -> Draft:
    tokens_BN = torch.tensor([[int(tokens_B[0]), *drafted]])
    return Draft(Tree.chain(1, tokens_BN.shape[1]), tokens_BN, torch.zeros(tokens_BN.shape))


def cycle_of(text: tuple[int, ...]) -> CycleInput:
    end, position = torch.tensor([text[-1]]), torch.tensor([len(text) - 1])
    noise = GumbelNoise.from_sampling([Sampling()])
    return CycleInput(
        end, position, torch.tensor([True]), (Sampling(),), noise, len(text), active_rows=(0,), row_tokens=(text,)
    )
