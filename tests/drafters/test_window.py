"""Windows of the draft (SEAGLE): what is kept, what is read of a long prompt, and that nothing grows with the text."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter
from eyas.drafters._eagle import EagleSession
from eyas.errors import OptionError
from eyas.nn import DraftKVCache, LayerShape, rope, rope_frequencies
from reference import plain_decode, run

SHAPE = LayerShape(8, 8, 2, 2, 4)


def make(target: Target, method: str = "seagle", **options: Any) -> Drafter:
    chosen = {} if method == "eagle1" else {"tree.nodes": 8, "tree.depth": 3, "tree.branch": 2}
    chosen |= {} if method in ("eagle1", "eagle2") else {"head.layers": "0,1,2"}
    kind = drafters.find(method)
    return kind.random(target, build_options(kind.Options, {**chosen, **options}), seed=1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(60) for _ in range(length))


@pytest.mark.parametrize("sink", [0, 2])
def test_trim_keeps_the_first_and_the_last_each_once_rotated_by_index(sink: int) -> None:
    """Against keys and values kept apart: rows below the window, exactly there, and beyond it."""
    size, generator = 5, torch.Generator().manual_seed(0)
    cache = DraftKVCache(2, 4, 3, torch.float32, torch.device("cpu"), (sink, size))
    frequency, T = rope_frequencies(SHAPE), 12
    keys, values = torch.randn(3, T, 2, 4, generator=generator), torch.randn(3, T, 2, 4, generator=generator)
    slots = torch.arange(T).expand(3, T)
    cache.prepare(range(3), lambda: slots, T)
    cache.store(keys, values, slots, frequency)
    length = torch.tensor([sink + size - 1, sink + size, T])
    trimmed = cache.trim(length, frequency)
    assert trimmed.tolist() == [sink + size - 1, sink + size, sink + size]
    cache.prepare(range(3), lambda: slots[:, :1] + sink + size, sink + size)
    seen_keys, seen_values = cache._stores[cache.store_key][:2]
    for row, kept in enumerate(([*range(sink + size - 1)], [*range(sink + size)], [*range(sink), *range(T - size, T)])):
        expected = rope(keys[row, kept][None], torch.arange(len(kept))[None], frequency)[0]
        torch.testing.assert_close(seen_keys[row, :, : len(kept)].transpose(0, 1), expected)
        torch.testing.assert_close(seen_values[row, :, : len(kept)].transpose(0, 1), values[row, kept])


@pytest.mark.cover
@pytest.mark.parametrize("crop", ["halves", "last", "none"])
@pytest.mark.parametrize("sink", [0, 3])
def test_ids_stay_those_of_the_target(crop: str, sink: int, target: Target) -> None:
    """Prompts shorter and far longer than the window, together; several chunks of prefill."""
    drafter = make(target, **{"window.size": 7, "window.sink": sink, "window.crop": crop})
    requests = [Request(prompt(n, n), 12) for n in (3, 60, 17)]
    tokens, _ = run(Decoder(target, drafter, 2), requests)
    assert tokens == [plain_decode(target.model, request) for request in requests]


def session_after(target: Target, length: int, crop: str, chunk: int, size: int = 8, sink: int = 2) -> EagleSession:
    """A session that has read a prompt in chunks; its cache's un-rotated keys tell which pairs it holds."""
    drafter = make(target, **{"window.size": size, "window.sink": sink, "window.crop": crop})
    session, ids = drafter.open(1), torch.tensor(prompt(length))
    features = target.encode(ids[None], drafter.feature_layers)[0]
    session.begin(0, 0, length)
    with torch.inference_mode():
        for begin in range(0, length, chunk):
            session.prefill(0, ids[begin : begin + chunk], features[begin : begin + chunk], begin)
    return session


def pairs_held(session: EagleSession, target: Target, length: int) -> list[int]:
    """Which pairs of the prompt stand in the slots, found by their un-rotated keys."""
    drafter, ids = session.drafter, torch.tensor(prompt(length))
    with torch.no_grad():
        features = target.encode(ids[None], drafter.feature_layers)[0]
        inputs: Tensor = drafter.net.join(drafter.net.fuse(features[:-1]), drafter.embed(ids[1:]))[0]
        keys = drafter.net.layer.attention.key_value(inputs)[0]
    held = session.cache._stores[session.cache.store_key][2, 0, :, : int(session.length_B[0])].transpose(0, 1)
    return [int((keys - key).abs().sum((1, 2)).argmin()) for key in held]


@pytest.mark.parametrize("chunk", [4, 7, 100])
def test_what_is_read_of_a_long_prompt(chunk: int, target: Target) -> None:
    """Window of 2 + 8, prompt of 50 tokens, cut in any way: 49 pairs are complete, the last waits for the root."""
    expected = {
        "halves": [0, 1, 2, 3, 4, 45, 46, 47, 48],  # the first 5, and with the waiting one the last 5
        "last": [40, 41, 42, 43, 44, 45, 46, 47, 48],
        "none": list(range(49)),
    }
    for crop, pairs in expected.items():
        session = session_after(target, 50, crop, chunk)
        assert pairs_held(session, target, 50) == pairs, crop
        assert int(session.pairs_B[0]) == 49
        assert pairs_held(session_after(target, 10, crop, 4), target, 10) == list(range(9))  # a short one is read whole


def test_a_head_that_was_trained_with_a_window_keeps_it(target: Target) -> None:
    drafter = make(target, "eagle3")
    drafter.trained_window = 12
    assert drafter.window() == (0, 12)
    again = type(drafter).load(drafter.weights(), target)
    assert again.window() == again.chain(3).window() == (0, 12)
    assert make(target, "eagle3", **{"window.size": 5}).window() == (4, 5)


@pytest.mark.parametrize(("options", "message"), [
    ({"window.size": 0}, r"window\.size must be a whole number, 1 or more, got 0"),
    ({"window.sink": -1}, r"window\.sink must be a whole number, 0 or more, got -1"),
    ({"window.crop": "half"}, r"unknown window\.crop 'half'.*halves"),
])  # fmt: skip
def test_bad_windows(options: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(OptionError, match=message):
        make(target, **options)
