"""REST: the trie of continuations, and what it gives a target."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import zoo
from eyas.core.engine import Decoder, Request
from eyas.core.features import Guess
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import InputError, OptionError
from eyas_lab.datastore import Datastore, Settings, Source, build
from eyas_lab.methods.method_rest import Method, Options, trie
from reference import plain_decode, run

END = 99


def paths(guesses: list[Guess]) -> list[tuple[int, ...]]:
    """The tokens from the root to each guess."""
    found: list[tuple[int, ...]] = [()]
    for guess in guesses:
        assert guess.parent < len(found), "parents come before their children"
        found.append((*found[guess.parent], guess.token))
    return found[1:]


def test_the_heaviest_nodes_of_the_trie() -> None:
    """Guards weights, order, parents and ends of documents against a trie made of counted prefixes."""
    dice = random.Random(0)
    for _ in range(100):
        rows = sorted([dice.choices((1, 2, 3, END), (6, 3, 1, 1), k=4) for _ in range(dice.randrange(1, 40))])
        weight = Counter(tuple(row[:d]) for row in rows for d in range(1, 5) if END not in row[:d])
        most = dice.randrange(1, 30)
        guesses = trie(np.array(rows, ">u2"), END, most)
        kept = paths(guesses)
        assert len(kept) == len(set(kept)) == min(most, len(weight))
        assert sorted(weight[path] for path in kept) == sorted(weight.values())[-len(kept) :]
        for path, guess in zip(kept, guesses, strict=True):
            above = weight[path[:-1]] if len(path) > 1 else len(rows)
            assert guess.logp == pytest.approx(math.log(weight[path] / above))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1)])
def test_a_datastore_that_knows_the_answer(sampling: Sampling) -> None:
    """Guards the whole way: what the target will say stands in the datastore, so nearly all of it is accepted, in rows
    of any age; a chat's row that is cut back and goes on looks up the right tokens."""
    target, dice = Target(zoo.FAMILIES["llama"]()), random.Random(0)
    requests = [Request(tuple(dice.randrange(100) for _ in range(5 + 3 * i)), 30, sampling) for i in range(5)]
    answers = [plain_decode(target.model, request) for request in requests]
    store = Datastore.from_documents(
        [[*request.prompt, *answer] for request, answer in zip(requests, answers, strict=True)], target.vocab_size
    )
    drafter = Method(target, Options(), store)
    for rows, reuse in ((1, False), (3, False), (1, True)):
        tokens, steps = run(Decoder(target, drafter, rows, reuse), requests)
        assert tokens == answers
        cycles = [step for step in steps if not step.prefill]
        assert sum(len(step.tokens) for step in cycles) / len(cycles) > 5
        sizes = {(step.draft.tree.nodes, step.draft.tree.max_depth) for step in cycles if step.draft is not None}
        assert sizes <= {(nodes, min(nodes - 1, 10)) for nodes in (1, 2, 3, 5, 9, 17, 33, 60)}
        assert len(sizes) > 1


def test_nothing_found() -> None:
    """Guards a text that the datastore does not know, an empty one, and a tree that is the root alone."""
    target = Target(zoo.FAMILIES["llama"]())
    request = Request((5, 6, 7), 8, Sampling())
    for store, options in (
        ([[150] * 4], {}),
        ([[5, 6, 7] * 9], {"rest.nodes": 1}),
        ([[5]], {"rest.longest": 30, "rest.depth": 30}),
    ):
        drafter = Method(target, build_options(Options, options), Datastore.from_documents(store, 160))
        assert run(Decoder(target, drafter), [request])[0] == [plain_decode(target.model, request)]


def test_refusals(tmp_path: Path) -> None:
    """Guards against a method without its datastore, or with one that the target cannot read."""
    target = Target(zoo.FAMILIES["llama"]())
    with pytest.raises(OptionError, match="eyas datastore build --data FILE --output FOLDER"):
        Method.load(None, target, Options())
    with pytest.raises(InputError, match="holds no datastore"):
        Method.load(None, target, Options(datastore=str(tmp_path)))
    build(tmp_path, Settings({}, "other", 1000), [Source("a", "sha", lambda: [[999, 3]])], {})
    with pytest.raises(OptionError, match=r"another tokenizer: it holds token 999, the target's vocabulary is 0..159"):
        Method.load(None, target, Options(datastore=str(tmp_path)))
    for options, said in (
        ({"rest.shortest": 5, "rest.longest": 4}, "rest.shortest is 5, more than rest.longest, 4"),
        ({"rest.depth": 50, "rest.longest": 16}, "may be 64, the depth to which a datastore is sorted; they are 66"),
        ({"rest.nodes": 0}, "rest.nodes must be a whole number, 1 or more"),
    ):
        with pytest.raises(OptionError, match=said):
            build_options(Options, options)
