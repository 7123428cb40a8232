"""Prompts with images: every method gives the text of transformers' generate, and none reads another image's keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

import eyas
import media_models
from eyas import drafters
from eyas.arguments import as_prompts
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import InputError, OptionError
from media_models import MODELS, make_model, mllama, prompt_with_image, with_processor
from reference import run
from test_lossless import DRAWN, Oracle, make

NEW = 14
SEEDED = Sampling(0.8, top_k=20, seed=4)


@pytest.fixture(scope="module", params=sorted(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str) -> Target:
    return Target(make_model(kind))


def generated(target: Target, prompt: dict[str, Tensor]) -> list[int]:
    """The greedy ids of transformers."""
    with torch.no_grad():
        ids_1T: Any = target.model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    return ids_1T[0, prompt["input_ids"].shape[1] :].tolist()


def ids_of(llm: eyas.LLM, prompt: dict[str, Tensor]) -> list[int]:
    """The greedy ids of eyas. A processor makes lists of one prompt, and so is the result."""
    (result,) = llm.generate(prompt, max_new_tokens=NEW)  # type: ignore[misc]
    return list(result.token_ids)


def asked(prompt: dict[str, Tensor], sampling: Sampling = Sampling()) -> Request:  # noqa: B008 (frozen)
    """The engine's request for a prompt."""
    (one,), _ = as_prompts(prompt)
    return Request(one, NEW, sampling) if isinstance(one, tuple) else Request(one.ids, NEW, sampling, media=one.media)


def text_alone(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 90, (1, 21), generator=torch.Generator().manual_seed(seed))}


def another_image(prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**prompt, "pixel_values": -prompt["pixel_values"]}


@pytest.mark.quick("llava")
def test_plain_decoding_is_generate(kind: str, target: Target) -> None:
    """Guards positions, masks and keys behind images, and a shift that an earlier prompt leaves behind."""
    llm = eyas.load(target.model, method="vanilla", tokenizer=False)
    first, several = prompt_with_image(kind, 0), prompt_with_image(kind, 1, images=2)
    prompts = [first, text_alone(0), several, prompt_with_image(kind, 2, before=0)]
    expected = [generated(target, prompt) for prompt in prompts]
    assert [ids_of(llm, prompt) for prompt in prompts] == expected
    together = llm.generate(prompts, max_new_tokens=NEW, batch_size=3)
    assert [list(result.token_ids) for result in together] == expected
    changed = another_image(prompts[0])
    assert ids_of(llm, changed) == generated(target, changed) != expected[0]


def requests_of(kind: str) -> list[Request]:
    """With and without images, greedy and sampled; two have the same ids and other images."""
    first, second = prompt_with_image(kind, 0), prompt_with_image(kind, 1, images=2)
    prompts = [first, text_alone(1), second, another_image(first), first, text_alone(1)]
    laws = (Sampling(), SEEDED, SEEDED, Sampling(), SEEDED, Sampling())
    return [asked(prompt, law) for prompt, law in zip(prompts, laws, strict=True)]


METHODS = [name for name in drafters.names() if name != "mtp"]
PAIRS = [
    (name, kind)
    for i, name in enumerate(METHODS)
    for j, kind in enumerate(sorted(MODELS))
    if name == "eagle3" or i % 3 == j
]


@pytest.mark.cover(name=4)
@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_every_method(name: str, model: str) -> None:
    """Guards each method on one kind of model, EAGLE-3 on all: three rows, reused prefixes, prompts in chunks."""
    kind, target = model, Target(make_model(model))
    requests = [r for r in requests_of(kind) if r.sampling.greedy or name not in DRAWN]
    expected = [run(Decoder(target, make("vanilla", target)), [request])[0][0] for request in requests]
    budget = 5 if drafters.names().index(name) % 2 else None
    texts, _ = run(Decoder(target, make(name, target), 3, reuse=True, prefill_budget=budget), requests)
    assert texts == expected


@pytest.mark.cover(kind=1)
def test_long_paths(kind: str, target: Target) -> None:
    """Guards trees behind images: paths of several nodes are accepted, with three rows."""
    requests = [
        asked(prompt_with_image(kind, seed, images=1 + seed % 2), (Sampling(), SEEDED)[seed % 2]) for seed in range(5)
    ]
    requests.append(asked(text_alone(2)))
    expected = [run(Decoder(target, make("vanilla", target)), [request])[0][0] for request in requests]
    oracle = Oracle(target, {r.prompt: text for r, text in zip(requests, expected, strict=True)}, 12, 5, 0)
    texts, steps = run(Decoder(target, oracle, 3), requests)
    assert texts == expected
    cycles = [step for step in steps if not step.prefill]
    assert sum(len(step.tokens) for step in cycles) > 2 * len(cycles)


@pytest.mark.quick("llava")
def test_kept_text_behind_an_image_is_not_reused(kind: str, target: Target) -> None:
    """Guards against keys of another image: with the same ids, and after a text that only begins alike."""
    prompt, decoder = prompt_with_image(kind, 0), Decoder(target, make("vanilla", target), 2, reuse=True)
    alike = {"input_ids": prompt["input_ids"][:, :12]}
    asked_for = [asked(p) for p in (prompt, another_image(prompt), alike, prompt)]
    texts, steps = run(decoder, asked_for)
    assert texts == [run(Decoder(target, make("vanilla", target)), [request])[0][0] for request in asked_for]
    assert all(step.cached_tokens == 0 for step in steps if step.prefill)


