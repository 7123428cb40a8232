"""small_model: its own cache beside the target's, vocabularies, what it drafts, and how it is loaded and trained."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from eyas import checkpoints, drafters
from eyas.api import load
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import Batch, Drafter
from eyas.drafters.small_model import Method, Options
from eyas.errors import CheckpointError, OptionError
from eyas.nn import Documents
from eyas.targets.fingerprints import fingerprint
from eyas.targets.loading import load_target
from reference import plain_decode, run
from toy_tokenizer import VOCAB, byte_tokenizer

SAMPLINGS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=20, repetition_penalty=1.3, seed=7))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(100) for _ in range(length))


def make(target: Target, draft: Target | None = None, **options: Any) -> Method:
    chosen = build_options(Options, options)
    return Method.random(target, chosen, 1) if draft is None else Method(target, chosen, draft)


def taus(drafter: Drafter, law: Sampling) -> list[int]:
    """Tokens of every cycle but the last."""
    _, steps = run(Decoder(drafter.target, drafter), [Request(prompt(11), 25, law)])
    return [len(s.tokens) for s in steps if not s.prefill][:-1]


@pytest.mark.quick("block-law0")
@pytest.mark.parametrize("law", SAMPLINGS)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_draft_that_is_the_target_is_always_right(verification: str, law: Sampling, target: Target) -> None:
    """Guards positions, masks, the draft's cache, and q, processed as p: with p = q nothing is refused."""
    draft = Target(zoo.tiny("llama"))
    assert set(taus(make(target, draft, depth=3, verification=verification), law)) == {4}


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2"])
def test_families_that_draft(family: str, target: Target) -> None:
    """The same with windows, masks by layer and learned positions, for a static tree grown level by level."""
    twins = [Target(zoo.FAMILIES[family]()) for _ in range(2)]
    drafter = make(*twins, **{"tree.choices": "reference"})
    assert set(taus(drafter, Sampling())) == {6}


TREES: tuple[dict[str, Any], ...] = (
    {"tree.choices": "reference", "tree.noise": "coupled"},
    {"depth": 4, "tree.noise": "coupled"},
    {"depth": 4, "dynamic.nodes": 12},
    {"depth": 2, "dynamic.nodes": 30, "dynamic.branch": 7, "dynamic.noise": "none"},
    {"depth": 4, "dynamic.nodes": 12, "confidence": 0.3},
    {"depth": 4, "confidence": 0.3, "tree.noise": "coupled"},
)


@pytest.mark.cover(options=3)
@pytest.mark.parametrize("options", TREES)
def test_chosen_trees_give_the_ids_of_plain_decoding(options: dict[str, Any], target: Target) -> None:
    """Guards every shape at any temperature, in a batch whose rows are of different ages."""
    requests = [Request(prompt(4 + 7 * i, i), 14 - i, SAMPLINGS[i % 3]) for i in range(4)]
    draft = Target(zoo.tiny("llama", seed=0, num_hidden_layers=2))
    tokens, _ = run(Decoder(target, make(target, draft, **options), 2), requests)
    assert tokens == [plain_decode(target.model, r) for r in requests]


@pytest.mark.exhaustive
def test_a_drawn_chain_keeps_the_law() -> None:
    """The second and third tokens of 1,500 seeds against the exact law of 9 tokens: false alarm 1e-5, seeded."""
    target = Target(zoo.tiny("llama", vocab_size=9))
    drafter = make(target, Target(zoo.tiny("llama", vocab_size=9, seed=5)), depth=2)
    requests = [Request((1, 4, 2), 3, Sampling(1.0, seed=seed)) for seed in range(1500)]
    tokens, _ = run(Decoder(target, drafter, 50), requests)
    second_V, third_V = torch.zeros(9), torch.zeros(9)
    first_V = target.model(torch.tensor([[1, 4, 2]])).logits[0, -1].softmax(-1)
    for a in range(9):
        after_V = first_V[a] * target.model(torch.tensor([[1, 4, 2, a]])).logits[0, -1].softmax(-1)
        second_V = second_V + after_V
        for b in range(9):
            third_V = third_V + after_V[b] * target.model(torch.tensor([[1, 4, 2, a, b]])).logits[0, -1].softmax(-1)
    for place, law_V in ((1, second_V), (2, third_V)):
        seen_V = torch.bincount(torch.tensor([t[place] for t in tokens]), minlength=9).float()
        expected_V = 1500 * law_V.detach()
        assert float(((seen_V - expected_V) ** 2 / expected_V).sum()) < 37.3


