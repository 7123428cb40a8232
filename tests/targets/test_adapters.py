"""Adapters of PEFT on the target, merged and switched: the text is that of PEFT's own model, by
every method; nothing is mixed up."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import eyas
import zoo
from covers import turn
from eyas import checkpoints, drafters, runners
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.errors import ModelError, OptionError
from eyas.runners.cpu import UnsuitedError
from eyas.targets.fingerprints import base_has_fingerprint, fingerprint, has_fingerprint
from eyas.targets.loading import target_of
from reference import plain_decode, run
from test_lossless import DRAWN, SAMPLINGS, make, requests

peft = pytest.importorskip("peft", reason="adapters need the extra peft")

# of PEFT, about transformers
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4},
    "dora": {"target_modules": "all-linear", "r": 2, "use_dora": True},
    "head": {"target_modules": ["o_proj", "lm_head"], "r": 3},
}


QUICK = {"vanilla", "eagle2"}
SWITCHED = ("lora", "dora")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of the small llama, by name, as PEFT writes them; their weights are random and large
    enough to change the text."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, options) in enumerate(KINDS.items()):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = peft.LoraConfig(init_lora_weights=False, lora_alpha=16, task_type="CAUSAL_LM", **options)
            tuned = peft.get_peft_model(zoo.FAMILIES["llama"](), config)
            tuned.save_pretrained(root / name, save_embedding_layers=False)
    return {name: str(root / name) for name in KINDS}


@pytest.fixture(scope="module")
def target(folders: dict[str, str]) -> Target:
    """The small llama with all adapters."""
    return target_of(zoo.FAMILIES["llama"](), adapters=folders)


@cache
def answered(folder: str) -> tuple[tuple[Request, list[int]], ...]:
    """Requests, and what PEFT's own model with this adapter answers by plain decoding."""
    model = peft.PeftModel.from_pretrained(zoo.FAMILIES["llama"](), folder).eval().get_base_model()
    return tuple((request, plain_decode(model, request)) for request, _ in requests("llama", 3, SAMPLINGS))


def asking(request: Request, adapter: str) -> Request:
    changed = copy.copy(request)
    object.__setattr__(changed, "adapter", adapter)
    return changed


@pytest.mark.cover(name=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in drafters.names()]
)
def test_every_method_switches(name: str, target: Target, folders: dict[str, str]) -> None:
    """Guards the switch before each forward: decoders of several adapters, and of none, step in
    turns on one model, and each gives the text of its own adapter. A forward with another's weights
    changes some token: the texts of the adapters differ. Most methods have one of the adapters, by turns."""
    drafter = make(name, target)
    asked = [request for request, _ in requests("llama", 3, SAMPLINGS)][:2]
    wanted = {"": [tokens for _, tokens in requests("llama", 3, SAMPLINGS)]}
    adapters = SWITCHED if name in QUICK else (turn(name, drafters.names(), SWITCHED),)
    wanted |= {adapter: [tokens for _, tokens in answered(folders[adapter])] for adapter in adapters}
    decoders, tokens = {}, dict[tuple[str, int], list[int]]()
    for adapter in wanted:
        view = drafter.for_target(target.with_adapter(adapter))
        decoders[adapter] = Decoder(view.target, view, 2)
        for request in asked:
            tokens[adapter, decoders[adapter].add(asking(request, adapter))] = []
    while any(not decoder.finished for decoder in decoders.values()):
        for adapter, decoder in decoders.items():
            for step in decoder.step():
                tokens[adapter, step.request_id] += step.tokens
    for adapter, texts in wanted.items():
        for number, request in enumerate(asked):
            if request.sampling.greedy or name not in DRAWN:
                assert tokens[adapter, number + 1] == list(texts[number]), f"{adapter or 'base'}, {request.sampling}"
    different = {tuple(map(tuple, texts)) for texts in wanted.values()}
    assert len(different) == len(wanted), "the adapters change nothing: this test proves little"


@pytest.mark.cover(kind=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_merged(kind: str, folders: dict[str, str]) -> None:
    """Guards merging: kernels run the merged weights, and the text is PEFT's own."""
    merged = runners.with_fastest_runner(target_of(zoo.FAMILIES["llama"](), adapters=folders[kind]), kernels="off")
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    drafter = make("eagle2", merged)
    tokens, _ = run(Decoder(merged, drafter, 2), [request for request, _ in answered(folders[kind])])
    assert tokens == [list(new) for _, new in answered(folders[kind])]


def test_kernels_refuse_what_they_would_leave_out(folders: dict[str, str]) -> None:
    """Guards against a silent wrong text: PEFT's layers show the base model's weights to whoever reads `weight`."""
    wide = zoo.tiny("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    # adds zero: the numbers alone show nothing
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True)
    tuned = peft.get_peft_model(wide, config).eval()
    with pytest.raises(UnsuitedError, match="adapter"):
        runners.make_cpu_runner(Target(tuned.get_base_model()))
    with pytest.raises(OptionError, match="merge"):
        eyas.load(tuned, weights="int8", tokenizer=False)


@pytest.mark.slow
def test_a_model_of_peft_is_used_as_it_is(folders: dict[str, str]) -> None:
    """Guards `eyas.load(peft_model)`: the adapter that was active answers, others answer by name,
    "base" without one."""
    tuned = peft.PeftModel.from_pretrained(zoo.FAMILIES["llama"](), folders["lora"], adapter_name="one").eval()
    tuned.load_adapter(folders["dora"], "two")
    llm = eyas.load(tuned, tokenizer=False)
    (request, one), base = answered(folders["lora"])[0], requests("llama", 3, SAMPLINGS)[0][1]
    two = answered(folders["dora"])[0][1]
    asked: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "ignore_eos": True}
    ids = list(request.prompt)
    assert list(llm.generate(ids, **asked).token_ids) == one
    assert list(llm.generate(ids, adapter="two", **asked).token_ids) == two
    assert list(llm.generate(ids, adapter="base", **asked).token_ids) == list(base)
    assert list(llm.generate(ids, adapter="one", **asked).token_ids) == one
    with tuned.disable_adapter():  # by the model's owner: the state is the model's, not the LLM's
        assert list(llm.generate(ids, adapter="one", **asked).token_ids) == one
    other = eyas.load(tuned, tokenizer=False)
    for adapter, expected in (("base", base), ("two", two), ("base", base)):
        for one_of_two in (llm, other):
            assert list(one_of_two.generate(ids, adapter=adapter, **asked).token_ids) == list(expected)


