"""Targets whose layers lie on several devices: the text is the whole model's, and no operation mixes devices."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import eyas
import media_models
import zoo
from eyas import drafters, runners
from eyas.core.cache import KVCache, Layout
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import FitError, ModelError, OptionError
from eyas.targets.placement import device_of
from eyas.targets.recurrent import state_modules
from reference import Oracle, plain_decode, run
from test_lossless import DRAWN, make
from toy_tokenizer import VOCAB, byte_tokenizer

pytest.importorskip("accelerate", reason="device maps need accelerate")
from two_devices import FIRST, SECOND, dispatched, halves, two_gpus

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {**zoo.FAMILIES, **zoo.HYBRIDS}
LAWS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=9, seed=4), Sampling())
PROMPTS = ((5, 9, 3), tuple(range(20, 43)), (7,), (*range(20, 40), 3, 4))
# the last prompt begins like the second one, which still runs when a row is free: its beginning is copied
NEW = (6, 18, 9, 12)


@cache
def answered(family: str) -> tuple[tuple[Request, list[int]], ...]:
    """Requests with the new tokens of plain decoding on one device."""
    requests = [Request(prompt, new, law) for prompt, new, law in zip(PROMPTS, NEW, LAWS, strict=True)]
    return tuple((request, plain_decode(MODELS[family](), request)) for request in requests)


def check(name: str, family: str, rows: int, device_map: Mapping[str, int] | None = None) -> Decoder:
    """Asserts the ids of plain decoding, and that keys and values lie where their layers compute."""
    cases = [(request, text) for request, text in answered(family) if request.sampling.greedy or name not in DRAWN]
    with two_gpus():
        model = dispatched(MODELS[family](), device_map or halves(MODELS[family]()))
        target = Target(model)
        answers = {request.prompt: text for request, text in cases}
        drafter = Oracle(target, answers, 12, 5) if name == "oracle" else make(name, target)
        decoder = Decoder(drafter.target, drafter, rows, reuse=True)
        texts, steps = run(decoder, [request for request, _ in cases])
        assert texts == [text for _, text in cases], "other ids than plain decoding"
        assert name != "oracle" or len(steps) < 0.6 * sum(map(len, texts)), "its paths must be accepted"
        session = decoder.target_session
        for k, layer in enumerate(target.family.layers):
            if session.cache.stores_of(k):
                (place,) = {weight.device for weight in layer.parameters()}
                assert {store.device for store in session.cache.keys_values(k)} == {place}
        for one in state_modules(target):
            (place,) = {weight.device for weight in one.module.parameters()}
            assert one.device == place
        return decoder


@pytest.mark.cover(family=1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_long_paths(family: str) -> None:
    """Nodes behind branches are accepted, so that keys and values move."""
    check("oracle", family, rows=3)


@pytest.mark.cover(name=5)
@pytest.mark.parametrize("name", [n for n in drafters.names() if n not in ("kangaroo", "self_speculative")])
def test_every_method(name: str) -> None:
    """Greedy and sampled requests, in three rows that are used again."""
    decoder = check(name, "llama", rows=3)
    assert list(decoder.target_session.cache.bytes_by_device(1)) == [FIRST, SECOND]


@pytest.mark.cover(family=2)
@pytest.mark.parametrize(
    "family", ["gemma2", "gpt2", "gpt_oss", "gemma4", "llama4", "deepseek_v3", "lfm2", "qwen3_5", "falcon_h1", "mamba2"]
)
def test_families(family: str) -> None:
    """Windows, learned positions, experts, keys that layers share, keys wider than values, states."""
    check("eagle2", family, rows=3)


@pytest.mark.cover(kind=2)
@pytest.mark.parametrize("name", ["mtp", "medusa"])
@pytest.mark.parametrize("kind", ["swapped", "by turns", "ends apart"])
def test_any_map(name: str, kind: str) -> None:
    """Embedding, rotary positions and LM head anywhere, layers in any order; the main device stays cuda:0."""
    plain = halves(MODELS["llama"]())
    turns = {name: k % 2 for k, name in enumerate(plain)}
    ends = {name: int("layers" not in name) for name in plain}
    swapped = {name: 1 - place for name, place in plain.items()}
    check(name, "llama", 2, {"swapped": swapped, "by turns": turns, "ends apart": ends}[kind])


def contents(cache: KVCache, layers: int) -> list[torch.Tensor]:
    """All that a cache holds, on one device."""
    return [part.cpu() for k in range(layers) if cache.stores_of(k) for part in cache.keys_values(k)]


def test_caches_hold_the_same() -> None:
    """Any sequence of writes, commits, copies and growths, of all rows or some, against a cache on one device."""
    layout: Layout = ((2, 4, 4), (2, 4, 4), None, (1, 6, 4), (2, 4, 4), (1, 6, 4))
    places = (FIRST, SECOND, None, FIRST, SECOND, SECOND)
    with two_gpus():
        one = KVCache(layout, 3, torch.float32, FIRST)
        two = KVCache(layout, 3, torch.float32, FIRST, devices=places)
        generator = torch.Generator().manual_seed(0)
        length_B = torch.tensor([3, 9, 0], device=FIRST)
        for width, rows in ((20, range(3)), (20, [0, 2]), (300, range(1, 2)), (300, range(3))):
            slot_RN = (length_B[list(rows)][:, None] + torch.arange(6, device=FIRST)).clone()
            for cache in (one, two):
                cache.prepare(rows, lambda slot_RN=slot_RN: slot_RN, width)
            for k, sizes in enumerate(layout):
                if sizes is not None:
                    heads, *widths = sizes
                    new = [torch.randn(len(rows), heads, 6, w, generator=generator).to(FIRST) for w in widths]
                    expected = one.update(*new, k)
                    seen = two.update(*(part.to(places[k]) for part in new), k)
                    assert {part.device for part in seen} == {places[k]}
                    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, seen, strict=True))
            path_BP = torch.tensor([[0, 2, 5], [0, 4, -1], [0, 1, 3]], device=FIRST)
            for cache in (one, two):
                cache.commit(length_B, path_BP)
                cache.copy(1, 2, 7)
            two.clear(0)
            one.clear(0)
            assert all(map(torch.equal, contents(one, len(layout)), contents(two, len(layout))))
            length_B = length_B + 2
        assert two.bytes_for(512) == one.bytes_for(512)
        assert two.bytes_by_device(512) == {
            place: sum(s.nbytes for s in two.stores if s.device == place) for place in (FIRST, SECOND)
        }


@pytest.mark.cover(kind=1)
@pytest.mark.parametrize("kind", sorted(media_models.MODELS))
def test_images(kind: str) -> None:
    """Keys that the model's own forward left on several devices are copied; logits and features come back."""

    def answers(model: Any, device: torch.device) -> list[int]:
        prompt: Any = {name: value.to(device) for name, value in media_models.prompt_with_image(kind, 0).items()}
        llm = eyas.load(model, make("eagle3", Target(model)), tokenizer=False)
        return [token for result in llm.generate(prompt, max_new_tokens=10) for token in result.token_ids]

    whole = media_models.make_model(kind)
    expected = answers(whole, torch.device("cpu"))
    with two_gpus():
        assert answers(dispatched(media_models.make_model(kind), halves(whole)), FIRST) == expected


