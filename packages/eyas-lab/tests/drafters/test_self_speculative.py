"""self_speculative: views without layers leave the model alone, say what the model without those
layers says, and are found by a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from covers import turn
from eyas.api import load
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.errors import ModelError, OptionError
from eyas_lab.methods import _skip
from eyas_lab.methods import method_self_speculative as self_speculative
from eyas_lab.methods._skip import Found, format_parts, own_text, parse_parts, search, without
from eyas_lab.methods.method_self_speculative import Method, Options
from reference import plain_decode, run


@pytest.fixture(autouse=True)
def nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered searches go to a folder of the test."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idle(*layers: int) -> Target:
    """A llama in which these layers do nothing."""
    model = zoo.tiny("llama", num_hidden_layers=6)
    with torch.no_grad():
        for k in layers:
            model.model.layers[k].self_attn.o_proj.weight.zero_()
            model.model.layers[k].mlp.down_proj.weight.zero_()
    return Target(model)


def make(target: Target, **options: Any) -> Method:
    return Method.load(None, target, build_options(Options, options))


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_view_is_the_model_without_those_parts(family: str) -> None:
    """Guards masks by layer, layer numbers and sublayers of every family, against hooks that zero
    what the parts put out; and the model, which must be as it was."""
    model = zoo.FAMILIES[family]()
    target, ids = Target(model), torch.arange(3, 30)[None]
    if target.family.shares_keys:
        with pytest.raises(ModelError, match="none can be left out"):
            without(target, parse_parts("1,2a,3m", target.num_layers))
        return
    state, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    modules, logits = list(model.named_modules()), model(ids, use_cache=False).logits
    view = without(target, parse_parts("1,2a,3m", target.num_layers))

    def zero(module: Any, args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    places = [(1, "a"), (1, "m"), (2, "a"), (3, "m")]
    layers = target.family.layers
    hooks = [layers[k].get_submodule(_skip._name_of(layers[k], kind)).register_forward_hook(zero) for k, kind in places]
    expected = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(view.model(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, logits, atol=1e-2)
    assert torch.equal(model(ids, use_cache=False).logits, logits)
    assert model.config.to_dict() == config
    assert [(name, id(module)) for name, module in modules] == [
        (name, id(module)) for name, module in model.named_modules()
    ]
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("skip", ["2", "1a,2m", "exit:2"])
def test_the_text_is_the_target_s(skip: str, family: str) -> None:
    """Guards the draft's own cache, in which the layers that are left out have no place."""
    target = Target(zoo.FAMILIES[family]())
    requests = [Request(tuple(range(3 + i, 12 + 5 * i)), 10 - i, Sampling(0.7 * i, seed=i)) for i in range(3)]
    tokens, _ = run(Decoder(target, make(target, skip=skip, depth=3, **{"tree.noise": "coupled"}), 2), requests)
    assert tokens == [plain_decode(target.model, r) for r in requests]