@pytest.mark.slow
def test_kept_text_of_another_adapter_is_not_used(target: Target, folders: dict[str, str]) -> None:
    """Guards prefixes: the same prompt under another adapter is read again, whole."""
    llm = eyas.LLM(target, make("suffix", target), None)
    prompt = list(answered(folders["lora"])[2][0].prompt)  # long enough to be worth copying
    for adapter in ("lora", "dora", "lora", "base"):
        results = llm.generate([prompt, prompt], n=2, adapter=adapter, max_new_tokens=8, ignore_eos=True, batch_size=2)
        fresh = llm.generate(prompt, adapter=adapter, max_new_tokens=8, ignore_eos=True)
        assert all(result.token_ids == fresh.token_ids for each in results for result in each)
        assert results[0][0].stats.cached_tokens == 0
        assert results[0][1].stats.cached_tokens > 0
    decoder = Decoder(target, make("suffix", target))
    with pytest.raises(OptionError, match="lora"):
        decoder.add(asking(answered(folders["lora"])[0][0], "lora"))


def test_a_head_of_the_base_model_is_named(target: Target, folders: dict[str, str], tmp_path: Path) -> None:
    """Guards the fingerprint: it is the base model's where adapters are switched, and remembered
    where one is merged."""
    plain, merged = Target(zoo.FAMILIES["llama"]()), target_of(zoo.FAMILIES["llama"](), adapters=folders["lora"])
    assert fingerprint(target) == fingerprint(plain) != fingerprint(merged)
    assert base_has_fingerprint(merged, fingerprint(plain))
    assert not has_fingerprint(merged, fingerprint(plain))
    checkpoints.save(make("eagle1", merged).weights(), tmp_path)  # bug: its fingerprint was not read again
    assert has_fingerprint(merged, str(drafters.find("eagle1").from_pretrained(tmp_path, merged).target_fingerprint))
    assert base_has_fingerprint(target, fingerprint(plain))
    assert not base_has_fingerprint(plain, fingerprint(plain))


@pytest.mark.slow
def test_an_adapter_on_other_weights_than_the_fingerprints(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a fingerprint reads three weights; where an adapter changes none of these, a head that was trained with it
    was said to be the base model's, and features of the base model passed for those of the merged one."""
    for module in ("fingerprints", "adapters"):
        monkeypatch.setattr(f"eyas.targets.{module}.fingerprint_of", lambda model: "shapes:0.1,0.2,0.3")
    plain = Target(zoo.FAMILIES["llama"]())
    chosen = [folders[name] for name in ("lora", "lora", "dora")]
    merged, again, other = (target_of(zoo.FAMILIES["llama"](), adapters=folder) for folder in chosen)
    assert has_fingerprint(merged, fingerprint(again))
    assert not has_fingerprint(merged, fingerprint(other))
    assert not has_fingerprint(merged, fingerprint(plain))
    assert base_has_fingerprint(merged, fingerprint(plain))
    assert not base_has_fingerprint(merged, fingerprint(again))


def test_refusals(folders: dict[str, str], tmp_path: Path) -> None:
    """Guards the messages: one line each, before anything is decoded."""

    def llama(**options: Any) -> PreTrainedModel:
        return zoo.tiny("llama", **options)

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(llama(), prompts).save_pretrained(tmp_path / "prompts")
    for model, folder, said in (
        (llama(), str(tmp_path / "absent"), "does not exist"),
        (llama(), str(tmp_path), r"adapter_config\.json"),
        (llama(num_hidden_layers=2), folders["lora"], "another model"),
        (llama(intermediate_size=96), folders["lora"], "cannot be loaded"),
        (llama(), str(tmp_path / "prompts"), "PROMPT_TUNING"),
    ):
        with pytest.raises(ModelError, match=said):
            target_of(model, adapters=folder)
    with pytest.raises(OptionError, match="known"):
        target_of(llama(), adapters={"a": folders["lora"]}).with_adapter("zzz")
    with pytest.raises(OptionError, match="by name"):
        Target(llama()).with_adapter("a")
    with pytest.raises(OptionError, match="PeftModel"):
        eyas.load(llama(), adapter=folders["lora"], tokenizer=False)
    twice = [f"a={folders['lora']}", f"a={folders['dora']}"]
    for wrong in ({"base": folders["lora"]}, {"": folders["lora"]}, twice, 3):
        with pytest.raises(OptionError, match="adapter"):
            eyas.load(adapter=wrong)
