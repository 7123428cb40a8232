"""Losslessness: every family with a drafter that knows the answers, and every method: the ids of the plain loop."""

import random
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from covers import turn
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import Drafter
from reference import Oracle, generated, plain_decode, run

NEW = 24
GREEDY = Sampling()
SAMPLINGS = (
    GREEDY,
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=20, top_p=0.9, seed=4),
    Sampling(1.3, min_p=0.05, repetition_penalty=1.2, seed=5),
)


@cache
def model(family: str) -> PreTrainedModel:
    return zoo.FAMILIES[family]()


@cache
def requests(family: str, count: int, samplings: tuple[Sampling, ...]) -> tuple[tuple[Request, tuple[int, ...]], ...]:
    """Requests of different lengths, each with the new tokens of plain decoding."""
    rng, vocab = random.Random(family), model(family).config.get_text_config().vocab_size
    lengths = (5, 23, 40, 3, 17, 31, 1, 12)
    made = [
        Request(tuple(rng.randrange(vocab) for _ in range(lengths[i])), NEW - i, samplings[i % len(samplings)])
        for i in range(count)
    ]
    return tuple((r, tuple(plain_decode(model(family), r))) for r in made)


def check(family: str, drafter: Drafter, rows: int, answered: tuple[tuple[Request, tuple[int, ...]], ...]) -> float:
    """Asserts equal ids; returns tau, the mean number of tokens per cycle."""
    tokens, steps = run(Decoder(drafter.target, drafter, rows), [r for r, _ in answered])
    assert [tuple(t) for t in tokens] == [t for _, t in answered]
    cycles = [s for s in steps if not s.prefill]
    return sum(len(s.tokens) for s in cycles) / len(cycles)


@pytest.mark.cover
@pytest.mark.quick("llama-shape0")
@pytest.mark.parametrize("shape", [(12, 5, 0), (20, 3, 1), (7, 6, 2)])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_with_an_oracle(family: str, shape: tuple[int, int, int]) -> None:
    """Guards target, cache and masks: a wrong position, window, mask or slot of joining rows changes some token."""
    answered = requests(family, 5, SAMPLINGS)
    tau = check(family, Oracle(Target(model(family)), {r.prompt: list(t) for r, t in answered}, *shape), 3, answered)
    assert tau > 2, "the oracle's paths must be accepted, or this test proves little"


TREE = {"tree.nodes": 14, "tree.depth": 4, "tree.branch": 3}
BLOCK = {**TREE, "head.layers": "1,2", "head.depth": 2}
OPTIONS = {
    "lookahead": {"lookahead.width": 4, "lookahead.ngram": 4, "lookahead.guesses": 3},
    "rest": {"rest.nodes": 14, "rest.depth": 4, "rest.shortest": 1},  # two random tokens are seldom found
    "eagle1": {"tree.choices": "reference"},
    "medusa": {"tree.choices": "dynamic", "tree.nodes": 14},  # its fixed trees: tests/drafters
    "hydra": {"tree.choices": "dynamic", "tree.nodes": 14, "head.arch": "prefix-mlp"},
    "dflash": {**BLOCK, "head.block": 6},
    "dflash2": {**BLOCK, "head.block": 6, "head.channels": 8, "head.candidates": 5},
    "dspark": {**BLOCK, "head.block": 5, "head.markov_rank": 8, "min_confidence": 0.3},
    "eagle2": TREE,
    "mtp": TREE,
    "gemma4_assistant": TREE,
    "glide": TREE,
    "eagle3": {**TREE, "head.layers": "0,1,2"},
    "pard": TREE,
    "peagle": {**TREE, "head.layers": "0,1,2", "head.depth": 2, "head.levels": 5},
    "self_speculative": {"skip": "1,2m", "depth": 3},
    "small_model": {"depth": 3},
    "distillspec": {"depth": 3},
    "spectr": {"depth": 3},
    "kangaroo": {"depth": 3, "confidence": 0.0},
    "cascade": {"depth": 3, "cascade.tail": 2},
    "seagle": {**TREE, "head.layers": "0,1,2", "window.size": 9, "window.sink": 2},  # smaller than most prompts here
}


# With these options their children are sampled from q where the row is sampled: other tokens than
# plain decoding, of the same distribution.
DRAWN = {"distillspec", "eagle1", "kangaroo", "self_speculative", "small_model", "spectr"}


def make(name: str, target: Target, **options: object) -> Drafter:
    """The method with random weights, and these options or those of OPTIONS."""
    kind = drafters.find(name)
    return kind.random(target, build_options(kind.Options, options or OPTIONS.get(name, {})), seed=1)


@pytest.mark.parametrize("name", drafters.names())
def test_every_method(name: str) -> None:
    """Guards each method, in a second: greedy and sampled rows, two at a time. The next test is the thorough one."""
    drafter, answered = make(name, Target(model("llama"))), requests("llama", 3, SAMPLINGS)
    tokens, _ = run(Decoder(drafter.target, drafter, 2), [r for r, _ in answered])
    for (request, expected), new in zip(answered, tokens, strict=True):
        if request.sampling.greedy or name not in DRAWN:
            assert tuple(new) == expected, f"{request.sampling}"


