"""Targets with recurrent or convolutional state: every family, every method, prompts in chunks, kept texts, and laws.

Plain decoding is here the model's own, one token after another with its cache: Zamba 2 and Nemotron-H give logits that
differ by 1e-3 when they read many tokens at once, so full forwards would be another target."""

import itertools
import random
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import eyas
import zoo
from eyas import drafters, kernels
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request, Step
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import Drafter, DraftSession, small_model
from eyas.errors import ModelError
from eyas.targets.recurrent import state_modules
from eyas.targets.state_modules import Level, tree_levels
from reference import Oracle, generated, plain_decode, run, run_at_random
from runners import test_cpu
from test_lossless import DRAWN, SAMPLINGS, make

NEW = 14
GREEDY = Sampling()
# convolution only, delta net, both in one layer, Mamba 1, Mamba 2 alone
QUICK = {"lfm2", "qwen3_next", "falcon_h1", "jamba", "mamba2"}
BY_KERNELS = (
    {f"{name} by kernels": name for name in ("qwen3_5_text", "qwen3_5_moe_text", "lfm2")} if kernels.available() else {}
)
FAMILIES = [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in (*zoo.HYBRIDS, *BY_KERNELS)]
Answered = tuple[tuple[Request, tuple[int, ...]], ...]


@cache
def model(family: str) -> PreTrainedModel:
    if family in BY_KERNELS:
        return test_cpu.model(BY_KERNELS[family])
    return zoo.HYBRIDS[family]()


@cache
def target(family: str) -> Target:
    if family in BY_KERNELS:
        return test_cpu.with_cpu_kernels(BY_KERNELS[family])
    return Target(model(family))


def answer(family: str, request: Request) -> tuple[int, ...]:
    return tuple(plain_decode(model(family), request, cached=True))


@cache
def requests(family: str, count: int, samplings: tuple[Sampling, ...]) -> Answered:
    """Requests of different lengths, each with the new tokens of plain decoding."""
    dice, lengths = random.Random(family), (5, 23, 40, 3, 17, 31, 1, 12)
    made = [
        Request(tuple(dice.randrange(zoo.VOCAB) for _ in range(lengths[i])), NEW - i, samplings[i % len(samplings)])
        for i in range(count)
    ]
    return tuple((request, answer(family, request)) for request in made)


@pytest.mark.cover(family=4)
@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_an_oracle(family: str) -> None:
    """Guards states of nodes, commits, rows that join and leave: a state of another node or row changes some token."""
    answered = requests(family, 5, SAMPLINGS)
    answers = {request.prompt: list(tokens) for request, tokens in answered}
    for nodes, depth, rows, count in ((12, 5, 3, 5), (7, 6, 1, 2)):
        oracle = Oracle(target(family), answers, nodes, depth, seed=rows)
        tokens, steps = run(Decoder(oracle.target, oracle, rows), [request for request, _ in answered[:count]])
        assert [tuple(new) for new in tokens] == [new for _, new in answered[:count]]
        cycles = [step for step in steps if not step.prefill]
        assert sum(len(step.tokens) for step in cycles) > 2 * len(cycles), (
            "paths must be accepted, or this test proves little"
        )


