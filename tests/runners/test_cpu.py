"""The target by compiled kernels: the model's own numbers, the same bits in every shape of pass,
and losslessness over every method."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

import zoo
from eyas import drafters, kernels, runners
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Tree
from eyas.errors import OptionError
from eyas.runners import UnsuitedError
from eyas.runners._decoders import FAMILIES
from eyas.runners.cpu import CpuRunner, make_cpu_runner
from eyas.targets.media import round_states
from reference import in_float64, plain_decode, run
from test_lossless import DRAWN, OPTIONS

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
GEMMA4 = {"head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0, **zoo.MIXED}
MORE = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": zoo.WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": zoo.WINDOW, "layer_types": zoo.ALTERNATING},
    "qwen3": {},
    "ministral": zoo.MIXED,
    "ministral3": {"seed": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1,
    }},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 0.7, "residual_multiplier": 0.6, "attention_multiplier": 0.2},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True},
    "arcee": {"mlp_bias": True},
    "cohere": {"logit_scale": 0.4, "attention_bias": True},
    "cohere2": {**zoo.MIXED, "logit_scale": 0.4},
    "ernie4_5": {"use_bias": True},
    "exaone4": {**zoo.MIXED, "sliding_window_pattern": 2},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {**zoo.MIXED, "eager": True, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {
        **zoo.MIXED, "query_pre_attn_scalar": 12, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
        },
    },
    "gemma4_text": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text of E2B": {
        **GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": zoo.VOCAB, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_text of E4B": {
        **GEMMA4, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": zoo.VOCAB, "num_hidden_layers": 6,
        "num_kv_shared_layers": 3, "layer_types": zoo.ALTERNATING + zoo.ALTERNATING[:2],
    },
    "gemma4_text of 26B": {
        **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 64,
    },
    "gemma4_unified_text": {"head_dim": 32, "global_head_dim": 64, **zoo.MIXED, "num_global_key_value_heads": 1},
    "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "gpt_oss": {
        "eager": True, **zoo.MIXED, **zoo.EXPERTS, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False, "original_max_position_embeddings": 128,
        },
    },
    "helium": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 8.0, "factor": 1.0}},
    "lfm2": {"layer_types": zoo.CONV_THEN_ATTENTION, "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {
        "layer_types": zoo.CONV_THEN_ATTENTION, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    },
    "nemotron": {"seed": 2, "partial_rotary_factor": 0.5, "attention_bias": True, "mlp_bias": True},
    "olmo2": {"seed": 3},
    "olmo3": {**zoo.MIXED, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    }},
    "mixtral": {"sliding_window": zoo.WINDOW, **zoo.EXPERTS},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": zoo.WINDOW, "original_max_position_embeddings": zoo.CONTEXT, "partial_rotary_factor": 0.5},
    "qwen3_5_text": {"layer_types": zoo.STATE_THEN_ATTENTION, **DELTA_NET},
    "qwen3_5_moe_text": {"seed": 1, "layer_types": zoo.STATE_THEN_ATTENTION, **SHARED, **DELTA_NET},
    "qwen3_next": {"layer_types": zoo.STATE_THEN_ATTENTION, **SHARED, **DELTA_NET, "mlp_only_layers": [1]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, **zoo.MIXED},
    "stablelm": {"partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": zoo.WINDOW, "use_bias": True},
}  # fmt: skip
EVERY = list(MORE)  # a family, or one form of it
STATES = [name for name, decoder in FAMILIES.items() if decoder.state]
LAWS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.9, seed=4))


@cache
def model(family: str) -> PreTrainedModel:
    made = zoo.tiny(family.split()[0], **SIZES | MORE[family])
    with torch.no_grad():
        for number, layer in enumerate(made.get_decoder().layers):
            if hasattr(mlp := getattr(layer, "feed_forward", None), "expert_bias"):
                mlp.expert_bias.copy_(torch.linspace(0.3, -0.3, len(mlp.expert_bias)))
            if hasattr(layer, "layer_scalar"):
                layer.layer_scalar.fill_(0.8 + 0.1 * number)
                layer.self_attn.q_norm.weight.mul_(
                    0.2
                )  # Gemma 4 does not scale scores, and random heads would give large ones
    return made


@cache
def with_cpu_kernels(family: str) -> Target:
    target = Target(model(family))
    return target.run_with(make_cpu_runner(target))


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, zoo.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", EVERY)
def test_the_models_own_numbers(family: str) -> None:
    """Guards what the kernels compute: norms, biases, rotary positions, windows shorter than the
    prompt and than one chunk of it, trees, features in any order. 90 tokens against a window of
    16."""
    plain, tree = Target(model(family)), Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 2, 5]]), 3)
    found = []
    for target in (plain, with_cpu_kernels(family), Target(in_float64(plain.model))):
        session = target.open(1, (3, 1, target.num_layers))
        first = session.prefill(0, ids(90))
        output = session.forward(torch.tensor([ids(7, 1)]), tree)
        found.append((first, output.logits_BNV, output.features_BNF))
    for own, ours, exact in zip(*found, strict=True):
        error = float((own.double() - exact).abs().max())
        torch.testing.assert_close(ours, own, rtol=0, atol=4 * error)
        assert 0 < error < 4e-4, "features of a hundred, as squares of ReLU make them, are 1.3e-4 from float64"


@pytest.mark.parametrize("family", EVERY)
def test_a_tree_has_plain_decodings_bits(family: str) -> None:
    """Guards the promise beyond float32's: the logits of every node of a tree, in a batch of rows
    of different lengths and with another number of threads, are those of decoding its path token by
    token, to the last bit."""
    target, prompts = with_cpu_kernels(family), [ids(n, n) for n in (33, 5, 61)]
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6]]).expand(3, 8).contiguous(), 5)
    tokens_BN = torch.tensor([ids(8, 100 + b) for b in range(3)])
    batch = target.open(3)
    for b, prompt in enumerate(prompts):
        batch.prefill(b, prompt)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        logits_BNV = batch.forward(tokens_BN, tree).logits_BNV
    finally:
        torch.set_num_threads(threads)
    for b, prompt in enumerate(prompts):
        for node in range(8):
            path = tree.mask_BNN[b, node].nonzero()[:, 0].tolist()
            alone = target.open(1)
            alone.prefill(0, prompt)
            for n in path:
                last = alone.forward(tokens_BN[b : b + 1, n : n + 1], Tree.chain(1, 1)).logits_BNV[0, 0]
                alone.advance(torch.ones(1, dtype=torch.long), [alone.lengths[0] + 1])
            assert torch.equal(last, logits_BNV[b, node]), f"row {b}, node {node}"


@pytest.mark.parametrize("family", EVERY)
def test_padding_is_left_out_and_changes_no_bit(family: str) -> None:
    """Bugs: a node of one row is taken for another row's, or reads what padding left in a slot; a row pays for the
    nodes of another. Rows of 1, 5 and 2 nodes of 5 each, beside an empty one; two prompts longer than the window."""
    target, counts = with_cpu_kernels(family), (1, 5, 2)
    parents_BN = torch.tensor([[-1, 0, 0, 0, 0], [-1, 0, 0, 1, 3], [-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]])
    padded, tokens_BN = Tree.build(parents_BN, 3), torch.tensor([ids(5, seed) for seed in range(4)])
    tree = Tree.build(parents_BN, 3, counts=(*counts, 1))
    session = target.open(4, (1, target.num_layers))
    for row, length in enumerate((40, 3, 25)):
        session.prefill(row, ids(length, row))
    passes = list[int]()
    layers = target.runner.layers.__class__.__call__

    def counting(self: Any, x_MD: torch.Tensor, *rest: Any) -> None:
        passes.append(len(x_MD))
        layers(self, x_MD, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.runner.layers.__class__, "__call__", counting)
        part = session.forward(tokens_BN, tree, (0, 1, 2))
    full = session.forward(tokens_BN, padded, (0, 1, 2))
    assert passes == [sum(counts)]
    for row, count in enumerate(counts):
        assert torch.equal(part.logits_BNV[row, :count], full.logits_BNV[row, :count])
        assert torch.equal(part.features_BNF[row, :count], full.features_BNF[row, :count])


@pytest.mark.cover(name=5)
@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.names())
def test_every_method_is_lossless_by_kernels(name: str) -> None:
    """Guards the loop with this runner, and the drafts' nets that are run by kernels too: ids equal
    those of the model's own forward, in three rows, two of them in one as well; sampled trees: their own single run."""
    kind, target = drafters.find(name), with_cpu_kernels("llama")
    drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
    requests = [Request(tuple(ids(n, n)), 20, law) for n, law in zip((5, 23, 40, 3, 17, 31), LAWS * 2, strict=True)]
    together = run(Decoder(target, drafter, 3), requests)[0]
    for number, (request, got) in enumerate(zip(requests, together, strict=True)):
        is_drawn = name in DRAWN and not request.sampling.greedy
        if not is_drawn:
            assert got == list(plain_decode(model("llama"), request))
        if is_drawn or number < 2:
            assert got == run(Decoder(target, drafter, 1), [request])[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "ministral3", "gemma4_text of E2B", "gemma4_text of 26B"])
