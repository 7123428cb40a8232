"""`eyas export`: what other engines read is read by eyas again, as the same head; what they would compute otherwise is
refused.

The engines themselves read the exports in tests/interop."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zoo
from eyas.checkpoints import ExportTarget, Weights, load
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import CheckpointError, InputError
from eyas.nn import Documents
from eyas_train.exports import export, export_formats
from eyas_train.formats.vllm import bias_into_embedding
from eyas_train.method_losses import packed
from eyas_train.own_outputs import training_time_test
from golden import same
from heads import make

EXPLICIT = {"head.layers": "1,2,3"}
# a module is stitched into a target of some families: tests/drafters/test_mtp.py; files need one of the target: test_gguf.py
ELSEWHERE = ("checkpoint", "gguf")
CASES = [(method, name) for name, methods in export_formats().items() for method in methods if name not in ELSEWHERE]


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target(zoo.tiny("llama", num_hidden_layers=8), "tiny-llama")


def named(target: Target, name: str = "someone/target") -> ExportTarget:
    return ExportTarget(name, ("LlamaForCausalLM",), lambda: target.embed(torch.arange(target.vocab_size)).float())


def head_of(target: Target, method: str, **options: Any) -> Weights:
    """A random head of this method, none of whose tensors is zero."""
    made = make(method, target, **options).weights()
    random = torch.Generator().manual_seed(3)
    vectors = {name: value for name, value in made.tensors.items() if value.is_floating_point() and value.ndim == 1}
    return changed(made, **{k: v + 0.1 * torch.randn(v.shape, generator=random) for k, v in vectors.items()})


def through(head: Weights, name: str, folder: Path, target: ExportTarget) -> Weights:
    export(head, name, folder, target)
    return load(folder)


def logits(head: Weights, target: Target) -> Tensor:
    """The predictions of a head's net behind each of a few tokens, and behind its own prediction
    (EAGLE), by the code that drafts."""
    method = find(head.method).load(head, target)
    tokens_N = torch.randint(target.vocab_size, (9,), generator=torch.Generator().manual_seed(5))
    features_NF = target.encode(tokens_N[None], method.train_feature_layers)[0]
    rows_N, documents = torch.arange(len(tokens_N)), Documents((len(tokens_N),))
    embed = target.embed if method.embed_tokens is None else method.embed_tokens.__getitem__
    with torch.no_grad():
        if head.method == "eagle1":
            return method.head(packed(method.net, features_NF, embed(tokens_N.roll(-1)), rows_N, documents))
        features_NF = features_NF[:, : len(method.feature_layers) * target.hidden_size]
        hidden = training_time_test(method.net, features_NF, lambda index: embed(tokens_N[index]), rows_N, documents, 2)
        return torch.stack([method.head(hidden_ND) for hidden_ND in hidden])


@pytest.mark.quick("peagle-speculators")
@pytest.mark.parametrize(("method", "name"), CASES)
def test_tiny_heads_come_back(method: str, name: str, tmp_path: Path, target: Target) -> None:
    """Guards against a tensor or a setting that an export loses, renames or moves by a layer: the
    engine would draft, and accept little."""
    head = head_of(target, method)
    again = through(head, name, tmp_path / "out", named(target))
    assert again.method == method
    if method in ("eagle1", "eagle3"):
        assert again.config.get("feature_layers") == head.config.get("feature_layers")
        torch.testing.assert_close(logits(again, target), logits(head, target), rtol=1e-4, atol=1e-4)
    table = again.tensors.pop("embed.weight", None)  # may hold a bias of fc, or what the speculators library misses
    assert (table is not None) == (f"{method}-{name}" in ("eagle1-vllm", "eagle3-speculators", "peagle-speculators"))
    kept = {key: value for key, value in head.tensors.items() if key != "fc.bias" or name != "vllm"}
    assert same(again.tensors, kept)
    assert [file.name for file in tmp_path.iterdir()] == ["out"], "a temporary folder stays"


KEPT = (
    "layers", "fc_norm", "carries", "feature_layers", "num_features", "draft_vocab_size", "head", "norm_before_residual",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "norms of EAGLE-3.1": {"head.fc_norm": True, "head.norm_output": True},
    "explicit layers": EXPLICIT,
    "two layers": {"head.layers": "1,3"},
    "a smaller vocabulary": {"head.draft_vocab": 40},
    "three layers of its own": {"head.depth": 3},
}


@pytest.mark.quick("explicit layers-vllm")
@pytest.mark.parametrize("name", [name for method, name in CASES if method == "eagle3" and name != "safeailab"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_eagle3(settings: str, name: str, tmp_path: Path, target: Target) -> None:
    """Guards against a setting that is written under a key which the format's readers do not look at."""
    head = head_of(target, "eagle3", **SETTINGS[settings])
    deep = settings == "three layers of its own" and name in ("sglang", "openvino")
    if deep or (name == "openvino" and settings != "a smaller vocabulary"):
        said = "the head has 3 layers, and versions of SGLang differ" if deep else "optimum-intel's class does not know"
        with pytest.raises(CheckpointError, match=said):
            through(head, name, tmp_path / "out", named(target))
        return
    again = through(head, name, tmp_path / "out", named(target))
    for key in KEPT:
        assert again.config[key] == head.config[key], key
    torch.testing.assert_close(logits(again, target), logits(head, target), rtol=0, atol=0)


