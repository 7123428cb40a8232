"""Two methods in one cycle: the ids of the plain loop, and each session is told what it would have seen alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from eyas import drafters
from eyas.core.drafter import CycleInput, Drafter, DraftSession, method_name
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict
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


class Probe(Drafter):
    """Guesses at random below a few nodes, some right, some scouts; its session checks what it is handed."""

    def __init__(self, target: Target, layer: int, seed: int, answers: dict[Any, list[int]], remembers: int = 999):
        super().__init__(target)
        self.feature_layers, self.seed, self.answers, self.remembers = (layer,), seed, answers, remembers

    def open(self, rows: int) -> DraftSession:
        return ProbeSession(self, rows)


class ProbeSession(DraftSession):
    def __init__(self, drafter: Probe, rows: int) -> None:
        self.drafter, self.dice = drafter, random.Random(drafter.seed)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.checked = self.foreign = 0

    def truncate(self, row: int, length: int) -> int:
        return min(length, self.drafter.remembers)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        del self.text[row][cached_tokens:]

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        assert position == len(self.text[row])
        self.text[row] += tokens_T.tolist()
        self.same(self.text[row], features_TF[-1])

    def same(self, text: list[int], feature_F: Tensor) -> None:
        """The feature is that of the text's last token."""
        true_TF = self.drafter.target.encode(torch.tensor([text]), self.drafter.feature_layers)[0]
        torch.testing.assert_close(feature_F, true_TF[-1], rtol=1e-3, atol=1e-3)

    def draft(self, roots: CycleInput) -> Draft:
        parents, tokens, candidates = [], [], []
        for row, root in enumerate(roots.tokens_B.tolist()):
            text = [*self.text[row], root]
            answer = next((a for p, a in self.drafter.answers.items() if [*p, *a][: len(text)] == text), [])
            prompt = next((len(p) for p, a in self.drafter.answers.items() if a is answer), 0)
            right = [*answer[len(text) - prompt :], 0, 0, 0][:3]
            length = self.dice.randrange(4)  # of the right path, so many tokens; then wrong ones
            path = [t if i < length else (t + 1 + self.drafter.seed) % zoo.VOCAB for i, t in enumerate(right)]
            parents.append([-1, 0, 1, 2, 0, 4])
            tokens.append([root, *path, (right[0] + 9) % zoo.VOCAB, 5])
            candidates.append([True, True, True, True, True, False])
        self.own = Draft(Tree.build(torch.tensor(parents), 3, torch.tensor(candidates)), torch.tensor(tokens))
        self.active = roots.active_B.tolist()
        return self.own

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        N = self.own.tree.nodes
        assert torch.equal(draft.tokens_BN[:, :N], self.own.tokens_BN)
        assert torch.equal(draft.tree.parents_BN[:, :N], self.own.tree.parents_BN)
        assert seen.features_BNF.shape[:2] == seen.logits_BNV.shape[:2] == draft.tokens_BN.shape
        for row, length in enumerate(verdict.length_B.tolist()):
            if not self.active[row]:
                continue
            path, root = verdict.path_BP[row], len(self.text[row])
            assert (path[:length] >= 0).all()
            assert (path[length:] == -1).all()
            assert draft.tokens_BN[row, path[:length]].tolist() == verdict.tokens_BP[row, :length].tolist()
            assert draft.tree.acceptable_BN[row, path[:length]].all()
            self.foreign += int((path[:length] >= N).sum())
            for n in range(N):
                nodes = [m for m in range(N) if self.own.tree.mask_BNN[row, n, m]]
                self.same([*self.text[row], *self.own.tokens_BN[row, nodes].tolist()], seen.features_BNF[row, n])
                self.checked += 1
            self.text[row] += verdict.tokens_BP[row, :length].tolist()
            assert self.text[row][root] == int(self.own.tokens_BN[row, 0])
            self.same(self.text[row], seen.features_BNF[row, path[length - 1]])


@pytest.mark.slow
def test_each_session_is_told_what_it_would_have_seen_alone() -> None:
    """Guards the views: own nodes first, their layers' features, the path in own numbers, on to the other's nodes."""
    target, asked = Target(zoo.FAMILIES["llama"]()), requests(3)
    answers = {request.prompt: plain_decode(target.model, request) for request in asked}
    drafter = Merged(Probe(target, 3, 1, answers), Probe(target, 1, 2, answers))
    assert drafter.feature_layers == (1, 3)
    decoder = Decoder(target, drafter, rows=2)
    assert run(decoder, asked)[0] == list(answers.values())
    both = decoder.draft_session.session
    for session in (both.first, both.second):  # type: ignore[attr-defined]
        assert session.checked > 50
        assert session.foreign > 0, "no path went on in the other's tree: this proves little"


@pytest.mark.parametrize(("one", "other", "kept"), [(999, 999, 20), (4, 999, 4), (999, 4, 4), (7, 4, 4)])
def test_keep_is_what_both_know(one: int, other: int, kept: int) -> None:
    """Guards chats: features are offered from where both sessions need them."""
    target = Target(zoo.FAMILIES["llama"]())
    session = Merged(Probe(target, 1, 0, {}, one), Probe(target, 1, 0, {}, other)).open(1)
    assert session.truncate(0, 20) == kept


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


def test_what_it_says_of_itself() -> None:
    """Guards --json: both methods and both trees."""
    target = Target(zoo.FAMILIES["llama"]())
    drafter = Merged(make("eagle2", target), make("suffix", target, **{"suffix.nodes": 9}))
    assert method_name(drafter) == "eagle2+suffix"
    told = drafter.describe()
    assert (told["kind"], told["nodes"]) == ("dynamic", 14)
    assert (told["with"]["method"], told["with"]["nodes"]) == ("suffix", 9)
