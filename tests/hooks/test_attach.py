"""`eyas.attach` and the folder of a head: `generate` for everybody, and the model as it was afterwards."""

import copy
import gc
import inspect
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, pipeline

import eyas
import zoo
from eyas import api, checkpoints, tiny
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError
from eyas_train.custom_generate import write_custom_generate
from golden import needs_weights
from hooks.conftest import padded
from toy_tokenizer import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ASKED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every LLM that is made."""
    made, load = list[Any](), api.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(api, "load", counted)
    return made


@pytest.mark.slow
def test_a_model_is_as_before_after_detach(model: PreTrainedModel) -> None:
    """Whatever else were changed on a user's model would change what it does without us."""
    before, weights = dict(model.__dict__), {k: v.clone() for k, v in model.state_dict().items()}
    config = model.config.to_dict()
    kind, expected = dict(type(model).__dict__), model.generate(**padded(), **ASKED)
    attachment = eyas.attach(model, "suffix", tree="fixed")
    assert attachment.stats == ()
    assert torch.equal(model.generate(**padded(), **ASKED), expected)
    assert len(attachment.stats) == 3
    assert inspect.signature(model.generate) == inspect.signature(type(model).generate.__get__(model))
    assert model.state_dict().keys() == weights.keys()
    eyas.detach(model)
    eyas.detach(model)
    assert model.__dict__ == before
    assert dict(type(model).__dict__) == kind
    assert model.config.to_dict() == config
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model.generate(**padded(), **ASKED), expected)


@pytest.mark.slow
def test_nothing_is_loaded_twice(model: PreTrainedModel, loads: list[Any]) -> None:
    """Loading or packing for each call would cost more than drafts gain; weights that changed need it."""
    for _ in range(2):
        model.generate(**padded(), **ASKED, custom_generate=eyas.hf("suffix", tree="fixed"))
    with eyas.attach(model, "suffix", tree="fixed"):
        model.generate(**padded(), **ASKED)
        model.generate(**padded(), **ASKED)
        assert len(loads) == 1
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
        changed = model.generate(**padded(), **ASKED)
        assert len(loads) == 2
    assert torch.equal(changed, model.generate(**padded(), **ASKED))


@pytest.mark.slow
def test_kernels_follow_the_weights(model: PreTrainedModel) -> None:
    """Kernels keep a copy of the weights: after a step of an optimizer it is another model's."""
    custom = eyas.hf("suffix", tree="fixed", kernels="on")
    made = []
    for _ in range(2):
        made.append(model.generate(**padded(), **ASKED, custom_generate=custom))
        assert torch.equal(made[-1], model.generate(**padded(), **ASKED))
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    assert not torch.equal(*made)


@pytest.mark.slow
def test_models_are_freed_copied_and_saved(model: PreTrainedModel) -> None:
    """The head and packed weights are freed with the model; a copy decodes with its own weights."""
    eyas.attach(model, "suffix")
    model.generate(**padded(), **ASKED)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    changed = other.generate(**padded(), **ASKED)
    eyas.detach(other)
    assert torch.equal(changed, other.generate(**padded(), **ASKED))
    assert not torch.equal(changed, model.generate(**padded(), **ASKED))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded.generate(**padded(), **ASKED), model.generate(**padded(), **ASKED))
    eyas.attach(loaded)
    gone = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: eyas.attach("a/name"), "not to str"),  # type: ignore[arg-type]
        (lambda: eyas.attach(zoo.tiny("llama").train()), "training mode"),
        (lambda: eyas.attach(zoo.tiny("llama"), "no/such/folder"), "no such folder"),
        (lambda: eyas.attach(zoo.tiny("llama"), "eagle3"), "head"),
        (lambda: eyas.attach(zoo.REFUSED["minimax"]()), "minimax"),
        (lambda: eyas.detach("a/name"), "not from str"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_told_at_once(make: Any, reason: str) -> None:
    with pytest.raises(EyasError, match=reason) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_pipelines_and_arguments_by_position(model: PreTrainedModel) -> None:
    """A pipeline calls `model.generate` with its own mixture of arguments; stop strings bring the tokenizer along."""
    tokenizer = byte_tokenizer(template=None)
    tokenizer.padding_side = "left"
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["abcabcabc", "xyxy"]
    asked = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    expected = answer(prompts, **asked)
    config = model.generation_config
    text = answer(prompts[0], **asked, return_full_text=False)[0]["generated_text"]
    cut = {**ASKED, "stop_strings": text[3:6], "tokenizer": tokenizer}
    ids = padded()["input_ids"][:1]
    stopped = model.generate(ids, **cut)
    with eyas.attach(model, "suffix", tree="fixed"):
        assert answer(prompts, **asked) == expected
        assert torch.equal(model.generate(ids, **cut), stopped)
        config.stop_strings = [text[3:6]]
        assert torch.equal(model.generate(ids, config, tokenizer=tokenizer, **ASKED), stopped)
        config.stop_strings = None
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(ids, stop_strings="x")
        with pytest.raises(EyasError, match="paged"):
            model.generate(ids, cache_implementation="paged")
        seen = []
        model.generate(ids, max_new_tokens=2, custom_generate=lambda model, input_ids, **more: seen.append(input_ids))
        assert len(seen) == 1, "another custom_generate is the caller's own wish"


@pytest.mark.slow
def test_a_head_that_is_named_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the folder says where it lies: transformers runs a copy of its code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model, method = zoo.tiny("llama"), find("eagle1")
    expected = model.generate(**padded(), **ASKED)
    for name in ("first", "second"):
        head = method.random(Target(model), build_options(method.Options, {}), len(name))
        checkpoints.save(head.weights(), tmp_path / name)
        write_custom_generate(tmp_path / name)
        write_custom_generate(tmp_path / name)
        named = {"custom_generate": str(tmp_path / name), "trust_remote_code": True}
        assert torch.equal(model.generate(**padded(), **ASKED, **named, tree="fixed"), expected)
    kept = [llm.draft_name for llm in model.__dict__["_eyas"].llms.values()]
    assert kept == [str(tmp_path / "first"), str(tmp_path / "second")]
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**padded(), **ASKED, custom_generate=str(tmp_path / "first"), trust_remote_code=False)
    (tmp_path / "first" / "custom_generate" / "requirements.txt").write_text("eyas>=99\n")
    with pytest.raises(ImportError, match=r"eyas>=99"):
        model.generate(**padded(), **ASKED, custom_generate=str(tmp_path / "first"), trust_remote_code=True)
    with pytest.raises(EyasError, match="is not a draft head"):
        write_custom_generate(tmp_path)
    with pytest.raises(EyasError, match=r"eyas\.hf"):
        eyas.hooks.generate_by_folder(model, **padded())


@pytest.mark.slow
@needs_weights
def test_the_embedded_head_drafts() -> None:
    """The head that the tutorial names: several tokens for each forward, the model's own text."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    messages = [{"role": "user", "content": "I want to book a table for two in San Jose tonight."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    custom = eyas.hf(tiny.HEADS["eagle3"], tree={"nodes": 8})
    assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=custom), expected)
    assert custom.stats[0].tau > 2
