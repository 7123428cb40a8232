"""EAGLE-3 heads: every published form becomes the same head of ours, and whatever would have to be guessed is refused.

The names of the published tensors are written out here, so that a swapped pair in the code's own tables is noticed.
"""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eyas.checkpoints
from eyas.checkpoints import Weights, load, save
from golden import GOLDEN, golden_head, needs_golden, same
from published import (
    AROUND,
    FILES,
    FORMS,
    HEADS,
    IDS,
    IN_THE_LAYER,
    INNER,
    KV,
    LAYER,
    LLAMA3,
    WIDTH,
    D,
    Head,
    V,
    deep,
    maps,
    modelopt,
    read,
    refused,
    safeailab,
    specforge,
    speculators,
    tensors,
    vllm,
    without,
)

# --- every form ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_names_are_paired_right(tmp_path: Path, form: str) -> None:
    """Guards against two tensors of one shape whose names are swapped, which no round trip notices,
    and against lost or added tensors."""
    config, held = FORMS[form]()
    layer = "midlayer" if "midlayer.hidden_norm.weight" in held else "layers.0"
    pairs = AROUND | {f"{layer}.{theirs}": mine for theirs, mine in IN_THE_LAYER.items()}
    pairs |= {"embed_tokens.weight": "embed.weight"} if form == "speculators" else {}
    weights = read(tmp_path, (config, held))
    assert weights.method == "eagle3"
    assert weights.tensors.keys() == {*pairs.values(), "draft_ids"}
    for theirs, mine in pairs.items():
        assert torch.equal(weights.tensors[mine], held[theirs]), mine
    assert weights.tensors["draft_ids"].tolist() == IDS


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out(tmp_path: Path, form: str) -> None:
    """Guards against wrong defaults: what a published config does not say has the meaning that its
    readers' code gives it."""
    head = modelopt(eagle_config=None) if form == "modelopt" else FORMS[form]()
    config = read(tmp_path, head).config
    assert config == {
        "hidden_size": D, "intermediate_size": INNER, "vocab_size": V, "num_heads": HEADS, "num_kv_heads": KV, "head_dim": WIDTH,
        "rms_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "max_positions": 512, "fc_bias": False, "qkv_bias": False,
        "layers": 1, "act": "silu", "draft_vocab_size": len(IDS), "target_hidden_size": D, "num_features": 3, "feature_layers": None,
        "layer_ids_as_published": None, "norm_before_fc": False, "fc_norm": False, "norm_before_residual": False, "carries": "raw",
        "qk_norm": False, "head": "own", "window": None,
    }  # fmt: skip


def formats() -> dict[str, Any]:
    found = [m.name for m in pkgutil.iter_modules(eyas.checkpoints.__path__) if not m.name.startswith("_")]
    return {name: importlib.import_module(f"eyas.checkpoints.{name}") for name in found}


EAGLE1 = {f"layers.0.{x}.weight" for x in ("self_attn.q_proj", "post_attention_layernorm")} | {"fc.weight"}


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        *[(*FORMS[form](), [FILES[form]]) for form in FORMS],
        (LAYER, tensors(), ["safeailab3"]),
        (LAYER | {"architectures": ["Qwen3ForCausalLM"]}, tensors(), ["safeailab3"]),
        (LAYER | {"architectures": ["EyasEagle3ForCausalLM"]}, tensors(), ["safeailab3"]),
        (LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}, EAGLE1, ["eagle3"]),
        (LAYER | {"architectures": ["LlamaForCausalLM"]}, EAGLE1, ["safeailab"]),
        (LAYER, EAGLE1, ["safeailab"]),
        (LAYER | {"speculators_model_type": "dflash"}, EAGLE1, ["speculators"]),
        (
            LAYER | {"architectures": ["LlamaForCausalLM"]},
            ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"],
            [],
        ),
    ],
)
def test_one_format_recognises_each_head(config: dict[str, Any], names: Any, expected: list[str]) -> None:
    """Guards against a head that two formats claim, so that the order of the files would decide how it is read."""
    readable = {name: form for name, form in formats().items() if hasattr(form, "read")}
    assert [name for name, form in readable.items() if form.recognises(config, list(names))] == expected


def test_one_format_writes_each_method() -> None:
    """Guards against two files that would both write the heads of a method, and against a reader
    that is asked to write."""
    writers = [(method, name) for name, form in formats().items() for method in getattr(form, "METHODS", ())]
    assert len(dict(writers)) == len(writers)
    assert {("eagle1", "safeailab"), ("eagle3", "safeailab3")} <= set(writers)
    assert all(hasattr(formats()[name], "write") for _, name in writers)


# --- layer ids -------------------------------------------------------------------------------------------------------------------------


def inner(ids: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **more}}