@pytest.mark.slow
def test_confidence_ends_a_row_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the threshold: nothing behind a token below it, and the model is not asked when no row goes on."""
    drafter = make(target, Target(zoo.tiny("llama", seed=5)), depth=5, confidence=0.25)
    _, steps = run(Decoder(target, drafter), [Request(prompt(9), 20)])
    ended = 0
    for step in steps:
        if step.draft is None:
            continue
        going, candidates = step.draft.log_q_BN[0].exp() >= 0.25, step.draft.tree.acceptable_BN[0]
        first = next((n for n in range(1, 6) if not going[n]), 6)
        assert candidates.tolist() == [n <= first for n in range(6)]
        ended += first < 5
    assert ended
    session, calls = drafter.open(1), list[int]()
    extend = session.model.extend
    monkeypatch.setattr(session.model, "extend", lambda *given: (calls.append(1), extend(*given))[1])
    monkeypatch.setattr(drafter, "open", lambda rows: session)
    _, steps = run(Decoder(target, drafter), [Request(prompt(9), 20)])
    assert len(calls) < 5 * sum(not step.prefill for step in steps)


@pytest.mark.slow
def test_a_chat_goes_on_where_the_draft_stands(target: Target) -> None:
    """Guards rows used again: the draft keeps what it has read of the shared prefix, and is right there."""
    drafter = make(target, Target(zoo.tiny("llama")), depth=3)
    decoder, history = Decoder(target, drafter, reuse=True), list(prompt(20))
    for turn in range(4):
        request = Request(tuple(history), 9)
        tokens, steps = run(decoder, [request])
        assert tokens == [plain_decode(target.model, request)]
        assert {len(s.tokens) for s in steps if not s.prefill} == {4}
        history = [*history, *tokens[0], *prompt(3 + 7 * turn, turn)] if turn != 2 else history[:12]


def folder_of(path: Path, size: int, tokenizer: Any, **more: Any) -> str:
    zoo.tiny("llama", vocab_size=size, eos_token_id=1, **more).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("mine", "theirs"), [(0, 10), (10, 0)])
def test_padded_vocabularies(mine: int, theirs: int, tmp_path: Path) -> None:
    """Guards matrices padded to different sizes: what one of both lacks is not drafted, and is read safely."""
    target = load_target(folder_of(tmp_path / "target", VOCAB + mine, byte_tokenizer()))
    draft = folder_of(tmp_path / "draft", VOCAB + theirs, byte_tokenizer(), num_hidden_layers=1)
    for options in ({"depth": 3}, {"depth": 3, "dynamic.nodes": 9}):
        drafter = Method.from_pretrained(draft, target, build_options(Options, options))
        law = Sampling(2.0, repetition_penalty=1.1, seed=2)
        requests = [Request((5, VOCAB + mine - 1, 7), 12), Request((5, 6, 7), 12, law)]
        tokens, steps = run(Decoder(target, drafter, 2), requests)
        chosen = tokens if "dynamic.nodes" in options else tokens[:1]
        assert chosen == [plain_decode(target.model, r) for r in requests][: len(chosen)]
        drafts = [s.draft for s in steps if s.draft is not None]
        drafted: list[Tensor] = [d.tokens_BN[:, 1:][d.tree.acceptable_BN[:, 1:]] for d in drafts]
        assert max(int(t.max()) for t in drafted if len(t)) < VOCAB


@pytest.mark.slow
def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    target = load_target(folder_of(tmp_path / "target", VOCAB, byte_tokenizer()))
    other = byte_tokenizer()
    other.add_tokens(["one more"])
    # the target does not know it: never drafted
    Method.from_pretrained(folder_of(tmp_path / "more", VOCAB + 1, other), target)
    swapped = tmp_path / "swapped"
    folder_of(swapped, VOCAB, byte_tokenizer())
    file = swapped / "tokenizer.json"
    file.write_text(file.read_text().replace('"a": ', '"A-": ', 1))
    said = r"another vocabulary than the target: token \d+ is 'A-' there and 'a' in the target"
    with pytest.raises(CheckpointError, match=said):
        Method.from_pretrained(swapped, target)
    said = "vocabulary of 300 tokens, but the target has 262. Without both tokenizers"
    with pytest.raises(CheckpointError, match=said):
        Method.from_pretrained(folder_of(tmp_path / "without", 300, None), target)


@pytest.mark.slow
def test_a_whole_model_is_recognised(tmp_path: Path) -> None:
    """Guards `--draft MODEL` without `--method`; what we wrote and what transformers wrote."""
    model = zoo.tiny("llama")
    target = Target(model)
    checkpoints.save(make(target).weights(), tmp_path / "ours")
    zoo.tiny("gpt2").save_pretrained(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        llm = load(model, draft=tmp_path / name)
        assert llm.method == "small_model"
        request = Request((3, 4, 5), 8)
        assert run(Decoder(llm.target, llm.drafter), [request])[0] == [plain_decode(model, request)]
    assert Method.from_pretrained(tmp_path / "ours", target).target_fingerprint == fingerprint(target)
    with pytest.warns(UserWarning, match="trained for another target"):
        load(zoo.tiny("llama", seed=9), draft=tmp_path / "ours")
    with pytest.raises(CheckpointError, match="not of EAGLE"):
        load(model, draft=tmp_path / "ours", method="eagle2")


def test_weights_come_back(target: Target) -> None:
    """Guards tied matrices, which are written once."""
    drafter = make(target)
    weights = drafter.weights()
    assert "lm_head.weight" not in weights.tensors
    again = Method.load(weights, target)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again.draft_model.model(ids).logits, drafter.draft_model.model(ids).logits)
    del weights.tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight"):
        Method.load(weights, target)


def test_several_models_draft_together(tmp_path: Path) -> None:
    """Guards merged trees: plain decoding's ids at any temperature; one model's luck helps the other."""
    model = zoo.tiny("llama")
    model.save_pretrained(tmp_path / "same")
    zoo.tiny("llama", seed=5).save_pretrained(tmp_path / "other")
    llm = load(model, draft=f"{tmp_path / 'other'}, {tmp_path / 'same'}", method="small_model", depth=3)
    assert llm.method == "small_model+small_model"
    requests = [Request(prompt(4 + 7 * i, i), 13, law) for i, law in enumerate(SAMPLINGS)]
    tokens, steps = run(Decoder(llm.target, llm.drafter, 2), requests)
    assert tokens == [plain_decode(model, r) for r in requests]
    cycles = [s for s in steps if not s.prefill]
    assert {len(s.tokens) for s in cycles} == {4}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"depth": 0}, "depth must be a whole number, 1 or more, got 0"),
    "confidence": ({"confidence": 1.0}, "confidence must be from 0 to below 1"),
    "depth of a tree": ({"depth": 3, "tree.choices": "reference"}, "leave depth out"),
    "two trees": ({"dynamic.nodes": 8, "tree.choices": "reference"}, "a dynamic tree needs"),
    "half a dynamic tree": ({"dynamic.branch": 3}, r"a dynamic tree needs dynamic\.nodes"),
    "a dynamic tree of nothing": ({"dynamic.nodes": 0}, r"tree\.nodes must be"),
    "a block that is a tree": (
        {"verification": "block", "tree.choices": "reference"},
        "verification block is for a whole sampled chain",
    ),
    "net": ({"net.width": 100}, "multiple of 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str, target: Target) -> None:
    options, message = BAD[name]
    with pytest.raises(OptionError, match=message):
        make(target, **options)


def test_without_a_model(target: Target) -> None:
    with pytest.raises(CheckpointError, match="needs a smaller language model: pass its folder"):
        drafters.find("small_model").from_pretrained(None, target)


def batch(target: Target) -> Batch:
    lengths, generator = (9, 4, 6), torch.Generator().manual_seed(0)
    tokens_N = torch.randint(100, (sum(lengths),), generator=generator)
    counted_N = torch.rand(len(tokens_N), generator=generator) < 0.7
    features = [target.encode(ids[None], (target.num_layers,))[0] for ids in tokens_N.split(lengths)]
    return Batch(tokens_N, torch.cat(features), counted_N, Documents(lengths))


def test_the_loss_is_the_plain_formula(target: Target) -> None:
    """Guards packing and shifting: against documents one by one, with the logits of both models' own forwards."""
    drafter, given = make(target), batch(target)
    expected, count = 0.0, 0
    for ids, counted in zip(given.tokens_N.split([9, 4, 6]), given.counted_N.split([9, 4, 6]), strict=True):
        p_TV, q_TV = (model(ids[None]).logits[0, :-1].detach() for model in (target.model, drafter.draft_model.model))
        expected -= float(((p_TV.softmax(-1) * q_TV.log_softmax(-1)).sum(-1) * counted[1:]).sum())
        count += int(counted[1:].sum())
    found = drafter.loss(given)
    assert int(found.count) == count
    assert float(found.total.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_training_helps(target: Target) -> None:
    """Guards the gradient: thirty steps on one batch make the draft agree with the target there."""
    drafter, given = make(target), batch(target)
    optimiser = torch.optim.Adam(drafter.net.parameters(), lr=3e-3)
    before = drafter.loss(given)
    for _ in range(30):
        optimiser.zero_grad()
        loss = drafter.loss(given)
        (loss.total / loss.count).backward()
        optimiser.step()
    after = drafter.loss(given)
    assert int(before.sums["accuracy"]) < 4
    assert int(after.sums["accuracy"]) > 7
    assert float(after.total.detach()) < float(before.total.detach())