def chatted(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """The answers of two turns."""
    chat = eyas.load(model, "suffix", tokenizer=byte_tokenizer(), kernels="off").chat(max_new_tokens=8)
    return [tuple(chat.send(text).token_ids) for text in ("one two", "three")]


@pytest.mark.slow
def test_chats_and_generate() -> None:
    """A chat that goes on from kept keys, `custom_generate` and `attach` give the ids of one device."""
    whole = zoo.tiny("llama", vocab_size=VOCAB, seed=4)
    ids = torch.tensor([[7, 8, 9, 7, 8, 9, 7]])
    asked = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = whole.generate(ids, **asked)
    alone = chatted(whole)
    with two_gpus():
        model = dispatched(zoo.tiny("llama", vocab_size=VOCAB, seed=4), halves(whole))
        assert chatted(model) == alone
        given = ids.to(FIRST)
        ours = model.generate(given, **asked, custom_generate=eyas.hf("suffix", tree="fixed"))
        assert torch.equal(ours.cpu(), expected)
        eyas.attach(model, "suffix", tree="fixed")
        assert torch.equal(model.generate(given, **asked).cpu(), expected)


def test_no_recordings() -> None:
    """Such a target runs by the model's own forward, and a warning says why where kernels were asked for."""
    with two_gpus():
        target = Target(dispatched(MODELS["llama"](), halves(MODELS["llama"]())))
        with pytest.warns(UserWarning, match="no CUDA graphs: the model's layers are on several devices"):
            assert runners.with_fastest_runner(target, "on").runner.name == "model"
        with pytest.raises(OptionError, match="weights int8 are for the compiled kernels, but there are none for"):
            runners.with_fastest_runner(target, weights="int8")


def test_too_many_tokens_are_told_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(cache: KVCache, slots: int) -> None:
        raise MemoryError

    with two_gpus():
        session = Target(dispatched(MODELS["llama"](), halves(MODELS["llama"]()))).open(1)
        monkeypatch.setattr(KVCache, "reserve", none_left)
        said = r"1 rows x 100000000 tokens need 35\.8 GiB on cuda:0 and 35\.8 GiB on cuda:1, which do not fit"
        with pytest.raises(FitError, match=said):
            session.reserve(100_000_000)


class Hook:
    """A hook of accelerate, with the attributes that eyas reads."""

    def __init__(self, place: Any) -> None:
        self.execution_device, self.offload = place, True


def test_what_stays_refused() -> None:
    """Layers on two devices without a hook that brings the logits back, layers in parts, and weights without values."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for place, module in enumerate(model):
        module._hf_hook = Hook(place)  # type: ignore[assignment]
    said = "lies on cuda:0, cuda:1, but nothing moves hidden states between them: load it whole"
    with pytest.raises(ModelError, match=said):
        device_of(model)
    with pytest.raises(ModelError, match="lies on meta, where weights have no values: load it with its weights"):
        device_of(nn.Linear(2, 2, device="meta"))
    whole = halves(MODELS["llama"]())
    parts = [name for name, _ in MODELS["llama"]().model.layers[1].named_children()]
    cut = {**whole, **{f"model.layers.1.{part}": int(part == "mlp") for part in parts}}
    del cut["model.layers.1"]
    with (
        two_gpus(),
        pytest.raises(ModelError, match="parts of layer 1 lie on cuda:0, cuda:1: write a device_map that keeps"),
    ):
        Target(dispatched(MODELS["llama"](), cut))
    with two_gpus(), pytest.raises(ModelError, match="load it on one device"):
        make("self_speculative", Target(dispatched(MODELS["llama"](), whole)))
