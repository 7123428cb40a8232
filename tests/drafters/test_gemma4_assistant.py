"""gemma4_assistant: the net is transformers' own, drafts by it are verified, misfits are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import zoo
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import gemma4_assistant
from eyas.drafters._assistant_net import Net
from eyas.errors import CheckpointError
from reference import plain_decode, run

TREE = {"tree.nodes": 10, "tree.depth": 4, "tree.branch": 3}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}


@pytest.fixture
def buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transformers build its own class, which 5.23 refuses: no layer of an assistant produces keys."""
    for config in (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig):
        published = config.kv_sharing_modes

        def modes(self: Any, published: Any = published) -> list[str | None]:
            shared, layers = self.num_kv_shared_layers, self.num_hidden_layers
            return ["reuse"] * layers if shared == layers else published.fget(self)

        monkeypatch.setattr(config, "kv_sharing_modes", property(modes))


def unified() -> Any:
    """A target of the family of the 12B."""
    sizes = {"num_kv_shared_layers": 2, "head_dim": 12, "global_head_dim": 24, "sliding_window": zoo.WINDOW}
    return zoo.tiny("gemma4_unified_text", layer_types=list(zoo.ALTERNATING), **sizes)


def theirs(target: Target, **more: Any) -> Any:
    """transformers' own assistant, with random weights: three layers, the window smaller than the target's."""
    unified = "Unified" if "unified" in target.family.model_type else ""
    names = [f"Gemma4{unified}Assistant{part}" for part in ("Config", "ForCausalLM")]
    config_class, model_class = (getattr(transformers, name) for name in names)
    text = {
        "vocab_size": target.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 4, "head_dim": 12,
        "global_head_dim": 24, "num_key_value_heads": 2, "sliding_window": 6, "num_kv_shared_layers": 3, "pad_token_id": 0,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "rope_parameters": target.model.config.rope_parameters,
    }  # fmt: skip
    text["model_type"] = target.family.model_type
    config = config_class(text_config=text, backbone_hidden_size=target.hidden_size, **more)
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = 1.0 if weight.ndim == 1 and "norm" in name else 0.0
            torch.nn.init.normal_(weight, mean, 0.2 if weight.ndim == 1 else 0.3)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size))
    return model