def test_a_table_of_tokens_in_every_head_for_openvino(tmp_path: Path, target: Target) -> None:
    """Bug: optimum-intel's class takes chance numbers for a d2t that the file lacks, and nothing
    that the head drafts is accepted."""
    for size, ids in ((0, list(range(target.vocab_size))), (40, None)):
        head = head_of(target, "eagle3", **({"head.draft_vocab": size} if size else {}))
        through(head, "openvino", tmp_path / str(size), named(target))
        tensors = load_file(tmp_path / str(size) / "model.safetensors")
        found = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
        assert found == (ids or head.tensors["draft_ids"].tolist())
        assert tensors["t2d"].nonzero().flatten().tolist() == found


def test_dflash_heads_that_openvino_computes_otherwise(tmp_path: Path, target: Target) -> None:
    """Guards against a head that optimum-intel converts without a word, and of which OpenVINO GenAI accepts little."""
    head = head_of(target, "dflash", **{"head.layers": "1,2", "head.depth": 2})
    through(head, "openvino", tmp_path / "plain", named(target))
    told: list[tuple[dict[str, Any], str]] = [
        ({"from_anchor": True}, "slots that predict the next token"),
        ({"windows": (7, 7), "causal": (True, True)}, "earlier slots only"),
        ({"windows": (7, 7)}, "has windows"),
        ({"embed_scale": 3.0}, "factors of embeddings"),
        ({"logit_cap": 2.0}, "factors of embeddings or logits, or a cap"),
        ({"feature_layers": (0, 2)}, "embeddings as one of its features"),
    ]
    for changes, message in told:
        with pytest.raises(CheckpointError, match=message):
            through(changed(head, changes), "openvino", tmp_path / "out", named(target))


def test_settings_that_few_formats_have(tmp_path: Path, target: Target) -> None:
    """Guards masks and levels of P-EAGLE, Qwen3's norms of queries and keys, windows, and heads that use the target's
    lm_head: an engine that does not find them drafts something else."""
    peagle = changed(head_of(target, "peagle"), {"levels": 6, "mask_token": 9})
    made = head_of(target, "eagle3", **EXPLICIT)
    norms = {f"layer.attention.{x}_norm.weight": torch.rand(made.config["head_dim"]) for x in "qk"}
    qwen3 = changed(made, {"qk_norm": True}, **norms)
    windowed = changed(with_target_head(head_of(target, "eagle3")), {"window": 32})
    for head, name, kept in (
        (peagle, "vllm", ("mask_token", "levels")),
        (peagle, "speculators", ("mask_token", "levels")),
        (qwen3, "speculators", ("qk_norm",)),
        (windowed, "sglang", ("head", "window")),
        (windowed, "vllm", ("head", "window")),
    ):
        again = through(head, name, tmp_path / f"{head.method} {kept} {name}", named(target))
        assert [again.config[key] for key in kept] == [head.config[key] for key in kept], (head.method, name)
        assert again.tensors.keys() - {"embed.weight"} == head.tensors.keys(), (head.method, name)
    for head, name, reason in (
        (peagle, "sglang", "sglang has no format for heads of peagle"),
        *((qwen3, name, "norms of queries and keys|settings of this head: qk_norm") for name in ("vllm", "sglang", "safeailab")),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=reason):
            through(head, name, tmp_path / "out", named(target))


def changed(head: Weights, config: dict[str, Any] | None = None, **tensors: Tensor) -> Weights:
    return dataclasses.replace(head, config=head.config | (config or {}), tensors=head.tensors | tensors)


def with_target_head(head: Weights) -> Weights:
    tensors = {key: value for key, value in head.tensors.items() if key != "head.weight"}
    return dataclasses.replace(changed(head, {"head": "target"}), tensors=tensors)


