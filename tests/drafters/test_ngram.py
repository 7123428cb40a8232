"""Drafting from the text alone, against naive searches through it; and the sessions that keep the text."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.features import Guess
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters._ngram import Index, TextSession
from eyas.drafters.prompt_lookup import Lookup, NgramIndex
from eyas.drafters.suffix import SuffixAutomaton, SuffixOptions
from eyas.errors import OptionError
from reference import plain_decode

texts = st.lists(st.integers(0, 3), max_size=40)
METHODS = ("prompt_lookup", "suffix")


def index_of(name: str) -> Index:
    return NgramIndex(Lookup(matches=3)) if name == "prompt_lookup" else SuffixAutomaton(SuffixOptions())


def learnt(index: Index, tokens: Sequence[int]) -> Index:
    for token in tokens:
        index.append(token)
    return index


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Places behind every occurrence."""
    return [i for i in range(len(part), len(text) + 1) if list(text[i - len(part) : i]) == list(part)]


def paths(guesses: Sequence[Guess]) -> list[tuple[int, ...]]:
    """The tokens from the root to each guess."""
    found: list[tuple[int, ...]] = [()]
    for guess in guesses:
        found.append((*found[guess.parent], guess.token))
    return found[1:]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts, st.integers(1, 3), st.integers(0, 2), st.sampled_from(["newest", "oldest"]), st.integers(1, 3))
def test_lookup_is_a_search_through_the_text(
    text: list[int], shortest: int, more: int, pick: str, matches: int
) -> None:
    """Guards which n-gram is looked up (the longest), at which places, and what follows it."""
    options = Lookup(longest=shortest + more, shortest=shortest, depth=6, matches=matches, pick=pick)  # type: ignore[arg-type]
    expected: list[tuple[int, ...]] = []
    for n in range(min(options.longest, len(text)), shortest - 1, -1):
        places = ends(text, text[len(text) - n :])[:-1]
        if places:
            for place in (places[::-1] if pick == "newest" else places)[:matches]:
                copy = list(text)
                for _ in range(6):
                    copy.append(copy[place + len(copy) - len(text)])
                chain = tuple(copy[len(text) :])
                expected += [chain[:d] for d in range(1, 7) if chain[:d] not in expected]
            break
    assert paths(learnt(NgramIndex(options), text).guesses()) == expected


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_the_automaton_knows_every_substring(text: list[int]) -> None:
    """Guards construction: each substring leads to its count, latest place and followers; links are earlier matches."""
    index = SuffixAutomaton(SuffixOptions())
    learnt(index, text)
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            part, state = text[begin:end], 0
            for token in part:
                state = index.next[state][token]
            places = ends(text, part)
            assert (index.count[state], index.latest[state]) == (len(places), places[-1])
            assert set(index.next[state]) == {text[i] for i in places if i < len(text)}
    assert len(index.link) <= 2 * len(text) + 1
    longest = max(n for n in range(len(text)) if len(ends(text, text[len(text) - n :])) > 1 or n == 0)
    assert index.length[index.link[index.last]] == longest


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts, st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_suffix_proposes_a_tree_of_probabilities(text: list[int], nodes: int, depth: int, branch: int) -> None:
    """Guards the best-first steps: sizes, distinct siblings of mass 1 at most, probable paths first, real followers."""
    guesses = learnt(SuffixAutomaton(SuffixOptions(nodes, depth, branch)), text).guesses()
    assert len(guesses) <= nodes - 1
    joint = [0.0]
    for n, guess in enumerate(guesses, start=1):
        assert 0 <= guess.parent < n
        assert guess.logp <= 0
        joint.append(joint[guess.parent] + guess.logp)
    assert all(a >= b - 1e-9 for a, b in pairwise(joint))
    for parent in range(len(guesses) + 1):
        siblings = [guess for guess in guesses if guess.parent == parent]
        assert len({guess.token for guess in siblings}) == len(siblings)
        assert sum(math.exp(guess.logp) for guess in siblings) <= 1 + 1e-9
    for path in paths(guesses):
        assert len(path) <= depth
        assert path[-1] in {text[i] for i in ends(text, [*text, *path[:-1]][-1:]) if i < len(text)}


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(METHODS), texts, st.integers(0, 40), texts)
def test_cut_forgets(name: str, text: list[int], length: int, more: list[int]) -> None:
    """Guards chats: an index that was cut back is the one that never read further."""
    index = learnt(index_of(name), text)
    index.cut(length)
    fresh = learnt(index_of(name), text[:length])
    for both in (index, fresh):
        learnt(both, more)
    assert index.tokens == [*text[:length], *more]
    assert index.guesses() == fresh.guesses()
    if len(set(index.tokens)) == len(index.tokens):
        assert index.guesses() == []