def published(model: Any, folder: Path, **changes: Any) -> Path:
    """The folder of a published assistant; `changes`: of its config.json's text_config."""
    folder.mkdir(exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["text_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(target: Target, folder: Path) -> gemma4_assistant.Method:
    made = gemma4_assistant.Method.from_pretrained(folder, target, build_options(gemma4_assistant.Options, TREE))
    assert isinstance(made, gemma4_assistant.Method)
    return made


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize(
    ("family", "more"),
    [("gemma4", {}), ("gemma4", CLUSTERS), ("gemma4_unified", {})],
    ids=["whole head", "clusters", "unified"],
)
def test_the_published_net_is_transformers(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Bug: halves exchanged, keys of a wrong layer, window, uncommitted slots, angles, the second step, clusters."""
    target = Target(zoo.FAMILIES[family]() if family in zoo.FAMILIES else unified())
    model = theirs(target, **more)
    made = loaded(target, published(model, tmp_path))
    prompt, root, child = list(range(3, 20)), 7, 11
    session, features = target.open(1, (target.num_layers,)), list[Tensor]()
    session.prefill(0, prompt, lambda tokens, found, begin: features.append(found))
    roots = CycleInput(
        torch.tensor([root]), torch.tensor([len(prompt)]), torch.tensor([True]), (Sampling(),), target.runner.ops.noise((Sampling(),)),
        len(prompt) + 5, target_cache=session.cache,
    )  # fmt: skip
    session.cache.reserve(len(prompt) + 5)  # slots beyond the committed ones, which nobody may see
    seen = made._seen(roots)
    with torch.no_grad():
        keys = target.model.model(torch.tensor([prompt]), return_shared_kv_states=True).shared_kv_states
        hidden, onward = None, features[0][None, -1:]
        for token in (root, child):
            ids = torch.tensor([[token]])
            inputs = torch.cat([target.embed(ids), onward], -1)
            expected = model(inputs_embeds=inputs, position_ids=torch.tensor([[len(prompt)]]), shared_kv_states=keys)
            before = features[0][None, -1:] if hidden is None else made.net.next_hidden(hidden)
            hidden = made._read(seen, roots, ids, before)
            logits = made.net.head(hidden)
            drafted = logits.isfinite()
            assert int(drafted.sum()) == (target.vocab_size if not more else target.vocab_size // 8 * 3)
            assert torch.allclose(logits[drafted], expected.logits[drafted], atol=1e-5)
            assert int(logits.argmax()) == int(expected.logits.argmax())
            onward = expected.last_hidden_state
        onward = made.net.next_hidden(hidden)
        both = made._read(seen, roots, torch.tensor([[root, child]]), onward.expand(-1, 2, -1))
        alone = made._read(seen, roots, torch.tensor([[root]]), onward)
        assert torch.allclose(both[:, :1], alone, atol=1e-5), "nodes see no other node"


@pytest.mark.slow
@pytest.mark.usefixtures("buildable")
def test_lossless(tmp_path: Path) -> None:
    """Guards the session on its own family: plain decoding's text, for rows of different ages, greedy and sampled."""
    target = Target(zoo.FAMILIES["gemma4"]())
    drafter = loaded(target, published(theirs(target), tmp_path))
    laws = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=9, seed=4))
    requests = [Request(tuple(range(5, 5 + n)), 14, law) for n, law in zip((4, 21, 9), laws, strict=True)]
    tokens, _ = run(Decoder(target, drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]


@pytest.mark.slow
def test_a_row_is_drafted_for_as_it_is_alone() -> None:
    """Bugs: keys of another row are read, or a feature of another row, or of a token that was rejected."""
    target = Target(zoo.FAMILIES["gemma4"]())
    drafter = gemma4_assistant.Method.random(target, build_options(gemma4_assistant.Options, TREE), seed=2)
    requests = [Request(tuple(range(5, 5 + n)), 12, Sampling()) for n in (4, 21, 9)]

    def drafts(rows: int, some: list[Request]) -> dict[tuple[int, ...], list[Any]]:
        found: dict[tuple[int, ...], list[Any]] = {}

        def watch(roots: CycleInput, draft: Any, *_: Any) -> None:
            for row in roots.active_rows:
                found[tuple(roots.row_tokens[row][: int(roots.position_B[row]) + 1])] = draft.tokens_BN[row].tolist()

        run(Decoder(target, drafter, rows, watch=watch), some)
        return found

    alone = {text: tokens for request in requests for text, tokens in drafts(1, [request]).items()}
    together = drafts(3, requests)
    assert len(together) > 12
    assert together.items() <= alone.items()


def written(net: Net, target: Target, folder: Path, **changes: Any) -> Path:
    """The folder of a net of eyas' own making; `changes`: of config.json."""
    text = {**net.text.to_dict(), "model_type": "gemma4_text"} | changes.pop("text", {})
    config = {"model_type": "gemma4_assistant", "text_config": text, "backbone_hidden_size": target.hidden_size}
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in net.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("changes", "message"), [
    ({"backbone_hidden_size": 7}, "for a target of hidden size 7"),
    ({"text_config": {}}, "no text_config"),
    ({"backbone_hidden_size": "x"}, "backbone_hidden_size"),
    ({**CLUSTERS, "num_centroids": 7}, "do not divide a vocabulary"),
    ({**CLUSTERS, "num_centroids": None}, "makes no assistant"),
    (CLUSTERS, "missing masked_embedding"),
    ({"text": {"num_hidden_layers": 10**9}}, "config.json counts 1000000000 layers"),
    ({"text": {"intermediate_size": 10**9}}, "should be"),
    ({"text": {"hidden_size": "x"}}, "makes no assistant"),
    ({"text": {"layer_types": [5]}}, "makes no assistant"),
    ({"text": {"rms_norm_eps": []}}, "makes no assistant"),
    ({"text": {"num_attention_heads": 0}}, "reads 0 heads"),
    ({"text": {"num_key_value_heads": 10**9}}, "made for another model"),
    ({"text": {"hidden_size_per_layer_input": 8}}, "no assistant of Google's has"),
    ({"text": {"sliding_window": 10**30}}, "sliding_window must be a number of tokens"),
])  # fmt: skip
def test_misfits_are_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Bugs: an assistant of another target drafts nonsense, or a damaged one ends in a traceback."""
    target = Target(zoo.FAMILIES["gemma4"]())
    net = gemma4_assistant.Method.random(target, seed=1).net
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(target, written(net, target, tmp_path, **changes))
    assert "\n" not in str(caught.value)