def test_methods_with_sinks_experts_scaled_queries_and_shared_keys(family: str) -> None:
    """Guards texts longer than a window and than the first training: ids of transformers, in four rows and in one."""
    target, laws = with_cpu_kernels(family), [*LAWS, Sampling(0.9, min_p=0.05, seed=5)]
    requests = [Request(tuple(ids(n, n)), 20, law) for n, law in zip((5, 23, 40, 90), laws, strict=True)]
    told = [list(plain_decode(model(family), request)) for request in requests]
    for name in ("vanilla", "prompt_lookup", "eagle3"):
        kind = drafters.find(name)
        drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
        assert run(Decoder(target, drafter, 4), requests)[0] == told
        assert run(Decoder(target, drafter, 1), requests[-1:])[0] == told[-1:]


def test_layers_of_gemma_4_that_were_edited() -> None:
    """Guards parts that other families lack, which few texts would show: values whose norm has another epsilon, factors of
    fewer experts, gates of another function, keys that no layer stores, odd widths."""
    name = "gemma4_text of E2B"
    for form, edit, reason in (
        (
            name,
            lambda layers: setattr(layers[1].self_attn.v_norm, "eps", 1e-3),
            "layer 1 is pruned or edited: Gemma4RMSNorm",
        ),
        (name, lambda layers: setattr(layers[1], "act_fn", torch.nn.SiLU()), "layer 1 is pruned or edited: SiLU"),
        (name, lambda layers: setattr(layers[3].self_attn, "layer_type", "other"), "layer 3 stores None"),
        (name, lambda layers: setattr(layers[1].self_attn, "head_dim", 16), "layer 1 stores"),
        (
            "gemma4_text of 26B",
            lambda layers: setattr(layers[1].router, "scale", Parameter(torch.ones(3))),
            "Gemma4TextRouter",
        ),
        ("gemma4_text of 26B", lambda layers: setattr(layers[0].pre_feedforward_layernorm_2, "eps", 1e-3), "layer 0"),
    ):
        edited = zoo.tiny("gemma4_text", **SIZES | MORE[form])
        target = Target(edited)
        edit(edited.model.layers)
        with pytest.raises(UnsuitedError, match=reason):
            make_cpu_runner(target)
    odd = zoo.tiny("gemma4_text", **SIZES | MORE[name] | {"hidden_size_per_layer_input": 40})
    with pytest.raises(UnsuitedError, match="reads 40 numbers of each token"):
        make_cpu_runner(Target(odd))


