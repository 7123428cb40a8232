"""The target session: features, chunks, windows, limits; and that the user's model stays the user's."""

import pytest
import torch

import zoo
from eyas.core import target as target_module
from eyas.core.cache import KVCache, Layout, slot_mask, slot_positions
from eyas.core.target import Target
from eyas.core.tree import Tree, Verdict
from eyas.errors import FitError, OptionError
from eyas.targets.fingerprints import fingerprint, has_fingerprint


def ids(count: int, seed: int = 0, vocab: int = 128) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_features_of_any_layer(family: str) -> None:
    """Guards the hooks: k is hidden_states[k], L after the final norm; an off-by-one halves acceptance silently."""
    target = Target(zoo.FAMILIES[family]())
    tokens = torch.tensor([ids(20)])
    with torch.no_grad():
        theirs = target.model(tokens, output_hidden_states=True).hidden_states
    feature_layers = tuple(range(target.num_layers + 1))
    mine = target.encode(tokens, feature_layers).split(target.hidden_size, dim=-1)
    for k in feature_layers:
        torch.testing.assert_close(mine[k], theirs[k], atol=1e-5, rtol=1e-5)
    assert target.head_is_exact


def test_the_model_is_left_as_it_was() -> None:
    """Guards against anything set on the user's model: hooks, buffers, configuration."""
    model = zoo.FAMILIES["llama"]()
    before, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    target = Target(model)
    session = target.open(1, (1, target.num_layers))
    session.prefill(0, ids(10))
    session.forward(torch.tensor([[3, 4]]), Tree.chain(1, 2))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_prefill_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunk boundaries: logits and features must not depend on how the prompt is cut, windows included."""
    target, prompt = Target(zoo.FAMILIES[family]()), ids(50)
    found = []
    for chunk in (512, 7, 1):
        monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
        features: list[torch.Tensor] = []
        session = target.open(2, (2, target.num_layers))
        logits = session.prefill(1, prompt, lambda t, f, at, keep=features: keep.append(f))
        found.append((logits, torch.cat(features)))
    for logits, features in found[1:]:
        torch.testing.assert_close(logits, found[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features, found[0][1], atol=1e-4, rtol=1e-4)


def test_prefill_makes_no_logits_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: the head may see one position per chunk, whatever the length of the prompt."""
    model = zoo.FAMILIES["llama"]()
    target = Target(model)
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 16)
    target.open(1).prefill(0, ids(60))
    assert seen == [1] * 4


def test_a_tree_equals_its_paths() -> None:
    """Guards mask and positions: a node's logits are those of a plain forward over its path; rows of two lengths."""
    target = Target(zoo.FAMILIES["qwen3"]())
    session, prompts = target.open(2, (target.num_layers,)), [ids(9), ids(30, 1)]
    for row, prompt in enumerate(prompts):
        session.prefill(row, prompt)
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 0, 4]])
    tokens = torch.tensor([ids(6, 2), ids(6, 3)])
    tree = Tree.build(parents, 4)
    seen = session.forward(tokens, tree)
    for row in range(2):
        for node in range(6):
            path = tokens[row][tree.mask_BNN[row, node]].tolist()
            with torch.no_grad():
                expected = target.model(torch.tensor([prompts[row] + path])).logits[0, -1]
            torch.testing.assert_close(seen.logits_BNV[row, node], expected, atol=1e-4, rtol=1e-4)


def test_refusal_with_the_numbers() -> None:
    """Guards against a request that dies half way."""
    session = Target(zoo.FAMILIES["llama"]()).open(1)
    session.check_fit(500, 12)
    said = r"500 prompt tokens \+ 13 new tokens = 513 .* context of 512: ask for at most 12"
    with pytest.raises(FitError, match=said):
        session.check_fit(500, 13)
    with pytest.raises(FitError, match="600 tokens, the target's context is 512"):
        session.check_fit(600, 1)
    with pytest.raises(FitError, match=r"dynamic NTK"):
        Target(zoo.SWITCHING["llama_dynamic"]()).open(1).check_fit(9000, 1)
    with pytest.raises(OptionError, match="has 4 layers"), Target(zoo.FAMILIES["llama"]()).tap((9,)):
        pass