@pytest.mark.cover(family=1)
@pytest.mark.quick("jamba", "zamba2")
@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_hybrids_without_an_inner_layer(family: str) -> None:
    """Guards kinds of layers that a configuration computes (Jamba, Bamba: a crash while decoding) and
    layers that are told their number (Zamba 2: a KeyError): the view says what the model says whose
    layer passes its input on, and the text is the target's (without one of the layers, by turns)."""
    target, ids = Target(zoo.HYBRIDS[family]()), torch.arange(3, 20)[None]
    for skipped in (0, 1, 2):

        def passes_on(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return (*args, *output[len(args) :])[: len(output)] if isinstance(output, tuple) else hidden

        hook = target.family.layers[skipped].register_forward_hook(passes_on, with_kwargs=True)
        expected = target.model(ids, use_cache=False).logits
        hook.remove()
        view = without(target, parse_parts(str(skipped), target.num_layers))
        torch.testing.assert_close(view.model(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
        if skipped != turn(family, list(zoo.HYBRIDS), (0, 1, 2)):
            continue
        requests = [Request(tuple(range(3, 8 + 4 * i)), 6, Sampling()) for i in range(2)]
        tokens, _ = run(Decoder(target, make(target, skip=str(skipped), depth=3), 2), requests)
        assert tokens == [plain_decode(target.model, request) for request in requests]


@pytest.mark.slow
def test_the_search_finds_them() -> None:
    """Guards the greedy search and its estimate: idle layers go first, as they cost no acceptance."""
    target = idle(1, 4)
    drafter = make(target, skip="1,4", depth=3)  # without them the draft is the target
    for law in (Sampling(), Sampling(1.0, seed=2)):
        _, steps = run(Decoder(target, drafter), [Request(tuple(range(5, 15)), 21, law)])
        assert {len(s.tokens) for s in steps if not s.prefill} == {4}
    assert drafter.draft_model.layout[1] is drafter.draft_model.layout[4] is None
    found = search(target, own_text(target, 3, 40))
    assert parse_parts("1,4", 6) <= parse_parts(found.skip, 6)
    assert 0 < found.cost < 0.75
    assert found.speedup > 1
    assert found.acceptance <= 1.0001


@pytest.mark.slow
def test_the_target_s_own_text() -> None:
    """Guards the text of the search: rows differ, are drawn from the target, and with numbers that
    no request reads."""
    target = idle()
    text_RT = own_text(target, 3, 12, seed=4)
    assert len({tuple(row) for row in text_RT.tolist()}) == 3
    noise = GumbelNoise.from_sampling([Sampling(1.0, seed=seed) for seed in (4, 5, 6)])
    noise_RTV = noise.gumbel(torch.arange(1, 12).expand(3, -1), target.vocab_size, GumbelNoise.SEARCH)
    with torch.no_grad():
        log_p_RTV = target.model(text_RT[:, :-1]).logits.log_softmax(-1)
    assert torch.equal(text_RT[:, 1:], (log_p_RTV + noise_RTV).argmax(-1))
    for row, seed in zip(text_RT.tolist(), (4, 5, 6), strict=True):
        assert row[1:] != plain_decode(target.model, Request((row[0],), 11, Sampling(1.0, seed=seed)))


@pytest.mark.slow
def test_a_search_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cache: one search for a target, none for the same one again, another for another;
    a broken file is no obstacle."""
    searched: list[Target] = []

    def with_cpu_kernels(target: Target, text: torch.Tensor) -> Found:
        searched.append(target)
        return Found("1,2a", 2, 0.5, 0.7, 1.1)

    monkeypatch.setattr(self_speculative, "search", with_cpu_kernels)
    target = idle()
    drafter = make(target)
    assert (drafter.options.skip, drafter.depth) == ("1,2a", 2)
    assert drafter.describe()["skip"] == "1,2a"
    assert make(Target(target.model), depth=4).depth == 4
    assert make(target, **{"tree.choices": "reference"}).depth == 5
    assert len(searched) == 1
    (file,) = (tmp_path / "cache" / "eyas").iterdir()
    file.write_text("{")
    make(target)
    make(Target(zoo.tiny("llama", seed=8)))
    assert len(searched) == 3


def test_parts(tmp_path: Path) -> None:
    """Guards the words for parts that are left out, there and back, and what they cannot be."""
    both = lambda *layers: {(layer, part) for layer in layers for part in "am"}  # noqa: E731
    for text, parts in (("3,5a,7m", {*both(3), (5, "a"), (7, "m")}), ("exit:6", both(6, 7)), ("0", both(0))):
        assert parse_parts(text, 8) == parts == parse_parts(format_parts(parts), 8)
    for skip, message in (
        ("", "skip must be auto, exit:N or a list"), ("3x", "'3x' is not a layer"), ("exit", "'exit' is not a layer"),
        ("9", "layer 9 does not exist: the target has 6 layers"), ("exit:0", "leaves out everything"), ("exit:6", "leaves out nothing"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            make(idle(), skip=skip)
    with pytest.raises(OptionError, match="leave --draft out"):
        load(zoo.tiny("llama"), draft=tmp_path, method="self_speculative")