TOP = {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}


@pytest.mark.parametrize(("head", "layers", "meaning"), [
    (specforge(**inner([1, 5, 9])), (2, 6, 10), "output"),
    (modelopt([1, 5, 9]), (2, 6, 10), "output"),
    (vllm(**inner([1, 5, 9])), (1, 5, 9), "input"),
    (vllm(**TOP), (1, 5, 9), "input"),
    (speculators(**TOP), (1, 5, 9), "input"),
    (specforge(**inner([1, 5, 9]), eyas={"layer_ids": "input"}), (1, 5, 9), "input"),
    (vllm(**inner([1, 5, 9]), eyas={"layer_ids": "output"}), (2, 6, 10), "output"),
    (safeailab(**TOP, eyas={"layer_ids": "input"}), (1, 5, 9), "input"),
    (specforge(**TOP, eyas={"layer_ids": "output"}), (2, 6, 10), "output"),
])  # fmt: skip
def test_layer_ids_become_inputs(tmp_path: Path, head: Head, layers: tuple[int, ...], meaning: str) -> None:
    """Guards against features that are off by one layer: the head still runs, and accepts a tenth instead of a half."""
    config = read(tmp_path, head).config
    assert config["feature_layers"] == layers
    assert config["layer_ids_as_published"] == {"ids": [1, 5, 9], "meaning": meaning}
    assert config["num_features"] == 3
    assert "eyas" not in config


@pytest.mark.parametrize("form", [specforge, vllm])
def test_other_numbers_of_features(tmp_path: Path, form: Any) -> None:
    """Guards against three features where a head was trained on another number of them."""
    head, wide = form(**inner([0, 3, 5, 7])), {"fc.weight": torch.randn(D, 4 * D)}
    assert read(tmp_path, head, **wide).config["num_features"] == 4
    refused(tmp_path, head, r"fc\.weight is \[8, 24\] and should be \[8, 32\]")


DISAGREE = "d2t and t2d disagree: 7 ids by d2t, "

# --- the draft vocabulary --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("says", "held"), [
    (DISAGREE + "7 by t2d, and id 0 is in one", {"d2t": maps()["d2t"] + 1, "t2d": maps()["t2d"]}),
    (DISAGREE + "7 by t2d, and id 9 is in one", {"t2d": maps([0, 3, 4, 10, 11, 17, 18])["t2d"]}),
    (DISAGREE + "6 by t2d, and id 18", {"t2d": maps(IDS[:-1])["t2d"]}),
    ("d2t holds the target's ids themselves", {"d2t": torch.tensor(IDS), "t2d": maps()["t2d"]}),
])  # fmt: skip
def test_maps_that_disagree(tmp_path: Path, form: str, says: str, held: dict[str, Any]) -> None:
    """Guards against draft tokens that mean another token, one place off or altogether, which only
    acceptance would show."""
    refused(tmp_path, FORMS[form](), says, **held)


@pytest.mark.parametrize(("held", "says"), [
    ({"d2t": torch.tensor(IDS)}, "d2t leads out of the vocabulary of 20, to 0 ... 24; it must hold offsets"),
    ({"d2t": maps()["d2t"] - 1}, "out of the vocabulary of 20, to -1 ... 17"),
    ({"d2t": maps()["d2t"] * torch.tensor([1, 1, 1, 1, 1, 1, 0])}, "draft tokens 5, 6 lead to 17, 6"),
    ({"d2t": torch.tensor([0, 2, 1, 2, 6, 12, 12])}, "draft tokens 1, 2 lead to 3, 3"),
    ({"d2t": maps()["d2t"].float()}, "d2t is torch.float32; it must be int64"),
    ({"d2t": None}, r"missing d2t \[7\]"),
    ({"d2t": maps()["d2t"][:6]}, r"d2t is \[6\] and should be \[7\]"),
    ({"t2d": maps()["t2d"].long()}, "t2d is torch.int64; it must be bool"),
    ({"t2d": maps()["t2d"][:19]}, r"t2d is \[19\] and should be \[20\]"),
])  # fmt: skip
def test_broken_maps(tmp_path: Path, held: dict[str, Any], says: str) -> None:
    """Guards against ids outside of the vocabulary, or twice in it, where there is no t2d to compare
    with; a map of short integers is read as any other."""
    refused(tmp_path, vllm(), says, **{"t2d": None, **held})
    ids = read(tmp_path, vllm(), d2t=maps()["d2t"].int()).tensors["draft_ids"]
    assert (ids.dtype, ids.tolist()) == (torch.int64, IDS)


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_vocabulary(tmp_path: Path, form: str) -> None:
    """Guards against maps demanded where there is nothing to map, and against maps that then say
    something after all."""
    config, held = FORMS[form]()
    for size in (V, None):
        whole: Head = (
            {**config, "draft_vocab_size": size},
            {**without(held, "d2t", "t2d"), "lm_head.weight": torch.randn(V, D)},
        )
        weights = read(tmp_path, whole)
        assert "draft_ids" not in weights.tensors
        assert weights.config["draft_vocab_size"] == V
        plain = read(tmp_path, whole, d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V, dtype=torch.bool))
        assert same(plain.tensors, weights.tensors)
        refused(tmp_path, whole, "d2t (must lead|leads out)", d2t=torch.arange(V) % 2)
        refused(tmp_path, whole, "d2t and t2d disagree", t2d=maps()["t2d"])
    refused(tmp_path, ({**config, "draft_vocab_size": None}, held), 'd2t has 7 entries: add "draft_vocab_size": 7')
    refused(tmp_path, ({**config, "draft_vocab_size": V + 1}, held), "draft_vocab_size 21, more than its vocab_size 20")