@pytest.mark.slow
def test_the_draft_by_kernels_is_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the nets' fused layers: with weights that are not rounded, the trees of eagle1,
    eagle3, mtp and hydra++ are those of the modules."""
    from eyas.runners import cpu_ops
    from eyas.runners._cpu_net import with_cpu_kernels as make_quick

    monkeypatch.setattr(cpu_ops, "with_cpu_kernels", lambda net, form, threads: make_quick(net, kernels.EXACT))
    monkeypatch.setattr(cpu_ops.CpuOps, "draft_lm_head", property(lambda ops: ops.packed))
    for name in ("eagle1", "eagle3", "seagle", "mtp", "hydra"):
        kind, drafts = drafters.find(name), []
        for target in (Target(model("llama")), with_cpu_kernels("llama")):
            drafter = kind.random(target, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
            _, steps = run(Decoder(target, drafter, 1), [Request(tuple(ids(30)), 12, Sampling())])
            drafts.append([s.draft.tokens_BN for s in steps if s.draft is not None])
        assert all(torch.equal(a, b) for a, b in zip(*drafts, strict=True)), name


RULES: list[dict[str, object]] = [
    {}, {"tree.rerank": False}, {"tree.expand": "confidence"}, {"tree.stop": 0.02}, {"tree.noise": "none"}
]  # fmt: skip


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["eagle2", "eagle3", "mtp", "eagle3 of three layers"])
def test_trees_grown_at_once_are_those_grown_level_by_level(
    name: str, rule: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the second writing of the dynamic tree: tokens, parents, depths, masks, candidates and
    scores of every cycle, with rows of different ages, greedy and sampled ones, and shapes that
    keep fewer nodes than they draft, or more. A tie of two values would be a false alarm; none is
    near on these seeds."""
    from eyas.runners import cpu_ops
    from eyas.runners._cpu_net import with_cpu_kernels as make_quick

    monkeypatch.setattr(cpu_ops, "with_cpu_kernels", lambda net, form, threads: make_quick(net, kernels.EXACT))
    monkeypatch.setattr(cpu_ops.CpuOps, "draft_lm_head", property(lambda ops: ops.packed))
    method, _, several = name.partition(" of ")
    kind, target = drafters.find(method), with_cpu_kernels("llama")
    head: dict[str, object] = {"head.layers": "0,1,2"} if method == "eagle3" else {}
    head |= {"head.depth": 3, "head.norm_output": True} if several else {}
    requests = [Request(tuple(ids(n, n)), 16, law) for n, law in zip((23, 5, 40), LAWS[:2] + LAWS[:1], strict=True)]
    shapes = ((14, 4, 3), (6, 3, 4), (40, 3, 3), (5, 4, 1))
    first = RULES.index(rule) + len(name)
    for nodes, depth, branch in (shapes[first % 4], shapes[(first + 2) % 4]):  # each shape with every method and rule
        tree = {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch, **rule}
        found = []
        for build_fused in (True, False):
            drafter = kind.random(target, build_options(kind.Options, {**tree, **head}), seed=1)
            for number, weight in enumerate(drafter.net.parameters()):
                if weight.ndim == 1:  # norms of random nets are all alike
                    weight.data *= 1 + 0.4 * torch.sin(torch.arange(len(weight)) + number)
            assert drafter.fused_tree_builder is not None
            if not build_fused:
                drafter.__dict__["fused_tree_builder"] = None
            tokens, steps = run(Decoder(target, drafter, 2), requests)
            found.append((tokens, [(s.draft, s.row) for s in steps if s.draft is not None]))
        assert found[0][0] == found[1][0]
        # rows that are empty draft what they like
        for (one, b), (other, _) in zip(found[0][1], found[1][1], strict=True):
            assert torch.equal(one.tokens_BN[b], other.tokens_BN[b])
            for field in ("parents_BN", "depth_BN", "mask_BNN", "acceptable_BN"):
                assert torch.equal(getattr(one.tree, field)[b], getattr(other.tree, field)[b]), field
            for field in ("log_q_BN", "value_BN"):
                torch.testing.assert_close(getattr(one, field)[b], getattr(other, field)[b], rtol=1e-4, atol=1e-4)
            assert (one.drafted is None) == (other.drafted is None) == ("tree.rerank" in rule)
            if one.drafted is None or other.drafted is None:
                continue
            assert torch.equal(one.drafted.parents_BX[b], other.drafted.parents_BX[b])
            torch.testing.assert_close(one.drafted.value_BX[b], other.drafted.value_BX[b], rtol=1e-4, atol=1e-4)


