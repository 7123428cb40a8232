"""Quantised targets: the text is that of their own plain decoding, by every method; whatever would
break that is named."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import eyas
import zoo
from eyas import drafters, runners
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.targets import quantised
from eyas.targets.fingerprints import base_has_fingerprint, fingerprint, has_fingerprint
from eyas.targets.loading import load_target
from eyas.targets.quantised import library_of
from quantised_models import KINDS, SIZES, load, write_compressed
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
