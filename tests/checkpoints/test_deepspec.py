"""EAGLE-3 heads whose layer is Qwen3's, and MTP modules of the speculators library.

DeepSpec's heads give the logits of a reference that is built from transformers' own Qwen3 parts. The heads are saved and
read again.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

import zoo
from eyas import checkpoints
from eyas.checkpoints import mtp as mtp_form
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import find, mtp
from eyas.errors import CheckpointError
from eyas.nn import Documents
from eyas_train.own_outputs import training_time_test
from reference import plain_decode, run

IDS = [0, 1, 3, 4, 5]  # outputs of layers
CONFIG: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "vocab_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.tiny("llama", num_hidden_layers=7))


class Layer(nn.Module):
    """A layer of such a head: norms of the embedding and of the hidden state side by side into Qwen3's attention."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        D, h, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Qwen3RMSNorm(D, eps) for _ in range(3))
        self.self_attn = nn.Module()
        sizes = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        for name, heads in sizes.items():
            setattr(self.self_attn, f"{name}_proj", nn.Linear(2 * D, heads * h, bias=False))
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * h, D, bias=False)
        self.self_attn.q_norm, self.self_attn.k_norm = Qwen3RMSNorm(h, eps), Qwen3RMSNorm(h, eps)
        self.mlp = Qwen3MLP(config)


class Published(nn.Module):
    """The net, written from its description: what a head of DeepSpec computes for a text, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        config = self.config = Qwen3Config(**CONFIG)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(IDS) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, features_NF: Tensor, following_N: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        hidden = self.fc(features_NF)[None]
        x = torch.cat([layer.input_layernorm(self.embed_tokens(following_N))[None], layer.hidden_norm(hidden)], dim=-1)
        attention, h = layer.self_attn, self.config.head_dim
        q, k, v = (getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, h)) for name in "qkv")
        q, k, v = attention.q_norm(q).transpose(1, 2), attention.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        cos, sin = self.rotary(hidden, torch.arange(len(following_N))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        summed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + attention.o_proj(summed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden))[0]  # type: ignore[no-any-return]


def published(folder: Path, **changes: Any) -> Published:
    """Write a head with random weights into a folder; return its net."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Published()
        for name, weight in net.named_parameters():
            nn.init.normal_(weight, mean="norm" in name, std=0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
    config = {**CONFIG, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": IDS}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "ttt_length": 7, "step_loss_decay": 1.0, **changes}))
    save_file({name: weight.detach() for name, weight in net.state_dict().items()}, folder / "model.safetensors")
    return net


def our_logits(method: Any, target: Target, tokens_N: Tensor) -> Tensor:
    """Our logits after each token."""
    features_NF = target.encode(tokens_N[None], method.feature_layers)[0]
    rows_N, documents = torch.arange(len(tokens_N)), Documents((len(tokens_N),))
    with torch.no_grad():
        hidden = training_time_test(method.net, features_NF, lambda i: method.embed(tokens_N[i]), rows_N, documents, 1)
        return method.head(hidden[0])  # type: ignore[no-any-return]


def test_logits_of_deepspec(target: Target, tmp_path: Path) -> None:
    """Guards layer ids by outputs, norms of queries and keys, the embeddings of the head's own, RoPE: equal logits."""
    net = published(tmp_path)
    method: Any = find("eagle3").from_pretrained(tmp_path, target)
    assert method.feature_layers == (1, 2, 4, 5, 6)
    tokens_N = torch.arange(5, 25)
    features_NF = target.encode(tokens_N[None], tuple(i + 1 for i in IDS))[0]
    with torch.no_grad():
        expected = net(features_NF, tokens_N.roll(-1))[:-1]
    torch.testing.assert_close(our_logits(method, target, tokens_N)[:-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.quick("off")
@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_deepspec_drafts(kernels: str, target: Target, tmp_path: Path) -> None:
    """Guards sessions with norms of queries and keys, and the kernels, which do not compute such a layer: texts are those of
    plain decoding, and a cache gives the logits of the whole text (drafts are accepted as often)."""
    import eyas

    published(tmp_path)
    with pytest.warns(UserWarning, match="made for another model"):  # its random embeddings are its own
        llm = eyas.load(target.model, tmp_path, tokenizer=None, kernels=kernels)
    assert llm.method == "eagle3"
    requests = [Request(tuple(range(5, 25)), 14, law) for law in (Sampling(), Sampling(1.0, seed=3))]
    tokens, _ = run(Decoder(llm.target, llm.drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]


@pytest.mark.parametrize(("changes", "says"), [
    ({"target_layer_ids": None}, "has no target_layer_ids"),
    ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma4Eagle3Model.*of a kind that is not read"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "If the head is one of DeepSpec, write"),
    ({"attention_bias": True}, "missing layers.0.self_attn.q_proj.bias"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Guards against heads whose layer is another one."""
    published(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says):
        checkpoints.load(tmp_path)


# --- MTP modules of the speculators library ----------------------------------------------------------


def speculators_module(weights: checkpoints.Weights, target: Target, by_expert: bool) -> dict[str, Tensor]:
    """A module under the library's names."""
    theirs = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    theirs["post_norm"] = "final_layernorm"
    tensors, experts = dict[str, Tensor](), "mtp_layers.0.mlp.experts"
    for name, tensor in mtp_form.write("mtp", weights.config, weights.tensors)[1].items():
        part, _, rest = name.removeprefix("layers.0.").partition(".")
        if rest.endswith("gate_up_proj") and by_expert:
            for half, kind in zip(tensor.chunk(2, dim=1), ("gate", "up"), strict=True):
                tensors |= {f"{experts}.{e}.{kind}_proj.weight": one.clone() for e, one in enumerate(half)}
        elif rest.endswith("experts.down_proj") and by_expert:
            tensors |= {f"{experts}.{e}.down_proj.weight": one.clone() for e, one in enumerate(tensor)}
        else:
            tensors["mtp_layers.0." + (rest if part == "mtp_block" else f"{theirs[part]}.{rest}")] = tensor
    return tensors


@pytest.mark.slow
@pytest.mark.quick("qwen3_5-*")
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_modules_of_speculators(family: str, by_expert: bool, tmp_path: Path) -> None:
    """Guards names, experts one by one, the target's type; such a module drafts."""
    target = Target(zoo.HYBRIDS[family]())
    made = mtp.Method.random(target, seed=5).weights()
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    config["transformer_layer_config"] = target.model.config.to_diff_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    tensors = speculators_module(made, target, by_expert)
    save_file(tensors, tmp_path / "model.safetensors")
    read = checkpoints.load(tmp_path)
    assert read.method == "mtp"
    assert read.tensors.keys() == made.tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in made.tensors.items())
    drafter = mtp.Method.from_pretrained(tmp_path, target, build_options(mtp.Options, {}))
    request = Request(tuple(range(5, 25)), 14, Sampling())
    tokens, _ = run(Decoder(target, drafter, 1), [request])
    assert tokens == [list(plain_decode(target.model, request))]
    save_file({**tensors, "other.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor other\.weight"):
        checkpoints.load(tmp_path)