def test_what_does_not_suit_is_left_to_the_model() -> None:
    """Guards the registry: other families, dtypes and devices run by the model's own forward, and
    `on` says why."""
    for refused, reason in (
        (zoo.FAMILIES["deepseek_v3"](), "family deepseek_v3"),
        (zoo.FAMILIES["llama"](), "heads of width"),
        (zoo.tiny("llama", **SIZES).bfloat16(), "float32"),
        (zoo.tiny("llama", **SIZES, hidden_act="gelu"), "activation GELU"),
        (zoo.tiny("gpt_oss", **SIZES | MORE["gpt_oss"], swiglu_limit=5.0), "clamped by"),
        (zoo.tiny("stablelm", **SIZES, use_parallel_residual=True), "parallel residual"),
        (zoo.tiny("stablelm", **SIZES, qk_layernorm=True), "q_layernorm.* not in the kernels' table"),
        (zoo.tiny("cohere", **SIZES, use_qk_norm=True), "Cohere"),
    ):
        target = Target(refused)
        with pytest.raises(UnsuitedError, match=reason):
            make_cpu_runner(target)
        assert runners.with_fastest_runner(target).runner.name == "model"
    with pytest.warns(UserWarning, match="float32"):
        runners.with_fastest_runner(Target(zoo.tiny("llama", **SIZES).bfloat16()), "on")
    with pytest.raises(OptionError, match="unknown kernels"):
        runners.with_fastest_runner(target, "yes")