def test_ids_and_keys_are_what_the_engines_read(tmp_path: Path, target: Target) -> None:
    """Guards against ids that only our own readers take back, as both sides of a round trip may be
    wrong in the same way: SGLang counts outputs under eagle_config, vLLM inputs at the top level,
    and "bias" must never say what SafeAILab means by it (see docs/reference/export.md)."""
    written, said = {}, {}
    heads = [head_of(target, "eagle3", **EXPLICIT), head_of(target, "eagle1")]
    heads.append(changed(head_of(target, "peagle"), {"levels": 6, "mask_token": 9}))
    for head, name in product(heads, ("sglang", "vllm", "speculators")):
        folder = tmp_path / f"{head.method}-{name}"
        if folder.name not in ("eagle1-speculators", "peagle-sglang"):
            said[folder.name] = export(head, name, folder, named(target))
            written[folder.name] = json.loads((folder / "config.json").read_text())
    assert written["eagle3-sglang"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["eagle3-sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert written["eagle3-vllm"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert written["eagle3-vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert written["eagle3-speculators"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert written["eagle3-speculators"]["norm_before_residual"] is False, "vLLM takes true where it is not said"
    assert written["eagle3-speculators"]["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert written["eagle1-sglang"]["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in written["eagle1-sglang"]
    assert written["eagle1-vllm"]["architectures"] == ["EagleLlamaForCausalLM"]
    assert written["eagle1-vllm"]["bias"] is False
    assert not any(config.get("attention_bias") for config in written.values())
    assert written["peagle-vllm"]["pard_token"] == written["peagle-speculators"]["mask_token_id"] == 9
    assert written["peagle-vllm"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert written["peagle-speculators"]["architectures"] == ["PEagleSpeculator"]
    (method,) = written["peagle-speculators"]["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == 6
    assert '"num_speculative_tokens": 6, "parallel_drafting": true' in said["peagle-vllm"][0]


def test_bias_moves_into_the_embeddings() -> None:
    """Guards against a shift that is that of the feature's half of fc, or of its transpose."""
    random = torch.Generator().manual_seed(0)
    table_VD, weight = torch.randn(20, 8, generator=random), torch.randn(8, 16, generator=random)
    feature_D, bias_D = torch.randn(8, generator=random), 0.1 * torch.randn(8, generator=random)
    moved_VD = bias_into_embedding(table_VD, weight, bias_D)
    for token in (0, 7, 19):
        before = weight @ torch.cat([table_VD[token], feature_D]) + bias_D
        torch.testing.assert_close(weight @ torch.cat([moved_VD[token], feature_D]), before, rtol=1e-4, atol=1e-5)
    weight[:, :8] = 0
    with pytest.raises(CheckpointError, match="no sound shift"):
        bias_into_embedding(table_VD, weight, bias_D)


def refusals(target: Target) -> dict[str, tuple[Weights, str, ExportTarget, str]]:
    """head, format, what is known of the target, and a part of the reason."""
    engines = ("vllm", "sglang", "speculators")
    one, three, known, unknown = head_of(target, "eagle1"), head_of(target, "eagle3"), named(target), ExportTarget()
    V, D = target.vocab_size, target.hidden_size
    table = torch.randn(V, D)
    bias = changed(three, {"fc_bias": True}, **{"fc.bias": torch.ones(D)})
    ablation = head_of(target, "eagle1", **{"head.inputs": "unshifted"})
    rows = {x: three.tensors[f"layer.attention.{x}.weight"].shape[0] for x in "qkv"}
    biases = {f"layer.attention.{x}.bias": torch.ones(size) for x, size in rows.items()}
    qkv, explicit = changed(three, {"qkv_bias": True}, **biases), head_of(target, "eagle3", **EXPLICIT)
    first = changed(three, {"feature_layers": (0, 2, 3)})
    found = {f"bias of fc, {name}": (bias, name, known, "bias of fc") for name in engines}
    found |= {f"biases of q, {name}": (qkv, name, known, "biases of q, k and v") for name in engines}
    found |= {f"ablation, {x}": (ablation, x, known, "unshifted inputs") for x in ("vllm", "sglang", "safeailab")}
    return found | {
        "the target's lm_head": (with_target_head(three), "speculators", known, "uses the target's lm_head"),
        "residual": (changed(three, {"norm_before_residual": True}), "sglang", known, "norm_before_residual"),
        "own table": (changed(three, **{"embed.weight": table}), "sglang", known, "embedding table of its own"),
        "unknown table": (changed(one, **{"embed.weight": table}), "sglang", unknown, "pass the target with --target"),
        "embeddings as features": (first, "sglang", known, "names layers by their outputs"),
        "bias without target": (one, "vllm", unknown, "pass the target with --target"),
        "explicit layers": (explicit, "safeailab", known, "no place for settings of this head: feature_layers"),
        "window": (changed(three, {"window": 32}), "safeailab", known, "sliding window of 32"),
        "no target": (three, "speculators", unknown, "names its target"),
        "method": (one, "speculators", known, "heads of eagle1; those are exported to safeailab, sglang, vllm"),
        "format": (one, "vlm", known, "no format 'vlm' to export to; did you mean vllm"),
    }


def test_refused_with_the_reason(tmp_path: Path, target: Target) -> None:
    """Guards against an export that the engine loads and computes otherwise: without an error
    there, and with almost no acceptance."""
    for case, (head, name, known, reason) in refusals(target).items():
        with pytest.raises(CheckpointError) as caught:
            pytest.fail(f"{case}: {export(head, name, tmp_path / 'out', known)}")
        assert reason in str(caught.value), case
        assert "\n" not in str(caught.value), case
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, target: Target) -> None:
    """Guards against a folder of the user's that an export replaces, and against a part of one that stays."""
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already: use another folder"):
        export(head_of(target, "eagle1"), "safeailab", tmp_path / "out", ExportTarget())
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        export(head_of(target, "eagle1"), "safeailab", tmp_path / "file" / "out", ExportTarget())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