@pytest.mark.quick("changes1-hides tokens: make it without padding")
@pytest.mark.parametrize(("changes", "message"), [
    ({"input_ids": torch.ones(2, 5, dtype=torch.long)}, "comes alone: call the processor for each prompt"),
    ({"attention_mask": torch.tensor([[0] * 3 + [1] * 30])}, "hides tokens: make it without padding"),
    ({"pixel_values": [[0.0]]}, "pixel_values is not a tensor"),
    ({"sounds": torch.zeros(1)}, "LlavaForConditionalGeneration takes no sounds"),
    ({"pixel_values": torch.zeros(2, 3, 8, 8)}, "cannot read this prompt with pixel_values"),
])  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    llm = eyas.load(make_model("llava"), method="vanilla", tokenizer=False)
    with pytest.raises(InputError, match=message) as caught:
        llm.generate({**prompt_with_image("llava", 0), **changes}, max_new_tokens=4)
    assert "\n" not in str(caught.value)
    assert ids_of(llm, prompt_with_image("llava", 0)), "the next prompt is answered"


@pytest.mark.slow
def test_layers_that_attend_to_images_apart() -> None:
    """Bug: Mllama attends to an image in layers of its own, and was decoded as if there were none."""
    image = {"pixel_values": torch.randn(1, 1, 1, 3, 8, 8), "aspect_ratio_ids": torch.ones(1, 1).long()}
    llm = eyas.load(mllama(), method="vanilla", tokenizer=False)
    prompt = {**text_alone(0), "aspect_ratio_mask": torch.ones(1, 1, 1).long(), **image}
    with pytest.raises(InputError, match="attend to images apart"):
        llm.generate(prompt, max_new_tokens=4)
    assert ids_of(llm, text_alone(0)) == generated(llm.target, text_alone(0))


@pytest.mark.slow
def test_a_prompt_that_the_model_refuses_fails_alone() -> None:
    """Guards the other requests, those that wait and those in flight, and the row of the refused one."""
    target, (good, bad) = Target(make_model("llava")), (prompt_with_image("llava", seed) for seed in range(2))
    requests = [asked(good), asked({**bad, "pixel_values": torch.zeros(2, 3, 8, 8)}), asked(text_alone(0)), asked(good)]
    decoder = Decoder(target, make("suffix", target), 2, reuse=True)
    tickets = [decoder.add(request) for request in requests]
    steps = []
    while not decoder.finished:
        steps += decoder.step()
    failed = [step for step in steps if step.error is not None]
    assert [step.request_id for step in failed] == tickets[1:2]
    assert "cannot read this prompt with pixel_values" in str(failed[0].error)
    for request_id, request in zip(tickets, requests, strict=True):
        if request_id != tickets[1]:
            expected = run(Decoder(target, make("vanilla", target)), [request])[0][0]
            assert [token for step in steps if step.request_id == request_id for token in step.tokens] == expected


@pytest.mark.slow
def test_messages_with_images(tmp_path: Path) -> None:
    """Guards an image on disk, or in memory, in a message: the ids of transformers by the same processor."""
    llm = eyas.load(with_processor(tmp_path / "llava"), "suffix")
    image = Image.effect_noise((20, 12), 90).convert("RGB")
    image.save(tmp_path / "image.png")
    text = {"type": "text", "text": "What is this?"}
    inputs = AutoProcessor.from_pretrained(tmp_path / "llava").apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": image}, text]}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    expected = generated(llm.target, dict(inputs))
    for part in ({"type": "image", "image": image}, {"type": "image", "path": str(tmp_path / "image.png")}):
        result = llm.generate([{"role": "user", "content": [part, text]}], max_new_tokens=NEW, ignore_eos=True)
        assert list(result.token_ids) == expected
    assert llm.generate("What is this?", max_new_tokens=4).text is not None


@pytest.mark.cover
@pytest.mark.quick("qwen2_5_vl-True")
@pytest.mark.parametrize("sampled", [False, True])
def test_attached(kind: str, sampled: bool) -> None:
    """Guards transformers' own call with a processor's output; sampled drafts are compared with none."""
    model, prompt = make_model(kind), prompt_with_image(kind, 0)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": sampled}
    texts = []
    for method in ("vanilla", "suffix"):
        torch.manual_seed(5)
        texts.append(model.generate(**prompt, custom_generate=eyas.hf(method), **settings)[0].tolist())
    with torch.no_grad():
        expected = texts[0] if sampled else model.generate(**prompt, **settings)[0].tolist()
    assert texts == [expected, expected]
    rows = {name: torch.cat([value, value]) for name, value in prompt.items()}
    with pytest.raises((OptionError, InputError), match="prompts with images are read one by one"):
        model.generate(**rows, custom_generate=eyas.hf("suffix"), **settings)


@pytest.mark.parametrize("kv", ["exact", "bfloat16", "int8"])
def test_kernels_continue_after_an_image(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards keys and values of an image, which the model's own forward makes: in a cache of rounded numbers they were refused."""
    monkeypatch.setattr(media_models, "TEXT", {**media_models.TEXT, "hidden_size": 64, "intermediate_size": 96})
    model, texts = make_model("llava"), []
    for method in ("vanilla", "suffix"):
        llm = eyas.load(model, method=method, tokenizer=False, kernels="on", kv=kv)
        assert llm.target.runner.name == "kernels"
        texts.append([ids_of(llm, prompt_with_image("llava", seed)) for seed in (0, 1)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    if kv == "exact":
        assert texts[0] == [generated(Target(model), prompt_with_image("llava", seed)) for seed in (0, 1)]