@pytest.mark.parametrize("form", ["specforge", "modelopt", "vllm", "speculators"])
def test_the_head_of_the_target(tmp_path: Path, form: str) -> None:
    """Guards against a head without lm_head that is refused, or taken for broken, where its readers
    use the target's."""
    config, held = FORMS[form]()
    config_, held_ = {**config, "draft_vocab_size": None}, without(held, "d2t", "t2d", "lm_head.weight")
    weights = read(tmp_path, (config_, held_))
    assert weights.config["head"] == "target"
    assert "head.weight" not in weights.tensors
    refused(tmp_path, (config, held), r"missing lm_head\.weight \[7, 8\]", **{"lm_head.weight": None})
    wide: Head = ({**config_, "target_hidden_size": 10}, {**held_, "fc.weight": torch.randn(D, 30)})
    said = refused(tmp_path, wide, r"missing lm_head\.weight \[20, 8\]")
    assert ("missing embed_tokens" in said) == (form != "speculators")


# --- settings --------------------------------------------------------------------------------------------------------------------------
NORM, NORMS = torch.randn(3 * D), {f"fc_norm.{i}.weight": torch.randn(D) for i in range(3)}
AUX = {f"aux_norm_{name}.weight": NORMS[f"fc_norm.{i}.weight"] for i, name in enumerate(["low", "mid", "high"])}


@pytest.mark.parametrize("form", [specforge, vllm, speculators])
def test_norms(tmp_path: Path, form: Any) -> None:
    """Guards against a norm that is dropped or invented: the flag and the tensors must say the same."""
    before = read(tmp_path, form(norm_before_fc=True), **{"input_norm.weight": NORM})
    assert (before.config["norm_before_fc"], before.config["fc_norm"]) == (True, False)
    assert torch.equal(before.tensors["input_norm.weight"], NORM)
    each = read(tmp_path, form(fc_norm=True), **NORMS)
    assert (each.config["norm_before_fc"], each.config["fc_norm"]) == (False, True)
    assert all(torch.equal(each.tensors[name], norm) for name, norm in NORMS.items())
    assert read(tmp_path, form(norm_before_residual=True)).config["norm_before_residual"] is True
    refused(tmp_path, form(norm_before_fc=True), r"missing input_norm\.weight \[24\]")
    refused(tmp_path, form(), r"unexpected input_norm\.weight \[24\]", **{"input_norm.weight": NORM})
    refused(tmp_path, form(), r"unexpected fc_norm\.0\.weight \[8\]", **NORMS)
    refused(tmp_path, form(fc_norm=True), r"missing fc_norm\.2\.weight", **{**NORMS, "fc_norm.2.weight": None})
    refused(tmp_path, form(fc_norm=True, norm_before_fc=True), "both fc_norm and norm_before_fc", **NORMS)


def test_older_names(tmp_path: Path) -> None:
    """Guards against the older names of three norms, which SGLang reads, and against a name with and without prefix."""
    weights = read(tmp_path, specforge(use_aux_norm=True), **AUX)
    assert all(torch.equal(weights.tensors[name], norm) for name, norm in NORMS.items())
    refused(tmp_path, specforge(), r"holds norm\.weight under two names", **{"model.norm.weight": torch.ones(D)})


def marked(**flags: Any) -> Head:
    """A head of ModelOpt's with these flags, which are in its eagle_config."""
    return modelopt(**inner([1, 5, 9], **flags))


