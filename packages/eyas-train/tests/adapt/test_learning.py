"""A head that learns while it drafts: the same ids, what is kept of requests, the budget, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eyas
import zoo
from eyas import checkpoints, drafters
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import InputError, OptionError
from eyas_train.adapt import Learner, LearningLLM, Private, Settings, adapting
from eyas_train.adapt.learner import BLOCK
from eyas_train.adapt.recording import MAX_TEXT, Text, Texts, batch_of
from learning import PROMPTS, RUNNERS, requests, target_by
from reference import plain_decode, run
from test_lossless import make

ALWAYS = Settings(share=1e9, lr=5e-3, steps=2, batch_tokens=64)


@pytest.mark.cover(runner=1)
@pytest.mark.quick("mtp-kernels")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_ids_stay_the_same_while_a_head_learns(name: str, runner: str) -> None:
    """Guards losslessness before, during and after steps, with trials in which the weights change every few cycles;
    greedy and sampled rows side by side, also in a decoder that was opened before the first step. And that what
    drafts has changed at all."""
    target = target_by(runner)
    learner = Learner(make(name, target), ALWAYS)
    first = learner.given.net.state_dict()
    wanted = [plain_decode(target.model, request) for request in requests(4)]
    decoder = Decoder(target, learner.drafter, 2, reuse=True)
    for _ in range(4):
        assert run(decoder, requests(4))[0] == wanted
        while learner.rest():
            pass
    assert learner.steps >= 8
    assert learner.trial is not None
    assert learner.trial.cycles > 2 * BLOCK  # both heads have drafted
    assert all(torch.equal(value, learner.given.net.state_dict()[key]) for key, value in first.items())
    learned = learner.student.net.state_dict()
    assert not all(torch.equal(value, learned[key].to(value.dtype)) for key, value in first.items())
    assert all(parameter.grad is None for parameter in target.model.parameters())


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_what_is_kept_is_what_the_target_has_read(name: str) -> None:
    """Guards the records: tokens, features of all layers that the loss reads, and which tokens are the answer's; with
    two rows, and prefixes that are not read again."""
    target = target_by("model")
    method = make(name, target)
    learner = Learner(method, Settings())
    decoder = Decoder(target, learner.drafter, 2, reuse=True)
    asked = [Request(prompt, 12, Sampling(1.0, seed=i)) for i, prompt in enumerate(PROMPTS)]
    answers = run(decoder, asked)[0]
    learner.rest()
    assert len(learner.texts.texts) == 3
    for text in learner.texts.texts:
        prompt, answer = next((p, a) for p, a in zip(PROMPTS, answers, strict=True) if text.tokens[: len(p)] == list(p))
        whole = [*prompt, *answer]
        assert text.tokens == whole[: len(text.tokens)]
        assert len(whole) - len(text.tokens) <= 1  # the last token was never read
        assert text.answer == len(prompt)
        features = target.encode(torch.tensor([text.tokens]), method.train_feature_layers)[0]  # type: ignore[attr-defined]
        torch.testing.assert_close(text.features_TF, features, atol=1e-4, rtol=1e-3)
    run(decoder, [Request((*PROMPTS[0], *answers[0], 5, 6), 12)])  # the first text is in a row already
    learner.rest()
    assert len(learner.texts.texts) == 4


@pytest.mark.slow
def test_nothing_is_kept_of_private_requests() -> None:
    target = target_by("model")
    learner = Learner(make("mtp", target), ALWAYS)
    run(Decoder(target, learner.drafter, 2), [*requests(2, (Private(),))])
    assert not learner.rest()
    assert not learner.texts.texts
    run(Decoder(target, learner.drafter, 2), [*requests(1, (Private(),)), Request((9, 8, 7), 12)])
    learner.rest()
    assert [text.tokens[:3] for text in learner.texts.texts] == [[9, 8, 7]]


def test_texts_are_bounded() -> None:
    texts = Texts(max_tokens=100, max_bytes=100 * 8, max_uses=2)
    for start in range(0, 500, 30):
        texts.add(Text(list(range(start, start + 30)), torch.zeros(30, 2), 3))
        assert texts.tokens <= 100
        assert texts.bytes <= 800
    assert len(texts.texts) == 3
    texts.add(Text([1, 2, 3, 4], torch.zeros(4, 2), 2))  # too short an answer
    assert len(texts.texts) == 3
    first = texts.take(40)
    assert [text.tokens[0] for text in first] == [480, 450]
    second = texts.take(40)
    assert [text.tokens[0] for text in second] == [420, 480]  # 480 has been used twice now, and leaves
    assert [text.tokens[0] for text in texts.texts] == [420, 450]
    batch = batch_of(first, torch.device("cpu"))
    assert batch.documents.lengths == (30, 30)
    assert batch.counted_N.tolist() == [place % 30 >= 3 for place in range(60)]


def test_a_long_text_keeps_its_end() -> None:
    target = Target(zoo.tiny("llama", max_position_embeddings=1024), "tiny")
    learner = Learner(make("mtp", target), Settings())
    prompt = tuple(3 + i % 50 for i in range(MAX_TEXT + 100))
    (answer,) = run(Decoder(target, learner.drafter, 1), [Request(prompt, 16)])[0]
    learner.rest()
    (text,) = learner.texts.texts
    whole = [*prompt, *answer]
    end = whole.index(text.tokens[-1], len(whole) - 2)
    assert len(text.tokens) == MAX_TEXT
    assert text.tokens == whole[: end + 1][-MAX_TEXT:]
    assert text.tokens[text.answer :] == list(answer)[: MAX_TEXT - text.answer]


def test_the_budget_is_kept() -> None:
    """Guards the promise of at most a share of the time: the clock is the test's own, and a step costs 1 s of it."""
    target, clock = target_by("model"), [0.0]
    learner = Learner(make("mtp", target), Settings(share=0.1, first_seconds=0.5, max_uses=100), lambda: clock[0])
    run(Decoder(target, learner.drafter, 1), requests(3))
    step = learner._step

    def slow() -> None:
        step()
        clock[0] += 1.0

    learner._step = slow  # type: ignore[method-assign]
    for _ in range(400):
        learner.begin_cycle()
        clock[0] += 0.1
        learner.end_cycle([1])
        learner.rest()
        if learner.steps > 1:
            assert learner.spent <= 0.1 * learner.served + 1e-9
    assert learner.served == pytest.approx(40, rel=0.01)
    assert learner.steps in (3, 4)  # a tenth of 40 s