@pytest.mark.cover(family=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_against_generate(family: str) -> None:
    """Guards plain decoding itself."""
    for request, expected in requests(family, 2, (GREEDY,)):
        assert tuple(generated(model(family), request.prompt, request.max_new_tokens)) == expected


SOME = ("vanilla", "suffix", "eagle1", "eagle2", "self_speculative", "small_model")  # one of each kind of session
METHODS = [
    *(
        pytest.param(name, "lfm2", marks=[] if name in ("suffix", "eagle2", "small_model") else pytest.mark.slow)
        for name in drafters.names()
    ),
    *(pytest.param(name, "qwen3_next", marks=pytest.mark.slow) for name in SOME),
    *(pytest.param(name, family, marks=pytest.mark.slow) for name in (*SOME, "eagle3", "mtp") for family in BY_KERNELS),
]


@pytest.mark.cover(name=5)
@pytest.mark.quick("suffix-*")
@pytest.mark.parametrize(("name", "family"), METHODS)
def test_every_method(name: str, family: str) -> None:
    """Guards each method with rows of different ages; where children are sampled, rows equal what they are alone."""
    drafter, answered = method(name, family), requests(family, 3, SAMPLINGS)
    together = run(Decoder(drafter.target, drafter, 2), [request for request, _ in answered])[0]
    for (request, expected), got in zip(answered, together, strict=True):
        if request.sampling.greedy or name not in DRAWN:
            assert tuple(got) == expected, f"{request.sampling}"
        else:
            assert run(Decoder(drafter.target, drafter), [request])[0][0] == got


def method(name: str, family: str) -> Drafter:
    options = {"skip": "exit:2"} if name == "self_speculative" else {}  # which parts are attention cannot be told
    return make(name, target(family), **options)


class Knowing(Drafter):
    """Drafts chains of 4 tokens from the only text it knows that goes on from a row's tokens."""

    def __init__(self, target: Target, texts: list[tuple[int, ...]]) -> None:
        super().__init__(target)
        self.texts = texts

    def open(self, rows: int) -> DraftSession:
        return KnowingSession(self)


class KnowingSession(DraftSession):
    def __init__(self, drafter: Knowing) -> None:
        self.drafter = drafter

    def truncate(self, row: int, length: int) -> int:
        return length

    def copy(self, source: int, row: int, length: int) -> int:
        return length

    def draft(self, cycle_input: CycleInput) -> Draft:
        chains = []
        for said in cycle_input.row_tokens:
            text = next((text for text in self.drafter.texts if said and text[: len(said)] == tuple(said)), ())
            chains.append([said[-1] if said else 0, *(*text[len(said) :], 0, 0, 0, 0)[:4]])
        return Draft(Tree.chain(len(chains), 5), torch.tensor(chains))


def decoded(decoder: Decoder, request: Request) -> tuple[tuple[int, ...], int]:
    """New tokens, and how many prompt tokens were not read again."""
    tokens, steps = run(decoder, [request])
    return tuple(tokens[0]), next(step.cached_tokens for step in steps if step.prefill)


KEPT = [
    pytest.param(f, marks=[] if f in ("lfm2", "jamba", "qwen3_5_text by kernels") else pytest.mark.slow)
    for f in ("lfm2", "jamba", "qwen3_next", *BY_KERNELS)
]


@pytest.mark.cover(family=1)
@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("family", KEPT)
def test_chats_keep_their_state(family: str) -> None:
    """A turn goes on from the last one's end, also behind its EOS; others start anew or behind a shared prompt."""
    dice, known = random.Random(1), 0
    prompt: tuple[int, ...] = (5, 6, 7, 8, 9, 10, 11)
    texts: list[tuple[int, ...]] = []
    decoder = Decoder(target(family), Knowing(target(family), texts), reuse=True)
    for _ in range(3):
        whole = answer(family, Request(prompt, 24))
        texts.append(prompt + whole)
        eos = next(token for at, token in enumerate(whole) if at >= 7 and token not in whole[:at])
        expected = whole[: whole.index(eos) + 1]
        new, cached = decoded(decoder, Request(prompt, 24, eos=frozenset([eos])))
        assert new == expected
        assert cached >= known - 1, "the last turn must not be read again"
        known = len(prompt) + len(new)
        prompt = (*prompt, *new, *(dice.randrange(zoo.VOCAB) for _ in range(4)))
    other = Request((5, 6, 7, 90, 91), 6)
    assert decoded(decoder, other) == (answer(family, other), 0)
    longer = Request((*other.prompt, 92, 93), 6)
    assert decoded(decoder, longer) == (answer(family, longer), len(other.prompt))


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("family", KEPT)
def test_a_stream_that_is_closed_early(family: str) -> None:
    """Its text can be read on from where it was closed, and the other row does not notice."""
    first, second = Request((3, 4, 5, 6), 20), Request((30, 40, 50), 20)
    texts = [request.prompt + answer(family, request) for request in (first, second)]
    decoder = Decoder(target(family), Knowing(target(family), texts), 2, reuse=True)
    tickets = [decoder.add(first), decoder.add(second)]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in tickets}
    for _ in range(3):
        for step in decoder.step():
            tokens[step.request_id] += step.tokens
    decoder.cancel(tickets[0])
    said = tuple(tokens[tickets[0]])
    assert 3 < len(said) < 20
    on = Request((*first.prompt, *said, 77), 8)
    request_id = decoder.add(on)
    tokens[request_id], cached = [], 0
    while not decoder.finished:
        for step in decoder.step():
            tokens[step.request_id] += step.tokens
            cached = max(cached, step.cached_tokens)
    assert cached == len(first.prompt) + len(said) - 1
    assert tuple(tokens[request_id]) == answer(family, on)
    assert tuple(tokens[tickets[1]]) == texts[1][len(second.prompt) :]