SLIDING = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(("head", "key", "value"), [
    *[(f(norm_output=True, eyas={"carries": x}), "carries", x) for f in (specforge, safeailab) for x in ("raw", "normed")],
    *[(f(norm_output=True), "carries", "normed") for f in (vllm, speculators)],
    (vllm(**inner(None, norm_output=True)), "carries", "normed"),
    (specforge(norm_output=False), "carries", "raw"),
    (safeailab(bias=True, attention_bias=True), "fc_bias", False),  # the authors' code does not look at these keys
    (safeailab(bias=True, attention_bias=True), "qkv_bias", False),
    (speculators(layer={**SLIDING, "sliding_window": 64}), "window", 64),
    (vllm(use_sliding_window=True, sliding_window=64), "window", 64),
    (specforge(sliding_window=64, use_sliding_window=False), "window", None),
    (specforge(sliding_window=None, use_sliding_window=True), "window", None),
    (vllm(sliding_window=64, layer_types=["full_attention"]), "window", None),
    (speculators(layer={**SLIDING, "sliding_window": 512}), "window", None),  # as long as what it was trained for
])  # fmt: skip
def test_settings(tmp_path: Path, head: Head, key: str, value: Any) -> None:
    """Guards against a state fed back normed to a head that was trained on the raw one, biases that are not there, and
    the window that a head's layer was trained with."""
    assert read(tmp_path, head).config[key] == value


@pytest.mark.parametrize("form", FORMS)
def test_biases_follow_the_tensors(tmp_path: Path, form: str) -> None:
    """Guards against fc's bias being taken for granted, as for EAGLE-1, and against one that a config denies."""
    config, held = FORMS[form]()
    layer = "midlayer" if "midlayer.hidden_norm.weight" in held else "layers.0"
    inside = {f"{layer}.self_attn.{x}_proj.bias": torch.randn(rows) for x, rows in (("q", 8), ("k", 4), ("v", 4))}
    silent: Head = (without(config, "bias", "attention_bias"), held)
    assert read(tmp_path, silent).config["fc_bias"] is False
    both = read(tmp_path, silent, **{"fc.bias": torch.randn(D)}, **inside)
    assert both.config["fc_bias"] is both.config["qkv_bias"] is True
    assert torch.equal(both.tensors["layer.attention.k.bias"], inside[f"{layer}.self_attn.k_proj.bias"])
    assert torch.equal(both.tensors["layer.attention.v.bias"], inside[f"{layer}.self_attn.v_proj.bias"])
    missing, more = f"{layer}.self_attn.v_proj.bias", f"{layer}.self_attn.o_proj.bias"
    refused(tmp_path, silent, f"missing {missing}", **{**inside, missing: None})
    refused(tmp_path, silent, f"unexpected {more}", **{more: torch.randn(D)})
    if form != "speculators":
        refused(tmp_path, ({**config, "bias": False}, held), r"unexpected fc\.bias", **{"fc.bias": torch.randn(D)})


@pytest.mark.parametrize("form", FORMS)
def test_a_wider_target(tmp_path: Path, form: str) -> None:
    """Guards against widths of the head where the target's are meant; then the head needs an embedding of its own."""
    table = {"embed_tokens.weight": torch.randn(V, D), "fc.weight": torch.randn(D, 3 * 10)}
    wide = FORMS[form](target_hidden_size=10)
    assert read(tmp_path, wide, **table).config["target_hidden_size"] == 10
    refused(tmp_path, wide, r"missing embed_tokens\.weight", **{**table, "embed_tokens.weight": None})
    if form == "vllm":
        norms = {f"fc_norm.{i}.weight": torch.randn(10) for i in range(3)}
        normed = read(tmp_path, vllm(target_hidden_size=10, fc_norm=True), **table, **norms)
        assert normed.tensors["fc_norm.1.weight"].shape == (10,)


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096.0}

YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
NO_MEANING = "does not tell whether they mean the input or the output"
TWO_MEANINGS = "norm_output, which has two meanings.*"
MORE_FEATURES = "num_aux_hidden_states 5 and names 3 layers .* name all of them under eagle_config.eagle_aux_"
SHORT_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 512.0}


