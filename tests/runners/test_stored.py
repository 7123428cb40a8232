"""Models whose weights stay in their files: the numbers of transformers, little memory, packed files that are used again."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForImageTextToText, Gemma4Config, PreTrainedModel, Qwen3_5Config

import eyas
import zoo
from eyas import kernels
from eyas.core.target import Target
from eyas.errors import FitError, ModelError
from eyas.kernels import Rows
from eyas.runners import _packing, cpu, plug_target
from eyas.runners._decoders import FAMILIES
from eyas.runners.stored import StoredLinear, stored_in
from eyas.targets.fingerprints import fingerprint, has_fingerprint
from gguf_models import write_gguf
from quantised_models import SIZES
from reference import in_float64
from runners.test_states import check_same_bits

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")

PROMPT = [1, 2, 3, 50, 9]

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA4 = {  # layers of every kind: the last ones read keys of earlier ones, and all read numbers of each token
    **zoo.MIXED, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": True,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": zoo.VOCAB, "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip
# sizes of GGUF files with blocks of 256 weights, which hold the values of several heads
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
DELTA_NET = {
    "layer_types": zoo.STATE_THEN_ATTENTION, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
SHARED = MOE | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
CONV = {
    "layer_types": zoo.CONV_THEN_ATTENTION,
    "tie_word_embeddings": True,
    "rope_parameters": zoo.ROPE | {"rope_type": "default"},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | SHARED,
    "qwen3_next": DELTA_NET | SHARED,
    "lfm2": CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV | SHARED | {"num_dense_layers": 1},
}
MIXES = {  # types of matrices that are not Q8_0
    "one": {},
    "several": {
        "attn_qkv": "Q5_K", "attn_gate": "Q4_K", "ssm_beta": "F32", "ssm_alpha": "F32", "ssm_ba": "F32", "ssm_out": "Q6_K",
        "ffn_down_exps": "Q6_K", "_exps": "Q4_K", "in_proj": "Q4_K", "attn_v": "Q6_K",
    },
}  # fmt: skip
TOKENS = ["<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, with the compiled kernels of all tests; and checkpoints of every size stay in files."""
    library = kernels.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernels.library() is library
    monkeypatch.setattr(plug_target, "LARGE", 0)