@pytest.mark.cover
@pytest.mark.parametrize(("name", "family"), [
    ("suffix", "lfm2"), ("suffix", "jamba"), ("eagle2", "jamba"), ("eagle2", "qwen3_next"), ("small_model", "lfm2"),
    *itertools.product(("suffix", "eagle2", "small_model"), BY_KERNELS),
])  # fmt: skip
def test_prompts_in_chunks_behind_shared_prefixes(name: str, family: str) -> None:
    """Requests come at random moments and share prefixes with texts that are kept or in flight."""
    drafter, dice = method(name, family), random.Random(2)
    begin = tuple(dice.randrange(zoo.VOCAB) for _ in range(21))
    prompts = [
        (*begin[: dice.choice([7, 14, 21])], *(dice.randrange(zoo.VOCAB) for _ in range(dice.randrange(1, 30))))
        for _ in range(7)
    ]
    prompts[4] = (*prompts[0], *answer(family, Request(prompts[0], 9)), 3, 4)  # the second turn of the first chat
    wanted = [
        Request(prompt, 9, SAMPLINGS[i % 2] if name != "small_model" else GREEDY) for i, prompt in enumerate(prompts)
    ]
    decoder = Decoder(target(family), drafter, 2, reuse=True, prefill_budget=7)
    tokens, _ = run_at_random(decoder, wanted, seed=2)
    assert [tuple(ids) for ids in tokens] == [answer(family, request) for request in wanted]


def test_a_draft_models_state_is_kept_by_its_length() -> None:
    """Bug: a prompt's state was kept as a longer one's, and the next prompt drafted from it, wrongly."""
    own, prompt = target("jamba"), tuple(range(3, 24))
    drafter = small_model.Method(own, small_model.Options(depth=3), own)
    decoder = Decoder(own, drafter, 3, reuse=True, prefill_budget=7)
    decoder.add(Request(prompt[::-1], 60))
    for _ in range(5):
        decoder.step()
    decoder.add(Request(prompt, 40))
    for _ in range(5):
        decoder.step()
    request_id, steps = decoder.add(Request(prompt, 13)), list[Step]()
    while not decoder.finished:
        steps += [step for step in decoder.step() if step.request_id == request_id]
    assert steps[0].cached_tokens == 14  # two chunks
    assert [len(step.path) for step in steps[1:]] == [4, 4, 4]


def test_tree_levels() -> None:
    """Parents come from the mask, in trees of different shapes side by side, and for nodes behind earlier ones."""
    trees = Tree.build(torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 0]]), 3)
    levels = tree_levels(trees.depth_BN, trees.mask_BNN)
    every = [(r, n, p) for r, row in enumerate(trees.parents_BN.tolist()) for n, p in enumerate(row)]
    assert sorted(triple for level in levels for triple in triples(level)) == every
    assert [len(triples(level)) for level in levels] == [2, 4, 2, 2]
    later = tree_levels(trees.depth_BN, trees.mask_BNN[:, 3:])
    assert [triples(level) for level in later] == [[(1, 1, 0)], [(0, 0, 1)], [(0, 1, 3), (1, 0, 2)]]


def triples(level: Level) -> list[tuple[int, int, int]]:
    return list(zip(level.row_M.tolist(), level.node_M.tolist(), level.parent_M.tolist(), strict=True))


def test_a_module_that_reads_differently_token_by_token_is_refused() -> None:
    """Guards families that nobody has tried: such a model would be decoded wrongly without an error."""
    broken = zoo.HYBRIDS["lfm2"]()
    module = broken.model.layers[0].conv
    forward = module.forward

    def hasty(hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        output: torch.Tensor = forward(hidden_states, **kwargs)
        return output * 1.5 if hidden_states.shape[1] == 1 else output

    module.forward = hasty
    with pytest.raises(ModelError, match="Lfm2ShortConv gives other outputs token by token"):
        Target(broken)


@pytest.mark.quick("falcon_h1-0-True")
@pytest.mark.parametrize(
    ("family", "first", "last"),
    [("lfm2", 1, True), ("qwen3_next", 2, True), ("falcon_h1", 0, True), ("zaya", 3, False)],
)
def test_projections_run_once_for_all_levels(
    family: str, first: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the cost: a pass, not a level, reads projections once; Falcon-H1 scales its input, so it has one less."""
    one = state_modules(target(family))[0]
    assert (len(one.first), one.last is not None) == (first, last)
    session, sizes = target(family).open(1), list[tuple[int, ...]]()
    session.prefill(0, [5, 6, 7])
    weights = {linear.weight.data_ptr() for linear in (*one.first, one.last) if linear is not None}
    multiply = torch.nn.functional.linear

    def noted(value: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        if weight.data_ptr() in weights:
            sizes.append(tuple(value.shape[:2]))
        return multiply(value, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    session.forward(torch.tensor([[8, 9, 10, 11]]), Tree.chain(1, 4))
    assert sizes == [(1, 4)] * (first + last)


@pytest.mark.slow
def test_attached_to_generate() -> None:
    """`model.generate` of a hybrid, of several padded rows, with drafts: transformers' own ids."""
    hybrid = zoo.HYBRIDS["lfm2"]()
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = hybrid.generate(ids, attention_mask=mask, **asked)
    eyas.attach(hybrid, "suffix", tree="fixed")
    assert torch.equal(hybrid.generate(ids, attention_mask=mask, **asked), expected)
    eyas.detach(hybrid)