@pytest.mark.parametrize(("changes", "theta", "scaling"), [
    ({}, 10000.0, None),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}, 1e6, None),
    ({"rope_scaling": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
    ({"rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}, 5e6, None),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
    ({"rope_theta": 150000, "rope_parameters": {**YARN, "truncate": False}}, 150000.0, {**YARN, "truncate": False}),
    ({"rope_scaling": {"type": "yarn", "factor": 32}, "max_position_embeddings": 512}, 10000.0, SHORT_YARN),
])  # fmt: skip
def test_rope(tmp_path: Path, changes: dict[str, Any], theta: float, scaling: Any) -> None:
    """Guards against a RoPE of another base or scaling than the head was trained with: it loads, and accepts less."""
    for head in (safeailab(**changes), specforge(**changes), vllm(**changes), speculators(layer=changes)):
        config = read(tmp_path, head).config
        assert config["rope_theta"] == theta
        assert config["rope_scaling"] == scaling


@pytest.mark.parametrize("form", FORMS)
def test_buffers_and_a_prefix(tmp_path: Path, form: str) -> None:
    """Guards files that hold RoPE's frequencies, and those saved from within a model: neither is part of a head."""
    config, held = FORMS[form]()
    saved = {name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}": x for name, x in held.items()}
    layer = "midlayer" if "midlayer.hidden_norm.weight" in held else "layers.0"
    buffers = {
        "model.rotary_emb.inv_freq": torch.ones(4),
        f"model.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    plain = read(tmp_path, (config, held))
    for tensors_ in (saved, saved | buffers, held | buffers, held | {"rotary_emb.inv_freq": torch.ones(4)}):
        made = read(tmp_path, (config, tensors_))
        assert same(made.tensors, plain.tensors)
        assert made.config == plain.config


@pytest.mark.parametrize("prefix", ["draft_model.", "module.eagle_module.", "_orig_mod.model."])
def test_shards_of_a_wrapped_head(tmp_path: Path, prefix: str) -> None:
    """Guards heads in shards whose names begin with the trainer's modules."""
    config, held = vllm()
    plain = read(tmp_path, (config, held))
    folder, where = tmp_path / "shards", dict[str, str]()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for number, part in enumerate((sorted(held)[::2], sorted(held)[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({prefix + name: held[name] for name in part}, folder / file)
        where |= {prefix + name: file for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(load(folder).tensors, plain.tensors)


REFUSED: list[tuple[Head, str]] = [
    # layer ids
    (safeailab(**TOP), r'add "eyas": {"layer_ids": "input"} \(hidden_states\[1\]\) or {"layer_ids": "output"} \(hidden_'),
    (safeailab(**inner([1, 5, 9])), NO_MEANING),
    (specforge(**TOP), NO_MEANING),
    (vllm(**inner([1, 5, 8]), **TOP), r"\[1, 5, 9\], but \[1, 5, 8\] in its eagle_config: remove the wrong one"),
    (specforge(**inner([9, 5, 1])), "each greater than the one before"),
    (specforge(**inner([1, 5, 5])), "each greater than the one before"),
    (specforge(**inner([-1, 5, 9])), "whole numbers from 0 on"),
    (specforge(**inner([1, 5, True])), "whole numbers from 0 on"),
    (specforge(**inner([])), r"layer ids \[\]; they must"),
    (vllm(**inner("1,5,9")), "layer ids '1,5,9'; they must"),
    (specforge(**inner([1, 5, 9]), eyas={"layer_ids": "outputs"}), "eyas.layer_ids 'outputs'; it must be input or output"),
    (specforge(eyas={"feature_layers": [1, 5, 9]}), 'without their meaning: add "layer_ids": "input" or "output"'),
    (specforge(**inner([1, 5, 9]), eyas={"feature_layers": [1, 5, 9], "layer_ids": "input"}), "has layer ids twice"),
    (specforge(num_aux_hidden_states=5), MORE_FEATURES),
    # what is carried, and biases
    (specforge(norm_output=True), TWO_MEANINGS + '"eyas": {"carries": "raw"} or {"carries": "normed"}'),
    (marked(norm_output=True), TWO_MEANINGS),
    (specforge(norm_output=True, eyas={"carries": "both"}), "eyas.carries 'both'; it must be raw or normed"),
    *[(form(bias=True), r"missing fc\.bias") for form in (specforge, modelopt, vllm)],
    *[(form(attention_bias=True), r"missing .*self_attn\.q_proj\.bias") for form in (specforge, modelopt, vllm)],
    # several layers, in forms whose readers do not agree on them
    *[(deep(form), r'has one layer, .*compute in different ways.*"architectures": \["Eagle3LlamaForCausalLM"\]')
      for form in ("specforge", "modelopt", "safeailab3")],
    # RoPE
    (specforge(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "more than one rope_theta, 10000.0 and 1000000.0"),
    (vllm(rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"}), "contradict each other"),
    (modelopt(rope_scaling={"type": "yarn"}), "has no factor"),
    (vllm(rope_scaling={"rope_type": "longrope", "factor": 32}), "type 'longrope'; known here: default, linear, llama3, yarn"),
    # other nets
    (modelopt(norm_before_fc=False, **inner([1], norm_before_fc=True)), "norm_before_fc False, but True in its eagle_config"),
    (marked(use_mtp_layernorm=True), "use_mtp_layernorm True: the head has the norms of multi-token"),
    (marked(parallel_draft_step=4), "parallel_draft_step 4: several tokens are drafted at once"),
    (marked(next_layer_regular=False), "next_layer_regular False"),
    (marked(use_input_layernorm_in_first_layer=False), "has no norm over the embedding"),
    (marked(use_last_layernorm=False), "nothing is normed before lm_head"),
    (modelopt(**inner(None, use_aux_hidden_state=False)), "use_aux_hidden_state False: the head reads the target's last"),
    (marked(gate="tanh"), "eagle_config.gate 'tanh', which is not known here"),
    (specforge(use_qk_norm=True), "use_qk_norm true, which is not known here"),
    (speculators(norm_features=True), "norm_features true, which is not known here"),
    (speculators(parallel_drafting=True), "parallel_drafting True"),
    (vllm(mlp_bias=True), "mlp_bias True: the MLP has biases"),
    (vllm(logit_scale=0.5), "logit_scale 0.5: the logits are scaled"),
    (specforge(quantization_config={"quant_method": "fp8"}), "has a quantization_config: quantised heads are not read"),
    (vllm(hidden_act="gelu"), "hidden_act 'gelu'; only silu"),
    (speculators(speculators_model_type="xpress"), "speculators type 'xpress'; .* of types 'eagle3', 'peagle', 'dflash'"),
    (speculators(speculators_model_type="mtp", transformer_layer_config=None), "no transformer_layer_config with a model_type"),
    (speculators(layer={"model_type": "gemma4_text"}), "'gemma4_text'; heads with a 'llama' or 'qwen3' layer are read"),
    (speculators(transformer_layer_config=None), "has no transformer_layer_config"),
    (speculators(norm_before_residual=None), "speculators takes for false and vLLM for true; say which by adding"),
    (safeailab(architectures=["Eagle3DeepseekV2ForCausalLM"]), r"\['Eagle3DeepseekV2ForCausalLM'\], an EAGLE-3 head of a kind"),
    (safeailab(architectures=["GptOssForCausalLMEagle3"]), "GptOssForCausalLMEagle3.* of a kind that is not read"),
    (safeailab(fc_norm=True), r'fc_norm, which this form .* name the writer.s: "architectures"'),
    (safeailab(norm_output=True), "norm_output, which this form of EAGLE-3 heads does not know"),
    ((safeailab()[0], tensors("layers.0")), r"is layers\.0, but midlayer in this form; name the writer.s"),
    # sizes
    (vllm(hidden_size=None), "has no hidden_size"),
    (vllm(target_hidden_size="10"), "target_hidden_size '10'; it must be a whole number"),
    (vllm(fc_norm="yes"), "fc_norm 'yes'; it must be true or false"),
    (safeailab(eyas={"head": "target"}), "names another vocabulary or hidden size than the target's"),
    # the authors' code has no head of the target
    ((safeailab(draft_vocab_size=V)[0], without(tensors(), "d2t", "t2d", "lm_head.weight")), r"missing lm_head\.weight \[20, 8\]"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "says"), REFUSED)
def test_refusals(tmp_path: Path, head: Head, says: str) -> None:
    """Guards against running a head as something that it is not, and against choosing a meaning silently: what is not
    served is named, with what to do about it."""
    refused(tmp_path, head, says)


@pytest.mark.parametrize("form", FORMS)
def test_every_difference_is_named(tmp_path: Path, form: str) -> None:
    """Guards against a head that loads in part (elsewhere the rest would silently be random), and
    errors that come one at a time."""
    config, held = FORMS[form]()
    layer = "midlayer" if "midlayer.hidden_norm.weight" in held else "layers.0"
    up, norm = f"{layer}.mlp.up_proj.weight", f"{layer}.hidden_norm.weight"
    changed = {up: torch.zeros(3, 8), norm: None, "state": torch.zeros(1, 24)}
    said = refused(tmp_path, (config, held), "EAGLE-3 head differ from config.json", **changed)
    for part in (f"missing {norm} [8]", "unexpected state [1, 24]", f"{up} is [3, 8] and should be [12, 8]"):
        assert part in said
    narrow = {f"{layer}.self_attn.q_proj.weight": torch.zeros(8, 8)}  # as an EAGLE-1 layer has it
    refused(tmp_path, (config, held), r"q_proj\.weight is \[8, 8\] and should be \[8, 16\]", **narrow)
    one = r"has one layer, .*\. This file has layers\.(0, layers\.)?1"
    says = one if form in ("safeailab3", "specforge", "modelopt") else r"num_hidden_layers 40.*2 layers"
    refused(tmp_path, (config, held), says, **{"layers.1.mlp.up_proj.weight": torch.zeros(12, 8)})
    quantised = {"fc.weight": torch.zeros(D, 3 * D).to(torch.float8_e4m3fn)}
    refused(tmp_path, (config, held), r"fc\.weight \(torch\.float8_e4m3fn\).*quantised heads", **quantised)


# --- several layers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_several_layers(tmp_path: Path, form: str) -> None:
    """Guards against layers that are lost, swapped or paired wrongly, reading and writing; and
    against hidden_norm, which vLLM does not use, in place of input_layernorm."""
    config, held = deep(form)
    weights = read(tmp_path / "a", (config, held))
    assert weights.config["layers"] == 3
    for number in (1, 2):
        inside = without(IN_THE_LAYER, "input_layernorm.weight", "hidden_norm.weight")
        pairs = {name: mine.replace("layer.", f"later.{number - 1}.", 1) for name, mine in inside.items()}
        for theirs, mine in {**pairs, "input_layernorm.weight": f"later.{number - 1}.input_norm.weight"}.items():
            assert torch.equal(weights.tensors[mine], held[f"layers.{number}.{theirs}"]), mine
    assert [name for name in weights.tensors if "hidden_norm" in name] == ["layer.hidden_norm.weight"]
    assert not any(name.startswith("later.2") for name in weights.tensors)
    save(weights, tmp_path / "b")
    again = load(tmp_path / "b")
    assert same(again.tensors, weights.tensors)
    assert again.config == weights.config
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_hidden_layers"] == 3


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_faults_of_several_layers(tmp_path: Path, form: str) -> None:
    """Guards against a head that runs without one of its layers, and against windows that a part of the layers has."""
    config, held = deep(form)
    two, norm = deep(form, 2)[0], "layers.2.input_layernorm.weight"
    gap = {name: None for name in held if name.startswith("layers.1.")}
    refused(tmp_path, (two, held), r"numbered without gaps; this file has layers\.0, layers\.2", **gap)
    refused(tmp_path, (two, held), "num_hidden_layers 2, but the file holds 3 layers")
    refused(tmp_path, (config, held), f"missing {norm}", **{norm: None})
    mixed = deep(form, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=8)
    refused(tmp_path, mixed, "whose layers all are of one type")
    assert read(tmp_path, deep(form, layer_types=["sliding_attention"] * 3, sliding_window=8)).config["window"] == 8
    if form == "speculators":
        more = {"layers.1.hidden_norm.weight": NORM[:D]}
        refused(tmp_path, (config, held), r"unexpected layers\.1\.hidden_norm", **more)


TABLE = {"embed_tokens.weight": torch.randn(V, D)}
BIASES = {f"layers.0.self_attn.{x}_proj.bias": torch.randn(rows) for x, rows in (("q", 8), ("k", 4), ("v", 4))}
ADDED = {"feature_layers": [1, 5, 9], "layer_ids": "input"}

# --- writing ---------------------------------------------------------------------------------------------------------------------------
WRITTEN: dict[str, tuple[Head, dict[str, Any]]] = {
    "plain": (safeailab(), {}),
    "whole": ((safeailab(draft_vocab_size=V)[0], tensors(vocab=V)), {}),
    "embedding": (safeailab(rope_theta=5e5, rope_scaling=LLAMA3, head_dim=2), TABLE),
    "recorded": (safeailab(eyas={"method": "eagle3", "training": {"steps": 3}}), {}),
    "wider": (safeailab(target_hidden_size=10), {**TABLE, "fc.weight": torch.randn(D, 30)}),
    "layers": (specforge(**inner([1, 5, 9]), eyas={"method": "eagle3"}), {}),
    "added_layers": (specforge(eyas=ADDED), {}),
    "modelopt": (modelopt(), {}),
    "norm_before_fc": (vllm(norm_before_fc=True, norm_output=True), {"input_norm.weight": NORM}),
    "norm_in_eagle_config": (marked(norm_before_fc=True), {"input_norm.weight": NORM}),
    "fc_norm": (specforge(fc_norm=True, norm_output=True, eyas={"carries": "normed"}), NORMS),
    "five": (vllm(**inner([0, 2, 4, 6, 8])), {"fc.weight": torch.randn(D, 40)}),
    "residual": (vllm(norm_before_residual=True), {}),
    "fc_bias": (vllm(), {"fc.bias": torch.randn(D)}),
    "qkv_bias": (vllm(), BIASES),
    "speculators": (speculators(norm_before_residual=True, fc_norm=True, norm_output=True), NORMS),
    "no_head": (vllm(draft_vocab_size=None), {"d2t": None, "t2d": None, "lm_head.weight": None}),
}
PLAIN = {"plain", "whole", "embedding", "recorded", "wider"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in WRITTEN] + [("plain", torch.bfloat16), ("no_head", torch.float16)],
)
def test_round_trip(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Guards against a tensor, a setting or a dtype that is lost or swapped between reading and
    writing, whatever form it came in; and against a head of ours that others run as what it is not.

    SGLang and vLLM go by the architecture; the authors' code does not, ignores unknown keys and
    tensors, and needs draft_vocab_size.
    """
    (config, held), more = WRITTEN[case]
    all_of_it = {name: tensor for name, tensor in {**held, **more}.items() if tensor is not None}
    all_of_it = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in all_of_it.items()}
    first = read(tmp_path / "a", (config, all_of_it))
    save(first, tmp_path / "b")
    again = load(tmp_path / "b")
    assert first.method == again.method == "eagle3"
    assert same(first.tensors, again.tensors)
    assert first.config == again.config
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    tensors_ = load_file(tmp_path / "b" / "model.safetensors")
    assert written["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert written["rope_theta"] == first.config["rope_theta"]
    assert not any(name.startswith("layers.") for name in tensors_)
    # where it stands, the authors' code does not take the target's embedding
    assert ("target_hidden_size" in written) == (case == "wider")
    sizes = V if case in ("whole", "no_head") else len(IDS)
    if case in PLAIN:
        assert same(tensors_, all_of_it)
        assert (written["architectures"], written["draft_vocab_size"]) == (["LlamaForCausalLM"], sizes)
    else:
        assert written["architectures"] == ["EyasEagle3ForCausalLM"]
        assert "draft_vocab_size" not in written
        assert written["eyas"]["draft_vocab_size"] == sizes


def test_what_is_written(tmp_path: Path) -> None:
    """Guards against a config.json that readers of the published form misread, and against a record
    that is lost or mixed up."""
    save(read(tmp_path / "a", safeailab()), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {
        **LAYER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "head_dim": WIDTH, "rope_theta": 1e4,
        "rope_scaling": None, "tie_word_embeddings": False, "draft_vocab_size": len(IDS), "torch_dtype": "float32",
    }  # fmt: skip
    head = specforge(**inner([1, 5, 9]), norm_output=True, eyas={"carries": "normed", "target_fingerprint": "ab:1.0"})
    first = read(tmp_path / "c", head)
    assert first.config["eyas"] == {"target_fingerprint": "ab:1.0"}
    save(first, tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["eyas"] == {
        "target_fingerprint": "ab:1.0",
        "feature_layers": [2, 6, 10],
        "layer_ids": "input",
        "layer_ids_as_published": {"ids": [1, 5, 9], "meaning": "output"},
        "carries": "normed",
        "draft_vocab_size": len(IDS),
    }


def test_a_net_may_leave_out_what_is_usual(tmp_path: Path) -> None:
    """Guards against a writer that demands every key of a trainer, or takes an absent one for something unusual."""
    first = read(tmp_path / "a", safeailab())
    usual = "target_hidden_size num_features layer_ids_as_published norm_before_fc fc_norm norm_before_residual carries"
    config = without(first.config, *usual.split(), "feature_layers", "head")
    save(Weights("eagle3", config, first.tensors, "memory"), tmp_path / "b")
    assert load(tmp_path / "b").config == first.config


def test_faults_of_ours(tmp_path: Path) -> None:
    """Guards against publishing a head that `load` refuses."""
    first = read(tmp_path / "a", safeailab())
    ids = first.tensors["draft_ids"]
    wide = {"fc.weight": torch.zeros(D, 4 * D)}
    for config, held, says in (
        ({}, {"draft_ids": ids.flip(0)}, "draft_ids do not increase"),
        ({}, {"draft_ids": ids + 2}, "draft_ids leave the vocabulary"),
        ({}, {"draft_ids": ids[:-1]}, r"draft_ids is \[6\] and should be \[7\]"),
        ({}, {"fc.bias": torch.zeros(D)}, r"unexpected fc\.bias"),
        ({"num_features": 4}, wide, "need feature_layers"),
    ):
        with pytest.raises(AssertionError, match=says):
            save(Weights("eagle3", {**first.config, **config}, {**first.tensors, **held}, "memory"), tmp_path / "b")
    assert not (tmp_path / "b").exists()


# --- published by the reference --------------------------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("name", ["head_eagle3_b", "head_eagle3_b_fullvocab"])
def test_golden_heads(name: str, tmp_path: Path) -> None:
    """Guards against reading the published files otherwise than their authors wrote them, .bin and
    .safetensors alike."""
    safe = golden_head(name, tmp_path)
    assert safe.config["rope_theta"] == 10000.0  # although the target's is 500000: the head was trained with this one
    assert (safe.config["fc_bias"], safe.config["feature_layers"], safe.config["carries"]) == (False, None, "raw")
    held = load_file(GOLDEN / name / "model.safetensors")
    if name.endswith("fullvocab"):
        assert "draft_ids" not in safe.tensors
    else:
        assert safe.tensors["draft_ids"].tolist() == held["t2d"].nonzero().flatten().tolist()
        assert safe.config["draft_vocab_size"] == 128