def test_other_numbers_are_noticed() -> None:
    """Guards against a model that calls itself llama and computes something else: the comparison
    must refuse it."""
    changed = zoo.tiny("llama", **SIZES)
    changed.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UnsuitedError, match="gives other numbers"):
        make_cpu_runner(Target(changed))


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "activations", "kv"),
    [
        *((w, a, "exact") for w in ("int8", "int4") for a in ("exact", "int16", "int8")),
        ("bfloat16", "exact", "exact"),
        ("bfloat16", "bfloat16", "exact"),
        ("exact", "exact", "bfloat16"),
        ("int4", "int8", "bfloat16"),
        ("exact", "exact", "int8"),
        ("int4", "int8", "int8"),
    ],
)
def test_rounded_numbers_are_a_target_of_their_own(weights: Any, activations: Any, kv: Any) -> None:
    """Guards rounded weights, activations, keys and values: other logits, near the model's; every method says
    what its plain decoding says."""
    if (weights == "int4" or activations.startswith("int")) and not kernels.has_dots():
        pytest.skip("a CPU without VNNI")
    if activations == "bfloat16" and not kernels.has_avx512_bf16():
        pytest.skip("a CPU without AVX-512 BF16")
    target = Target(model("llama"))
    rounded = runners.with_fastest_runner(
        target, weights=weights, activations=activations, kv=kv, draft_weights="int4" if weights == "int4" else "auto"
    )
    assert rounded.runner.weight_format == kernels.WeightFormat(weights, activations, kv)
    assert rounded.open(1).cache.dtype == getattr(torch, kv, torch.float32)
    assert with_cpu_kernels("llama").runner.weight_format.exact
    logits = [t.open(1).prefill(0, ids(40)) for t in (target, rounded)]
    assert 1e-4 < float((logits[0] - logits[1]).abs().max()) < (4.0 if weights == "int4" else 1.0)
    session, more = rounded.open(1), ids(13, 13)
    session.prefill(0, ids(20))
    together_NV = session.forward(torch.tensor([more]), Tree.chain(1, 13)).logits_BNV[0]
    for k in (0, 5, 12):
        assert torch.equal(rounded.open(1).prefill(0, [*ids(20), *more[: k + 1]]), together_NV[k]), (
            "the same bits in every pass"
        )
    requests = [Request(tuple(ids(n, n)), 20, law) for n, law in zip((5, 23, 40), LAWS, strict=True)]
    said = run(Decoder(rounded, drafters.find("vanilla").load(None, rounded), 1), requests)[0]
    for name in ("eagle2", "eagle3", "suffix"):
        kind = drafters.find(name)
        drafter = kind.random(rounded, build_options(kind.Options, OPTIONS.get(name, {})), seed=1)
        assert run(Decoder(rounded, drafter, 2), requests)[0] == said


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_methods_read_rounded_keys_and_values(kv: str) -> None:
    """Guards what GliDe and Gemma 4's assistants read: numbers near the exact ones, a scale for each head and slot; the
    bytes that a cache is said to take; the rounding of prompts with images, which the kernels do not write."""
    target, caches = Target(model("llama")), []
    for form in ("exact", kv):
        session = target.run_with(CpuRunner(target, kernels.WeightFormat(kv=form))).open(2)  # type: ignore[arg-type]
        session.prefill(1, ids(20))
        caches.append(session.cache)
    assert caches[1].bytes_for(256) == sum(store.nbytes for store in caches[1].stores)
    first, written = (one.tensor[0, 1, :, :20] for one in caches)
    assert torch.equal(round_states(first, written.dtype), written)
    for exact, rounded in zip(*(one.read_committed(0, 20) for one in caches), strict=True):
        bound = exact[1].abs().amax(-1, keepdim=True) / 253 if kv == "int8" else exact[1].abs() / 255
        difference = (exact[1] - rounded[1]).abs()
        assert rounded.shape == exact.shape
        assert difference.max() > 0
        assert (difference <= bound).all()