def check_texts(decoder: Decoder) -> None:
    """Each row's index holds its committed tokens: all but the root."""
    session = decoder.draft_session.session
    assert isinstance(session, TextSession)
    for index, row in zip(session.indexes, decoder.rows, strict=True):
        assert row is None or index.tokens == row.tokens[:-1]


@pytest.mark.cover
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("law", [Sampling(), Sampling(0.6, top_k=8, seed=1)])
def test_lossless_where_drafts_are_accepted(name: str, law: Sampling) -> None:
    """Guards the cycle with repeating texts, in rows that join and leave: ids, each row's index, few sizes."""
    target, dice, kind = Target(zoo.FAMILIES["llama"]()), random.Random(2), drafters.find(name)
    phrase = [dice.randrange(zoo.VOCAB) for _ in range(6)]
    requests = [Request(tuple([*phrase, i] * (2 + i)), 60 - 7 * i, law) for i in range(4)]
    decoder, tokens, accepted = Decoder(target, kind(target), rows=2), dict[int, list[int]](), 0
    tickets = [decoder.add(request) for request in requests]
    while not decoder.finished:
        for step in decoder.step():
            tokens.setdefault(step.request_id, []).extend(step.tokens)
            accepted += step.accepted
            assert step.draft is None or step.draft.tree.nodes in {1, 2, 3, 5, 9, kind(target).describe()["nodes"]}
        check_texts(decoder)
    assert [tokens[ticket] for ticket in tickets] == [plain_decode(target.model, request) for request in requests]
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_chat_keeps_what_is_equal(name: str) -> None:
    """Guards `truncate`: prompts after, before, within or beside the row's text; the index holds the row's text."""
    target = Target(zoo.FAMILIES["llama"]())
    decoder = Decoder(target, drafters.find(name)(target), rows=1, reuse=True)
    first = (3, 5, 7, 3, 5, 7, 9)
    answer = tuple(plain_decode(target.model, Request(first, 12)))
    for prompt in (first, (*first, *answer, 4, 4), (*first, *answer[:5], 8), first[:4], (50, 60), (50, 60, 70)):
        request, tokens = Request(prompt, 12), list[int]()
        decoder.add(request)
        while not decoder.finished:
            tokens += [token for step in decoder.step() for token in step.tokens]
            check_texts(decoder)
        assert tokens == plain_decode(target.model, request)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("prompt_lookup", {"lookup.longest": 0}, "lookup.longest must be a whole number, 1 or more, got 0"),
    ("prompt_lookup", {"lookup.shortest": 4}, "lookup.shortest is 4, more than lookup.longest, 3"),
    ("prompt_lookup", {"lookup.pick": "newst"}, "unknown lookup.pick 'newst'; did you mean newest"),
    ("suffix", {"suffix.nodes": True}, "suffix.nodes must be a whole number, 1 or more, got True"),
    ("suffix", {"suffix.dept": 3}, "unknown option 'suffix.dept'; did you mean suffix.depth"),
])  # fmt: skip
def test_bad_options(name: str, options: dict[str, object], message: str) -> None:
    """Guards the one line that a user reads."""
    with pytest.raises(OptionError, match=message):
        build_options(drafters.find(name).Options, options)


@pytest.mark.parametrize(("counts", "nodes"), [((0, 0), 1), ((1, 0), 2), ((3, 4), 5), ((5, 0), 7), ((6, 6), 7)])
def test_a_tree_is_no_larger_than_its_guesses_need(counts: tuple[int, int], nodes: int) -> None:
    """Guards the price of a cycle that has little to propose: few sizes of trees, one node for nothing."""
    guesses = [[Guess(0, 5 + i, 0.0) for i in range(count)] for count in counts]
    draft = TextSession(2, lambda: None, 7, 3, scored=True)._draft([1, 2], guesses, torch.tensor([1, 2]))  # type: ignore[arg-type,return-value]
    assert draft.tree.nodes == nodes
    assert draft.tree.acceptable_BN.sum(1).tolist() == [1 + count for count in counts]
    assert draft.tokens_BN[:, 0].tolist() == [1, 2]