@pytest.mark.slow
def test_worse_weights_go_back() -> None:
    """Guards the way back: the old weights draft again, what was learnt is forgotten, and the learning rate halves. The
    lengths are made up: the new weights' are shorter. With equal lengths the new weights stay, and every fourth
    comparison is with the head that was given."""
    target = target_by("model")
    learner = Learner(make("mtp", target), Settings(share=1e9, lr=5e-3, steps=1, batch_tokens=64, max_uses=100))
    run(Decoder(target, learner.drafter, 1), requests(3))
    compared = list[bool]()
    for _ in range(4):
        assert learner.rest()
        compared.append(learner._old is learner.given)
        drafted_with(learner, lambda cycle: 2)
    assert compared == [True, False, False, True]  # the first one is both
    assert (learner.undone, learner.kept) == (0, 4)
    assert learner.good.net is learner.method.net is not learner.given.net
    good = learner.good
    assert learner.rest()
    new = learner.new
    assert new is not None
    used = drafted_with(learner, lambda cycle: 2 + (cycle % 3) - (learner.method.net is new.net))
    assert used == {id(good.net), id(new.net)}
    assert (learner.undone, learner.kept, learner.lr) == (1, 4, 2.5e-3)
    assert learner.good.net is learner.method.net is good.net
    student = learner.student.net.state_dict()
    assert all(torch.equal(value, student[key]) for key, value in good.net.state_dict().items())


def drafted_with(learner: Learner, length: Callable[[int], int]) -> set[int]:
    """End a trial by cycles of these lengths; return the nets that drafted in it."""
    nets, cycle = set[int](), 0
    while learner.trial is not None:
        learner.begin_cycle()
        nets.add(id(learner.method.net))
        learner.end_cycle([length(cycle)])
        cycle += 1
    return nets


@pytest.mark.slow
def test_a_learnt_head_is_saved(tmp_path: Path) -> None:
    """Guards the file: it is read as any head, and no head that was there is overwritten."""
    model = zoo.tiny("llama")
    given, mine = tmp_path / "given", tmp_path / "mine"
    checkpoints.save(make("eagle3", Target(model)).weights(), given)  # type: ignore[attr-defined]
    before = {file.name: file.read_bytes() for file in given.iterdir()}
    plain = eyas.load(model, given, tokenizer=False, tree={"nodes": 8, "depth": 3, "branch": 2})
    llm = adapting(plain, share=1e9, steps=1)
    assert isinstance(llm, LearningLLM)
    assert llm.method == "eagle3"
    for _ in range(4):
        llm.generate([3, 4, 5], max_new_tokens=60)
    llm.save_draft(mine)
    llm.save_draft(mine)  # its own folder is written again
    assert json.loads((mine / "adapt.json").read_text())["steps"] == llm.learner.steps > 0
    again = eyas.load(model, mine, tokenizer=False)
    for name, value in again.drafter.net.state_dict().items():  # type: ignore[union-attr]
        torch.testing.assert_close(value, llm.learner.good.net.state_dict()[name])
    with pytest.raises(InputError, match="another head"):
        llm.save_draft(given)
    assert {file.name: file.read_bytes() for file in given.iterdir()} == before


def test_drafters_that_cannot_learn_are_refused() -> None:
    target = target_by("model")
    for name, words in (("suffix", "only heads"), ("medusa", "only heads"), ("eagle1", "deterministic")):
        with pytest.raises(OptionError, match=words):
            Learner(make(name, target))
    with pytest.raises(OptionError, match="second method"):
        Learner(drafters.merge(make("mtp", target), make("suffix", target)))
    with pytest.raises(OptionError, match="share"):
        Settings(share=0)