def test_rounded_numbers_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the one line that says why: no kernels, wider weights, a CPU without the instructions,
    another word."""
    target = Target(model("llama"))
    every, none = (
        dict.fromkeys(("has_dots", "has_avx512_bf16"), True),
        dict.fromkeys(("has_dots", "has_avx512_bf16"), False),
    )
    for has, asked, message in (
        ({}, {"weights": "int2"}, "unknown weights"),
        ({}, {"kernels": "off", "activations": "int8"}, "remove kernels='off'"),
        ({}, {"kernels": "off", "draft_weights": "int4"}, "draft weights int4 need compiled kernels"),
        (every, {"activations": "int8"}, r"activations int8 are for .* kept as float32: take weights int8$"),
        (every, {"weights": "int8", "activations": "bfloat16"}, "kept as int8: take weights bfloat16"),
        (none, {"weights": "bfloat16", "activations": "bfloat16"}, "no bfloat16 dot-product instructions"),
        (none, {"weights": "int4"}, "no integer dot products for this CPU"),
    ):
        for name, value in has.items():
            monkeypatch.setattr(kernels, name, lambda value=value: value)
        with pytest.raises(OptionError, match=message):
            runners.with_fastest_runner(target, **asked)
    with pytest.raises(OptionError, match=r"kv bfloat16 are for .* none for this model: .* family jamba"):
        runners.with_fastest_runner(Target(zoo.HYBRIDS["jamba"]()), kv="bfloat16")


def test_the_model_stays_as_it_was() -> None:
    """Guards the user's model: no weight, module or result of it changes."""
    own = zoo.tiny("llama", **SIZES)
    before, x = {name: value.clone() for name, value in own.state_dict().items()}, torch.tensor([ids(9)])
    said = own(x).logits
    target = Target(own)
    Decoder(target.run_with(CpuRunner(target)), drafters.find("vanilla").load(None, target))
    assert torch.equal(own(x).logits, said)
    assert before.keys() == own.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