def folder(tmp_path: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Write a random model in several files; return where."""
    model: PreTrainedModel = zoo.tiny(family, **SIZES, **options).to(dtype)
    model.save_pretrained(tmp_path / family, max_shard_size="100KB")
    if family == "gpt_oss":
        quantise_experts(tmp_path / family)
    return tmp_path / family


def quantise_experts(place: Path) -> None:
    """Give a folder of gpt-oss random experts in MXFP4, in the layout of its publisher."""
    about, generator = json.loads((place / "config.json").read_text()), torch.Generator().manual_seed(0)
    about["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (place / "config.json").write_text(json.dumps(about))
    tensors = {name: x for file in place.glob("*.safetensors") for name, x in load_file(file).items()}
    for file in place.glob("model*"):
        file.unlink()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        groups = count, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, groups, generator=generator, dtype=torch.uint8)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})


def load(place: Path, **options: Any) -> eyas.LLM:
    return eyas.load(place, "vanilla", tokenizer=False, **options)


def scores(llm: eyas.LLM, ids: list[int]) -> torch.Tensor:
    session = llm.target.open(1)
    return session.prefill(0, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_packed_from_its_files(family: str, tmp_path: Path) -> None:
    """Guards names, shards, biases, tied tables, dtypes: the logits of transformers, and its texts."""
    more: dict[str, Any] = dict(MOE) if "moe" in family or family == "qwen3_next" else {}
    more |= GEMMA4 if family == "gemma4_text" else {"global_head_dim": 32} if "gemma4" in family else {}
    more |= CONV | {"num_dense_layers": 1} if family == "lfm2_moe" else {}
    eager = family in ("gemma2", "gpt_oss")
    place = folder(tmp_path, family, **{"tie_word_embeddings": family == "qwen3", "eager": eager} | more)
    llm, plain = load(place), load(place, kernels="off", dtype="float32")
    assert llm.target.runner.name == "kernels"
    assert stored_in(llm.target.model) is not None
    assert stored_in(plain.target.model) is None
    torch.testing.assert_close(scores(llm, PROMPT), scores(plain, PROMPT), rtol=1e-4, atol=1e-4)
    told = plain.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
    assert llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids == told
    assert has_fingerprint(llm.target, fingerprint(plain.target))
    with torch.inference_mode():
        own = llm.target.model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(own, scores(plain, PROMPT), rtol=1e-4, atol=1e-4)


def test_the_text_model_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    """Guards published files of Qwen3.5. They hold a model with images; eyas takes the text model out, as transformers does."""
    text = zoo.tiny("qwen3_5_text", **SIZES).config.to_dict()
    images = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": SIZES["hidden_size"],
    }
    model = AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=text, vision_config=images))
    zoo._initialise(model, 0)
    model.save_pretrained(tmp_path / "whole", max_shard_size="100KB")
    llm, plain = load(tmp_path / "whole"), load(tmp_path / "whole", kernels="off")
    assert llm.target.runner.name == "kernels"
    assert stored_in(llm.target.model) is not None
    assert type(llm.target.model) is type(plain.target.model)
    torch.testing.assert_close(scores(llm, PROMPT), scores(plain, PROMPT), rtol=1e-4, atol=1e-4)


def test_gemma_4_with_images(tmp_path: Path) -> None:
    """Guards published files of Gemma 4: the text model by the kernels, from its files and inside of the whole model."""
    text = zoo.tiny("gemma4_text", **SIZES, **GEMMA4, tie_word_embeddings=True, pad_token_id=0).config.to_dict()
    model = AutoModelForImageTextToText.from_config(Gemma4Config(text_config=text))
    zoo._initialise(model, 0)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    ids = torch.randint(
        3, zoo.VOCAB, (40,), generator=torch.Generator().manual_seed(0)
    ).tolist()  # longer than the window
    llm, plain = load(tmp_path), load(tmp_path, kernels="off")
    assert llm.target.runner.name == "kernels"
    assert stored_in(llm.target.model) is not None
    torch.testing.assert_close(scores(llm, ids), scores(plain, ids), rtol=1e-4, atol=1e-4)
    whole = plain.target.run_with(cpu.make_cpu_runner(plain.target))
    torch.testing.assert_close(whole.open(1).prefill(0, ids), scores(plain, ids), rtol=1e-4, atol=1e-4)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Guards published files of Qwen3.5 with experts. One tensor holds all experts; transformers writes a tensor for each."""
    model = zoo.tiny("qwen3_5_moe_text", **SIZES, **MOE, shared_expert_intermediate_size=64)
    model.config.save_pretrained(tmp_path)
    weights = {name.replace("model.", "model.language_model."): x for name, x in model.state_dict().items()}
    assert any(name.endswith(".experts.gate_up_proj") for name in weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = load(tmp_path)
    assert stored_in(llm.target.model) is not None
    torch.testing.assert_close(scores(llm, PROMPT), Target(model).open(1).prefill(0, PROMPT), rtol=1e-4, atol=1e-4)


def test_a_gguf_file_keeps_its_own_numbers(tmp_path: Path) -> None:
    """Guards the order of heads, and matrices that are read together and have several types, as Q4_K_M has: the numbers
    that transformers makes of the file."""
    for number, others in enumerate(({}, {"attn_v": "Q5_1"}, {"attn_k": "F16", "attn_v": "Q4_0", "ffn_up": "Q4_1"})):
        file = tmp_path / f"{number}.gguf"
        write_gguf(file, "Q8_0", others=others)
        llm, plain = load(file), load(file, kernels="off")
        assert llm.target.runner.name == "kernels"
        assert stored_in(llm.target.model) is not None
        torch.testing.assert_close(scores(llm, PROMPT), scores(plain, PROMPT), rtol=1e-4, atol=1e-4)
        assert has_fingerprint(llm.target, fingerprint(plain.target))
    assert llm.target.runner.layers.layers[0].v is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "nemotron", "phi3", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2"]
)
def test_gguf_files_of_families(family: str, tmp_path: Path) -> None:
    """Guards norms to which llama.cpp adds 1, fused matrices, biases, scaled embeddings."""
    file = tmp_path / f"{family}.gguf"
    vocabulary: dict[str, Any] = {"vocab_size": 32064} if family == "phi3" else {"tokens": TOKENS}
    gemma = family.startswith("gemma")
    more = MOE if "moe" in family else {}
    write_gguf(file, "Q8_0", family=family, eager=family == "gemma2", tie_word_embeddings=gemma, **vocabulary, **more)
    llm, plain = load(file), load(file, kernels="off")
    assert llm.target.runner.name == "kernels"
    assert stored_in(llm.target.model) is not None
    torch.testing.assert_close(scores(llm, PROMPT), scores(plain, PROMPT), rtol=1e-4, atol=1e-4)


def check_against(own: PreTrainedModel, llm: eyas.LLM) -> None:
    """The kernels and the stored model have the logits of the model with the numbers of the file, beyond any window."""
    assert llm.target.runner.name == "kernels"
    ids = torch.arange(60) % len(TOKENS)
    with torch.inference_mode():
        expected, stored, exact = (one(ids[None]).logits[0, -1] for one in (own, llm.target.model, in_float64(own)))
    bound = 4 * float((expected.double() - exact).abs().max())
    assert 0 < bound < 2e-3, "random states are 1.4e-4 from float64"
    torch.testing.assert_close(scores(llm, ids.tolist()), expected, rtol=0, atol=bound)
    torch.testing.assert_close(stored, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("form", ["31B", "E2B", "26B"])
def test_gguf_files_of_gemma_4(form: str, tmp_path: Path) -> None:
    """Guards settings that transformers does not read: heads of two sizes, keys that are values, shared keys, angles,
    factors of layers, numbers of tokens for layers, experts beside a dense MLP."""
    own_options = {
        "31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        "E2B": {**GEMMA4, "enable_moe_block": False, "num_experts": None},
        "26B": {**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    }[form]
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
    options: dict[str, Any] = zoo.MIXED | own_options | {
        "global_head_dim": 32, "vocab_size_per_layer_input": len(TOKENS), "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }  # fmt: skip
    others = {"_exps": "Q4_0"}
    own = write_gguf(tmp_path / "model.gguf", family="gemma4_text", tokens=TOKENS, others=others, **options)
    check_against(own, load(tmp_path / "model.gguf"))


def test_a_gguf_file_of_gpt_oss(tmp_path: Path) -> None:
    """Guards files that transformers cannot read, as their RoPE is scaled: sinks, biases of experts in parts, experts in
    MXFP4, and the configuration."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    options: dict[str, Any] = zoo.MIXED | zoo.EXPERTS | {"eager": True, "rope_parameters": yarn | {"truncate": False}}
    own = write_gguf(tmp_path / "model.gguf", family="gpt_oss", tokens=TOKENS, others={"_exps": "MXFP4"}, **options)
    with pytest.warns(UserWarning, match="no tokenizer"):
        check_against(own, eyas.load(tmp_path / "model.gguf", "vanilla"))


@pytest.mark.parametrize("others", [*MIXES])
@pytest.mark.parametrize("family", [*HYBRIDS])
def test_gguf_files_of_hybrids(family: str, others: str, tmp_path: Path) -> None:
    """Guards what llama.cpp makes of states: the order of value heads, also within a block of 256 inputs, rates, norms to
    which 1 is added, tensors in two parts or without sizes of 1. Matrices that are read together have one type or several.
    Prompts, trees and paths have the same bits, and drafts change no text."""
    own = write_gguf(
        tmp_path / "model.gguf", family=family, tokens=TOKENS, others=MIXES[others], **HYBRIDS[family], **WIDE
    )
    llm = load(tmp_path / "model.gguf")
    check_against(own, llm)
    check_same_bits(llm.target)
    told = llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
    drafted = eyas.load(tmp_path / "model.gguf", "suffix", tokenizer=False)
    assert drafted.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids == told


@pytest.mark.parametrize("weights", ["exact", "int8", "int4"])
def test_packed_weights_are_kept_and_used_again(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the file of packed weights: the second load packs nothing, copied or mapped, with the same bits; another
    checkpoint and another format have files of their own."""
    place = folder(tmp_path, dtype=torch.float32)
    first = load(place, weights=weights)
    packed = packed_files(tmp_path)
    monkeypatch.setattr(kernels.library(), "eyas_pack", lambda *_: pytest.fail("it is packed again"))
    for shared in ("0", "1"):
        monkeypatch.setenv("EYAS_SHARE_WEIGHTS", shared)
        again = load(place, weights=weights)
        assert torch.equal(scores(again, PROMPT), scores(first, PROMPT))
    assert packed_files(tmp_path) == packed
    assert len(packed) == 1


def packed_files(tmp_path: Path) -> list[Path]:
    """What the folder of packed weights holds, locks left out."""
    return [path for path in (tmp_path / "cache" / "eyas" / "packed").glob("*") if path.suffix != ".lock"]


def test_two_files_that_look_alike_are_two_models(tmp_path: Path) -> None:
    """Bug: packed weights were found by the name, size and time of a file, which two fine-tunes in images or archives
    share, so the second one answered with the first one's weights."""
    first, second = folder(tmp_path / "a", seed=0), folder(tmp_path / "b", seed=1)
    for place in (first, second):
        for file in place.glob("*.safetensors"):
            os.utime(file, ns=(0, 0))
    apart = [scores(load(place), PROMPT) for place in (first, second)]
    assert torch.equal(scores(load(second), PROMPT), apart[1])
    assert not torch.allclose(*apart)
    assert len(packed_files(tmp_path)) == 2, "and the few layers of the comparison are not kept"


def test_a_full_disk_and_a_killed_process_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a write to a mapped page of a full disk ends the process; a process that dies while it packs leaves gigabytes."""
    place = folder(tmp_path)
    wanted = scores(load(place), PROMPT)
    (packed,) = packed_files(tmp_path)
    packed.unlink()
    packed.with_name(f".{packed.name}.1.tmp").write_bytes(b"of a process that was killed")
    rooms = iter([None] * 3)

    def reserve(number: int, begin: int, size: int) -> None:
        if next(rooms, "full") == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", reserve)
        assert torch.equal(scores(load(place), PROMPT), wanted)
        assert packed_files(tmp_path) == []
    monkeypatch.setattr(kernels.library(), "eyas_pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(place)
    assert packed_files(tmp_path) == []


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_little_is_read_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a model is run once to learn its sizes, by its own forward, which reads all weights: minutes for 8B."""
    place, read = folder(tmp_path, num_hidden_layers=6), list[int]()
    load(place)
    original = Rows.read
    monkeypatch.setattr(Rows, "read", lambda self, *more: read.append(len(self) * self.inputs) or original(self, *more))
    llm = load(place)
    layer = sum(p.numel() for p in zoo.tiny("llama", **SIZES).model.layers[0].parameters())
    assert sum(read) < 3 * llm.target.vocab_size * llm.target.hidden_size + layer


def test_what_does_not_fit_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the line that says what is needed, the setting that would fit, and the choice of "auto"."""
    place = folder(tmp_path)
    target = load(place).target
    sizes = {name: _packing._bytes(target, kernels.WeightFormat(name)) for name in _packing.SMALLER}  # type: ignore[arg-type]
    assert sizes["exact"] > sizes["int8"] > sizes["int4"]
    rest = _packing._cache_bytes(target) + _packing.RESERVE
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=rest + sizes["int8"]))
    with pytest.raises(FitError, match="GB are free: weights int8 need"):
        load(place)
    assert load(place, weights="auto").target.runner.weight_format.weights == "int8"
    narrow = _packing._cache_bytes(target, "bfloat16")
    assert 2 * narrow == _packing._cache_bytes(target)
    head = target.layout[0][1]  # type: ignore[index]
    assert _packing._cache_bytes(target, "int8") * 2 * head == narrow * (head + 4)
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=narrow + _packing.RESERVE + sizes["exact"])
    )
    assert load(place, weights="auto", kv="bfloat16").target.runner.weight_format == kernels.WeightFormat(kv="bfloat16")
    with pytest.raises(FitError):
        load(place)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    with pytest.raises(FitError, match=r"GB are free$"):
        load(place, weights="auto")


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    """Guards one line for a broken checkpoint."""
    place = folder(tmp_path)
    about = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(about | {"num_hidden_layers": about["num_hidden_layers"] + 1}))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers"):
        load(place)
    (place / "config.json").write_text(json.dumps(about | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"mlp.*weight is \[128, 64\] instead of \[256, 64\]"):
        load(place)


def test_drafts_read_a_stored_target(tmp_path: Path) -> None:
    """Guards what heads take from a target: its table of embeddings and its lm_head, which stay in the file."""
    place = folder(tmp_path)
    llm = load(place)
    head = llm.target.family.head
    assert isinstance(head, StoredLinear)
    ids = torch.tensor([[3, 1], [4, 3]])
    own = zoo.tiny("llama", **SIZES).to(torch.bfloat16).float()
    assert torch.equal(llm.target.embed(ids), own.get_input_embeddings()(ids))
    assert torch.equal(head.weight, own.get_output_embeddings().weight)
    told = llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
    for method in ("suffix", "prompt_lookup"):
        other = eyas.load(place, method, tokenizer=False)
        assert other.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids == told
