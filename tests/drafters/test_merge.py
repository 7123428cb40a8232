"""Two methods in one cycle: the ids of the plain loop, and each session is told what it would have seen alone."""

import random

import pytest

import zoo
from eyas import drafters
from eyas.core.drafter import Drafter
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters._merge import Merged
from reference import SAMPLINGS, plain_decode, run

TREE = {"tree.nodes": 14, "tree.depth": 4, "tree.branch": 3}
FIRST = {
    "eagle1": {"tree.choices": "reference"},  # drawn, where a row samples
    "eagle2": TREE,
    "eagle3": {**TREE, "head.layers": "0,1,2"},
    "seagle": {**TREE, "head.layers": "0,1,2", "window.size": 9, "window.sink": 2},
    "small_model": {"depth": 3},  # drawn too; keeps its own nodes' keys and values
    "vanilla": {},
    "suffix": {},
}


def make(name: str, target: Target, **options: object) -> Drafter:
    kind = drafters.find(name)
    return kind.random(target, build_options(kind.Options, options or FIRST.get(name, {})), seed=1)


def requests(count: int) -> list[Request]:
    """Prompts that repeat themselves, so that both methods have something to say."""
    dice = random.Random(7)
    phrase = [dice.randrange(zoo.VOCAB) for _ in range(5)]
    return [Request(tuple([*phrase, i] * (2 + i)), 30 - 3 * i, SAMPLINGS[i % len(SAMPLINGS)]) for i in range(count)]


@pytest.mark.cover(first=3)
@pytest.mark.parametrize("second", ["suffix", "prompt_lookup", "lookahead"])
@pytest.mark.parametrize("first", FIRST)
def test_lossless(first: str, second: str) -> None:
    """Guards the merged cycle: ids of the plain loop, also where the first method draws its tree."""
    if second != "suffix" and first not in ("eagle1", "eagle2"):
        pytest.skip("each second method beside two first ones, each first one beside suffix")
    target, asked = Target(zoo.FAMILIES["gemma2" if first == "eagle3" else "llama"]()), requests(5)
    drafter = Merged(make(first, target), make(second, target))
    expected = [plain_decode(target.model, request) for request in asked]
    for rows, count in ((1, 2), (3, 5)):
        tokens, steps = run(Decoder(target, drafter, rows), asked[:count])
        assert tokens == expected[:count], f"{rows} rows"
        assert sum(step.accepted for step in steps) > 0
        assert all(step.draft is None or step.draft.q_BNV is None for step in steps)


@pytest.mark.cover(first=2)
@pytest.mark.parametrize("first", ["eagle2", "seagle", "small_model", "suffix"])
def test_a_chat(first: str) -> None:
    """Guards `truncate` of two sessions of which one knows a token less; the second prompt is not read again."""
    target = Target(zoo.FAMILIES["llama"]())
    drafter = Merged(make(first, target), make("suffix", target))
    decoder, prompt = Decoder(target, drafter, rows=1, reuse=True), tuple(range(3, 43))
    for turn in range(3):
        request, tokens = Request(prompt, 10), list[int]()
        decoder.add(request)
        first_step = decoder.step()
        indexes = decoder.draft_session.session.second.indexes  # type: ignore[attr-defined]
        while True:
            tokens += [token for step in first_step for token in step.tokens]
            if decoder.finished:
                break
            assert indexes[0].tokens == decoder.rows[0].tokens[:-1]  # type: ignore[union-attr]
            first_step = decoder.step()
        assert tokens == plain_decode(target.model, request)
        prompt = (*prompt, *tokens[: 10 - 4 * turn], 50 + turn)