@pytest.mark.cover(name=6)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_at_every_batch_size(name: str, family: str) -> None:
    """Guards sessions of rows of different ages, 1, 2, 3 and 8 at a time; drawn rows equal what they are alone."""
    drafter = make(name, Target(model(family)))
    answered = requests(family, 8, SAMPLINGS)
    wanted = [list(expected) for _, expected in answered]
    if name in DRAWN:
        alone = [run(Decoder(drafter.target, drafter, 1), [r])[0][0] for r, _ in answered]
        wanted = [
            list(expected) if r.sampling.greedy else got for (r, expected), got in zip(answered, alone, strict=True)
        ]
    rows = turn(name, drafters.names(), (1, 8, 2, 3), offset=0 if family == "llama" else 1)
    count = 5 if rows == 1 else 8  # each sampling alone, and a row that is used again
    tokens, _ = run(Decoder(drafter.target, drafter, rows), [r for r, _ in answered[:count]])
    assert tokens == wanted[:count]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle2", "eagle3", "seagle"])
def test_heads_that_are_right_now_and_then(name: str) -> None:
    """Guards commits at depth: a net that hands the feature through repeats the last law, so paths are accepted."""
    target = Target(model("llama"))
    if name in ("eagle3", "seagle"):
        kind = drafters.find(name)
        # does just that
        drafter = kind.init_for_training(target, build_options(kind.Options, {**OPTIONS[name], "head.layers": "0,1,3"}))
    else:
        drafter = make(name, target)
        with torch.no_grad():
            for weight in drafter.net.parameters():
                weight.zero_()
            drafter.net.fc.weight[:, target.hidden_size :] = torch.eye(target.hidden_size)
    answered = requests("llama", 8, SAMPLINGS)
    tokens, steps = run(Decoder(target, drafter, 3), [r for r, _ in answered])
    for (request, expected), got in zip(answered, tokens, strict=True):
        if request.sampling.greedy or name not in DRAWN:
            assert tuple(got) == expected
    assert sum(s.accepted for s in steps) > 0, "nothing was accepted: this head should be right now and then"


@pytest.mark.cover
@pytest.mark.parametrize("name", ["eagle3", "peagle"])
@pytest.mark.parametrize("window", [{}, {"window.size": 9, "window.sink": 2}])
def test_nets_of_several_layers(name: str, window: dict[str, int]) -> None:
    """Guards the cache of several layers: its prompts, which need attention here, its commits, its windows."""
    target, answered, kind = Target(model("llama")), requests("llama", 8, SAMPLINGS), drafters.find(name)
    options = {**OPTIONS[name], **window, "head.depth": 3}
    check("llama", make(name, target, **options), 3, answered)
    fresh = kind.init_for_training(target, build_options(kind.Options, {**options, "head.layers": "0,1,3"}))
    assert check("llama", fresh, 3, answered) > 1, "nothing was accepted"


SHAPES = ((1, 1, 1), (2, 1, 1), (5, 4, 1), (60, 8, 10), (9, 1, 4), (300, 3, 6))


@pytest.mark.quick("shape0")
@pytest.mark.parametrize("shape", [*SHAPES, "chain-1", "chain-4", "reference"])
def test_shapes(shape: str | tuple[int, int, int]) -> None:
    """Guards dynamic trees at their edges: a root alone, a chain, more nodes than were drafted; other static trees."""
    static = isinstance(shape, str)
    options = {"tree.choices": shape} if static else dict(zip(TREE, shape, strict=True))
    drafter = make("eagle1" if static else "eagle2", Target(model("llama")), **options)
    check("llama", drafter, 2, requests("llama", 3, (GREEDY,)))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1, 7])
def test_eagle3_with_a_small_draft_vocabulary(vocabulary: int) -> None:
    """Guards the map from draft ids to the target's, and trees smaller than asked for."""
    target, kind = Target(model("llama")), drafters.find("eagle3")
    counts = torch.arange(target.vocab_size) % 11
    options = build_options(kind.Options, {**OPTIONS["eagle3"], "head.draft_vocab": vocabulary})
    drafter = kind.init_for_training(target, options, 1, counts)
    assert drafter.draft_ids_v.tolist() == [10 + 11 * i for i in range(vocabulary)]
    answered = requests("llama", 4, SAMPLINGS)
    check("llama", drafter, 2, answered)
    trees = [s.draft for s in run(Decoder(target, drafter), [answered[0][0]])[1] if s.draft is not None]
    assert {int(t) for draft in trees for t in draft.tokens_BN[0, 1:]} <= set(drafter.draft_ids_v.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("eagle1", {}), ("eagle2", TREE), ("eagle3", OPTIONS["eagle3"])])
def test_every_eagle_with_a_window(method: str, options: dict[str, object]) -> None:
    """Guards `--window.*` for each of them, at several rows of different ages."""
    drafter = make(method, Target(model("llama")), **{**options, "window.size": 5, "window.sink": 1})
    check("llama", drafter, 3, requests("llama", 6, (GREEDY,)))


def test_against_generate() -> None:
    """Guards the plain loop itself: greedy decoding must be what transformers' generate gives."""
    for request, expected in requests("llama", 3, (GREEDY,)):
        assert tuple(generated(model("llama"), request.prompt, request.max_new_tokens)) == expected