def test_fingerprint() -> None:
    """Guards the warning about a head of another target: other weights, other name; same weights, same name."""
    a, b = zoo.FAMILIES["llama"](), zoo.FAMILIES["llama"]()
    assert fingerprint(Target(a)) == fingerprint(Target(b))
    head = b.lm_head.weight
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) * head.std())
    assert not has_fingerprint(Target(b), fingerprint(Target(a)))
    assert has_fingerprint(Target(zoo.FAMILIES["llama"]().half()), fingerprint(Target(a)))
    assert has_fingerprint(Target(zoo.FAMILIES["llama"]().bfloat16()), fingerprint(Target(a)))


def test_cache_commit_and_growth() -> None:
    """Guards per-row commits: accepted nodes move behind their own row's tokens, and growth keeps what is stored."""
    cache = KVCache(((2, 4, 4),), 2, torch.float32, torch.device("cpu"))
    length_B = torch.tensor([3, 5])
    keys = torch.arange(2 * 6).view(2, 1, 6, 1).expand(2, 2, 6, 4).float()
    cache.prepare(range(2), lambda: length_B[:, None] + torch.arange(6), 11)
    stored, _ = cache.update(keys, keys, 0)
    assert stored.shape == (2, 2, 11, 4)
    cache.commit(length_B, torch.tensor([[0, 2, 5], [0, 4, -1]]))
    cache.reserve(1000)
    cache.prepare(range(2), lambda: torch.tensor([[20], [20]]), 21)
    stored, _ = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert stored[0, 0, 3:6, 0].tolist() == [0, 2, 5]
    assert stored[1, 0, 5:7, 0].tolist() == [6, 10]
    assert cache.slots == 1024


def test_bytes_are_those_that_are_reserved() -> None:
    """Guards the limit of what a decoder keeps between requests: the bytes of all layers and all rows."""
    layout: Layout = ((2, 8, 8), None, (1, 4, 6), (2, 8, 8))  # the second layer stores nothing of its own
    for rows, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        cache = KVCache(layout, rows, dtype, torch.device("cpu"))
        for slots in (256, 512):
            cache.reserve(slots)
            assert cache.bytes_for(slots) == sum(store.nbytes for store in cache.stores)


def test_slot_masks() -> None:
    """Guards what a node sees, on the drawn example of the module."""
    length_B = torch.tensor([5, 3])
    tree = Tree.build(torch.tensor([[-1, 0, 1], [-1, 0, 0]]), 2)
    rows = ["".join("01"[int(x)] for x in row) for row in slot_mask(length_B, tree.mask_BNN, 9).flatten(0, 1)]
    assert rows == ["111111000", "111111100", "111111110", "111100000", "111110000", "111101000"]
    assert slot_positions(length_B, tree.depth_BN, 9)[1].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4]


def test_commit_leaves_inactive_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards parked rows (chat): a cycle of other rows must not lengthen them."""
    session = Target(zoo.FAMILIES["llama"]()).open(2)
    session.prefill(0, ids(4))
    session.prefill(1, ids(6))
    verdict = Verdict(torch.tensor([[0], [0]]), torch.tensor([[1], [1]]), torch.tensor([1, 1]), torch.tensor([2, 2]))
    session.forward(torch.tensor([[1], [1]]), Tree.chain(2, 1))
    session.commit(verdict, torch.tensor([True, False]))
    assert session.length_B.tolist() == [5, 6]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_level_by_level_equals_one_pass(family: str) -> None:
    """Guards `extend`: levels one after another, uncommitted, equal a whole tree; `advance` is read like a prompt."""
    target = Target(zoo.FAMILIES[family]())
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 5]]).expand(2, -1)
    tree, tokens = Tree.build(parents, 3), torch.tensor([ids(8, 2), ids(8, 3)])
    whole, parts = target.open(2), target.open(2)
    for session in (whole, parts):
        for row, length in enumerate((9, 30)):
            session.prefill(row, ids(length, row))
    expected = whole.forward(tokens, tree).logits_BNV
    found = []
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 8)):
        visible = tree.mask_BNN[:, begin:end, :end]
        found.append(parts.extend(tokens[:, begin:end], tree.depth_BN[:, :end], visible).logits_BNV)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    chain = Tree.chain(2, 3)
    parts.forward(tokens[:, :3], chain)
    parts.advance(torch.tensor([2, 3]), [12, 33])
    other = target.open(2)
    for row, length in enumerate((9, 30)):
        other.prefill(row, [*ids(length, row), *tokens[row, : 2 + row].tolist()])
    found, expected = (session.forward(tokens, tree).logits_BNV for session in (parts, other))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
