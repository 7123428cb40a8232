"""Quantised targets: the text is that of their own plain decoding, by every method; whatever would
break that is named."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import eyas
import zoo
from eyas import checkpoints, drafters, runners
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.errors import ModelError, OptionError
from eyas.targets import quantised
from eyas.targets.fingerprints import base_has_fingerprint, fingerprint, has_fingerprint
from eyas.targets.loading import load_target
from eyas.targets.quantised import library_of
from gguf_models import write_gguf
from quantised_models import KINDS, SIZES, _bitsandbytes, load, write_compressed, write_packed
from reference import SAMPLINGS, plain_decode, run
from test_lossless import DRAWN, make

# bitsandbytes and torchao say such things about torch and about themselves; GPTQModel leaves a
# temporary folder to the collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
]

ROUNDED_INPUTS = [kind for kind in KINDS if kind.endswith("by token")]
EXACT = [kind for kind in KINDS if kind not in ROUNDED_INPUTS]
NEAR_TIE = 0.15  # standard deviations of a token's logits
QUICK = {"torchao int8", "compressed-tensors W4A16", "bitsandbytes nf4"}
THOROUGH = QUICK | {"GPTQ 4 bit", "AWQ 4 bit"}
QUICK_METHODS = {"eagle2", "suffix"}
PROMPTS = ((7, 3, 90, 41, 5), tuple(range(20, 43)), (11, 12, 13, 11, 12, 13, 11, 12))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """kind -> (model, requests with the new tokens of plain decoding); made once."""

    @cache
    def made(kind: str) -> tuple[PreTrainedModel, tuple[tuple[Request, list[int]], ...]]:
        model = KINDS[kind](tmp_path_factory.mktemp("quantised"))
        return model, answered(model)

    return made


def answered(model: PreTrainedModel) -> tuple[tuple[Request, list[int]], ...]:
    requests = [Request(prompt, 20, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=False)]
    return tuple((request, plain_decode(model, request)) for request in requests)


def check(method: str, target: Target, requests: tuple[tuple[Request, list[int]], ...]) -> None:
    tokens, _ = run(Decoder(target, make(method, target), 2), [request for request, _ in requests])
    for (request, expected), new in zip(requests, tokens, strict=True):
        if request.sampling.greedy or method not in DRAWN:
            assert new == expected, f"{request.sampling}"


def cases() -> list[Any]:
    """One kind of each library by every method; the others by two."""
    found = []
    for kind in EXACT:
        for method in drafters.names() if kind in THOROUGH else sorted(QUICK_METHODS):
            quick = kind in QUICK and method in QUICK_METHODS
            found.append(pytest.param(kind, method, marks=[] if quick else pytest.mark.slow))
    return found


@pytest.mark.cover(method=9)
@pytest.mark.quick("compressed-tensors W4A16-suffix")
@pytest.mark.parametrize(("kind", "method"), cases())
def test_every_kind_by_every_method(kind: str, method: str, models: Any) -> None:
    """Guards the passes over trees: the library's layers give a tree's nodes the numbers of single
    tokens, greedily and seeded."""
    model, requests = models(kind)
    target = runners.with_fastest_runner(Target(model))
    assert library_of(target.model), "the layers are plain: this test proves nothing"
    check(method, target, requests)


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDED_INPUTS)
@pytest.mark.parametrize("method", ["vanilla", *sorted(QUICK_METHODS)])
def test_kinds_that_round_inputs(kind: str, method: str, models: Any) -> None:
    """Guards kinds whose layers round each token's inputs to 8 bits: a difference in the last bit
    of a float, which another order of summation makes, may become a whole step of that scale, so
    texts part at near ties, with plain decoding by a cache just as with trees. Every token that is
    emitted must be the model's own choice behind the text before it, or nearly tied with it."""
    model, _ = models(kind)
    target = runners.with_fastest_runner(Target(model))
    requests = [Request(prompt, 20) for prompt in PROMPTS]
    tokens, _ = run(Decoder(target, make(method, target), 2), requests)
    for request, new in zip(requests, tokens, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*request.prompt, *new]])).logits[0, len(request.prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert float(((logits_TV.amax(1) - chosen_T) / logits_TV.std(1)).max()) < NEAR_TIE


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_no_layer_mixes_tokens(kind: str, models: Any) -> None:
    assert quantised.mixing_layer(models(kind)[0]) == ""


@pytest.mark.slow
def test_layers_that_mix_tokens_are_named(tmp_path: Path) -> None:
    """Guards the warning: LLM.int8 picks outlier columns from all tokens of a pass; a scale per
    tensor is one for all of them."""
    write_compressed(tmp_path / "by tensor", "W8A8", strategy="tensor")
    with pytest.warns(UserWarning, match="by all tokens of a pass together"):
        eyas.load(load(tmp_path / "by tensor"), tokenizer=False)


def test_outliers_of_bitsandbytes_are_named(tmp_path: Path) -> None:
    model = _bitsandbytes(load_in_8bit=True)(tmp_path)
    with pytest.warns(UserWarning, match=r"llm_int8_threshold=0\.0"):
        eyas.load(model, tokenizer=False)


class ByTensor(nn.Linear):
    """A layer that rounds its inputs by one scale for the whole pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


def test_the_probe_of_mixing_layers() -> None:
    """Guards the probe without any library: it finds the layer, and no ordinary one."""
    model = nn.ModuleDict({"plain": nn.Linear(32, 8), "mixing": ByTensor(32, 8), "same": nn.Linear(32, 8)})
    assert quantised.mixing_layer(model) == ""
    for layer in model.values():
        layer.quantization_scheme = "some"  # type: ignore[assignment]
    assert quantised.mixing_layer(model) == "mixing (ByTensor)"
    assert library_of(Target(zoo.FAMILIES["llama"]()).model) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "library"),
    [("compressed-tensors W8A16", "compressed-tensors"), ("GPTQ 4 bit", "gptq"), ("AWQ 4 bit", "awq")],
)
def test_kernels_leave_quantised_layers_alone(kind: str, library: str, models: Any) -> None:
    """Guards against kernels that would read packed weights as if they were the matrix."""
    model, _ = models(kind)
    assert runners.with_fastest_runner(Target(model)).runner.name == "model"
    with pytest.warns(UserWarning, match=f"computed by {library}"):
        runners.with_fastest_runner(Target(model), "on")
    with pytest.raises(OptionError, match="kept quantised"):
        runners.with_fastest_runner(Target(model), weights="int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("compressed-tensors W8A16", "compressed-tensors W4A16"), ("GPTQ 4 bit", "AWQ 4 bit")]
)
def test_fingerprints(kinds: tuple[str, str], models: Any) -> None:
    """Guards `has_fingerprint`: a quantised model is neither the plain one nor another quantised one, and
    it is itself."""
    plain = Target(zoo.tiny("llama", **SIZES))
    found = {kind: Target(models(kind)[0]) for kind in kinds}
    for kind, target in found.items():
        assert has_fingerprint(target, fingerprint(target))
        assert not has_fingerprint(target, fingerprint(plain))
        assert not has_fingerprint(plain, fingerprint(target))
        assert not any(has_fingerprint(target, fingerprint(other)) for name, other in found.items() if name != kind)


def test_a_folder_just_works(tmp_path: Path) -> None:
    """Guards a user's first try: `--target FOLDER` of a quantised checkpoint in bfloat16, which
    stays in its own dtype."""
    pytest.importorskip("torchao", reason="needs torchao")
    model = KINDS["torchao int8"](tmp_path / "plain").bfloat16()
    model.save_pretrained(tmp_path / "saved")
    llm = eyas.load(tmp_path / "saved", "suffix")
    assert (library_of(llm.target.model), llm.target.dtype) == ("torchao", torch.bfloat16)
    exact = eyas.load(tmp_path / "saved", "suffix", dtype="float32")
    expected = plain_decode(exact.target.model, Request(PROMPTS[0], 20))
    assert list(exact.generate(list(PROMPTS[0]), max_new_tokens=20, ignore_eos=True).token_ids) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_packed_folder_just_works(method: str, tmp_path: Path) -> None:
    """Guards a user's first try with a checkpoint of GPTQ or AWQ in float16, also by `--dtype float32`."""
    pytest.importorskip("gptqmodel", reason="needs GPTQModel")
    pytest.importorskip("optimum", reason="transformers reads GPTQ with optimum")
    write_packed(tmp_path, method)
    llm = eyas.load(tmp_path, "suffix")
    assert (library_of(llm.target.model), llm.target.dtype) == (method, torch.float16)
    assert len(llm.generate(list(PROMPTS[0]), max_new_tokens=20, ignore_eos=True).token_ids) == 20
    exact = eyas.load(tmp_path, "suffix", dtype="float32")
    expected = plain_decode(load(tmp_path), Request(PROMPTS[0], 20))
    assert list(exact.generate(list(PROMPTS[0]), max_new_tokens=20, ignore_eos=True).token_ids) == expected


@pytest.mark.slow
def test_an_adapter_stays_beside_quantised_weights(models: Any, tmp_path: Path) -> None:
    """Guards a single adapter: merged, it would be rounded as the weights are."""
    peft = pytest.importorskip("peft", reason="adapters need the extra peft")
    write_compressed(tmp_path / "model", "W4A16")
    sizes = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 16}
    config = peft.LoraConfig(**sizes, init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tuned = peft.get_peft_model(zoo.tiny("llama", **SIZES), config)
        tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    target = load_target(tmp_path / "model", adapters=str(tmp_path / "adapter"))
    assert any("lora" in name for name, _ in target.model.named_parameters())
    base = load(tmp_path / "model")
    base(torch.tensor([[1]]))  # compressed-tensors unpacks its weights when they are first used
    own = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval().get_base_model()
    requests = answered(own)
    assert requests != answered(models("compressed-tensors W4A16")[0]), "the adapter changes nothing"
    check("eagle2", runners.with_fastest_runner(target), requests)
    base_target = Target(models("compressed-tensors W4A16")[0])
    assert base_has_fingerprint(target, fingerprint(base_target))
    assert not has_fingerprint(target, fingerprint(base_target))


@pytest.mark.slow
def test_a_head_of_the_plain_model(models: Any, tmp_path: Path) -> None:
    """Guards heads that were trained for the model before it was quantised: they draft, with a
    note, and the text is the quantised's."""
    checkpoints.save(make("eagle1", Target(zoo.tiny("llama", **SIZES))).weights(), tmp_path)
    model, requests = models("compressed-tensors W8A16")
    with pytest.warns(UserWarning, match="other weights than these quantised ones"):
        llm = eyas.load(model, tmp_path, tokenizer=False)
    request, expected = requests[0]
    found = llm.generate(list(request.prompt), max_new_tokens=request.max_new_tokens, ignore_eos=True)
    assert list(found.token_ids) == expected
    checkpoints.save(make("eagle1", Target(model)).weights(), tmp_path / "its own")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        eyas.load(model, tmp_path / "its own", tokenizer=False)


@pytest.mark.slow
def test_gguf(tmp_path: Path) -> None:
    """Guards files in GGUF format: by path or by folder and name; the weights are plain, so kernels
    run them and text is exact."""
    write_gguf(tmp_path / "model.gguf")
    with pytest.warns(UserWarning, match="no tokenizer in model.gguf"):
        llm = eyas.load(tmp_path / "model.gguf", "suffix")
    assert library_of(llm.target.model) == ""
    by_name = eyas.load(tmp_path, "suffix", gguf_file="model.gguf", tokenizer=False)
    assert has_fingerprint(by_name.target, fingerprint(llm.target))
    for method in QUICK_METHODS:
        check(method, runners.with_fastest_runner(by_name.target), answered(by_name.target.model))


def test_gguf_refusals(tmp_path: Path) -> None:
    """Guards the messages: one line each, which says what to write."""
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"there: model\.gguf"):
        eyas.load(tmp_path, gguf_file="other.gguf")
    with pytest.raises(ModelError, match="or a file in GGUF format"):
        eyas.load(tmp_path)
    with pytest.raises(OptionError, match="gguf_file"):
        eyas.load(zoo.FAMILIES["llama"](), gguf_file="model.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:3000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        eyas.load(tmp_path / "cut.gguf", tokenizer=False)
